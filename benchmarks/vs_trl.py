"""TRL's OnlineDPOTrainer against ours: seconds a step by phase, tokens a second, peak memory, ratios.

Both sides read one config, so that weights, prompts and their order, lengths, sampling, reward, loss, optimizer and threads
are the same. They alternate, each turn in fresh processes, so that a machine that drifts drifts for all of them; a ratio
compares turns of the same round. Ours runs as a user runs it, by ``ray_gpt.py``. Both write one line an iteration, and one
watcher outside times both by these lines, so that logging and bookkeeping count too.

    python benchmarks/vs_trl.py                                    # the quick start's config, about 15 minutes on 2 cores
    python benchmarks/vs_trl.py training.global_batch_size=16      # any key of the config
    python benchmarks/vs_trl.py --sides ours-fp32,trl-fp32 --rounds 5 --json result.json
"""

from __future__ import annotations

import argparse
import ctypes
import importlib.metadata
import importlib.util
import json
import os
import platform
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

# Only light imports up here: --help works without TRL, and Ray's workers import this file for `tie_breaker`.

ROOT = Path(__file__).resolve().parents[1]
PHASES = ("generate", "reference + reward", "policy", "sync", "rest")
STALL_SECONDS = 900
"""A side that writes no line for so long has hung."""
PACKAGES = ("torch", "transformers", "trl", "accelerate", "datasets", "megatron-core", "ray")


@dataclass(frozen=True)
class Side:
    ours: bool
    bf16: bool
    """The config's ``training.bf16``; TRL's precision is in its name."""
    precision: str


SIDES = {
    "ours-bf16": Side(True, True, "bf16 weights and activations; fp32 master weights, gradients, Adam moments"),
    "trl-autocast": Side(False, True, "fp32 weights, gradients, Adam moments; bf16 autocast (TRL's bf16=True)"),
    "trl-bf16": Side(False, True, "bf16 weights, gradients and Adam moments; no fp32 copy, so small updates are rounded away"),
    "ours-fp32": Side(True, False, "fp32"),
    "trl-fp32": Side(False, False, "fp32"),
}

DIFFERENCES = """\
What differs, and is meant to:
- Ours is a driver, Ray's own processes and one worker with all roles; memory counts them all. TRL is one process.
- Ours samples with a decode module of its own, fed by the sync; TRL samples with the weights in training and has no sync.
- Ours runs reference and reward side by side, so they are one phase; for TRL it is their sum.
- Ours drops answers that have ended out of the batch; TRL computes padding until the longest answer ends.
- Ours makes logits at answer positions only; TRL at every position of the prompt too.
- Random numbers differ, so do the answers: read seconds beside the tokens, or use --fixed-length.
- Ours leaves ties and pairs of identical answers out; TRL trains them, the first answer wins. A tie-breaker of 1e-3 is
  added to the reward on both sides, so that only identical answers differ: see the row of pairs.
- TRL's AdamW is torch's fused one; ours is Megatron's, over torch's AdamW. TRL's objective/kl and entropy include padding.
- Not TRL's defaults: gradient_checkpointing=False (its default also turns the KV cache off), use_cpu, prompts in file order."""


# ---------------------------------------------------------------------------------------------------------------------
# arithmetic

Row = Mapping[str, float]


def phase_seconds(ours: bool, row: Row, wall: float) -> dict[str, float]:
    """Seconds of one iteration by ``PHASES``. ``row``: what the side wrote; ``wall``: seconds from its line before to this one.

    ``policy`` is forward, backward, clipping and optimizer step. ``rest`` is what no phase has: data, pairs, logging.
    """
    if ours:
        known = [row["timing/gen"], row["timing/ref"], row["timing/update_actor"], row["timing/sync"]]
    else:
        known = [row["generate"], row["reference"] + row["reward"], row["policy"], 0.0]
    return dict(zip(PHASES, [*known, wall - sum(known)], strict=True))


def counts(ours: bool, row: Row, prompts: int) -> dict[str, float]:
    """Answer tokens (EOS included), prompt tokens and trained pairs of one iteration of ``prompts`` prompts with two answers."""
    if ours:
        answer, prompt = row["response_length/mean"] * prompts * 2, row["prompt_length/mean"] * prompts
        return {"tokens": float(round(answer)), "prompt_tokens": float(round(prompt)), "pairs": row["pairs/kept"]}
    return {name: row[name] for name in ("tokens", "prompt_tokens", "pairs")}


def turn_numbers(iterations: Sequence[Row], seconds: Sequence[float]) -> dict[str, float]:
    """The numbers of one turn (one side, one round): medians over its measured iterations, throughput from their sums.

    ``iterations``: ``phase_seconds`` and ``counts`` of each, together; ``seconds``: the wall time of each.
    """
    tokens = sum(row["tokens"] for row in iterations)
    return {
        **{phase: statistics.median(row[phase] for row in iterations) for phase in PHASES},
        "step": statistics.median(seconds),
        "tokens/s": tokens / sum(seconds),
        "tokens/s, generation": tokens / sum(row["generate"] for row in iterations),
        "tokens a step": tokens / len(iterations),
        "pairs trained a step": sum(row["pairs"] for row in iterations) / len(iterations),
    }


def spread(values: Sequence[float]) -> tuple[float, float, float]:
    """Median, smallest, largest."""
    return statistics.median(values), min(values), max(values)


def advantage(name: str, ours: Sequence[float], theirs: Sequence[float]) -> list[float] | None:
    """How many times better ours is, round by round: > 1 is less time or memory, or more tokens a second. None where a
    quantity says nothing about better or worse, or one side has none of it."""
    if name in ("sync", "rest", "tokens a step", "pairs trained a step") or not all([*ours, *theirs]):
        return None
    more_is_better = name.startswith("tokens/s")
    return [o / t if more_is_better else t / o for o, t in zip(ours, theirs, strict=True)]


def show(values: Sequence[float], digits: int = 2, unit: str = "") -> str:
    middle, low, high = (f"{value:.{digits}f}" for value in spread(values))
    return f"{middle}{unit}" if low == high else f"{middle}{unit} ({low}-{high})"


UNITS = {
    **{phase: (f"{phase}, s", 2) for phase in PHASES},
    "policy": ("policy forward + backward + step, s", 2),
    "step": ("whole step, s", 2),
    "tokens/s": ("answer tokens/s, whole step", 0),
    "tokens/s, generation": ("answer tokens/s, generation", 0),
    "memory": ("peak memory, all processes, GiB", 2),
    "start": ("start to first line, s", 1),
    "tokens a step": ("answer tokens a step", 0),
    "pairs trained a step": ("pairs trained a step", 1),
}


def rows_of_table(turns: Mapping[str, Sequence[Mapping[str, float]]]) -> tuple[list[str], list[list[str]]]:
    """Header and rows. ``turns``: for each side its numbers, a dict a round; the first side of ours is compared to each of TRL's."""
    base = next((name for name in turns if SIDES[name].ours), None)
    peers = [name for name in turns if base and not SIDES[name].ours]
    header = ["", *turns, *(f"{base} against {peer}" for peer in peers)]
    rows = []
    for name, (label, digits) in UNITS.items():
        values = {side: [numbers[name] for numbers in rounds] for side, rounds in turns.items()}
        row = [label, *(show(of_side, digits) for of_side in values.values())]
        for peer in peers:
            better = advantage(name, values[base], values[peer])
            row.append("" if better is None else show(better, unit="x"))
        rows.append(row)
    return header, rows


def check_same_prompts(prompt_tokens: Mapping[str, Sequence[float]]) -> None:
    """WorkerError when two turns read different prompts. ``prompt_tokens``: turn -> prompt tokens of its iterations."""
    from mindspeed_odpo.errors import WorkerError

    first, *others = prompt_tokens
    for other in others:
        for step, (a, b) in enumerate(zip(prompt_tokens[first], prompt_tokens[other], strict=True), start=1):
            if a != b:
                raise WorkerError(
                    f"iteration {step}: {first} read {a:.0f} prompt tokens, {other} {b:.0f}: the sides did not get the same prompts; "
                    "does the chat template depend on the date or on the caller?"
                )


def tie_breaker(responses: list[str], **_: Any) -> list[float]:
    """A reward in [0, 1) that differs where answers differ."""
    return [zlib.crc32(text.encode()) / 2**32 for text in responses]


# ---------------------------------------------------------------------------------------------------------------------
# one turn: a side in fresh processes, watched from outside


@dataclass
class Turn:
    """What the watcher saw of one side in one round."""

    rows: list[dict[str, float]] = field(default_factory=list)
    arrived: list[float] = field(default_factory=list)
    """Seconds since the start at which each row was there."""
    peak_bytes: int = 0


class Watcher:
    """Runs a command; times the lines it appends to a file; measures the memory of its processes, except while
    ``quiet`` lines (from, to) are being made: reading memory maps costs the watched processes time. Ends what it started."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], lines: Path, output: Path, quiet: tuple[int, int]) -> None:
        self.command, self.environment, self.lines, self.output, self.quiet = command, environment, lines, output, quiet
        self.turn = Turn()
        self.processes: dict[int, Any] = {}

    def run(self) -> Turn:
        import psutil

        stop = threading.Event()
        with self.output.open("wb") as output:
            began = time.perf_counter()
            child = subprocess.Popen(
                self.command,
                env=dict(self.environment),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C is ours to handle
                preexec_fn=_die_with_parent,  # no other thread runs yet
            )
            root = psutil.Process(child.pid)
            sampler = threading.Thread(target=self._sample, args=(root, stop), daemon=True)
            sampler.start()
            try:
                self._follow(child, began)
                self._wait_for_all()
            finally:
                stop.set()
                sampler.join()
                self._end(root)
                child.wait()
        if child.returncode:
            from mindspeed_odpo.errors import WorkerError

            tail = self.output.read_text(errors="replace").splitlines()[-20:]
            print("\n".join(tail), file=sys.stderr)
            raise WorkerError(
                f"exit code {child.returncode} after {len(self.turn.rows)} iterations; the last lines of its output are above: "
                f"{' '.join(self.command)}"
            )
        return self.turn

    def _follow(self, child: subprocess.Popen[bytes], began: float) -> None:
        """Until the child has ended: note each whole line and when it was there."""
        seen = 0
        while True:
            ended = child.poll() is not None
            now = time.perf_counter() - began
            size = self.lines.stat().st_size if self.lines.exists() else 0
            if size > seen:
                with self.lines.open("rb") as file:
                    file.seek(seen)
                    whole, newline, _ = file.read().rpartition(b"\n")
                seen += len(whole) + len(newline)
                for line in whole.splitlines():
                    self.turn.rows.append(json.loads(line))
                    self.turn.arrived.append(now)
            if ended:
                return
            if now - (self.turn.arrived[-1] if self.turn.arrived else 0.0) > STALL_SECONDS:
                from mindspeed_odpo.errors import WorkerError

                raise WorkerError(f"no iteration for {STALL_SECONDS} s after {len(self.turn.rows)}: {' '.join(self.command)}")
            time.sleep(0.01)

    def _sample(self, root: Any, stop: threading.Event) -> None:
        import psutil

        while not stop.wait(0.1):
            if self.quiet[0] <= len(self.turn.rows) < self.quiet[1]:
                continue
            total = 0
            for process in self._tree(root):
                try:
                    memory = process.memory_full_info()
                except psutil.Error:  # ended meanwhile
                    continue
                # Proportional share: pages that processes share (libraries, Ray's object store) count once.
                total += memory.pss if sys.platform == "linux" else memory.uss
            self.turn.peak_bytes = max(self.turn.peak_bytes, total)

    def _tree(self, root: Any) -> list[Any]:
        import psutil

        try:
            tree = [root, *root.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []
        self.processes.update({process.pid: process for process in tree})
        return tree

    def _alive(self) -> list[Any]:
        import psutil

        def runs(process: Any) -> bool:
            try:
                return process.is_running() and process.status() != psutil.STATUS_ZOMBIE  # is_running knows a reused number
            except psutil.NoSuchProcess:
                return False

        return [process for process in list(self.processes.values()) if runs(process)]

    def _wait_for_all(self) -> None:
        """Ray's processes go a little after their driver; the next turn shall not share the machine with them."""
        until = time.perf_counter() + 15
        while self._alive() and time.perf_counter() < until:
            time.sleep(0.1)

    def _end(self, root: Any) -> None:
        """Ends what is left of the processes that this turn started, and nothing else."""
        import psutil

        self._tree(root)
        for signal_name in ("terminate", "kill"):
            for process in self._alive():
                try:
                    getattr(process, signal_name)()
                except psutil.NoSuchProcess:
                    continue
            self._wait_for_all()


def _die_with_parent() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG: also when the benchmark itself is killed


# ---------------------------------------------------------------------------------------------------------------------
# TRL's side


def trl_side(spec: Mapping[str, Any]) -> None:
    """Runs TRL's trainer on the config of ``spec`` and appends a line an iteration to ``spec["lines"]``."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, TrainerCallback
    from trl.experimental.online_dpo import OnlineDPOTrainer
    from trl_settings import trl_config

    from mindspeed_odpo.data.prompts import Prompts, as_messages, load_tokenizer
    from mindspeed_odpo.rewards.function import FunctionReward

    config = compose(spec["config_name"], spec["overrides"], spec["config_dir"])
    torch.set_num_threads(config.cpu_threads)
    tokenizer = load_tokenizer(config.tokenizer)
    prompts = Prompts(config.data, tokenizer, config.rollout.max_prompt_length, config.global_batch_size, config.seed)
    data = [row for step in range(1, config.train_iters + 1) for row in prompts.batch(step).rows]
    judge = FunctionReward(config.reward.functions)
    seconds = dict.fromkeys(("generate", "reference", "reward", "policy"), 0.0)
    numbers: dict[str, int] = {}

    @contextmanager
    def timed(phase: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        seconds[phase] += time.perf_counter() - start

    def reward(prompts: Any, completions: Any, completion_ids: Any, row: list[int], **_: Any) -> list[float | None]:
        chosen = [data[i] for i in row]
        texts = [completion[0]["content"] for completion in completions]
        return judge.score([r[config.data.prompt_key] for r in chosen], texts, completion_ids, chosen)

    class Timed(OnlineDPOTrainer):
        def _generate(self, *args: Any, **kwargs: Any) -> Any:
            with timed("generate"):
                out = super()._generate(*args, **kwargs)
            numbers.update(tokens=int(out[3].sum()), prompt_tokens=int(out[1].sum()) // 2)
            return out

        def _forward(self, model: Any, *args: Any, **kwargs: Any) -> Any:
            with timed("reference" if model is self.ref_model else "policy"):
                return super()._forward(model, *args, **kwargs)

        def _calculate_rewards_from_functions(self, *args: Any, **kwargs: Any) -> Any:
            with timed("reward"):
                return super()._calculate_rewards_from_functions(*args, **kwargs)

        def _clip_grad_norm(self, model: Any) -> Any:
            with timed("policy"):
                return super()._clip_grad_norm(model)

    class Lines(TrainerCallback):
        def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
            self.start = time.perf_counter()

        def on_optimizer_step(self, *_: Any, **__: Any) -> None:
            seconds["policy"] += time.perf_counter() - self.start

        def on_step_end(self, arguments: Any, state: Any, control: Any, **_: Any) -> None:
            line = {"step": state.global_step, **seconds, **numbers, "pairs": config.global_batch_size, "threads": torch.get_num_threads()}
            with open(spec["lines"], "a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
            seconds.update(dict.fromkeys(seconds, 0.0))

    rollout = config.rollout
    sampling = {"temperature": rollout.temperature, "top_p": rollout.top_p, "top_k": rollout.top_k}
    arguments = trl_config(config, spec["folder"], bf16=spec["side"] == "trl-autocast", **sampling)
    dtype = torch.bfloat16 if spec["side"] == "trl-bf16" else torch.float32
    key, system = config.data.prompt_key, config.data.system_prompt
    trainer = Timed(
        model=AutoModelForCausalLM.from_pretrained(config.actor.load, dtype=dtype, local_files_only=True),
        reward_funcs=reward,
        args=arguments,
        train_dataset=Dataset.from_list([{"prompt": as_messages(row[key], system), "row": i} for i, row in enumerate(data)]),
        processing_class=tokenizer,
        callbacks=[Lines()],
    )
    backward = trainer.accelerator.backward

    def timed_backward(*args: Any, **kwargs: Any) -> None:
        with timed("policy"):
            backward(*args, **kwargs)

    trainer.accelerator.backward = timed_backward
    trainer.train()


# ---------------------------------------------------------------------------------------------------------------------
# the benchmark


def compose(name: str, overrides: Sequence[str], folder: str | None) -> Any:
    from mindspeed_odpo.config import parse
    from mindspeed_odpo.launch import compose as compose_tree

    return parse(compose_tree(name, overrides, folder), name)


def as_override(key: str, value: Any) -> str:
    return f"{key}={json.dumps(value)}" if isinstance(value, (str, bool)) else f"{key}={value}"


ACTOR = "actor_rollout_ref.actor_rollout"


def plain_run(iterations: int, threads: int) -> dict[str, Any]:
    """What the config cannot choose here: how long, how many threads, prompts in file order, a constant rate, nothing saved."""
    return {
        "training.train_iters": iterations,
        "training.cpu_threads": threads,
        "training.save_interval": 0,
        "training.checkpoint_at_end": False,
        "training.export_hf": False,
        f"{ACTOR}.shuffle": False,
        f"{ACTOR}.lr_decay_style": "constant",
        f"{ACTOR}.lr_warmup_iters": 0,
        f"{ACTOR}.lr_warmup_fraction": 0.0,
    }


def shared_overrides(config: Any, stop_model: Path | None) -> list[str]:
    """Reward and model of both sides. ConfigError where TRL's trainer cannot do what ``config`` asks for."""
    from mindspeed_odpo.errors import ConfigError

    if config.rollout.num_answers != 2:
        raise ConfigError(f"{ACTOR}.n_samples_per_prompt {config.rollout.num_answers}: TRL's trainer samples 2 answers, set it to 2")
    if config.actor.loss.label_smoothing:
        raise ConfigError(f"{ACTOR}.dpo_label_smoothing {config.actor.loss.label_smoothing:g}: TRL's trainer has none, set it to 0")
    if not config.reward.functions:
        raise ConfigError("reward.load: this benchmark compares with reward functions, set reward.functions")
    functions = [(f.target, f.weight) for f in config.reward.functions]
    functions.append((f"{Path(__file__).resolve()}:tie_breaker", 1e-3))
    listed = ",".join(f"{{target:{json.dumps(target)},weight:{weight}}}" for target, weight in functions)
    folders = (f"{ACTOR}.load", "actor_rollout_ref.ref.load", "training.tokenizer_name_or_path") if stop_model else ()
    return [f"reward.functions=[{listed}]", *(as_override(key, str(stop_model)) for key in folders)]


def model_without_stop(source: Path, folder: Path, token: str) -> Path:
    """The model of ``source`` with ``token`` as its only EOS, the weights linked: answers then run to the token limit."""
    from mindspeed_odpo.data.prompts import load_tokenizer
    from mindspeed_odpo.errors import ConfigError

    number = load_tokenizer(source).get_vocab().get(token)
    if number is None:
        raise ConfigError(f"--fixed-length {token}: no such token in {source}; give one that the model never writes")
    folder.mkdir()
    for path in source.iterdir():
        if path.suffix == ".json" and path.name.endswith("config.json"):
            content = json.loads(path.read_text(encoding="utf-8"))
            content["eos_token" if path.name == "tokenizer_config.json" else "eos_token_id"] = (
                token if path.name == "tokenizer_config.json" else number
            )
            (folder / path.name).write_text(json.dumps(content), encoding="utf-8")
        else:
            (folder / path.name).symlink_to(path.resolve())
    return folder


def run_turn(side: str, options: argparse.Namespace, overrides: Sequence[str], folder: Path, threads: int) -> Turn:
    folder.mkdir()
    own = [*overrides, as_override("training.bf16", SIDES[side].bf16), as_override("training.run_dir", str(folder / "run"))]
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("RAY_")},
        "RAY_ADDRESS": "local",
        "OMP_NUM_THREADS": str(threads),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "TRL_EXPERIMENTAL_SILENCE": "1",
    }
    if SIDES[side].ours:
        named = ["--config-name", options.config_name, *(["--config-dir", options.config_dir] if options.config_dir else [])]
        command, lines = [sys.executable, str(ROOT / "ray_gpt.py"), *named, *own], folder / "run" / "metrics.jsonl"
    else:
        lines = folder / "lines.jsonl"
        spec = {"side": side, "config_name": options.config_name, "config_dir": options.config_dir, "overrides": own}
        (folder / "spec.json").write_text(json.dumps({**spec, "lines": str(lines), "folder": str(folder / "trl")}))
        command = [sys.executable, str(Path(__file__).resolve()), "--trl-side", str(folder / "spec.json")]
    quiet = (options.warmup, options.warmup + options.iterations)
    return Watcher(command, environment, lines, folder / "output.txt", quiet).run()


def measured(side: str, turn: Turn, warmup: int, iterations: int, prompts: int) -> tuple[dict[str, float], list[dict[str, float]]]:
    """The numbers of a turn, and its measured iterations."""
    ours, rows, walls = SIDES[side].ours, [], []
    for i in range(warmup, warmup + iterations):
        walls.append(turn.arrived[i] - turn.arrived[i - 1])
        rows.append({**phase_seconds(ours, turn.rows[i], walls[-1]), **counts(ours, turn.rows[i], prompts)})
    numbers = {**turn_numbers(rows, walls), "memory": turn.peak_bytes / 2**30, "start": turn.arrived[0]}
    return numbers, [{**row, "step": wall} for row, wall in zip(rows, walls, strict=True)]


def machine(threads: int) -> dict[str, Any]:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {
        "cpu": names[0] if names else platform.processor() or platform.machine(),
        "cores": cores(),
        "threads": threads,
        "load": round(os.getloadavg()[0], 2),
        "system": platform.platform(),
        "python": platform.python_version(),
    }


def cores() -> int:
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def versions() -> dict[str, str]:
    from mindspeed_odpo import __version__

    found = {"mindspeed-odpo": __version__}
    for name in PACKAGES:
        if importlib.util.find_spec(name.replace("megatron-core", "megatron")):
            found[name] = importlib.metadata.version(name)
    return found


def benchmark(options: argparse.Namespace, folder: Path) -> None:
    from rich.console import Console
    from rich.table import Table

    from mindspeed_odpo.errors import OdpoError, WorkerError

    threads = options.threads or cores()
    iterations = options.warmup + options.iterations + 1  # one more, in which memory is measured
    plain = [as_override(key, value) for key, value in plain_run(iterations, threads).items()]
    base = compose(options.config_name, [*options.overrides, *plain], options.config_dir)
    stop_model = model_without_stop(base.actor.load, folder / "model", options.fixed_length) if options.fixed_length else None
    defaults = [f"{role}.micro_batch_size={base.global_batch_size}" for role in (ACTOR, "actor_rollout_ref.ref")]  # one forward, as TRL's
    overrides = [*defaults, *options.overrides, *plain, *shared_overrides(base, stop_model)]
    config = compose(options.config_name, overrides, options.config_dir)

    about, began = machine(threads), datetime.now().astimezone()
    settings = {
        "model": str(base.actor.load),
        "prompts": str(config.data.path),
        "prompts a step": config.global_batch_size,
        "answers a prompt": 2,
        "longest prompt": config.rollout.max_prompt_length,
        "answer tokens": config.rollout.max_new_tokens,
        "answers end": "at the token limit only" if options.fixed_length else "at their EOS or the token limit",
        "temperature": config.rollout.temperature,
        "ours, pairs a micro-batch": config.actor.micro_batch_size,
        "placement": config.placement,
        "rounds": options.rounds,
        "measured iterations a round": options.iterations,
        "warm-up iterations a round": options.warmup,
    }
    console = Console() if sys.stdout.isatty() else Console(width=160)
    for title, facts in (("machine", about), ("versions", versions()), ("settings", settings)):
        console.print(f"{title}: " + ", ".join(f"{k} {v}" for k, v in facts.items()), markup=False, highlight=False, soft_wrap=True)
    if about["load"] > 0.5:
        print(f"note: the load of this machine is {about['load']}: seconds will be too long, only ratios mean something", flush=True)

    turns: dict[str, list[dict[str, float]]] = {side: [] for side in options.sides}
    details, prompt_tokens = [], {}
    for number in range(1, options.rounds + 1):
        for side in options.sides:
            label = f"{side}, round {number}"
            try:
                turn = run_turn(side, options, overrides, folder / f"{side}-{number}", threads)
            except OdpoError as error:
                raise WorkerError(f"{label}: {error}") from error
            if len(turn.rows) != iterations:
                raise WorkerError(f"{label}: {len(turn.rows)} iterations, expected {iterations}")
            numbers, rows = measured(side, turn, options.warmup, options.iterations, config.global_batch_size)
            turns[side].append(numbers)
            details.append({"side": side, "round": number, **numbers, "iterations": rows})
            all_counts = [counts(SIDES[side].ours, row, config.global_batch_size) for row in turn.rows]
            prompt_tokens[label] = [one["prompt_tokens"] for one in all_counts]
            full = 2.0 * config.global_batch_size * config.rollout.max_new_tokens
            if options.fixed_length and any(one["tokens"] != full for one in all_counts):
                raise WorkerError(f"{label}: an answer ended early, with {options.fixed_length}: give a token that the model never writes")
            check_same_prompts(prompt_tokens)
            print(f"{label}: {numbers['step']:.2f} s a step, {numbers['tokens/s']:.0f} tokens/s, {numbers['memory']:.2f} GiB", flush=True)

    header, rows = rows_of_table(turns)
    title = f"online DPO, {began:%Y-%m-%d}: medians over {options.rounds} rounds (smallest-largest)"
    table = Table(*header, title=title, title_justify="left")
    for row in rows:
        table.add_row(*row)
    console.print(table)
    print("x: how many times better ours is, from turns of the same round; below 1 it is worse.\nPrecision:")
    for side in options.sides:
        print(f"- {side}: {SIDES[side].precision}")
    print(DIFFERENCES)
    if options.json:
        facts = {"date": began.isoformat(timespec="seconds"), "command": " ".join([Path(sys.executable).name, *sys.argv])}
        report = {**facts, "machine": about, "versions": versions(), "settings": settings, "turns": details, "table": [header, *rows]}
        Path(options.json).write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def parser() -> argparse.ArgumentParser:
    out = argparse.ArgumentParser(
        prog="vs_trl.py", description=__doc__, epilog=DIFFERENCES, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    out.add_argument(
        "--sides",
        type=lambda text: text.split(","),
        default="ours-bf16,trl-autocast,trl-bf16",
        metavar="A,B,...",
        help=f"some of {', '.join(SIDES)}; they run in this order (default: %(default)s)",
    )
    out.add_argument("--rounds", type=int, default=3, help="turns of every side (default: %(default)s)")
    out.add_argument("--iterations", type=int, default=6, help="measured iterations of a turn (default: %(default)s)")
    out.add_argument("--warmup", type=int, default=2, help="iterations before these, at least 1 (default: %(default)s)")
    out.add_argument("--threads", type=int, default=0, help="torch threads of each side (default: all cores)")
    out.add_argument(
        "--fixed-length", metavar="TOKEN", help="answers of equal length: TOKEN, which the model never writes, becomes the only EOS"
    )
    out.add_argument("--config-name", default="online_dpo_quickstart_smollm2", metavar="NAME", help="(default: %(default)s)")
    out.add_argument("--config-dir", metavar="DIR", help="a folder of your own with configs")
    out.add_argument("--json", metavar="FILE", help="write every number there")
    out.add_argument("--trl-side", metavar="SPEC", help=argparse.SUPPRESS)
    out.add_argument("overrides", nargs="*", metavar="key=value", help="overrides of the config, for both sides")
    return out


def check(options: argparse.Namespace) -> None:
    from mindspeed_odpo.errors import ConfigError, nearest

    for name, least in (("rounds", 1), ("iterations", 1), ("warmup", 1), ("threads", 0)):
        if getattr(options, name) < least:
            raise ConfigError(f"--{name} {getattr(options, name)}: must be at least {least}")
    if len(set(options.sides)) < len(options.sides):
        raise ConfigError(f"--sides {','.join(options.sides)}: name each side once")
    for side in options.sides:
        if side not in SIDES:
            raise ConfigError(f"--sides: no side '{side}'{nearest(side, SIDES)}; there are {', '.join(SIDES)}")
    if any(not SIDES[side].ours for side in options.sides):
        missing = [name for name in ("trl", "datasets") if importlib.util.find_spec(name) is None]
        if missing:
            cure = "pip install -e '.[benchmark]', or compare without TRL: --sides ours-bf16"
            raise ConfigError(f"{' and '.join(missing)} not installed: {cure}")


def main(argv: Sequence[str] | None = None) -> int:
    options = parser().parse_intermixed_args(argv)
    if options.trl_side:
        trl_side(json.loads(Path(options.trl_side).read_text()))
        return 0
    from mindspeed_odpo.errors import OdpoError

    def stop(number: int, _: Any) -> None:
        raise SystemExit(128 + number)

    signal.signal(signal.SIGTERM, stop)
    folder = Path(tempfile.mkdtemp(prefix="vs_trl."))
    try:
        check(options)
        benchmark(options, folder)
    except OdpoError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
