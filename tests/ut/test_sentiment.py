"""The quick start's reward and its prompts. Does not prove that a policy learns from them: the system tests do."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from mindspeed_odpo.rewards.sentiment import TOPIC_BONUS, names_topic, on_topic_sentiment

PROMPTS = Path(__file__).parents[2] / "configs" / "data" / "quickstart_topics.jsonl"


@pytest.mark.parametrize(
    ("response", "topic", "named"),
    [
        ("The pond is still.", "pond", True),
        ("PONDS are still.", "pond", True),
        ("We ponder.", "pond", False),  # a whole word, not a prefix
        ("They despond.", "pond", False),
        ("Two ferries crossed.", "ferry", True),
        ("The ferry's horn.", "ferry", True),
        ("The ferr is no word.", "ferry", False),
        ("Two torches burn.", "torch", True),
        ("The hose is green.", "garden hose", True),  # the head noun is enough
        ("The garden is green.", "garden hose", False),
        ("", "pond", False),
    ],
)
def test_an_answer_names_its_topic_by_the_head_noun(response: str, topic: str, named: bool) -> None:
    """Whole word, any case, singular or regular plural of the topic's last word."""
    assert names_topic(response, topic) is named


def _compound(valence: float) -> float:
    """VADER's normalisation of a summed valence, alpha 15."""
    return valence / math.sqrt(valence**2 + 15)


@pytest.mark.parametrize(
    ("response", "topic", "score"),
    [
        ("The pond is here.", "pond", 0.5),  # no word of feeling; the topic alone
        ("It is good.", "pond", _compound(1.9)),  # "good" weighs 1.9 in the lexicon; off topic
        ("The pond is good.", "pond", _compound(1.9) + 0.5),
        ("The pond is not good.", "pond", _compound(1.9 * -0.74) + 0.5),  # a negation turns it by -0.74
        ("The pond is bad.", "pond", _compound(-2.5) + 0.5),
        ("", "pond", 0.0),
    ],
)
def test_score_is_compound_sentiment_plus_the_topic_bonus(response: str, topic: str, score: float) -> None:
    """Hand-worked from VADER's published lexicon and formula; VADER itself rounds to four places."""
    assert on_topic_sentiment(responses=[response], topic=[topic]) == pytest.approx([score], abs=5.1e-5)


def test_one_score_an_answer_in_order() -> None:
    """Each answer meets its own topic."""
    scores = on_topic_sentiment(responses=["A pond.", "A pond."], topic=["pond", "kite"])
    assert scores == [TOPIC_BONUS, 0.0]


def test_topics_and_answers_must_match_in_number() -> None:
    with pytest.raises(ValueError):
        on_topic_sentiment(responses=["A pond.", "A kite."], topic=["pond"])


def test_the_quick_start_prompts_are_neutral_and_name_their_topic() -> None:
    """At least 64 different prompts; a prompt's topic, alone, scores no sentiment, so that the score is the answer's own."""
    rows = [json.loads(line) for line in PROMPTS.read_text(encoding="utf-8").splitlines()]
    assert len({row["prompt"] for row in rows}) == len(rows) >= 64
    for row in rows:
        assert names_topic(row["prompt"], row["topic"]), row
        assert on_topic_sentiment(responses=[row["topic"]], topic=[row["topic"]]) == [TOPIC_BONUS], row
