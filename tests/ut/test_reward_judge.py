"""The pairwise judge: asked in both orders, its verdicts turned into one score an answer."""

from __future__ import annotations

from pathlib import Path

import pytest

from mindspeed_odpo.errors import ConfigError, DataError, WorkerError
from mindspeed_odpo.rewards.judge import JudgeReward

ANSWERS = ["a", "bb", "ccc", "dddd"]


def judge(folder: Path, source: str) -> JudgeReward:
    path = folder / "judges.py"
    path.write_text(source)
    return JudgeReward(f"{path}:f")


def score(reward: JudgeReward, answers: list[str] = ANSWERS, k: int = 2, **columns: list) -> list[float | None]:
    rows = [{"prompt": f"p{i // k}", **{key: values[i // k] for key, values in columns.items()}} for i in range(len(answers))]
    prompts = [row["prompt"] for row in rows]
    return reward.score(prompts=prompts, responses=answers, response_ids=[[7]] * len(answers), rows=rows, answers_per_prompt=k)


def returning(folder: Path, value: str) -> JudgeReward:
    return judge(folder, f"import torch, numpy as np\ndef f(first, second):\n    return {value}\n")


LONGER = "[0 if len(a) > len(b) else 1 if len(b) > len(a) else None for a, b in zip(first, second)]"


def test_two_answers_score_one_and_zero(tmp_path):
    """Prompt 0: "a", "bb"; prompt 1: "dddd", "ccc"; the longer answer is better."""
    assert score(returning(tmp_path, LONGER), ["a", "bb", "dddd", "ccc"]) == [0.0, 1.0, 1.0, 0.0]


def test_four_answers_score_the_share_of_their_wins(tmp_path):
    """Each meets three others; "bb" wins once, "ccc" twice."""
    assert score(returning(tmp_path, LONGER), k=4) == pytest.approx([0, 1 / 3, 2 / 3, 1])


def test_a_tie_is_half_a_win(tmp_path):
    """Answers "xx" and "yy" tie (the first is called better in both orders) and both beat "z": (1/2 + 1) / 2 each."""
    source = "[0 if len(a) >= len(b) else 1 for a, b in zip(first, second)]"
    assert score(returning(tmp_path, source), ["xx", "z", "yy"], k=3) == [0.75, 0.0, 0.75]


@pytest.mark.parametrize("place", [0, 1])
def test_a_judge_that_loves_a_place_says_nothing(tmp_path, place):
    """The same place in both orders is a contradiction: a tie."""
    assert score(returning(tmp_path, f"[{place}] * len(first)")) == [0.5] * 4


def test_no_opinion(tmp_path):
    """Prompt 0 in one order only: a tie. Prompt 1 in both: no score."""
    source = "[None if 'c' in a + b or a < b else 0 for a, b in zip(first, second)]"
    assert score(returning(tmp_path, source)) == [0.5, 0.5, None, None]


def test_no_opinion_in_the_other_order_is_a_tie_too(tmp_path):
    """The judge answers when "b" stands second and says nothing when it stands first."""
    assert score(returning(tmp_path, "[None if a > b else 0 for a, b in zip(first, second)]")) == [0.5] * 4


def test_answers_that_are_no_whole_prompts(tmp_path):
    with pytest.raises(WorkerError, match="4 answers are not a multiple of 3 a prompt"):
        score(returning(tmp_path, LONGER), k=3)


def test_no_opinion_on_one_answer_leaves_the_others_scored(tmp_path):
    """Of three answers "?" is never judged; "a" against "bb" is."""
    source = "[None if '?' in (a, b) else int(len(b) > len(a)) for a, b in zip(first, second)]"
    assert score(returning(tmp_path, source), ["a", "?", "bb"], k=3) == [0.0, None, 1.0]


def test_every_two_answers_of_a_prompt_meet_in_both_orders_in_one_call(tmp_path):
    source = """calls = []
def f(prompts, first, second, topic):
    calls.append(list(zip(prompts, first, second, topic)))
    return [0] * len(first)
"""
    reward = judge(tmp_path, source)
    score(reward, ["a", "b", "c", "x", "y", "z"], k=3, topic=["s", "t"])
    (asked,) = reward._judge._function.__globals__["calls"]
    pairs = [("p0", a, b, "s") for a, b in ("ab", "ac", "bc")] + [("p1", a, b, "t") for a, b in ("xy", "xz", "yz")]
    assert sorted(asked) == sorted([*pairs, *((p, b, a, t) for p, a, b, t in pairs)])


def test_kwargs_get_every_column(tmp_path):
    source = (
        "def f(first, **rest):\n    assert sorted(rest) == ['gold', 'prompt', 'prompts', 'second'], rest\n    return [None] * len(first)\n"
    )
    assert score(judge(tmp_path, source), gold=["g", "h"]) == [None] * 4


@pytest.mark.parametrize(
    "value", ["[0, 1, 1, 0]", "np.array([0, 1, 1, 0])", "torch.tensor([0, 1, 1, 0])", "[np.int64(0), 1, torch.tensor(1), 0]"]
)
def test_verdicts_of_every_kind(tmp_path, value):
    """Questions: a/bb, ccc/dddd, bb/a, dddd/ccc; the first prompt's "a" wins both ways, the second prompt's "dddd"."""
    assert score(returning(tmp_path, value)) == [1.0, 0.0, 0.0, 1.0]


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("[0]", "expected 4 verdicts, got 1; return one for every first and second, None for no opinion"),
        ("[0] * 5", "expected 4 verdicts, got 5"),
        ("0", "expected a list of 4 verdicts, got int"),
        ("None", "expected a list of 4 verdicts, got NoneType"),
        ("torch.zeros(2, 2)", "expected 4 verdicts, got an array of shape [2, 2]"),
        ("[0, 2, 0, 0]", "verdict 1 is 2 (int), expected 0 (first is better), 1 (second is better) or None"),
        ("[0, 0, -1, 0]", "verdict 2 is -1 (int)"),
        ("[0, 'first', 0, 0]", "verdict 1 is 'first', expected 0"),
        ("[0, 0, 0, float('nan')]", "verdict 3 is nan (float), expected 0"),
        ("[0, 0.5, 0, 0]", "verdict 1 is 0.5 (float)"),
        ("[True, 0, 0, 0]", "verdict 0 is True (bool)"),
        ("[0, [1], 0, 0]", "verdict 1 is [1] (list)"),
        ("[0, 2, 0, 0]", "first: 'ccc', second: 'dddd'"),
    ],
)
def test_a_wrong_verdict_is_named(tmp_path, value, said):
    with pytest.raises(WorkerError) as error:
        score(returning(tmp_path, value))
    assert said in str(error.value) and f"judge '{tmp_path / 'judges.py'}:f'" in str(error.value)


def test_an_exception_names_its_line(tmp_path):
    with pytest.raises(WorkerError, match=r"^judge '.*judges.py:f' raised ZeroDivisionError: division by zero \(.*judges.py:3\)$"):
        score(returning(tmp_path, "[1 / 0]"))


def test_an_argument_that_is_not_there(tmp_path):
    reward = judge(tmp_path, "def f(first, secnd):\n    return []\n")
    with pytest.raises(ConfigError, match="judge '.*' needs 'secnd', there are: prompts, first, second, prompt; did you mean 'second'"):
        reward.check(["prompt"])
    with pytest.raises(ConfigError, match="no module 'no_such_pkg'"):
        JudgeReward("no_such_pkg.mod:f")


def test_a_column_named_like_an_argument(tmp_path):
    with pytest.raises(DataError, match="column 'first' of the data has the name of an argument .* rename the column"):
        score(returning(tmp_path, LONGER), first=["g", "h"])
    with pytest.raises(DataError, match="column 'second'"):  # told before a run starts
        returning(tmp_path, LONGER).check(["prompt", "second"])
