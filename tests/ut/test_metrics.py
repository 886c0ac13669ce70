"""Numbers of one iteration, worked by hand, and the log line."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from datetime import datetime
from pathlib import Path

import pytest
import torch

from mindspeed_odpo import device

device.setup()

from mindspeed_odpo.config import PairsConfig  # noqa: E402
from mindspeed_odpo.engine.forward import pack_rows  # noqa: E402
from mindspeed_odpo.loss import preference_loss, sft_loss  # noqa: E402
from mindspeed_odpo.metrics import log_line, step_metrics  # noqa: E402
from mindspeed_odpo.pairs import make_pairs  # noqa: E402
from mindspeed_odpo.types import REASONS, Pairs, Rollout, StepStats  # noqa: E402

NAN = float("nan")
TIMINGS = {"rollout": 2.0, "judge": 1.0, "pairs": 0.125, "update": 0.5, "sync": 0.25, "all": 4.0}


def rollout() -> Rollout:
    """P=3, K=2. Answer lengths [[2, 3], [1, 3], [2, 2]], prompts of 1, 2 and 3 tokens; four of six answers finish."""
    mask = torch.tensor([[[1, 1, 0], [1, 1, 1]], [[1, 0, 0], [1, 1, 1]], [[1, 1, 0], [1, 1, 0]]]).bool()
    ids = torch.arange(18).view(3, 2, 3)
    prompt = torch.tensor([[0, 0, 1], [0, 1, 1], [1, 1, 1]])
    finished = torch.tensor([[True, False], [True, False], [True, True]])
    return Rollout(prompt, prompt.bool(), ids, mask, finished, torch.tensor([4, 5, 6]), policy_version=3).check()


def metrics(scores: list[list[float]], stats: StepStats, **options) -> dict[str, float]:
    tensor = torch.tensor(scores)
    pairs = make_pairs(tensor, rollout(), PairsConfig(**options))
    return step_metrics(stats, rollout(), pairs, tensor, TIMINGS, beta=0.1, epoch=0.5, sync_bytes=1000)


STATS = StepStats(
    {
        **{"loss": 1.2, "sft": 5.0, "logps_chosen": -20.0, "logps_rejected": -30.0, "accuracy": 1.0},
        **{"ref_logps_chosen": -26.0, "ref_logps_rejected": -28.0, "reward_chosen": 0.6, "reward_rejected": -0.2},
    },
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
        "sft_loss": 2.5,
        "objective/kl": 1.0,
        "objective/entropy": 12.5,
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
        "pairs/dropped_empty": 0,
        "pairs/dropped_identical": 0,
        "pairs/dropped_margin": 0,
        "pairs/tie_fraction": 1 / 3,
        "grad_norm": 1.5,
        "lr": 2e-5,
        "update_skipped": 0,
        "update_nonfinite": 0,
        "policy_version": 3,
        "sync/bytes": 1000,
        "throughput/tokens_per_second": 13 / 4,
        "throughput/rollout_tokens_per_second": 13 / 2,
        "epoch": 0.5,
        "timing/gen": 2.0,
        "timing/ref": 1.0,
        "timing/adv": 0.125,
        "timing/update_actor": 0.5,
        "timing/sync": 0.25,
        "timing/all": 4.0,
    }
    assert m == {name: pytest.approx(value, abs=1e-6) for name, value in wanted.items()}
    assert all(type(value) is float for value in m.values())


def test_scores_are_raw_the_margin_is_penalised():
    """Penalty 1 on the unfinished second answers: margin of the second prompt |0.5 - (1 - 1)|, of the first 1 - (-1)."""
    m = metrics([[1.0, 0.0], [0.5, 1.0], [0.2, 0.2]], STATS, missing_eos_penalty=1.0)
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
        *(
            "rewards/accuracies",
            "sft_loss",
            "objective/kl",
            "objective/entropy",
            "reward/margin",
            "reward/score/mean",
            "reward/score/max",
            "reward/score/min",
        ),
    }
    assert m["update_skipped"] == 1.0 and m["pairs/kept"] == 0.0


def test_kept_pairs_alone_make_the_margin():
    pairs = Pairs(*torch.tensor([[[0], [0], [0]], [[1], [1], [1]]]), torch.tensor([[0.5], [9.0], [9.0]]), torch.tensor([[0], [3], [4]]))
    m = step_metrics(STATS, rollout(), pairs, torch.zeros(3, 2), TIMINGS, beta=0.1, epoch=0.0)
    assert m["reward/margin"] == 0.5


def test_each_reason_is_counted_under_its_own_name():
    """Three prompts of five pairs: reason i of REASONS stands i + 1 times, the last one 0 times; all pairs are accounted for."""
    reason = torch.tensor([0] + [1] * 2 + [2] * 3 + [3] * 4 + [4] * 5).view(3, 5)
    zero = torch.zeros(3, 5)
    m = step_metrics(STATS, rollout(), Pairs(zero.long(), zero.long() + 1, zero + 1, reason), zero[:, :2], TIMINGS, beta=0.1, epoch=0.0)
    counts = [m["pairs/kept"], *(m[f"pairs/dropped_{name}"] for name in REASONS[1:])]
    assert counts == [1, 2, 3, 4, 5, 0]
    assert m["pairs/tie_fraction"] == pytest.approx(4 / 15)


@pytest.mark.parametrize(("ties", "kept"), [("drop", 1), ("first", 3)])
def test_the_tie_fraction_counts_ties_that_train_too(ties, kept):
    """Two of three prompts tie."""
    m = metrics([[1.0, 0.0], [0.5, 0.5], [0.2, 0.2]], STATS, ties=ties)
    assert (m["pairs/kept"], m["pairs/tie_fraction"]) == (kept, pytest.approx(2 / 3))


def test_without_a_reference_kl_is_nan_and_rewards_are_not():
    """SimPO: the reference's log-probs are NaN; its rewards, beta times the policy's mean log-prob, are not made from them."""
    m = metrics([[1.0, 0.0]] * 3, replace(STATS, sums={**STATS.sums, "ref_logps_chosen": NAN, "ref_logps_rejected": NAN}))
    assert {name for name, value in m.items() if math.isnan(value)} == {"objective/kl"}
    assert m["rewards/chosen"] == pytest.approx(0.3) and m["rewards/margins"] == pytest.approx(0.4)


def test_an_update_left_out_for_a_nan_is_told_apart_from_one_without_pairs():
    m = metrics([[1.0, 0.0]] * 3, replace(STATS, skipped=True, nonfinite=True))
    assert (m["update_skipped"], m["update_nonfinite"]) == (1.0, 1.0)


def test_recorded_preferences_have_no_scores_and_no_rollout():
    """No speed of a rollout; no reward, reward margin or tie: a margin of 0 that nobody measured is not a tie. The rest is as ever."""
    timings = {name: value for name, value in TIMINGS.items() if name in ("pairs", "update", "all")}
    one = torch.ones(3, 1, dtype=torch.int64)
    m = step_metrics(
        STATS, rollout(), Pairs(0 * one, one, torch.zeros(3, 1), 0 * one), torch.full((3, 2), NAN), timings, beta=0.1, epoch=0.0
    )
    absent = metrics([[1.0, 0.0]] * 3, STATS).keys() - m.keys()
    assert absent == {"timing/gen", "timing/ref", "timing/sync", "sync/bytes", "throughput/rollout_tokens_per_second"}
    undefined = {name for name, value in m.items() if math.isnan(value)}
    assert undefined == {"reward/margin", "reward/score/mean", "reward/score/max", "reward/score/min"}
    assert (m["pairs/kept"], m["pairs/tie_fraction"], m["reward/unscored"]) == (3.0, 0.0, 6.0)


def of_a_model(batch: Rollout) -> dict[str, float]:
    """Metrics with log-probs of a made-up policy and reference, which depend on each token and its position."""
    scores = torch.tensor([[1.0, 0.0], [0.5, 1.0], [0.2, 0.1]])
    pairs = make_pairs(scores, batch, PairsConfig())
    prompt = torch.arange(len(batch))
    sums, lengths = {}, batch.lengths()
    for side, which in (("chosen", pairs.chosen[:, 0]), ("rejected", pairs.rejected[:, 0])):
        rows = pack_rows(batch, prompt, which)
        seen = rows.ids[rows.row, rows.column]
        sums[f"logps_{side}"] = rows.sums(-0.1 * (rows.target % 7) - 0.03 * rows.column - 0.01 * seen)
        sums[f"ref_logps_{side}"] = rows.sums(-0.2 * (rows.target % 5) - 0.02 * rows.column)
        sums[f"reward_{side}"] = 0.1 * (sums[f"logps_{side}"] - sums[f"ref_logps_{side}"])
    sides = [sums[f"{model}_{side}"] for model in ("logps", "ref_logps") for side in ("chosen", "rejected")]
    sums["loss"] = preference_loss(*sides, loss_type="sigmoid", beta=0.1)
    sums["sft"] = sft_loss(sums["logps_chosen"], lengths[prompt, pairs.chosen[:, 0]])
    sums["accuracy"] = (sums["reward_chosen"] > sums["reward_rejected"]).float()
    stats = StepStats({name: float(value.sum()) for name, value in sums.items()}, pairs=int(pairs.keep.sum()))
    return step_metrics(stats, batch, pairs, scores, TIMINGS, beta=0.1, epoch=0.0)


@pytest.mark.parametrize(("left", "right"), [(40, 0), (0, 40), (40, 40)])
def test_padding_changes_no_metric(left, right):
    """The same pairs with 40 more columns of padding before the prompts, behind the answers, or both: every number is equal to the bit.
    The padding holds token ids, so that anything that looked at it would show."""
    base = rollout()
    p, k, r = base.response_ids.shape
    wide = replace(
        base,
        prompt_ids=torch.cat([torch.full((p, left), 11), base.prompt_ids], 1),
        prompt_mask=torch.cat([torch.zeros(p, left, dtype=torch.bool), base.prompt_mask], 1),
        response_ids=torch.cat([base.response_ids, torch.full((p, k, right), 12)], 2),
        response_mask=torch.cat([base.response_mask, torch.zeros(p, k, right, dtype=torch.bool)], 2),
    ).check()
    assert of_a_model(wide) == of_a_model(base)
    assert of_a_model(base)["objective/kl"] != 0.0


def test_mutant_padding_that_counts_is_seen():
    """A mask that takes the padding in, as where KL and entropy are summed over whole rows, changes the numbers."""
    base = rollout()
    wrong, right = of_a_model(replace(base, response_mask=torch.ones_like(base.response_mask))), of_a_model(base)
    changed = {name for name in right if wrong[name] != right[name]}
    assert {"objective/kl", "objective/entropy", "logps/chosen", "rewards/chosen", "actor/pg_loss", "sft_loss"} <= changed


def test_the_table_in_the_docs_has_every_metric_and_no_other():
    """Each row: name, formula, unit, which way is good; no cell is empty."""
    text = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text(encoding="utf-8")
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("| `")]
    assert all(len(row) == 4 and all(row) for row in rows)
    assert sorted(row[0].strip("`") for row in rows) == sorted(metrics([[1.0, 0.0]] * 3, STATS))


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
