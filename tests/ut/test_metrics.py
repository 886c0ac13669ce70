"""Numbers of one iteration, worked by hand, and the log line."""

from __future__ import annotations

import math
import re
from datetime import datetime

import pytest
import torch

from mindspeed_odpo.metrics import log_line, step_metrics
from mindspeed_odpo.pairs import make_pairs
from mindspeed_odpo.types import Pairs, Rollout, StepStats

NAN = float("nan")
TIMINGS = {"rollout": 2.0, "judge": 1.0, "update": 0.5, "sync": 0.25, "all": 4.0}


def rollout() -> Rollout:
    """P=3, K=2. Answer lengths [[2, 3], [1, 3], [2, 2]], prompts of 1, 2 and 3 tokens; four of six answers finish."""
    mask = torch.tensor([[[1, 1, 0], [1, 1, 1]], [[1, 0, 0], [1, 1, 1]], [[1, 1, 0], [1, 1, 0]]]).bool()
    ids = torch.arange(18).view(3, 2, 3)
    prompt = torch.tensor([[0, 0, 1], [0, 1, 1], [1, 1, 1]])
    finished = torch.tensor([[True, False], [True, False], [True, True]])
    return Rollout(prompt, prompt.bool(), ids, mask, finished, torch.tensor([4, 5, 6]), policy_version=3).check()


def metrics(scores: list[list[float]], stats: StepStats, penalty: float = 0.0) -> dict[str, float]:
    tensor = torch.tensor(scores)
    return step_metrics(stats, rollout(), make_pairs(tensor, rollout(), penalty), tensor, TIMINGS, beta=0.1, epoch=0.5)


STATS = StepStats(
    {"loss": 1.2, "logps_chosen": -20.0, "logps_rejected": -30.0, "ref_logps_chosen": -26.0, "ref_logps_rejected": -28.0, "accuracy": 1.0},
    pairs=2,
    grad_norm=1.5,
    lr=2e-5,
)


def test_worked_example():
    """Two kept pairs (margins 1.0 and 0.5), one tie. Log-ratios: chosen (-20+26)/2 = 3, rejected (-30+28)/2 = -1."""
    m = metrics([[1.0, 0.0], [0.5, 1.0], [0.2, 0.2]], STATS)
    wanted = {
        "actor/pg_loss": 0.6,
        "beta": 0.1,
        "logps/chosen": -10.0,
        "logps/rejected": -15.0,
        "rewards/chosen": 0.3,
        "rewards/rejected": -0.1,
        "rewards/margins": 0.4,
        "rewards/accuracies": 0.5,
        "objective/kl": 1.0,
        "reward/score/mean": 2.9 / 6,
        "reward/score/max": 1.0,
        "reward/score/min": 0.0,
        "reward/margin": 0.75,
        "reward/unscored": 0,
        "response_length/mean": 13 / 6,
        "response_length/max": 3,
        "response_length/min": 1,
        "prompt_length/mean": 2,
        "prompt_length/max": 3,
        "prompt_length/min": 1,
        "val/eos_rate": 4 / 6,
        "pairs/kept": 2,
        "pairs/dropped_tie": 1,
        "pairs/dropped_no_score": 0,
        "pairs/dropped_identical": 0,
        "grad_norm": 1.5,
        "lr": 2e-5,
        "update_skipped": 0,
        "policy_version": 3,
        "throughput/tokens_per_second": 13 / 4,
        "throughput/rollout_tokens_per_second": 13 / 2,
        "epoch": 0.5,
        "timing/gen": 2.0,
        "timing/ref": 1.0,
        "timing/update_actor": 0.5,
        "timing/sync": 0.25,
        "timing/all": 4.0,
    }
    assert m == {name: pytest.approx(value, abs=1e-6) for name, value in wanted.items()}
    assert all(type(value) is float for value in m.values())


def test_scores_are_raw_the_margin_is_penalised():
    """Penalty 1 on the unfinished second answers: margin of the second prompt |0.5 - (1 - 1)|, of the first 1 - (-1)."""
    m = metrics([[1.0, 0.0], [0.5, 1.0], [0.2, 0.2]], STATS, penalty=1.0)
    assert m["reward/score/mean"] == pytest.approx(2.9 / 6)
    assert m["reward/margin"] == pytest.approx((2.0 + 0.5) / 2)


def test_unscored_answers_count_nowhere():
    """None is not zero: zeros would give mean 0.4667 and minimum 0."""
    m = metrics([[1.0, NAN], [0.5, 1.0], [NAN, 0.3]], STATS)
    assert (m["reward/score/mean"], m["reward/score/min"], m["reward/unscored"]) == (pytest.approx(0.7), pytest.approx(0.3), 2.0)
    assert m["pairs/dropped_no_score"] == 2.0


def test_no_pair_kept_is_nan_not_zero():
    stats = StepStats(dict.fromkeys(STATS.sums, 0.0), pairs=0, skipped=True)
    m = metrics([[NAN, NAN]] * 3, stats)
    undefined = {name for name, value in m.items() if math.isnan(value)}
    assert undefined == {
        *("actor/pg_loss", "logps/chosen", "logps/rejected", "rewards/chosen", "rewards/rejected", "rewards/margins"),
        *("rewards/accuracies", "objective/kl", "reward/margin", "reward/score/mean", "reward/score/max", "reward/score/min"),
    }
    assert m["update_skipped"] == 1.0 and m["pairs/kept"] == 0.0


def test_kept_pairs_alone_make_the_margin():
    pairs = Pairs(torch.tensor([0, 0, 0]), torch.tensor([1, 1, 1]), torch.tensor([True, False, False]), torch.tensor([0.5, 0.0, 0.0]))
    m = step_metrics(STATS, rollout(), pairs, torch.zeros(3, 2), TIMINGS, beta=0.1, epoch=0.0)
    assert m["reward/margin"] == 0.5


def test_log_line_byte_for_byte():
    """MindSpeed-LLM 2.0.0's line: same head, separators, four decimals, trailing space."""
    numbers = {"timing/gen": 0.87281, "actor/pg_loss": 0.69384, "logps/chosen": -88.16184, "lr": 2e-5, "timing/all": 1.24779}
    line = log_line(1, 5, numbers, datetime(2026, 11, 30, 20, 3, 36, 999))
    assert line == (
        "INFO:root:[2026-11-30 20:03:36] iteration: 1 / 5 | timing/gen : 0.8728 | actor/pg_loss : 0.6938 | "
        "logps/chosen : -88.1618 | lr : 2.0000e-05 | timing/all : 1.2478 "
    )


def test_log_line_has_the_hosts_names_in_its_order():
    line = log_line(1, 5, metrics([[1.0, 0.0], [0.5, 1.0], [0.2, 0.2]], STATS), datetime(2026, 1, 1))
    host = (
        "timing/gen timing/ref timing/update_actor actor/pg_loss beta logps/chosen logps/rejected rewards/chosen rewards/rejected "
        "reward/score/mean reward/score/max reward/score/min response_length/mean response_length/max response_length/min "
        "prompt_length/mean prompt_length/max prompt_length/min timing/all"
    ).split()
    names = [part.split(" : ")[0] for part in line.split(" | ")[1:]]
    assert [name for name in names if name in host] == host
    assert re.findall(r"actor/pg_loss : ([0-9.]+)", line) == ["0.6000"]


def test_log_line_says_nan():
    line = log_line(2, 5, {"actor/pg_loss": NAN}, datetime(2026, 1, 1))
    assert line.endswith("| actor/pg_loss : nan ") and not re.findall(r"actor/pg_loss : ([0-9.]+)", line)
