"""The decode module over two tensor-parallel ranks (gloo) against one: same tokens, and a clear error where ranks part ways.

fp32 on a CPU alone: the sums of two ranks round otherwise than one rank's, so logits are compared to 1e-4 and tokens exactly.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

import launcher
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from mindspeed_odpo.config import ModelConfig
from mindspeed_odpo.engine.generate import Decoder, tensor_group, tensor_part, uniforms_for, weight_shapes
from mindspeed_odpo.errors import ConfigError, WorkerError

TINY = ModelConfig(
    name="tiny",
    num_layers=2,
    hidden_size=48,
    ffn_hidden_size=80,
    num_attention_heads=8,
    num_query_groups=4,
    kv_channels=16,
    vocab_size=150,  # 150 of 320 rows: the second rank's shard has no id that may be sampled, the first one's is cut
    padded_vocab_size=320,
    max_position_embeddings=256,
    rotary_base=1000.0,
)
VARIANTS = {
    "tied": TINY,
    "untied": replace(TINY, untie_embeddings_and_output_weights=True, vocab_size=301),
    "qkv bias": replace(TINY, add_qkv_bias=True, vocab_size=320),
    "interleaved rope": replace(TINY, rotary_interleaved=True, num_query_groups=2, vocab_size=200),
}
PROMPTS, ANSWERS, TOKENS = 4, 3, 16


def weights(model: ModelConfig) -> dict[str, Tensor]:
    """Far from uniform answers; the padded rows are huge, so that using them cannot go unnoticed."""
    draw = torch.Generator().manual_seed(7)
    made = {name: torch.randn(shape, generator=draw) * 0.3 + ("layernorm" in name) for name, shape in weight_shapes(model).items()}
    for name in ("embedding.word_embeddings.weight", "output_layer.weight"):
        if name in made:
            made[name][model.vocab_size :] = 100.0
    return made


def prompts() -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(11)
    mask = torch.arange(14) >= 14 - torch.tensor([9, 3, 14, 1])[:, None]
    return torch.randint(0, TINY.vocab_size, (PROMPTS, 14), generator=draw), mask


def answers(decoder: Decoder, seed: int = 0, version: int = 1, **settings: Any) -> dict[str, Tensor]:
    decoder.load_weights(version, weights(decoder.model).items())
    ids, mask = prompts()
    first: list[Tensor] = []
    uniforms = uniforms_for(seed, 1, torch.arange(PROMPTS), ANSWERS, TOKENS)
    eos = list(range(0, decoder.model.vocab_size, 9))  # rows end at many different tokens, and move
    kept = {"num_answers": ANSWERS, "max_new_tokens": TOKENS, "eos_ids": eos, "uniforms": uniforms, "temperature": 2.0} | settings
    tokens, real, finished = decoder.generate(ids, mask, **kept, watch=lambda j, rows, x: first.append(x.clone()) if j == 0 else None)
    return {"tokens": tokens, "mask": real, "finished": finished, "logits": first[0]}


def join(rank: int, port: int, world: int = 2) -> tuple[int, int, dist.ProcessGroup]:
    store = dist.TCPStore("127.0.0.1", port, world, is_master=rank == 0, timeout=timedelta(seconds=60))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=60))
    return tensor_group(2, 1.0)


def every_variant(rank: int, port: int) -> dict[str, Any]:
    group = join(rank, port)
    found: dict[str, Any] = {"place": group[:2]}
    for name, model in VARIANTS.items():
        decoder = Decoder(model, False, tp_group=group)
        held = sum(weight.numel() for key, weight in decoder._weights.items() if "layernorm" not in key)
        found[name] = {"held": held, "greedy": answers(decoder, do_sample=False), "sampled": answers(decoder, top_p=0.9, top_k=40)}
    found["bf16"] = answers(Decoder(TINY, True, tp_group=group))["tokens"]
    dist.destroy_process_group()
    return found


@pytest.fixture(scope="module")
def two() -> list[dict[str, Any]]:
    return launcher.run(2, every_variant)


@pytest.mark.parametrize("how", ["greedy", "sampled"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_two_ranks_answer_as_one(two: list[dict[str, Any]], variant: str, how: str) -> None:
    """Both ranks return the one-rank answers token for token, with rows that end and move on the way; logits to 1e-4."""
    settings: dict[str, Any] = {"do_sample": False} if how == "greedy" else {"top_p": 0.9, "top_k": 40}
    one = answers(Decoder(VARIANTS[variant], False), **settings)
    assert one["tokens"].shape[-1] > 4 and len(one["tokens"].flatten(0, 1).unique(dim=0)) >= 4
    for rank in two:
        for name in ("tokens", "mask", "finished"):
            assert torch.equal(rank[variant][how][name], one[name]), name
        torch.testing.assert_close(rank[variant][how]["logits"], one["logits"], rtol=1e-4, atol=1e-4)
    assert torch.equal(two[0][variant][how]["logits"], two[1][variant][how]["logits"])


def test_each_rank_keeps_half(two: list[dict[str, Any]]) -> None:
    """Of every matrix, the embedding and the head half the elements; bf16 runs and both ranks agree."""
    assert [rank["place"] for rank in two] == [(0, 2), (1, 2)]
    for name, model in VARIANTS.items():
        whole = sum(weight.numel() for key, weight in weights(model).items() if "layernorm" not in key)
        assert [rank[name]["held"] * 2 for rank in two] == [whole, whole]
    assert torch.equal(two[0]["bf16"], two[1]["bf16"])


def disagree(rank: int, port: int, case: str) -> str:
    decoder = Decoder(TINY, False, tp_group=join(rank, port))
    said = "nothing"
    try:
        if case == "seed":
            answers(decoder, seed=rank)
        elif case == "version":
            answers(decoder, version=rank)
        else:  # a mutant: the second rank draws for itself
            from mindspeed_odpo.engine import generate

            if rank:
                generate.sample = lambda logits, *_, **__: torch.full((len(logits),), 1)
            answers(decoder, eos_ids=[])
    except WorkerError as error:
        said = str(error)
    dist.destroy_process_group()
    return said


@pytest.mark.parametrize(
    ("case", "words"), [("seed", "were not asked the same"), ("version", "were not asked the same"), ("mutant", "were not giving the same")]
)
def test_ranks_that_part_ways_end_the_run(case: str, words: str) -> None:
    """Other uniforms or weights on one rank, and a rank that draws other tokens: both ranks say so, none hangs."""
    for said in launcher.run(2, disagree, case):
        assert f"tensor-parallel ranks 0 and 1 {words}" in said


def place(rank: int, port: int) -> tuple[int, int, int]:
    place, size, group = join(rank, port, world=4)
    found = torch.tensor(rank)
    dist.all_reduce(found, group=group)
    dist.destroy_process_group()
    return place, size, int(found)


def test_groups_are_runs_of_ranks() -> None:
    """Four ranks, tensor parallelism 2: ranks 0 and 1, 2 and 3, whatever layout the trainer has."""
    assert launcher.run(4, place) == [(0, 2, 1), (1, 2, 1), (0, 2, 5), (1, 2, 5)]


def test_parts_by_hand() -> None:
    """One query group a rank: rows of its queries, key, value; gate rows then up rows; columns of the row-parallel ones."""
    rows = torch.arange(8.0)[:, None]
    assert tensor_part("x.linear_qkv.bias", rows[:, 0], 1, 2).tolist() == [4, 5, 6, 7]
    assert tensor_part("x.linear_fc1.weight", rows, 0, 2)[:, 0].tolist() == [0, 1, 4, 5]
    assert tensor_part("x.linear_fc2.weight", rows.t(), 1, 4).tolist() == [[2, 3]]
    assert tensor_part("x.linear_proj.weight", rows.t(), 0, 2).tolist() == [[0, 1, 2, 3]]
    assert tensor_part("output_layer.weight", rows, 3, 4)[:, 0].tolist() == [6, 7]
    assert tensor_part("x.input_layernorm.weight", rows, 1, 2) is rows


@pytest.mark.parametrize(
    ("size", "words"),
    [
        (8, "num_query_groups 4 of model tiny does not divide by the 8 tensor-parallel ranks"),
        (4, "padded_vocab_size 322 of model tiny does not divide by the 4 .* set make_vocab_size_divisible_by to 4"),
    ],
)
def test_sizes_that_do_not_divide(size: int, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Decoder(replace(TINY, padded_vocab_size=322), False, tp_group=(0, size, None))  # type: ignore[arg-type]
