"""The quick start's reward: a cheerful sentence that stays on its topic. Needs ``vaderSentiment`` (in the ``standalone`` extra)."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any

TOPIC_BONUS = 0.5
"""Added when the answer names its topic. Sentiment alone is easily won by praise about nothing."""


@lru_cache(maxsize=1)
def _analyser() -> Any:
    from vaderSentiment.vaderSentiment import SentimentIntensityAnalyzer  # optional: only this reward needs it

    return SentimentIntensityAnalyzer()  # reads a lexicon of 7,500 words: once a process, not once a call


@lru_cache(maxsize=4096)
def _pattern(topic: str) -> re.Pattern[str]:
    words = re.findall(r"[a-z]+", topic.lower())
    head = words[-1]
    stem, plurals = (head[:-1], "y|ies") if head.endswith("y") else (head, "|s|es")
    return re.compile(rf"\b{stem}(?:{plurals})\b", re.IGNORECASE)


def names_topic(response: str, topic: str) -> bool:
    """Whether the head noun of ``topic`` (its last word: "pond", "garden hose", "ferry") stands in ``response``.

    A whole word in any case, singular or regular plural: "Ferries" names "ferry", "ponder" does not name "pond".
    """
    return _pattern(topic).search(response) is not None


def on_topic_sentiment(responses: list[str], topic: list[str]) -> list[float]:
    """Score each answer: VADER's compound sentiment in [-1, 1], plus ``TOPIC_BONUS`` when it names its topic.

    ``responses``: answer texts without special tokens; ``topic``: the data column of that name, one entry an answer.
    Returns one float an answer in [-1, 1 + TOPIC_BONUS].
    """
    polarity = _analyser().polarity_scores
    return [
        polarity(text)["compound"] + (TOPIC_BONUS if names_topic(text, subject) else 0.0)
        for text, subject in zip(responses, topic, strict=True)
    ]
