"""A reward that compares: a Python function says which of two answers is better."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations
from typing import Any

from mindspeed_odpo.errors import WorkerError
from mindspeed_odpo.rewards.function import UserFunction, data_columns, free_columns


class JudgeReward:
    """Scores from a pairwise judge: the share of its comparisons that an answer won; a tie is half a win.

    The judge gets keyword arguments: ``prompts`` (as in the data), ``first`` and ``second`` (two answers to it, text without
    special tokens) and every column of the data as a list, all of one length N; only those that it declares, all with
    ``**kwargs``. It returns N verdicts: 0 (first is better), 1 (second is better) or None (no opinion).

    Judges, language models above all, prefer a place as such (arXiv 2306.05685). So every two answers of a prompt are asked
    about in both orders, in one call of the function, and verdicts that contradict each other are a tie. No opinion in one
    order is a tie too; in both, the comparison does not count.
    """

    ARGUMENTS = ("prompts", "first", "second")

    def __init__(self, target: str) -> None:
        self._judge = UserFunction(target, "judge")

    def check(self, columns: Iterable[str]) -> None:
        """``ConfigError`` where the judge needs an argument that the data does not have."""
        self._judge.check([*self.ARGUMENTS, *free_columns(columns, ["first", "second"])])

    def score(
        self,
        prompts: Sequence[Any],
        responses: Sequence[str],
        response_ids: Sequence[list[int]],
        rows: Sequence[Mapping[str, Any]],
        answers_per_prompt: int,
    ) -> list[float | None]:
        """One score in [0, 1] for each of N answers; None where no comparison of the answer counts. All arguments have
        length N = P * ``answers_per_prompt``, the answers of a prompt side by side; ``response_ids`` are not read."""
        if len(responses) % answers_per_prompt:
            raise WorkerError(f"{self._judge.name}: {len(responses)} answers are not a multiple of {answers_per_prompt} a prompt")
        starts = range(0, len(responses), answers_per_prompt)
        pairs = [pair for start in starts for pair in combinations(range(start, start + answers_per_prompt), 2)]
        verdicts = self._ask([*pairs, *((b, a) for a, b in pairs)], prompts, responses, rows)
        won, asked = [0.0] * len(responses), [0] * len(responses)
        for (a, b), straight, swapped in zip(pairs, verdicts[: len(pairs)], verdicts[len(pairs) :], strict=True):
            if straight is None and swapped is None:
                continue
            asked[a] += 1
            asked[b] += 1
            a_wins = 0.5 if straight is None or swapped is None or straight == swapped else float(straight == 0)
            won[a] += a_wins
            won[b] += 1 - a_wins
        return [w / n if n else None for w, n in zip(won, asked, strict=True)]

    def _ask(
        self, questions: Sequence[tuple[int, int]], prompts: Sequence[Any], responses: Sequence[str], rows: Sequence[Mapping[str, Any]]
    ) -> list[int | None]:
        """One verdict for each question, a pair of indexes on N: (first, second)."""
        asked = [prompts[first] for first, _ in questions]
        offered = {
            **data_columns([rows[first] for first, _ in questions], self.ARGUMENTS, asked),
            "prompts": asked,
            "first": [responses[first] for first, _ in questions],
            "second": [responses[second] for _, second in questions],
        }
        verdicts = self._judge(offered, len(questions), "verdicts", "return one for every first and second, None for no opinion")
        for i, value in enumerate(verdicts):
            # A bool is refused though it is an int: True reads as "yes, the first" and would count for the second.
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value not in (0, 1)):
                got = f"'{value}'" if isinstance(value, str) else f"{value} ({type(value).__name__})"
                first, second = offered["first"][i], offered["second"][i]
                raise WorkerError(
                    f"{self._judge.name}: verdict {i} is {got}, expected 0 (first is better), 1 (second is better) or None (no opinion); "
                    f"first: {first[:80]!r}, second: {second[:80]!r}"
                )
        return verdicts
