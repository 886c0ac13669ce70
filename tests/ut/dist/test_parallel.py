"""Every layout against one process: the same loss, statistics, log-probs, gradient norm and updated weights (gloo, fp32).

``pytest -s`` prints the largest relative deviation of each layout. One launch of processes runs all variations of a layout:
micro-batches of 1 and 4 pairs, prompts and answers padded by 0 and 40 columns, long prompts with short answers, a data-parallel
rank without a kept pair. Mutants are versions with one known fault, which the same comparison must catch.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import launcher
import pytest
import torch
from tiny import make_tiny_hf

from mindspeed_odpo.config import ParallelConfig

STEPS, PADDED, LIMIT = 3, 400, 1e-5
TIMEOUT = 300.0
CASES = [(1, 0, ""), (1, 40, ""), (4, 0, ""), (4, 40, ""), (2, 0, "long prompts")]
"""Pairs a micro-batch, columns of padding, what is special."""
NOTHING_KEPT = (2, 0, "nothing kept")
"""One of the data-parallel ranks has no kept pair."""
SPLIT = {"": ([0, 1, 2], [3, 4, 5]), "nothing kept": ([0, 1, 2, 4, 5], [3])}
"""Prompts of the two data-parallel ranks. 3 and 2 of their pairs are kept, so that a mean of means would differ."""
RECOMPUTE = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
LAYOUTS = {
    "TP2": ("tied", ParallelConfig(tensor=2), {}),
    "TP2+SP": ("tied", ParallelConfig(tensor=2, sequence=True), {}),
    "PP2 tied": ("tied", ParallelConfig(pipeline=2), {}),
    "PP2 untied": ("untied", ParallelConfig(pipeline=2), {}),
    "PP2, layers 1 and 3": ("tied", ParallelConfig(pipeline=2), {"num_layers_in_first_pipeline_stage": 1}),
    "PP2·VPP2 tied": ("tied", ParallelConfig(pipeline=2, virtual=2), {}),
    "PP2·VPP2 untied": ("untied", ParallelConfig(pipeline=2, virtual=2), {}),
    "CP2": ("tied", ParallelConfig(context=2), {}),
    "DP2": ("tied", ParallelConfig(data=2), {}),
    "TP2·PP2": ("untied", ParallelConfig(tensor=2, pipeline=2), {}),
    "TP2+SP·PP2·VPP2, recomputing": ("tied", ParallelConfig(tensor=2, sequence=True, pipeline=2, virtual=2), RECOMPUTE),
    "TP2·DP2": ("tied", ParallelConfig(tensor=2, data=2), {}),
    "TP2·CP2": ("tied", ParallelConfig(tensor=2, context=2), {}),
    "TP2+SP·CP2, recomputing": ("tied", ParallelConfig(tensor=2, sequence=True, context=2), RECOMPUTE),
    "PP2·CP2": ("tied", ParallelConfig(pipeline=2, context=2), {}),
    "PP2·DP2": ("tied", ParallelConfig(pipeline=2, data=2), {}),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Path]]:
    """Policy and reference of four layers, with a tied head and without."""
    root = tmp_path_factory.mktemp("models")
    return {
        kind: tuple(
            make_tiny_hf(root / f"{kind}{seed}", tied=kind == "tied", seed=seed, num_hidden_layers=4, initializer_range=0.1)
            for seed in (1, 2)
        )
        for kind in ("tied", "untied")
    }


def long_prompt(rollout: Any) -> Any:
    """Prompts of 14 tokens, answers of 2: of 15 columns, padded to 16, the answer stands in 13 and 14. With two context-parallel
    ranks the second one, which has 4 to 11, holds no token that counts."""
    g = torch.Generator().manual_seed(4)
    p = len(rollout)
    return replace(
        rollout,
        prompt_ids=torch.randint(3, 384, (p, 14), generator=g),
        prompt_mask=torch.ones(p, 14, dtype=torch.bool),
        response_ids=rollout.response_ids[..., :2],
        response_mask=torch.ones(p, 2, 2, dtype=torch.bool),
    )


def join(parallel: ParallelConfig, rank: int, port: int) -> None:
    import problem  # noqa: F401 - prepares the device

    from mindspeed_odpo.engine import parallel as ranks

    ranks.init_parallel(parallel, rank, "127.0.0.1", port, 0, timeout_minutes=1.0)


def train(
    rank: int,
    folders: tuple[Path, Path],
    parallel: ParallelConfig,
    forwarded: dict,
    micro_batch_size: int,
    padding: int,
    special: str,
    bf16: bool = False,
) -> dict:
    """Three optimizer steps of one rank; what it saw."""
    import problem

    from mindspeed_odpo.engine import forward
    from mindspeed_odpo.pairs import make_pairs
    from mindspeed_odpo.types import TrainBatch

    policy, reference = (
        problem.load(folder, trainable, PADDED, bf16, parallel=parallel, padding=0.3, forwarded=forwarded)
        for folder, trainable in zip(folders, (True, False), strict=True)
    )
    rollout = problem.rollout(padding, padding)
    if special == "long prompts":
        rollout = long_prompt(rollout)
    cpu = torch.device("cpu")
    ref = forward.answer_logps(reference.chunks, rollout, 2, cpu)
    whole = TrainBatch(rollout, make_pairs(problem.scores(), rollout, problem.PAIRS_CONFIG), ref)
    mine = whole if parallel.data == 1 else whole.select(SPLIT.get(special, SPLIT[""])[parallel.data_index(rank)])
    stats, logps = [], [ref]
    for _ in range(STEPS):
        logps.append(forward.answer_logps(policy.chunks, rollout, 3, cpu))
        stats.append(problem.step(policy, mine, micro_batch_size, global_pairs=int(whole.pairs.keep.sum())))
    return {
        "sums": [dict(s.sums) for s in stats],
        "norms": [s.grad_norm for s in stats],
        "logps": torch.stack(logps),
        "weights": policy.weights(),
    }


def variations(
    rank: int, port: int, folders: tuple[Path, Path], parallel: ParallelConfig, forwarded: dict, cases: list[tuple]
) -> list[dict]:
    join(parallel, rank, port)
    return [train(rank, folders, parallel, forwarded, *case) for case in cases]


def deviations(base: dict, ranks: list[dict], parallel: ParallelConfig) -> dict[str, float]:
    """Largest relative deviation from one process: of a number to the number, of a tensor by norms."""

    def far(got: torch.Tensor, expected: torch.Tensor) -> float:
        return float((got - expected).norm() / expected.norm())

    by_index: dict[int, dict] = {}
    for rank, seen in enumerate(ranks):
        first = by_index.setdefault(parallel.data_index(rank), seen)
        assert seen["sums"] == first["sums"] and torch.equal(seen["logps"], first["logps"]), f"rank {rank} was told something else"
    out = {"loss": 0.0, "statistics": 0.0}
    for step in range(STEPS):
        for name, expected in base["sums"][step].items():
            got = sum(seen["sums"][step][name] for seen in by_index.values())
            key = "loss" if name == "loss" else "statistics"
            out[key] = max(out[key], abs(got - expected) / abs(expected) if expected else abs(got))
    out["log-probs"] = max(far(seen["logps"], base["logps"]) for seen in ranks)
    out["gradient norm"] = max(abs(got / one - 1) for seen in ranks for got, one in zip(seen["norms"], base["norms"], strict=True))
    out["weights"] = max(far(seen["weights"][name], value) for seen in ranks for name, value in base["weights"].items())
    return out


@pytest.fixture(scope="module")
def one(models) -> dict[str, dict[str, dict]]:
    """One process, once: two pairs a micro-batch, no padding."""
    cases = {"": (2, 0, ""), "long prompts": (2, 0, "long prompts"), "bf16": (2, 0, "", True)}
    seen = {
        kind: launcher.run(1, variations, models[kind], ParallelConfig(), {}, list(cases.values()), timeout=TIMEOUT)[0] for kind in models
    }
    return {kind: dict(zip(cases, each, strict=True)) for kind, each in seen.items()}


@pytest.mark.parametrize("name", LAYOUTS)
def test_layout_equals_one_process(name, models, one):
    kind, parallel, forwarded = LAYOUTS[name]
    cases = [*CASES, NOTHING_KEPT] if parallel.data == 2 else CASES
    ranks = launcher.run(parallel.world_size, variations, models[kind], parallel, forwarded, cases, timeout=TIMEOUT)
    found = [
        deviations(one[kind].get(case[2], one[kind][""]), [rank[index] for rank in ranks], parallel) for index, case in enumerate(cases)
    ]
    worst = {key: max(each[key] for each in found) for key in found[0]}
    print(f"\n| {name} | " + " | ".join(f"{value:.1e}" for value in worst.values()) + " |")
    for case, each in zip(cases, found, strict=True):
        assert max(each.values()) <= LIMIT, (case, each)


def test_bf16_is_near_one_process(models, one):
    """bf16 rounds in another order on two ranks; what stages exchange is bf16, statistics are not."""
    parallel = ParallelConfig(tensor=2, sequence=True, pipeline=2)
    ranks = launcher.run(4, variations, models["untied"], parallel, {}, [(1, 0, "", True)], timeout=TIMEOUT)
    found = deviations(one["untied"]["bf16"], [rank[0] for rank in ranks], parallel)
    assert 0 < found["log-probs"] < 5e-3 and found["loss"] < 5e-2 and found["weights"] < 5e-2


def watched(rank: int, port: int, folders: tuple[Path, Path], parallel: ParallelConfig, drop_outputs: bool) -> dict[str, Any]:
    """A training whose sends between stages carry a copy, to be compared with the tensor when the schedule waits for it, and whose
    receives hold NaN until then."""
    join(parallel, rank, port)
    import torch.distributed as dist
    from megatron.core.pipeline_parallel import p2p_communication

    from mindspeed_odpo.engine import model as model_module

    changed = [0, 0]  # of all sends

    class Work:
        def __init__(self, work: Any, tensor: torch.Tensor, copy: torch.Tensor, received: bool) -> None:
            self.parts = work, tensor, copy, received

        @torch.no_grad()
        def wait(self) -> None:
            work, tensor, copy, received = self.parts
            work.wait()
            if received:
                tensor.copy_(copy)
            else:
                changed[0] += tensor.shape != copy.shape or not torch.equal(tensor, copy)
                changed[1] += 1

    isend, irecv, exchange = dist.isend, dist.irecv, p2p_communication._p2p_ops

    def send(tensor: torch.Tensor, dst: int, group: Any) -> Work:
        copy = tensor.detach().clone()
        return Work(isend(copy, dst, group), tensor, copy, False)

    @torch.no_grad()
    def receive(tensor: torch.Tensor, src: int, group: Any) -> Work:
        copy = torch.empty_like(tensor)
        tensor.fill_(torch.nan)
        return Work(irecv(copy, src, group), tensor, copy, True)

    def watched_exchange(**tensors: Any) -> Any:
        with pytest.MonkeyPatch.context() as patch:  # not for the shapes, which go in a batch
            patch.setattr(dist, "isend", send)
            patch.setattr(dist, "irecv", receive)
            return exchange(**tensors)

    config = model_module.transformer_config
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(p2p_communication, "_p2p_ops", watched_exchange)
        if drop_outputs:
            patch.setattr(model_module, "transformer_config", lambda *args: _with_outputs_dropped(config(*args)))
        seen = train(rank, folders, parallel, {}, 1, 40, "")
    return {**seen, "changed": changed}


def _with_outputs_dropped(config: Any) -> Any:
    config.deallocate_pipeline_outputs = True
    return config


@pytest.mark.parametrize("drop_outputs", [False, pytest.param(True, id="mutant outputs dropped early")])
def test_nothing_changes_while_it_is_sent(drop_outputs, models, one):
    """Interleaved stages send beside their work. On a CPU nobody keeps a tensor's memory until it is gone; one that is dropped
    before is a wrong number now and then, on a busy machine."""
    parallel = ParallelConfig(pipeline=2, virtual=2)
    ranks = launcher.run(2, watched, models["tied"], parallel, drop_outputs, timeout=TIMEOUT)
    assert max(deviations(one["tied"][""], ranks, parallel).values()) <= LIMIT
    for seen in ranks:
        changed, sends = seen["changed"]
        assert sends > 50 and (changed > 0 if drop_outputs else changed == 0)


# ---------------------------------------------------------------- the reward model


def score(rank: int, port: int, folder: Path, parallel: ParallelConfig) -> torch.Tensor:
    join(parallel, rank, port)
    from mindspeed_odpo.engine.value_head import build_value_model, values
    from mindspeed_odpo.engine.weights import load_named
    from mindspeed_odpo.hf.config import read_model_config
    from mindspeed_odpo.hf.weights import hf_to_megatron

    config = read_model_config(folder, "reward")
    chunks = build_value_model(config, parallel, False)
    load_named(chunks, hf_to_megatron(folder, config, True))
    ids = torch.randint(3, 384, (5, 21), generator=torch.Generator().manual_seed(1))
    return values(chunks, ids, torch.tensor([20, 0, 3, 11, 20]), torch.device("cpu"))


@pytest.mark.parametrize("layout", [{"tensor": 2, "sequence": True}, {"pipeline": 2, "virtual": 2}, {"context": 2}], ids=str)
def test_a_reward_model_has_its_own_layout(layout, tmp_path):
    """Values at the last token of each row, equal to one process' on every rank."""
    folder = make_tiny_hf(tmp_path, classifier=True, num_hidden_layers=4, initializer_range=0.1)
    (expected,) = launcher.run(1, score, folder, ParallelConfig(), timeout=TIMEOUT)
    assert expected.std() > 0.01
    for got in launcher.run(2, score, folder, ParallelConfig(**layout), timeout=TIMEOUT):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)


# ---------------------------------------------------------------- mutants: one fault each, all to be caught


def _rolled_after_slicing(part):
    def wrong(self, rank, ranks, multiple):
        right = part(self, rank, ranks, multiple)
        return replace(right, target=right.ids.roll(-1, 1)[right.row, right.column])

    return wrong


def _local_positions(part):
    def wrong(self, *args):
        right = part(self, *args)
        return replace(right, positions=torch.arange(len(right.positions)))

    return wrong


def _mutate(name: str, patch: pytest.MonkeyPatch) -> None:
    from mindspeed_odpo.engine import forward
    from mindspeed_odpo.engine import model as model_module
    from mindspeed_odpo.engine import parallel as ranks

    token_logps, dp_size = model_module.token_logps, forward.dp_size
    if name == "labels rolled after slicing":
        patch.setattr(forward.Rows, "part", _rolled_after_slicing(forward.Rows.part))
    elif name == "positions counted in the slice":
        patch.setattr(forward.Rows, "part", _local_positions(forward.Rows.part))
    elif name == "loss scaled by the context ranks":
        patch.setattr(forward, "dp_size", lambda: dp_size() * ranks.cp_size())
    elif name == "sum over the context missing":
        patch.setattr(forward, "sum_over_context", lambda part: part)
    elif name == "gradient summed over the context":
        patch.setattr(ranks._SumOverContext, "backward", staticmethod(lambda ctx, grad: ranks._SumOverContext.forward(ctx, grad)))
    elif name == "all-reduce of the hidden gradient missing":
        patch.setattr(model_module, "copy_to_tensor_model_parallel_region", lambda hidden: hidden)
    elif name == "softmax over one part of the vocabulary":
        patch.setattr(model_module, "token_logps", lambda *args, group: token_logps(*args))
    else:
        raise AssertionError(name)


MUTANTS = {
    "CP2": [
        "labels rolled after slicing",
        "positions counted in the slice",
        "loss scaled by the context ranks",
        "sum over the context missing",
        "gradient summed over the context",
    ],
    "TP2": ["all-reduce of the hidden gradient missing", "softmax over one part of the vocabulary"],
}


def mutated(rank: int, port: int, folders: tuple[Path, Path], parallel: ParallelConfig, names: list[str]) -> list[dict]:
    join(parallel, rank, port)
    seen = []
    for name in names:
        with pytest.MonkeyPatch.context() as patch:
            _mutate(name, patch)
            seen.append(train(rank, folders, parallel, {}, 2, 0, ""))
    return seen


@pytest.mark.parametrize("layout", MUTANTS)
def test_mutants_are_caught(layout, models, one):
    """Each is off by a hundred times what right code may be, or told the ranks different things."""
    _, parallel, _ = LAYOUTS[layout]
    ranks = launcher.run(2, mutated, models["tied"], parallel, MUTANTS[layout], timeout=TIMEOUT)
    for index, name in enumerate(MUTANTS[layout]):
        try:
            found = deviations(one["tied"][""], [rank[index] for rank in ranks], parallel)
        except AssertionError as error:
            assert "was told something else" in str(error)
            continue
        assert max(found.values()) > 100 * LIMIT, (name, found)


# ---------------------------------------------------------------- log-probs over a vocabulary in parts


def vocabulary(rank: int, port: int, world: int) -> None:
    """11 ids in 16 rows on 4 ranks: the third has three that count, the last none."""
    import torch.distributed as dist

    from mindspeed_odpo.engine.logprobs import token_logps

    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)
    torch.manual_seed(0)
    hidden, weight, slope = torch.randn(9, 8), torch.randn(16, 8), torch.randn(9)
    weight[11:] = 50.0
    targets = torch.tensor([0, 3, 4, 7, 8, 10, 5, 1, 9])  # first and last id of each part
    plain_hidden, plain_weight = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    expected = torch.nn.functional.log_softmax(plain_hidden @ plain_weight[:11].T, -1).gather(1, targets[:, None]).squeeze(1)
    (expected * slope).sum().backward()
    rows = slice(rank * 4, rank * 4 + 4)
    for chunk in (2, 9, 100):
        h, w = hidden.clone().requires_grad_(), weight[rows].clone().requires_grad_()
        got = token_logps(h, w, targets, 11, chunk, dist.group.WORLD)
        (got * slope).sum().backward()
        whole = h.grad.clone()
        dist.all_reduce(whole)
        torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(whole, plain_hidden.grad, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(w.grad, plain_weight.grad[rows], rtol=1e-5, atol=1e-6)
        empty = token_logps(h[:0], w, targets[:0], 11, chunk, dist.group.WORLD)
        assert empty.shape == (0,)
        empty.sum().backward()


def test_log_probs_over_a_vocabulary_in_parts():
    """Equal to the plain function, with the gradients of hidden states and weight, for every size of chunk; no answer token too."""
    launcher.run(4, vocabulary, 4)
