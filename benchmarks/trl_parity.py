"""Parity with TRL: our trainer and TRL's OnlineDPOTrainer on the same recorded answers give the same numbers.

An online run of ours records answers; our trainer then replays them (rollout engine ``replay``), and TRL's trainer gets them
in place of its own generation. Everything else is each side's own code: prompts and chat template, scores, pairs, log-probs,
loss, gradient, clipping, AdamW. Both run in fp32 from one Hugging Face folder. The command ends with exit code 1 when a
number of any iteration differs by more than its limit. Some minutes on 2 quiet cores.

    python benchmarks/trl_parity.py                                       # record, replay, compare
    python benchmarks/trl_parity.py --completions runs/X/completions.jsonl training.global_batch_size=12 ...
    python benchmarks/trl_parity.py --train-pad-row                       # without the one fault of transformers that shows
    python benchmarks/trl_parity.py --write-docs                          # and renew docs/precision.md
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import math
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

# Only light imports up here: --help works with nothing installed.

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs" / "precision.md"
PICTURE = "trl_parity.svg"
BEGIN, END = "<!-- trl_parity: begin -->", "<!-- trl_parity: end -->"
NEEDED = ("trl", "datasets", "matplotlib")
PACKAGES = ("trl", "transformers", "torch", "megatron-core")
ACTOR, REF = "actor_rollout_ref.actor_rollout", "actor_rollout_ref.ref"

SETTINGS: dict[str, Any] = {
    "training.train_iters": 15,
    "training.global_batch_size": 4,
    f"{ACTOR}.ppo_mini_batch_size": None,  # global_batch_size, whatever that is
    "training.seq_length": 64,
    "training.bf16": False,
    "training.save_interval": 0,
    "training.checkpoint_at_end": False,
    "training.export_hf": False,
    f"{ACTOR}.max_prompt_length": 32,
    f"{ACTOR}.micro_batch_size": 2,  # two micro-batches an iteration; TRL takes the batch in one
    f"{REF}.micro_batch_size": 4,
    f"{ACTOR}.dpo_beta": 0.1,
    f"{ACTOR}.lr": 2e-5,
    f"{ACTOR}.lr_decay_style": "constant",
    f"{ACTOR}.lr_warmup_iters": 0,
    f"{ACTOR}.weight_decay": 0.0,
    f"{ACTOR}.clip_grad": 1.0,
    f"{ACTOR}.adam_beta1": 0.9,
    f"{ACTOR}.adam_beta2": 0.95,
    f"{ACTOR}.adam_eps": 1e-8,
    # TRL's rules, so that both sides train on the same pairs; ours leaves such pairs out unless told otherwise.
    "algorithm.pair_ties": "first",
    "algorithm.pair_identical": "keep",
}
"""Over the quick start's config: overrides of the command line come after these."""


# ---------------------------------------------------------------------------------------------------------------------
# arithmetic


@dataclass(frozen=True)
class Quantity:
    name: str
    """As TRL logs it."""
    ours: str
    """The name in our metrics.jsonl."""
    first: float
    """Largest difference at the first iteration."""
    limit: float
    """Largest difference at any iteration."""
    near_zero: float = 0.0
    """The difference is relative to TRL's value, or to this where that value is smaller."""


QUANTITIES = (
    Quantity("loss", "actor/pg_loss", 1e-4, 1e-3),
    Quantity("logps/chosen", "logps/chosen", 1e-3, 1e-3),
    Quantity("logps/rejected", "logps/rejected", 1e-3, 1e-3),
    Quantity("rewards/chosen", "rewards/chosen", 1e-3, 1e-3, near_zero=1.0),
    Quantity("rewards/rejected", "rewards/rejected", 1e-3, 1e-3, near_zero=1.0),
    Quantity("rewards/margins", "rewards/margins", 1e-3, 1e-3, near_zero=1.0),
    Quantity("grad_norm", "grad_norm", 1e-3, 1e-3),
    Quantity("lr", "lr", 1e-9, 1e-9),
    Quantity("score", "reward/score/mean", 1e-9, 1e-9, near_zero=1.0),
)
AWAY = 0.05
"""The loss must go at least so far from ln 2: while the policy is the reference, nearly every trainer shows ln 2."""

Row = Mapping[str, float]


def difference(quantity: Quantity, ours: float, trl: float) -> float:
    """|ours - TRL|, relative to TRL's value; absolute in units of ``near_zero`` below it. Infinite where one is not finite."""
    if not (math.isfinite(ours) and math.isfinite(trl)):
        return math.inf
    gap, scale = abs(ours - trl), max(abs(trl), quantity.near_zero)
    return gap / scale if scale else (math.inf if gap else 0.0)


@dataclass(frozen=True)
class Comparison:
    """Both curves of one quantity, and their difference; one entry an iteration."""

    quantity: Quantity
    ours: tuple[float, ...]
    trl: tuple[float, ...]
    differences: tuple[float, ...]

    @property
    def worst(self) -> int:
        """The iteration (from 1) with the largest difference."""
        return 1 + max(range(len(self.differences)), key=self.differences.__getitem__)

    def faults(self) -> list[str]:
        q = self.quantity
        limits = [q.first, *[q.limit] * (len(self.differences) - 1)]
        over = [i for i, (d, limit) in enumerate(zip(self.differences, limits, strict=True)) if not d <= limit]
        if not over:
            return []
        i = over[0]
        shown = f"ours {self.ours[i]:.8g}, TRL {self.trl[i]:.8g}, difference {self.differences[i]:.2g}, limit {limits[i]:.0e}"
        return [f"{q.name} at iteration {i + 1} of {len(limits)}: {shown} ({len(over)} iterations are over it)"]


def compare(ours: Sequence[Row], trl: Sequence[Row]) -> list[Comparison]:
    """Every quantity over all iterations. ``ours``: lines of metrics.jsonl (null for NaN), ``trl``: lines of TRL's side."""
    from mindspeed_odpo.errors import WorkerError

    if [row["step"] for row in ours] != [row["step"] for row in trl] or not ours:
        raise WorkerError(f"ours has {len(ours)} iterations, TRL {len(trl)}: both must run the same, and at least one")
    out = []
    for quantity in QUANTITIES:
        a = tuple(math.nan if row[quantity.ours] is None else float(row[quantity.ours]) for row in ours)
        b = tuple(float(row[quantity.name]) for row in trl)
        out.append(Comparison(quantity, a, b, tuple(difference(quantity, x, y) for x, y in zip(a, b, strict=True))))
    return out


def faults(comparisons: Sequence[Comparison], loss_type: str) -> list[str]:
    """What is over its limit, and whether the run says anything; empty: parity."""
    found = [fault for comparison in comparisons for fault in comparison.faults()]
    losses = comparisons[0].trl
    if loss_type == "sigmoid" and all(abs(loss - math.log(2)) < AWAY for loss in losses):
        farthest = max(losses, key=lambda loss: abs(loss - math.log(2)))
        found.append(
            f"the loss stays near ln 2 (farthest: {farthest:.4f}), less than {AWAY} away: it proves little; raise {ACTOR}.lr or train_iters"
        )
    return found


def repeats(recorded: Sequence[Row], replayed: Sequence[Row]) -> None:
    """WorkerError unless replaying a run's answers gave the run's losses again, to fp32 rounding: on two threads of a loaded machine a
    matrix product may be cut otherwise than the last time. Both are lines of metrics.jsonl."""
    from mindspeed_odpo.errors import WorkerError

    for a, b in zip(recorded, replayed, strict=True):
        if not abs(a["actor/pg_loss"] - b["actor/pg_loss"]) <= 1e-4 * a["actor/pg_loss"]:
            raise WorkerError(
                f"iteration {a['step']}: the recorded run had loss {a['actor/pg_loss']:.8g}, its replay {b['actor/pg_loss']:.8g}: "
                "rollout and replay give the actor different batches"
            )


def data_text(ours: Sequence[Row], batch: int) -> str:
    """What the recorded answers are like: pairs that TRL would decide by its rule for ties, answers without EOS."""
    ties = round(sum(row["pairs/tie_fraction"] for row in ours) * batch)
    ended = round(sum(row["val/eos_rate"] for row in ours) * 2 * batch)
    pairs = len(ours) * batch
    return (
        f"{pairs} pairs, {ties} of them ties (the first answer wins on both sides); {2 * pairs - ended} of {2 * pairs} answers have no EOS"
    )


def summary_rows(comparisons: Sequence[Comparison]) -> list[list[str]]:
    """A row a quantity: name, largest difference, its iteration, limit, what it is relative to."""
    rows = [["", "largest difference", "at iteration", "limit", "relative to"]]
    for one in comparisons:
        q = one.quantity
        limit = f"{q.limit:.0e}" if q.first == q.limit else f"{q.first:.0e} at the first, then {q.limit:.0e}"
        scale = "TRL's value" if not q.near_zero else f"TRL's value, {q.near_zero:g} where it is smaller"
        rows.append([q.name, f"{max(one.differences):.1e}", str(one.worst), limit, scale])
    return rows


def iteration_rows(comparisons: Sequence[Comparison]) -> list[list[str]]:
    """A row an iteration: loss, log-probs and margin of both sides, and the difference of the loss."""
    by_name = {one.quantity.name: one for one in comparisons}
    shown = {"loss": 6, "logps/chosen": 3, "logps/rejected": 3, "rewards/margins": 5, "grad_norm": 3}
    rows = [["iteration", *(f"{name}, {side}" for name in shown for side in ("ours", "TRL")), "loss, difference"]]
    for i in range(len(comparisons[0].ours)):
        values = [f"{curve[i]:.{digits}f}" for name, digits in shown.items() for curve in (by_name[name].ours, by_name[name].trl)]
        rows.append([str(i + 1), *values, f"{by_name['loss'].differences[i]:.1e}"])
    return rows


def markdown(rows: Sequence[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([lines[0], "|" + " --- |" * len(rows[0]), *lines[1:]])


def between_markers(text: str, new: str, path: Path) -> str:
    """``text`` with what stands between the two markers replaced by ``new``."""
    from mindspeed_odpo.errors import DataError

    if text.count(BEGIN) != 1 or text.count(END) != 1 or text.index(BEGIN) > text.index(END):
        raise DataError(f"{path}: expected one line '{BEGIN}' and, after it, one '{END}'; the result goes between them")
    return text[: text.index(BEGIN) + len(BEGIN)] + f"\n\n{new}\n\n" + text[text.index(END) :]


def draw(comparisons: Sequence[Comparison], path: Path) -> None:
    """Two curves on one picture, their difference below, for the loss and for the implicit reward's margin."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "trl_parity", "font.size": 9})
    from matplotlib import pyplot

    by_name = {one.quantity.name: one for one in comparisons}
    figure, axes = pyplot.subplots(2, 2, figsize=(9, 4.6), sharex=True, height_ratios=[2.2, 1], layout="constrained")
    for column, name in enumerate(("loss", "rewards/margins")):
        one = by_name[name]
        steps = range(1, len(one.ours) + 1)
        top, below = axes[0, column], axes[1, column]
        top.plot(steps, one.trl, "o-", color="#d95f02", markersize=8, markerfacecolor="none", linewidth=3, alpha=0.6, label="TRL")
        top.plot(steps, one.ours, ".-", color="#1b4f9c", linewidth=1, label="ours")
        if name == "loss":
            top.axhline(math.log(2), color="grey", linewidth=0.8, linestyle=":")
            top.annotate("ln 2", (len(one.ours), math.log(2)), xytext=(-4, 3), textcoords="offset points", color="grey")
        top.set_title(name)
        top.legend(frameon=False)
        below.semilogy(steps, [max(d, 1e-9) for d in one.differences], ".-", color="#444444", linewidth=1)
        limits = [one.quantity.first, *[one.quantity.limit] * (len(one.ours) - 1)]
        below.step(steps, limits, where="mid", color="#c0392b", linewidth=0.8, linestyle="--")
        below.set_ylim(1e-9, 1e-2)
        below.set_ylabel("difference")
        below.set_xlabel("iteration (dashed: limit)")
        below.xaxis.set_major_locator(matplotlib.ticker.MaxNLocator(integer=True))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


# ---------------------------------------------------------------------------------------------------------------------
# the two sides


def ours_side(config: Any) -> None:
    """Our ``train()`` with the real roles in this process, without Ray; its run log is ``config.run_dir``."""
    from mindspeed_odpo import device

    device.setup()
    import torch

    from mindspeed_odpo.engine.parallel import destroy
    from mindspeed_odpo.hosts.standalone import Host
    from mindspeed_odpo.report.run_log import RunLog
    from mindspeed_odpo.roles.actor import Actor
    from mindspeed_odpo.roles.reference import Reference
    from mindspeed_odpo.roles.replay import ReplayEngine
    from mindspeed_odpo.roles.reward import Reward
    from mindspeed_odpo.roles.rollout import RolloutEngine
    from mindspeed_odpo.train import train

    torch.set_num_threads(config.cpu_threads)
    host = Host(config)
    prompts = host.preflight()
    host.init(config.actor.parallel, 0, "127.0.0.1", 0)
    try:
        actor = Actor(config, host)
        rollout = (ReplayEngine if config.rollout.engine == "replay" else RolloutEngine)(config, host)

        def update(batch: Any, step: int, beta: float) -> Any:
            return actor.update(batch, step, beta, global_pairs=int(batch.pairs.keep.sum()))

        def sync_weights(version: int) -> int:
            rollout.load_weights(version, actor.weight_layout().gather())
            return 0

        roles = SimpleNamespace(
            actor=SimpleNamespace(update=update),
            rollout=rollout,
            reference=Reference(config, host),
            reward=Reward(config, host),
            sync_weights=sync_weights,
        )
        roles.sync_weights(0)
        with RunLog(config, 0, prompts) as log:
            train(config, roles, prompts, log, 0)
    finally:
        destroy()


def trl_side(config: Any, train_pad_row: bool = False) -> None:
    """TRL's trainer on the recorded answers; appends a line an iteration to ``trl.jsonl`` in ``config.run_dir``.

    Its model's ``generate`` alone is replaced: template, tokens, padding, cut at the EOS and all that follows are TRL's.
    ``train_pad_row``: also lift the ``padding_idx`` of transformers' input embedding, which keeps the pad id's row from its
    gradient, where pad = EOS that of a token that every prompt holds.
    """
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, TrainerCallback
    from trl.experimental.online_dpo import OnlineDPOTrainer
    from trl_settings import trl_config

    from mindspeed_odpo.data.prompts import Prompts, as_messages, load_tokenizer
    from mindspeed_odpo.hf.config import eos_token_ids
    from mindspeed_odpo.rewards.function import FunctionReward
    from mindspeed_odpo.roles.replay import ReplayEngine

    torch.set_num_threads(config.cpu_threads)
    config.run_dir.mkdir(parents=True)
    tokenizer = load_tokenizer(config.tokenizer)
    prompts = Prompts(config.data, tokenizer, config.rollout.max_prompt_length, config.global_batch_size, config.seed)
    replay: Any = ReplayEngine(config, SimpleNamespace(eos_ids=lambda: eos_token_ids(config.hf_folder)))
    data = [row for step in range(1, config.train_iters + 1) for row in prompts.batch(step).rows]
    judge = FunctionReward(config.reward.functions)
    row: dict[str, float] = {}

    def reward(prompts: Any, completions: Any, completion_ids: Any, row_number: list[int], **_: Any) -> list[float | None]:
        rows = [data[i] for i in row_number]
        scores = judge.score([r[config.data.prompt_key] for r in rows], [c[0]["content"] for c in completions], completion_ids, rows)
        row["score"] = float(torch.tensor(scores, dtype=torch.float32).double().mean())
        return scores

    class Trainer(OnlineDPOTrainer):
        def training_step(self, *args: Any, **kwargs: Any) -> Any:
            """TRL's own; notes what TRL's log would round to four decimals."""
            loss = super().training_step(*args, **kwargs)
            names = ("logps/chosen", "logps/rejected", "rewards/chosen", "rewards/rejected", "rewards/margins")
            row.update(loss=float(loss), lr=self._get_learning_rate(), **{name: self.stats[name][-1] for name in names})
            return loss

    class Lines(TrainerCallback):
        def on_log(self, arguments: Any, state: Any, control: Any, logs: Mapping[str, float], **_: Any) -> None:
            if "grad_norm" not in logs:  # the summary at the end
                return
            with (config.run_dir / "trl.jsonl").open("a", encoding="utf-8") as file:
                file.write(json.dumps({"step": state.global_step, **row, "grad_norm": logs["grad_norm"]}) + "\n")
            row.clear()

    arguments = trl_config(config, str(config.run_dir), bf16=False)
    key, system = config.data.prompt_key, config.data.system_prompt
    model = AutoModelForCausalLM.from_pretrained(config.actor.load, dtype=torch.float32, local_files_only=True)
    trainer = Trainer(
        model=model,
        reward_funcs=reward,
        args=arguments,
        train_dataset=Dataset.from_list([{"prompt": as_messages(r[key], system), "row_number": i} for i, r in enumerate(data)]),
        processing_class=tokenizer,
        callbacks=[Lines()],
    )

    def recorded(input_ids: Any, attention_mask: Any, **_: Any) -> Any:
        """TRL's order: the first answers of all prompts, then the second ones; padded with the pad id, as ``generate`` does."""
        batch = prompts.batch(trainer.state.global_step + 1)
        rollout = replay.generate(batch)
        check_prompts(trainer.state.global_step + 1, batch, input_ids, attention_mask.bool())
        answers = trl_answers(rollout, tokenizer.pad_token_id)
        return torch.cat([input_ids, answers], dim=1)

    model.generate = recorded
    if train_pad_row:
        model.get_input_embeddings().padding_idx = None
    trainer.train()


def check_prompts(step: int, batch: Any, ids: Any, mask: Any) -> None:
    """WorkerError unless TRL rendered the prompts to our tokens. ``ids``, ``mask``: ``[2P, S]``, left-padded."""
    from mindspeed_odpo.errors import WorkerError

    for i in range(len(ids)):
        p = i % len(batch)
        ours, trl = batch.ids[p][batch.mask[p]].tolist(), ids[i][mask[i]].tolist()
        if ours != trl:
            raise WorkerError(
                f"iteration {step}, prompt {p}: ours has the tokens {ours[:12]}, TRL {trl[:12]} (first 12): the sides did not get the same "
                "prompts; does the chat template depend on the date or on the caller?"
            )


def trl_answers(rollout: Any, pad_id: int) -> Any:
    """i64 ``[2P, R]``, TRL's order. DataError where TRL would take padding for an EOS: it looks for one in the padding too."""
    from mindspeed_odpo.errors import DataError

    ids, mask = rollout.response_ids, rollout.response_mask
    short = (~rollout.finished & (rollout.lengths() < ids.shape[-1])).nonzero()
    if len(short):
        p, k = short[0].tolist()
        raise DataError(
            f"prompt_index {int(rollout.prompt_index[p])}, answer {k}: {int(rollout.lengths()[p, k])} tokens without EOS, the longest of "
            f"its iteration has {ids.shape[-1]}: TRL would take padding for an EOS; use answers that end with an EOS or at max_new_tokens"
        )
    return ids.masked_fill(~mask, pad_id).transpose(0, 1).reshape(-1, ids.shape[-1])


# ---------------------------------------------------------------------------------------------------------------------
# the benchmark


def compose(name: str, folder: str | None, overrides: Sequence[str]) -> Any:
    from mindspeed_odpo.config import parse
    from mindspeed_odpo.launch import compose as compose_tree

    return parse(compose_tree(name, overrides, folder), name)


def as_override(key: str, value: Any) -> str:
    return f"{key}={json.dumps(value)}" if value is None or isinstance(value, (str, bool)) else f"{key}={value}"


def all_overrides(options: argparse.Namespace) -> list[str]:
    model = str(options.model.expanduser().absolute())
    folders = {f"{ACTOR}.load": model, f"{REF}.load": model, "training.tokenizer_name_or_path": model}
    threads = {"training.cpu_threads": options.threads or cores()}
    return [*(as_override(key, value) for key, value in {**SETTINGS, **folders, **threads}.items()), *options.overrides]


def cores() -> int:
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def check(config: Any) -> None:
    """ConfigError for what one of the two sides does not have, or has only otherwise."""
    from mindspeed_odpo.errors import ConfigError

    loss, optimizer = config.actor.loss, config.actor.optimizer
    plain = {
        f"{ACTOR}.n_samples_per_prompt": (config.rollout.num_answers, 2),
        f"{ACTOR}.dpo_label_smoothing": (loss.label_smoothing, 0.0),
        f"{ACTOR}.dpo_logps_reduction": (loss.reduction, "sum"),
        f"{ACTOR}.pref_ftx": (loss.sft_weight, 0.0),
        f"{ACTOR}.dpo_beta, values": (len(loss.beta), 1),  # TRL 1.16 raises a TypeError on more than one
        f"{ACTOR}.lr_decay_style": (optimizer.lr_decay_style, "constant"),
        f"{ACTOR}.lr_warmup_iters": (optimizer.lr_warmup_iters, 0),
        "training.bf16": (config.bf16, False),
    }
    for key, (value, only) in plain.items():
        if value != only:
            raise ConfigError(f"{key} {value}: both sides can do only {only} here; set it")
    if loss.loss_type not in ("sigmoid", "ipo"):
        raise ConfigError(f"{ACTOR}.dpo_loss_type {loss.loss_type}: TRL's trainer has sigmoid and ipo")
    if not config.reward.functions:
        raise ConfigError("reward.functions: this comparison scores with reward functions; set it")
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(f"{' and '.join(missing)} not installed: pip install -e '.[benchmark]'")


def run_side(side: str, options: argparse.Namespace, overrides: Sequence[str], folder: Path) -> Path:
    """A side in a process of its own, so that neither inherits what the other did to torch. Returns its folder."""
    from mindspeed_odpo.errors import WorkerError

    spec: dict[str, Any] = {"config_name": options.config_name, "config_dir": options.config_dir, "train_pad_row": options.train_pad_row}
    spec["overrides"] = [*overrides, as_override("training.run_dir", str(folder / side))]
    (folder / f"{side}.json").write_text(json.dumps(spec), encoding="utf-8")
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "TRL_EXPERIMENTAL_SILENCE": "1"}
    output = folder / f"{side}.txt"
    print(f"{side} ...", flush=True)
    command = [sys.executable, str(Path(__file__).resolve()), "--side", side, "--spec", str(folder / f"{side}.json")]
    with output.open("wb") as file:
        done = subprocess.run(command, env=environment, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT)
    if done.returncode:
        tail = output.read_text(errors="replace").splitlines()[-20:]
        print("\n".join(tail), file=sys.stderr)
        raise WorkerError(f"side {side} ended with exit code {done.returncode}; the last lines of {output} are above")
    return folder / side


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def settings_text(config: Any) -> str:
    """What the numbers depend on, and not the machine."""
    loss, optimizer, rollout = config.actor.loss, config.actor.optimizer, config.rollout
    functions = ", ".join(f.target.rpartition(":")[2] for f in config.reward.functions)
    batch, size = config.global_batch_size, config.actor.micro_batch_size
    return (
        f"{config.train_iters} iterations of {batch} prompts with {rollout.num_answers} answers of at most {rollout.max_new_tokens} tokens "
        f"(ours in micro-batches of {min(batch, size)} pairs, TRL's in one); fp32; {loss.loss_type}, beta {loss.beta[0]:g}; "
        f"score: {functions}, {config.pairs.missing_eos_penalty:g} less without EOS; "
        f"AdamW, lr {optimizer.lr:g} constant, betas {optimizer.adam_beta1:g} and "
        f"{optimizer.adam_beta2:g}, eps {optimizer.adam_eps:g}, weight decay {optimizer.weight_decay:g}, gradient norm clipped at "
        f"{optimizer.clip_grad:g}; seed {config.seed}"
    )


def versions() -> str:
    return ", ".join(f"{name} {importlib.metadata.version(name).partition('+')[0]}" for name in PACKAGES)


def run(options: argparse.Namespace) -> int:
    from rich.console import Console
    from rich.table import Table

    from mindspeed_odpo.errors import WorkerError
    from mindspeed_odpo.report.run_log import free_run_dir

    overrides = all_overrides(options)
    config = compose(options.config_name, options.config_dir, overrides)
    check(config)
    folder = free_run_dir(options.out.absolute())
    folder.mkdir(parents=True)
    print(f"{settings_text(config)}\n{versions()}", flush=True)

    recorded = None if options.completions else run_side("record", options, overrides, folder)
    answers = options.completions.absolute() if recorded is None else recorded / "completions.jsonl"
    replayed = [*overrides, f"{ACTOR}.rollout_engine=replay", as_override(f"{ACTOR}.replay_path", str(answers))]
    ours = read_lines(run_side("ours", options, replayed, folder) / "metrics.jsonl")
    if recorded is not None:
        repeats(read_lines(recorded / "metrics.jsonl"), ours)
    trl = read_lines(run_side("trl", options, replayed, folder) / "trl.jsonl")
    comparisons = compare(ours, trl)

    console = Console() if sys.stdout.isatty() else Console(width=200)
    for rows in (iteration_rows(comparisons), summary_rows(comparisons)):
        table = Table(*rows[0])
        for row in rows[1:]:
            table.add_row(*row)
        console.print(table)
    draw(comparisons, folder / PICTURE)
    data = data_text(ours, config.global_batch_size)
    print(f"{data}\npicture and every number: {folder}", flush=True)
    found = faults(comparisons, config.actor.loss.loss_type)
    if found:
        raise WorkerError("no parity: " + "; ".join(found))
    print("parity: every number of every iteration is within its limit")
    if options.write_docs:
        body = "\n\n".join(
            [f"Settings: {settings_text(config)}.", f"Answers: {data}.", f"Versions: {versions()}.", markdown(summary_rows(comparisons))]
            + [f"![loss and margin of both sides, and their differences](img/{PICTURE})", markdown(iteration_rows(comparisons))]
        )
        DOCS.write_text(between_markers(DOCS.read_text(encoding="utf-8"), body, DOCS), encoding="utf-8")
        draw(comparisons, DOCS.parent / "img" / PICTURE)
        print(f"written: {DOCS}", flush=True)
    return 0


def parser() -> argparse.ArgumentParser:
    out = argparse.ArgumentParser(
        prog="trl_parity.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    out.add_argument("--model", type=Path, default=Path("models/smollm2-135m"), metavar="FOLDER", help="(default: %(default)s)")
    out.add_argument("--completions", type=Path, metavar="FILE", help="recorded answers to use (default: record them)")
    out.add_argument("--out", type=Path, default=Path("runs/trl_parity"), metavar="FOLDER", help="(default: %(default)s)")
    out.add_argument("--threads", type=int, default=0, help="torch threads of each side (default: all cores)")
    out.add_argument(
        "--train-pad-row", action="store_true", help="let TRL's model train the pad id's embedding too, which transformers holds back"
    )
    out.add_argument("--write-docs", action="store_true", help="put tables and picture into docs/precision.md")
    out.add_argument("--config-name", default="online_dpo_quickstart_smollm2", metavar="NAME", help="(default: %(default)s)")
    out.add_argument("--config-dir", metavar="DIR", help="a folder of your own with configs")
    out.add_argument("--side", choices=("record", "ours", "trl"), help=argparse.SUPPRESS)
    out.add_argument("--spec", type=Path, help=argparse.SUPPRESS)
    out.add_argument("overrides", nargs="*", metavar="key=value", help="overrides of the config, for both sides")
    return out


def main(argv: Sequence[str] | None = None) -> int:
    options = parser().parse_intermixed_args(argv)
    from mindspeed_odpo.errors import exit_code

    if options.side is None:
        return exit_code(lambda: run(options))
    spec = json.loads(options.spec.read_text(encoding="utf-8"))

    def call() -> int:
        config = compose(spec["config_name"], spec["config_dir"], spec["overrides"])
        if options.side == "trl":
            trl_side(config, spec["train_pad_row"])
        else:
            ours_side(config)
        return 0

    return exit_code(call)


if __name__ == "__main__":
    sys.exit(main())
