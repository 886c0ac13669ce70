"""benchmarks/trl_parity.py: its arithmetic, and the whole of it on a tiny model where TRL is installed.

The tiny run shows that the comparison is fair and that wrong trainers fail it. The numbers on a real model are in
docs/precision.md.
"""

from __future__ import annotations

import importlib.util
import json
import math
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tiny import make_tiny_hf

from mindspeed_odpo.errors import DataError, WorkerError
from mindspeed_odpo.types import PromptBatch, Rollout

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "trl_parity.py"
spec = importlib.util.spec_from_file_location("trl_parity", SCRIPT)
parity = importlib.util.module_from_spec(spec)
sys.modules["trl_parity"] = parity  # dataclasses look their module up
spec.loader.exec_module(parity)

LN2 = math.log(2)
ABOVE_1 = parity.Quantity("x", "x", 1e-4, 1e-3)
NEAR_0 = parity.Quantity("x", "x", 1e-3, 1e-3, near_zero=1.0)


def lines(losses: list[float], **trl: float) -> tuple[list[dict], list[dict]]:
    """Our lines and TRL's, equal but for the keywords in TRL's last line."""
    theirs = [{q.name: 2.0 for q in parity.QUANTITIES} | {"step": i, "loss": loss} for i, loss in enumerate(losses, start=1)]
    ours = [{q.ours: row[q.name] for q in parity.QUANTITIES} | {"step": row["step"]} for row in theirs]
    theirs[-1].update(trl)
    return ours, theirs


# -- arithmetic ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("quantity", "ours", "trl", "expected"),
    [
        (ABOVE_1, -202.0, -200.0, 0.01),
        (ABOVE_1, 0.51, 0.5, 0.02),
        (NEAR_0, 0.51, 0.5, 0.01),
        (NEAR_0, 4.1, 4.0, 0.025),
        (ABOVE_1, 0.0, 0.0, 0.0),
        (ABOVE_1, 1.0, 0.0, math.inf),
        (NEAR_0, math.nan, 0.0, math.inf),
    ],
)
def test_difference_is_relative_and_absolute_near_zero(quantity, ours, trl, expected):
    """0.51 against 0.5 is 2 % of the value, 0.01 where values below 1 are compared in absolute terms; NaN equals nothing."""
    assert parity.difference(quantity, ours, trl) == pytest.approx(expected)


def test_equal_curves_have_no_fault():
    comparisons = parity.compare(*lines([LN2, 0.6, 0.8]))
    assert parity.faults(comparisons, "sigmoid") == []
    assert max(max(one.differences) for one in comparisons) == 0


@pytest.mark.parametrize("name", [q.name for q in parity.QUANTITIES])
def test_mutant_one_number_off_at_the_last_iteration(name):
    """0.3 % off in one number of one iteration: named, with iteration, both values and limit."""
    wrong = {name: {"loss": 0.8}.get(name, 2.0) * 1.003}
    (fault,) = parity.faults(parity.compare(*lines([LN2, 0.6, 0.8], **wrong)), "sigmoid")
    assert fault.startswith(f"{name} at iteration 3 of 3: ours ") and ", limit 1e-0" in fault and "(1 iterations" in fault


def test_the_first_loss_has_a_limit_of_its_own():
    """3e-4 off: too much at the first iteration, within the limit at later ones."""
    ours, trl = lines([LN2, 0.6, 0.8])
    trl[1]["loss"] *= 1 + 3e-4
    assert parity.faults(parity.compare(ours, trl), "sigmoid") == []
    trl[0]["loss"] *= 1 + 3e-4
    assert "loss at iteration 1 of 3" in parity.faults(parity.compare(ours, trl), "sigmoid")[0]


def test_mutant_a_loss_that_stays_at_ln_2_proves_nothing():
    """Both sides at ln 2 throughout are equal and still refused; ipo has another start and no such rule."""
    comparisons = parity.compare(*lines([LN2, LN2 + 0.049, LN2 - 0.049]))
    assert "stays near ln 2" in parity.faults(comparisons, "sigmoid")[0]
    assert parity.faults(comparisons, "ipo") == []
    assert parity.faults(parity.compare(*lines([LN2, LN2 - 0.051])), "sigmoid") == []


def test_a_step_without_pairs_is_not_parity():
    """null in metrics.jsonl is NaN."""
    ours, trl = lines([LN2, 0.6])
    ours[1]["logps/chosen"] = None
    assert "difference inf" in parity.faults(parity.compare(ours, trl), "sigmoid")[0]


def test_different_numbers_of_iterations():
    ours, trl = lines([LN2, 0.6])
    with pytest.raises(WorkerError, match="ours has 2 iterations, TRL 1"):
        parity.compare(ours, trl[:1])


def test_a_replay_that_does_not_repeat_its_run():
    a = [{"step": 1, "actor/pg_loss": 0.7}]
    parity.repeats(a, a)
    with pytest.raises(WorkerError, match=r"iteration 1: the recorded run had loss 0.7, its replay 0.701"):
        parity.repeats(a, [{"step": 1, "actor/pg_loss": 0.701}])


def test_data_text_counts_ties_and_answers_without_eos():
    """Two iterations of 4 pairs: 1 tie of 8; 7 + 4 of 16 answers ended, 5 did not."""
    rows = [{"pairs/tie_fraction": 0.25, "val/eos_rate": 7 / 8}, {"pairs/tie_fraction": 0.0, "val/eos_rate": 4 / 8}]
    assert parity.data_text(rows, 4).startswith("8 pairs, 1 of them ties") and "5 of 16 answers have no EOS" in parity.data_text(rows, 4)


def test_tables_have_a_cell_everywhere():
    comparisons = parity.compare(*lines([LN2, 0.6, 0.8], loss=0.8004))
    for rows in (parity.summary_rows(comparisons), parity.iteration_rows(comparisons)):
        assert len({len(row) for row in rows}) == 1
        text = parity.markdown(rows).splitlines()
        assert len(text) == len(rows) + 1 and len({line.count("|") for line in text}) == 1
    assert parity.summary_rows(comparisons)[1][:3] == ["loss", "5.0e-04", "3"]


def test_docs_are_renewed_between_their_markers():
    text = f"before\n{parity.BEGIN}\nold\n{parity.END}\nafter\n"
    new = parity.between_markers(text, "new", Path("x.md"))
    assert new == f"before\n{parity.BEGIN}\n\nnew\n\n{parity.END}\nafter\n"
    assert parity.between_markers(new, "new", Path("x.md")) == new
    for broken in ("nothing", text + text, f"{parity.END}{parity.BEGIN}"):
        with pytest.raises(DataError, match=r"x.md: expected one line"):
            parity.between_markers(broken, "new", Path("x.md"))
    assert parity.BEGIN in parity.DOCS.read_text() and parity.END in parity.DOCS.read_text()


def rollout(finished: list[bool]) -> Rollout:
    """Two prompts; answers [5, 2], [5, 6, 7] and [8, 9], [4, 4, 2]."""
    ids = torch.tensor([[[5, 2, 0], [5, 6, 7]], [[8, 9, 0], [4, 4, 2]]])
    mask = torch.tensor([[[True, True, False], [True] * 3], [[True, True, False], [True] * 3]])
    one = torch.ones(2, 1, dtype=torch.int64)
    return Rollout(one, one.bool(), ids, mask, torch.tensor(finished).view(2, 2), torch.tensor([7, 3]), 0).check()


def test_trl_gets_all_first_answers_then_all_second_ones():
    assert parity.trl_answers(rollout([True, False, True, True]), 2).tolist() == [[5, 2, 2], [8, 9, 2], [5, 6, 7], [4, 4, 2]]


def test_an_unfinished_answer_that_trl_would_pad_with_its_eos():
    """[8, 9] without EOS beside longer answers: TRL finds the EOS in the padding and takes it for finished."""
    with pytest.raises(DataError, match="prompt_index 3, answer 0: 2 tokens without EOS, the longest of its iteration has 3"):
        parity.trl_answers(rollout([True, False, False, True]), 2)


def test_different_prompts_end_the_comparison():
    ids, mask = torch.tensor([[0, 5], [6, 7]]), torch.tensor([[False, True], [True, True]])
    batch = PromptBatch(1, ids, mask, torch.arange(2), torch.arange(2), ({}, {}))
    parity.check_prompts(1, batch, ids.repeat(2, 1), mask.repeat(2, 1))
    with pytest.raises(WorkerError, match=r"iteration 1, prompt 1: ours has the tokens \[6, 7\], TRL \[6, 8\]"):
        parity.check_prompts(1, batch, torch.tensor([[0, 5], [6, 8]] * 2), mask.repeat(2, 1))


def test_help_works_with_nothing_installed():
    done = subprocess.run([sys.executable, "-I", "-S", str(SCRIPT), "--help"], capture_output=True, text=True)
    assert done.returncode == 0 and "--write-docs" in done.stdout


def test_without_trl_the_cure_is_named(monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name in ("trl", "datasets") else find(name, *rest))
    monkeypatch.setattr(parity, "NEEDED", ("trl", "datasets"))
    with pytest.raises(Exception, match=r"trl and datasets not installed: pip install -e '.\[benchmark\]'"):
        parity.check(config_of())


def config_of(**changes) -> SimpleNamespace:
    loss = {"label_smoothing": 0.0, "reduction": "sum", "sft_weight": 0.0, "beta": (0.1,), "loss_type": "sigmoid"}
    loss.update({k: v for k, v in changes.items() if k in loss})
    return SimpleNamespace(
        bf16=changes.get("bf16", False),
        rollout=SimpleNamespace(num_answers=changes.get("num_answers", 2)),
        reward=SimpleNamespace(functions=changes.get("functions", ("f",))),
        actor=SimpleNamespace(loss=SimpleNamespace(**loss), optimizer=SimpleNamespace(lr_decay_style="constant", lr_warmup_iters=0)),
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_answers": 4}, "n_samples_per_prompt 4: both sides can do only 2 here"),
        ({"label_smoothing": 0.1}, "dpo_label_smoothing 0.1"),
        ({"beta": (0.1, 0.2)}, "dpo_beta, values 2"),
        ({"bf16": True}, "training.bf16 True"),
        ({"loss_type": "hinge"}, "dpo_loss_type hinge: TRL's trainer has sigmoid and ipo"),
        ({"functions": ()}, "reward.functions"),
    ],
)
def test_what_one_side_lacks_is_refused(change, message):
    with pytest.raises(Exception, match=message):
        parity.check(config_of(**change))


# -- the whole, on a tiny model ------------------------------------------------------------------------------------------

ACTOR = "actor_rollout_ref.actor_rollout"


@pytest.fixture(scope="module")
def tiny_run(tmp_path_factory) -> SimpleNamespace:
    """Both sides through the command line: 4 iterations of 4 prompts, answers of at most 32 bytes, a score with ties."""
    for package in ("trl", "datasets", "matplotlib"):
        pytest.importorskip(package, reason="pip install -e '.[benchmark]'")
    folder = tmp_path_factory.mktemp("parity")
    model = make_tiny_hf(folder / "model")
    (folder / "prompts.jsonl").write_text("".join(json.dumps({"prompt": f"say {i}"}) + "\n" for i in range(8)))
    (folder / "score.py").write_text("def score(responses):\n    return [float(sum(c.isalpha() for c in r) // 3) for r in responses]\n")
    overrides = [
        "training.train_iters=4",
        f"{ACTOR}.data_path={folder}/prompts.jsonl",
        f"reward.functions={folder}/score.py:score",
        f"{ACTOR}.lr=2e-3",
        f"{ACTOR}.missing_eos_penalty=100",
    ]
    # pad = EOS, and the model is so small that the row of embeddings which transformers leaves out shows at once.
    options = ["--train-pad-row", "--config-name", "online_dpo_tiny", "--model", str(model), "--threads", "1"]
    options += ["--out", str(folder / "out"), *overrides]
    code = parity.main(options)
    return SimpleNamespace(code=code, folder=folder / "out", trl=parity.read_lines(folder / "out" / "trl" / "trl.jsonl"))


def test_tiny_models_numbers_are_trls(tiny_run):
    """Exit code 0, four iterations, a picture; the loss moves, so that this is not ln 2 against ln 2."""
    assert tiny_run.code == 0
    assert len(tiny_run.trl) == 4 and max(abs(row["loss"] - LN2) for row in tiny_run.trl) > 0.05
    assert "<svg" in (tiny_run.folder / parity.PICTURE).read_text()


def ours_with(tiny_run, tmp_path, *overrides: str) -> list[str]:
    """Faults of a wrong trainer of ours on the same answers, against the same numbers of TRL."""
    spec = json.loads((tiny_run.folder / "ours.json").read_text())
    changed = [*spec["overrides"], *overrides, f"training.run_dir={tmp_path}/wrong"]
    parity.ours_side(parity.compose(spec["config_name"], spec["config_dir"], changed))
    return parity.faults(parity.compare(parity.read_lines(tmp_path / "wrong" / "metrics.jsonl"), tiny_run.trl), "sigmoid")


def test_tiny_run_in_this_process_is_the_same(tiny_run, tmp_path):
    """The tests below change one thing each; with nothing changed there is no fault."""
    assert ours_with(tiny_run, tmp_path) == []


@pytest.mark.parametrize(
    "wrong",
    [
        f"{ACTOR}.dpo_beta=0.101",
        f"{ACTOR}.dpo_logps_reduction=masked_mean",
        f"{ACTOR}.missing_eos_penalty=0",
        f"{ACTOR}.lr=2.1e-3",
        f"{ACTOR}.clip_grad=0",
        f"{ACTOR}.adam_beta1=0.5",
        f"{ACTOR}.dpo_loss_type=ipo",
        "algorithm.pair_ties=drop",
    ],
)
def test_mutant_setting_is_caught(tiny_run, tmp_path, wrong):
    """One setting of ours differs from TRL's: not parity."""
    assert ours_with(tiny_run, tmp_path, wrong) != []


def swapped(monkeypatch) -> None:
    """The rejected answer is preferred."""
    from dataclasses import replace

    from mindspeed_odpo import train

    right = train.make_pairs

    def make_pairs(*args):
        pairs = right(*args)
        return replace(pairs, chosen=pairs.rejected, rejected=pairs.chosen)

    monkeypatch.setattr(train, "make_pairs", make_pairs)


def no_reference(monkeypatch) -> None:
    """The reference's log-probabilities are taken as 0."""
    from mindspeed_odpo.roles.reference import Reference

    right = Reference.logps
    monkeypatch.setattr(Reference, "logps", lambda self, rollout: torch.zeros_like(right(self, rollout)))


def last_token_uncounted(monkeypatch) -> None:
    """The mask ends one token early: the EOS is left out."""
    from dataclasses import replace

    from mindspeed_odpo.roles.replay import ReplayEngine

    right = ReplayEngine.generate

    def generate(self, prompts, greedy=False):
        rollout = right(self, prompts, greedy)
        mask = rollout.response_mask & (torch.arange(rollout.response_mask.shape[-1]) < rollout.lengths()[..., None] - 1)
        return replace(rollout, response_mask=mask)

    monkeypatch.setattr(ReplayEngine, "generate", generate)


def row_order(monkeypatch) -> None:
    """Chosen is always the first answer, whatever the score."""
    from dataclasses import replace

    from mindspeed_odpo import train

    right = train.make_pairs

    def make_pairs(*args):
        pairs = right(*args)
        return replace(pairs, chosen=torch.zeros_like(pairs.chosen), rejected=torch.ones_like(pairs.rejected))

    monkeypatch.setattr(train, "make_pairs", make_pairs)


@pytest.mark.parametrize("wrong", [swapped, no_reference, last_token_uncounted, row_order])
def test_mutant_trainer_is_caught(tiny_run, tmp_path, monkeypatch, wrong):
    wrong(monkeypatch)
    assert ours_with(tiny_run, tmp_path) != []
