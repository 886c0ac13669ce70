"""Weights in and out of every parallel layout: whole tensors, bit for bit those of the model on one rank.

Megatron's own GPTModel is cut by Megatron's rules; what each rank must hold is worked out here a second time, from the shapes
alone. Copies are tested, not arithmetic.
"""

from __future__ import annotations

import inspect
import re
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from launcher import free_port, run
from torch import Tensor

LAYERS, H, F, HEADS, GROUPS, D, VOCAB = 4, 16, 24, 4, 2, 4, 48
LAYOUTS: dict[str, dict[str, int]] = {
    "tp2": {"tensor": 2},
    "pp2": {"pipeline": 2},
    "pp2 vpp2": {"pipeline": 2, "virtual": 2},
    "dp2": {"data": 2},
    "cp2": {"context": 2},
    "tp2 pp2": {"tensor": 2, "pipeline": 2},
    "ep2": {"data": 2, "expert": 2, "experts": 4},
    "tp2 ep2": {"tensor": 2, "data": 2, "expert": 2, "experts": 4},
    "pp2 ep2": {"pipeline": 2, "data": 2, "expert": 2, "experts": 4},
}
KINDS: dict[str, dict[str, bool]] = {"tied": {}, "untied": {"tied": False}, "bias": {"bias": True}}
CASES = [(name, kind) for name, layout in LAYOUTS.items() for kind in KINDS if kind == "tied" or "experts" not in layout]


def world(layout: dict[str, int]) -> int:
    return layout.get("tensor", 1) * layout.get("pipeline", 1) * layout.get("context", 1) * layout.get("data", 1)


def join(layout: dict[str, int], rank: int, port: int) -> None:
    from mindspeed_odpo.config import ParallelConfig
    from mindspeed_odpo.engine import parallel

    sizes = {name: size for name, size in layout.items() if name != "experts"}
    # Megatron wants sequence parallelism where experts meet tensor parallelism.
    sizes["sequence"] = "experts" in layout and layout.get("tensor", 1) > 1
    parallel.init_parallel(ParallelConfig(**sizes), rank, "127.0.0.1", port, 0, 1.0)


def chunks(layout: dict[str, int], tied: bool = True, bias: bool = False) -> list[torch.nn.Module]:
    """This rank's GPTModels, one a virtual stage, with NaN in every weight."""
    from mindspeed_odpo.engine.model import CoreAttention, RMSNorm  # first: it prepares torch for megatron.core

    from megatron.core import parallel_state  # isort: skip
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
    from megatron.core.transformer.transformer_config import TransformerConfig

    tensor, pipeline, virtual = layout.get("tensor", 1), layout.get("pipeline", 1), layout.get("virtual", 1)
    experts = layout.get("experts")
    config = TransformerConfig(
        num_layers=LAYERS,
        hidden_size=H,
        ffn_hidden_size=F,
        num_attention_heads=HEADS,
        num_query_groups=GROUPS,
        kv_channels=D,
        add_bias_linear=False,
        add_qkv_bias=bias,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        params_dtype=torch.float32,
        pipeline_dtype=torch.float32,
        normalization="RMSNorm",
        tensor_model_parallel_size=tensor,
        pipeline_model_parallel_size=pipeline,
        virtual_pipeline_model_parallel_size=virtual if virtual > 1 else None,
        expert_model_parallel_size=layout.get("expert", 1),
        context_parallel_size=layout.get("context", 1),
        sequence_parallel=bool(experts) and tensor > 1,
        **({"num_moe_experts": experts, "moe_ffn_hidden_size": F} if experts else {}),
    )
    spec = get_gpt_layer_local_spec(num_experts=experts, normalization="RMSNorm")
    spec.submodules.input_layernorm = spec.submodules.pre_mlp_layernorm = RMSNorm
    spec.submodules.self_attention.submodules.core_attention = CoreAttention
    stage = parallel_state.get_pipeline_model_parallel_rank()
    built = []
    for v in range(virtual):
        if virtual > 1:
            parallel_state.set_virtual_pipeline_model_parallel_rank(v)
        newer = {"vp_stage": v} if virtual > 1 and "vp_stage" in inspect.signature(GPTModel.__init__).parameters else {}
        model = GPTModel(
            config,
            TransformerBlockSubmodules(layer_specs=[spec] * get_num_layers_to_build(config, **newer), layer_norm=RMSNorm),
            VOCAB,
            64,
            pre_process=(stage, v) == (0, 0),
            post_process=(stage, v) == (pipeline - 1, virtual - 1),
            share_embeddings_and_output_weights=tied,
            position_embedding_type="rope",
            **newer,
        )
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(torch.nan)
        built.append(model)
    return built


def whole_shapes(rank: int, port: int) -> dict[tuple[int | None, str], dict[str, tuple[int, ...]]]:
    """Megatron's own list of names and shapes for each kind of model on one rank."""
    join({}, rank, port)
    found = {}
    for experts, kind in [(None, "tied"), (None, "untied"), (None, "bias"), (4, "tied")]:
        (model,) = chunks({} if experts is None else {"experts": experts}, **KINDS[kind])
        found[experts, kind] = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    return found


@cache
def sources() -> dict[tuple[int | None, str], dict[str, Tensor]]:
    (shapes,) = run(1, whole_shapes)
    generator = torch.Generator().manual_seed(5)
    return {key: {name: torch.randn(shape, generator=generator) for name, shape in each.items()} for key, each in shapes.items()}


def part(name: str, whole: Tensor, rank: int, size: int) -> Tensor:
    """What tensor-parallel rank ``rank`` of ``size`` holds, by the shapes alone."""
    if "norm" in name or "router" in name:
        return whole
    if "linear_fc1" in name:
        gate, up = whole[:F], whole[F:]
        rows = slice(rank * F // size, (rank + 1) * F // size)
        return torch.cat([gate[rows], up[rows]])
    if "linear_qkv" in name:
        groups = whole.view(GROUPS, -1, *whole.shape[1:])
        return groups[rank * GROUPS // size : (rank + 1) * GROUPS // size].flatten(0, 1)
    axis = 1 if "linear_proj" in name or "linear_fc2" in name else 0
    return whole.chunk(size, axis)[rank]


def check(layout: dict[str, int], kind: str, source: dict[str, Tensor], rank: int) -> list[str]:
    """Load, look at what this rank holds, gather; what was found wrong."""
    from megatron.core import parallel_state

    from mindspeed_odpo.engine import weights

    models = chunks(layout, **KINDS[kind])
    weights.load_named(models, reversed(source.items()))
    wrong = []
    tensor, pipeline = layout.get("tensor", 1), layout.get("pipeline", 1)
    per_chunk = LAYERS // len(models) // pipeline
    for v, model in enumerate(models):
        first = (v * pipeline + parallel_state.get_pipeline_model_parallel_rank()) * per_chunk
        for local, parameter in model.named_parameters():
            name = re.sub(r"layers\.(\d+)", lambda match: f"layers.{int(match[1]) + first}", local)  # noqa: B023
            if "local_experts" in name:
                offset = parallel_state.get_expert_model_parallel_rank() * layout["experts"] // layout["expert"]
                name = re.sub(r"experts\.(\d+)", lambda match: f"experts.{int(match[1]) + offset}", name)  # noqa: B023
            if name == "output_layer.weight" and kind != "untied":
                name = "embedding.word_embeddings.weight"
            if not torch.equal(parameter, part(name, source[name], rank % tensor, tensor)):
                wrong.append(f"rank {rank} holds a wrong {name}")
    gathered = list(weights.named_weights(models))
    if [name for name, _ in gathered] != list(source):
        wrong.append(f"names {[name for name, _ in gathered]}, expected {list(source)}")
    wrong += [f"rank {rank} gathers a wrong {name}" for name, whole in gathered if not torch.equal(whole, source[name])]
    return wrong


def check_all(rank: int, port: int, cases: list[tuple[str, str, str, int]], tensors: Any) -> dict[tuple[str, str, str], list[str]]:
    from mindspeed_odpo.engine import parallel, weights

    found = {}
    for name, kind, variant, own_port in cases:
        layout = LAYOUTS[name]
        join(layout, rank, own_port)
        with pytest.MonkeyPatch.context() as patch:
            VARIANTS[variant](weights, patch)
            found[name, kind, variant] = check(layout, kind, tensors[layout.get("experts"), kind], rank)
        parallel.destroy()
    return found


def _small_buckets(weights: Any, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(weights, "BUCKET_BYTES", 3000)


def _fc1_is_not_gated(weights: Any, patch: pytest.MonkeyPatch) -> None:
    """Gate and up rows cut as one run: a round trip gives every bit back, and yet each rank holds the wrong rows."""
    right = weights._describe
    patch.setattr(weights, "_describe", lambda *args: replace(right(*args), blocks=1))


def _parts_in_a_row(weights: Any, patch: pytest.MonkeyPatch) -> None:
    """fc1 gathered as gate, up, gate, up."""
    patch.setattr(weights.Weight, "join", lambda self, parts: parts[0] if self.dim is None else torch.cat(list(parts), self.dim))


def _layers_of_a_stage(weights: Any, patch: pytest.MonkeyPatch) -> None:
    """The second stage's chunks before the first stage's second ones."""
    right = weights.WeightLayout.__init__

    def wrong(self: Any, models: Any) -> None:
        right(self, models)
        self.weights.sort(key=lambda weight: weight.stage)

    patch.setattr(weights.WeightLayout, "__init__", wrong)


def _tied_copy_is_forgotten(weights: Any, patch: pytest.MonkeyPatch) -> None:
    right = weights.WeightLayout.__init__

    def wrong(self: Any, models: Any) -> None:
        right(self, models)
        if not any(weight.name == weights.EMBEDDING and weight.stage == weights._rank(weights._pipeline()) for weight in self.weights):
            self.held.pop(weights.EMBEDDING, None)

    patch.setattr(weights.WeightLayout, "__init__", wrong)


VARIANTS: dict[str, Any] = {
    "": lambda weights, patch: None,
    "small buckets": _small_buckets,
    "fc1 is not gated": _fc1_is_not_gated,
    "parts in a row": _parts_in_a_row,
    "layers of a stage": _layers_of_a_stage,
    "tied copy is forgotten": _tied_copy_is_forgotten,
}
MUTANTS = [
    ("tp2", "fc1 is not gated", "rank 0 holds a wrong decoder.layers.0.mlp.linear_fc1.weight"),
    ("tp2", "parts in a row", "rank 0 gathers a wrong decoder.layers.0.mlp.linear_fc1.weight"),
    ("pp2 vpp2", "layers of a stage", "names "),
    ("pp2", "tied copy is forgotten", "rank 1 holds a wrong embedding.word_embeddings.weight"),
]


@cache
def results(ranks: int) -> dict[tuple[str, str, str], list[str]]:
    """All cases of one number of processes, in these processes: starting them costs more than the cases."""
    cases = [(name, kind, "") for name, kind in CASES]
    cases += [("tp2 pp2", "untied", "small buckets"), ("ep2", "tied", "small buckets"), *((name, "tied", v) for name, v, _ in MUTANTS)]
    mine = [(*case, free_port()) for case in cases if world(LAYOUTS[case[0]]) == ranks]
    found = run(ranks, check_all, mine, sources(), timeout=180)
    return {case: sum((each[case] for each in found), []) for case in found[0]}


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_every_rank_holds_its_part_and_gathers_the_whole(name, kind):
    assert results(world(LAYOUTS[name]))[name, kind, ""] == []


@pytest.mark.parametrize(("name", "kind"), [("tp2 pp2", "untied"), ("ep2", "tied")])
def test_buckets_smaller_than_a_tensor(name, kind):
    assert results(world(LAYOUTS[name]))[name, kind, "small buckets"] == []


@pytest.mark.parametrize(("name", "variant", "says"), MUTANTS)
def test_mutant_is_caught(name, variant, says):
    found = results(world(LAYOUTS[name]))[name, "tied", variant]
    assert any(text.startswith(says) for text in found), found
