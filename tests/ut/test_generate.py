"""The decode module against transformers on tiny random models (float32), and against itself under every split.

Nothing here shows that Megatron's own GPTModel agrees, nor anything about bfloat16 beyond that it runs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from mindspeed_odpo.config import ModelConfig
from mindspeed_odpo.engine.generate import Decoder, rope_tables, uniforms_for, weight_shapes
from mindspeed_odpo.errors import ConfigError, WorkerError

transformers = pytest.importorskip("transformers")
torch.set_num_threads(1)

TINY = ModelConfig(
    name="tiny",
    num_layers=3,
    hidden_size=48,
    ffn_hidden_size=80,
    num_attention_heads=6,
    num_query_groups=2,
    kv_channels=16,  # 6 * 16 is not the hidden size: heads of their own width
    vocab_size=300,
    padded_vocab_size=320,
    max_position_embeddings=256,
    rotary_base=1000.0,
)
VARIANTS = {
    "tied": TINY,
    "untied": replace(TINY, untie_embeddings_and_output_weights=True),
    "qwen2": replace(TINY, kv_channels=8, add_qkv_bias=True, norm_epsilon=1e-6),  # transformers' Qwen2: 6 * 8 = hidden size
    "llama3": replace(TINY, rope_scaling_factor=8.0, original_max_position_embeddings=32),
    "interleaved": replace(TINY, rotary_interleaved=True),
    "interleaved-qwen2-llama3": replace(
        TINY, kv_channels=8, add_qkv_bias=True, rotary_interleaved=True, rope_scaling_factor=8.0, original_max_position_embeddings=32
    ),
}
LENGTHS = [9, 3, 14, 1]


def _rope(m: ModelConfig) -> dict[str, Any]:
    if m.rope_scaling_factor is None:
        return {"rope_type": "default", "rope_theta": m.rotary_base}
    return {
        "rope_type": "llama3",
        "rope_theta": m.rotary_base,
        "factor": m.rope_scaling_factor,
        "low_freq_factor": m.low_freq_factor,
        "high_freq_factor": m.high_freq_factor,
        "original_max_position_embeddings": m.original_max_position_embeddings,
    }


def _hf_config(m: ModelConfig) -> Any:
    family = transformers.Qwen2Config if m.add_qkv_bias else transformers.LlamaConfig
    return family(
        vocab_size=m.vocab_size,
        hidden_size=m.hidden_size,
        intermediate_size=m.ffn_hidden_size,
        num_hidden_layers=m.num_layers,
        num_attention_heads=m.num_attention_heads,
        num_key_value_heads=m.num_query_groups,
        head_dim=m.kv_channels,
        max_position_embeddings=m.max_position_embeddings,
        rms_norm_eps=m.norm_epsilon,
        rope_parameters=_rope(m),
        tie_word_embeddings=not m.untie_embeddings_and_output_weights,
        initializer_range=0.3,  # far from uniform answers, so that a wrong head or position shows in the tokens
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=None,
    )


def _hf_model(m: ModelConfig) -> Any:
    torch.manual_seed(3)
    model = transformers.AutoModelForCausalLM.from_config(_hf_config(m), dtype=torch.float32).eval()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "norm" in name or "bias" in name:  # ones and zeros would hide a norm or a bias that is left out
                p.add_(torch.randn_like(p) * 0.2)
    return model


def _megatron(sd: dict[str, Tensor], m: ModelConfig) -> Iterator[tuple[str, Tensor]]:
    """transformers' tensors under Megatron's names; the padded rows are huge, so that using them cannot go unnoticed."""

    def padded(x: Tensor) -> Tensor:
        return torch.cat([x, torch.full((m.padded_vocab_size - m.vocab_size, m.hidden_size), 100.0)])

    half = m.kv_channels // 2
    turned = [channel for i in range(half) for channel in (i, i + half)]

    def rows(at: str, n: str, kind: str) -> Tensor:
        part = sd[f"{at}{n}_proj.{kind}"].unflatten(0, (-1, m.kv_channels))
        return (part[:, turned] if m.rotary_interleaved and n != "v" else part).flatten(0, 1)

    def grouped(at: str, kind: str) -> Tensor:
        return torch.cat([rows(at, n, kind).unflatten(0, (m.num_query_groups, -1)) for n in "qkv"], 1).flatten(0, 1)

    yield "embedding.word_embeddings.weight", padded(sd["model.embed_tokens.weight"])
    if m.untie_embeddings_and_output_weights:
        yield "output_layer.weight", padded(sd["lm_head.weight"])
    yield "decoder.final_layernorm.weight", sd["model.norm.weight"]
    for i in range(m.num_layers):
        a, b = f"model.layers.{i}.", f"decoder.layers.{i}."
        yield b + "input_layernorm.weight", sd[a + "input_layernorm.weight"]
        yield b + "self_attention.linear_qkv.weight", grouped(a + "self_attn.", "weight")
        if m.add_qkv_bias:
            yield b + "self_attention.linear_qkv.bias", grouped(a + "self_attn.", "bias")
        yield b + "self_attention.linear_proj.weight", sd[a + "self_attn.o_proj.weight"]
        yield b + "pre_mlp_layernorm.weight", sd[a + "post_attention_layernorm.weight"]
        yield b + "mlp.linear_fc1.weight", torch.cat([sd[a + "mlp.gate_proj.weight"], sd[a + "mlp.up_proj.weight"]])
        yield b + "mlp.linear_fc2.weight", sd[a + "mlp.down_proj.weight"]


def _prompts(lengths: list[int], width: int) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(11)
    ids, mask = torch.full((len(lengths), width), -7), torch.zeros(len(lengths), width, dtype=torch.bool)
    for row, n in enumerate(lengths):
        ids[row, width - n :] = torch.randint(0, TINY.vocab_size, (n,), generator=g)
        mask[row, width - n :] = True
    return ids, mask


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    made = Decoder(TINY, bf16=False)
    made.load_weights(1, _megatron(_hf_model(TINY).state_dict(), TINY))
    return made


def _answers(decoder: Decoder, ids: Tensor, mask: Tensor, k: int = 3, r: int = 12, **kw: Any) -> tuple[Tensor, Tensor, Tensor]:
    kw = {"uniforms": uniforms_for(0, 1, torch.arange(len(ids)), k, r), "eos_ids": [], "temperature": 2.0} | kw
    return decoder.generate(ids, mask, num_answers=k, max_new_tokens=r, **kw)


@pytest.mark.parametrize("variant", VARIANTS)
def test_greedy_equals_transformers(variant: str) -> None:
    """Prompts of 9, 3, 14 and 1 tokens together, 3 answers each: every answer has the tokens and the logits (to 1e-4) that
    transformers gives each prompt alone, without padding; with a tied head, an own head, qkv biases, Llama 3 rope
    and rope between neighbouring channels."""
    m = VARIANTS[variant]
    hf = _hf_model(m)
    decoder = Decoder(m, bf16=False)
    decoder.load_weights(1, _megatron(hf.state_dict(), m))
    ids, mask = _prompts(LENGTHS, 14)
    seen: list[Tensor] = []
    tokens, real, _ = _answers(decoder, ids, mask, r=40, do_sample=False, watch=lambda j, rows, logits: seen.append(logits.clone()))
    logits = torch.stack(seen, 1).unflatten(0, (len(LENGTHS), 3))
    assert bool(real.all()) and logits.shape == (4, 3, 40, m.vocab_size)
    for p, n in enumerate(LENGTHS):
        for k in range(3):
            whole = torch.cat([ids[p, -n:], tokens[p, k]])
            with torch.no_grad():
                want = hf(whole[None]).logits[0, n - 1 : -1]
            assert (logits[p, k] - want).abs().max() < 1e-4
            assert torch.equal(want.argmax(-1), tokens[p, k])


def test_extra_left_padding_changes_nothing(decoder: Decoder) -> None:
    """40 more columns of padding for all, then the same width forced by a long neighbour: tokens equal, logits to 1e-4."""
    ids, mask = _prompts(LENGTHS, 14)
    neighbour_ids, neighbour_mask = _prompts([54], 54)
    wide_ids, wide_mask = torch.nn.functional.pad(ids, (40, 0)), torch.nn.functional.pad(mask, (40, 0))
    logs: list[list[Tensor]] = [[], [], []]
    runs = []
    uniforms = uniforms_for(0, 1, torch.arange(5), 3, 12)
    for log, (i, m) in zip(
        logs,
        [(ids, mask), (wide_ids, wide_mask), (torch.cat([wide_ids, neighbour_ids]), torch.cat([wide_mask, neighbour_mask]))],
        strict=True,
    ):
        runs.append(
            _answers(decoder, i, m, uniforms=uniforms[: len(i)], watch=lambda j, rows, x, log=log: log.append(x[:12].clone()))[0][:4]
        )
    assert torch.equal(runs[0], runs[1]) and torch.equal(runs[0], runs[2])
    for a, b, c in zip(*logs, strict=True):
        assert (a - b).abs().max() < 1e-4 and (a - c).abs().max() < 1e-4


def test_a_prompt_alone_answers_as_in_a_batch(decoder: Decoder) -> None:
    """Same uniforms, same answers: split by prompt, and with answers asked for one by one. The answers differ among each other."""
    ids, mask = _prompts(LENGTHS, 14)
    uniforms = uniforms_for(0, 1, torch.arange(4), 3, 12)
    together = _answers(decoder, ids, mask)[0]
    for p in range(4):
        assert torch.equal(_answers(decoder, ids[p : p + 1], mask[p : p + 1], uniforms=uniforms[p : p + 1])[0][0], together[p])
        for k in range(3):
            alone = _answers(decoder, ids[p : p + 1], mask[p : p + 1], k=1, uniforms=uniforms[p : p + 1, k : k + 1])[0]
            assert torch.equal(alone[0, 0], together[p, k])
    assert len(together.flatten(0, 1).unique(dim=0)) == 12


def test_same_seed_same_answers_and_another_seed_others(decoder: Decoder) -> None:
    ids, mask = _prompts(LENGTHS, 14)
    one, again = _answers(decoder, ids, mask)[0], _answers(decoder, ids, mask)[0]
    other = _answers(decoder, ids, mask, uniforms=uniforms_for(1, 1, torch.arange(4), 3, 12))[0]
    assert torch.equal(one, again) and not torch.equal(one, other)


def test_answers_end_with_any_eos_and_leave_the_batch(decoder: Decoder) -> None:
    """A third of the vocabulary ends an answer, so that rows end at many different tokens. Each answer equals the run
    without EOS up to its first EOS (rows that move in the cache keep their keys, padding and uniforms), what follows is 0
    and masked, and the batch shrinks by exactly the answers that have ended."""
    ids, mask = _prompts(LENGTHS * 3, 14)
    eos = list(range(0, 300, 9)) + list(range(1, 300, 11))
    free = _answers(decoder, ids, mask, r=16)[0]
    sizes: list[int] = []
    tokens, real, finished = _answers(decoder, ids, mask, r=16, eos_ids=eos, watch=lambda j, rows, x: sizes.append(len(rows)))
    ends = []
    for p in range(12):
        for k in range(3):
            hits = [j for j, t in enumerate(free[p, k].tolist()) if t in eos]
            n = hits[0] + 1 if hits else 16
            ends.append(n)
            assert bool(finished[p, k]) == bool(hits)
            assert real[p, k].tolist() == [j < n for j in range(real.shape[-1])]
            assert tokens[p, k, :n].tolist() == free[p, k, :n].tolist()
            assert not tokens[p, k, n:].any()
    assert len(set(ends)) > 6
    assert real.shape[-1] == max(ends)
    assert sizes == [sum(n > j for n in ends) for j in range(max(ends))]


def test_logits_stay_right_after_rows_have_moved(decoder: Decoder) -> None:
    """With rows leaving at different times, the logits of those that stay equal the run in which none leaves, to 1e-4."""
    ids, mask = _prompts(LENGTHS, 14)
    want: dict[tuple[int, int], Tensor] = {}
    _answers(decoder, ids, mask, watch=lambda j, rows, x: want.update({(j, r): x[n].clone() for n, r in enumerate(rows.tolist())}))
    got: dict[tuple[int, int], Tensor] = {}
    _answers(
        decoder,
        ids,
        mask,
        eos_ids=range(0, 300, 7),
        watch=lambda j, rows, x: got.update({(j, r): x[n].clone() for n, r in enumerate(rows.tolist())}),
    )
    assert 12 < len(got) < len(want)
    assert max(float((got[key] - want[key]).abs().max()) for key in got) < 1e-4


def test_all_ended_stops_at_once(decoder: Decoder) -> None:
    """Every token is an EOS: one token, R' = 1, one look at logits."""
    calls: list[int] = []
    tokens, real, finished = _answers(decoder, *_prompts(LENGTHS, 14), eos_ids=range(300), watch=lambda j, rows, x: calls.append(j))
    assert tokens.shape == (4, 3, 1) and bool(real.all()) and bool(finished.all()) and calls == [0]


def test_an_eos_as_last_token_is_finished(decoder: Decoder) -> None:
    """max_new_tokens = 1: finished follows the token, not the length."""
    tokens, _, finished = _answers(decoder, *_prompts(LENGTHS, 14), r=1, eos_ids=range(150))
    assert torch.equal(finished, tokens[..., 0] < 150) and 0 < int(finished.sum()) < 12


def test_padded_vocabulary_is_never_sampled(decoder: Decoder) -> None:
    """The 20 padded rows hold 100s: greedy or at a high temperature, ids stay below vocab_size, and the logits have 300 columns."""
    widths: set[int] = set()
    for kw in ({"temperature": 50.0}, {"do_sample": False}):
        tokens = _answers(decoder, *_prompts(LENGTHS, 14), watch=lambda j, rows, x: widths.add(x.shape[-1]), **kw)[0]
        assert int(tokens.max()) < 300
    assert widths == {300}


@pytest.mark.parametrize("m", [TINY, VARIANTS["llama3"], replace(VARIANTS["llama3"], low_freq_factor=2.0, high_freq_factor=3.0)])
def test_rope_frequencies_equal_transformers(m: ModelConfig) -> None:
    """cos and sin of the first 64 positions against transformers' rotary module; the first half of our sin is negated."""
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    want_cos, want_sin = LlamaRotaryEmbedding(_hf_config(m))(torch.zeros(1), torch.arange(64)[None])
    cos, sin = rope_tables(m, 64, torch.float32)
    sign = torch.tensor([-1.0] * 8 + [1.0] * 8)
    assert (cos - want_cos[0]).abs().max() < 1e-5 and (sin * sign - want_sin[0]).abs().max() < 1e-5
    cos_pairs, sin_pairs = rope_tables(replace(m, rotary_interleaved=True), 64, torch.float32)
    turned = [channel for i in range(8) for channel in (i, i + 8)]
    assert torch.equal(cos_pairs, cos[:, turned]) and torch.equal(sin_pairs, sin[:, turned])


@pytest.mark.parametrize("interleaved", [False, True])
def test_mutant_rope_of_the_other_layout(interleaved: bool) -> None:
    """Weights of one layout in a decoder of the other: the first logits differ by far more than the 1e-4 allowed above."""
    weights = dict(_megatron(_hf_model(TINY).state_dict(), replace(TINY, rotary_interleaved=interleaved)))
    first: list[Tensor] = []
    for layout in (interleaved, not interleaved):
        d = Decoder(replace(TINY, rotary_interleaved=layout), bf16=False)
        d.load_weights(1, weights.items())
        _answers(d, *_prompts(LENGTHS, 14), r=1, watch=lambda j, rows, x: first.append(x.clone()))
    assert (first[0] - first[1]).abs().max() > 0.1


def test_bf16_runs_and_stays_near_float32(decoder: Decoder) -> None:
    """The first logits in bfloat16 lie within 5 % (relative rms) of float32's; weights arrive in float32 and are cast."""
    half = Decoder(TINY, bf16=True)
    half.load_weights(1, _megatron(_hf_model(TINY).state_dict(), TINY))
    first: list[Tensor] = []
    for d in (decoder, half):
        _answers(d, *_prompts(LENGTHS, 14), r=3, watch=lambda j, rows, x: first.append(x.float()) if j == 0 else None)
    assert ((first[0] - first[1]).norm() / first[0].norm()) < 0.05


def _random_weights(m: ModelConfig) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=g) for name, shape in weight_shapes(m).items()}


def test_a_new_version_replaces_the_old_weights() -> None:
    """In place and complete: after version 2 the answers are those of a decoder that has only ever seen version 2."""
    hf = _hf_model(TINY)
    old, fresh = Decoder(TINY, bf16=False), Decoder(TINY, bf16=False)
    old.load_weights(1, _random_weights(TINY).items())
    address = [w.data_ptr() for w in old._weights.values()]
    for d in (old, fresh):
        d.load_weights(2, _megatron(hf.state_dict(), TINY))
    assert old.version == 2 and [w.data_ptr() for w in old._weights.values()] == address
    assert torch.equal(_answers(old, *_prompts(LENGTHS, 14))[0], _answers(fresh, *_prompts(LENGTHS, 14))[0])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda w: {name: x for name, x in w.items() if name != "decoder.layers.1.mlp.linear_fc1.weight"},
            "1 tensors are missing, the first is decoder.layers.1.mlp.linear_fc1.weight",
        ),
        (
            lambda w: w | {"decoder.layers.3.mlp.linear_fc1.weight": torch.zeros(1)},
            "unknown tensor decoder.layers.3.mlp.linear_fc1.weight",
        ),
        (lambda w: w | {"output_layer.weight": torch.zeros(320, 48)}, "unknown tensor output_layer.weight"),
        (
            lambda w: w | {"decoder.layers.0.mlp.linear_fc2.weight": torch.zeros(80, 48)},
            r"decoder.layers.0.mlp.linear_fc2.weight: expected \[48, 80\], got \[80, 48\]",
        ),
        (lambda w: [*w.items(), ("decoder.final_layernorm.weight", torch.ones(48))], "decoder.final_layernorm.weight was sent twice"),
    ],
)
def test_a_wrong_sync_names_the_tensor_and_stops_generation(change: Any, message: str) -> None:
    """A missing, unknown, wrongly shaped or doubled tensor: an error, and the half-new weights cannot answer."""
    d = Decoder(TINY, bf16=False)
    d.load_weights(1, _random_weights(TINY).items())
    sent = change(_random_weights(TINY))
    with pytest.raises(WorkerError, match=message):
        d.load_weights(2, sent.items() if isinstance(sent, dict) else sent)
    assert d.version is None
    with pytest.raises(WorkerError, match="no complete set of weights"):
        _answers(d, *_prompts(LENGTHS, 14))


def test_a_sync_that_breaks_off_leaves_no_version() -> None:
    d = Decoder(TINY, bf16=False)
    d.load_weights(1, _random_weights(TINY).items())

    def broken() -> Iterator[tuple[str, Tensor]]:
        yield next(iter(_random_weights(TINY).items()))
        raise ConnectionError("gone")

    with pytest.raises(ConnectionError):
        d.load_weights(2, broken())
    assert d.version is None


def test_weights_that_are_not_finite_name_version_answer_and_token() -> None:
    d = Decoder(TINY, bf16=False)
    weights = _random_weights(TINY)
    weights["decoder.layers.2.mlp.linear_fc2.weight"][0, 0] = float("nan")
    d.load_weights(5, weights.items())
    with pytest.raises(WorkerError, match="weights version 5, prompt 0, answer 0, token 0: logits are not finite"):
        _answers(d, *_prompts(LENGTHS, 14))


def _holes(ids: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    return ids, mask.flip(1)


@pytest.mark.parametrize(
    ("prompts", "kw", "error", "message"),
    [
        (lambda i, m: (i, m & (torch.arange(4) != 2)[:, None]), {}, WorkerError, "prompt 2 has no token"),
        (_holes, {}, WorkerError, "prompt 0 is not left-padded"),
        (lambda i, m: (i + 300, m), {}, WorkerError, "the model has 300"),
        (lambda i, m: (i.int(), m), {}, WorkerError, "expected prompt_ids int64"),
        (lambda i, m: (i, m), {"r": 243}, ConfigError, "14 tokens and 243 new ones exceed max_position_embeddings 256"),
        (lambda i, m: (i, m), {"uniforms": torch.zeros(4, 2, 12).double()}, WorkerError, r"expected uniforms float64 \[4, 3, 12\]"),
        (lambda i, m: (i, m), {"uniforms": torch.ones(4, 3, 12).double()}, WorkerError, r"uniforms must lie in \[0, 1\)"),
        (lambda i, m: (i, m), {"top_p": 0.0}, ConfigError, "top_p: expected"),
        (lambda i, m: (i, m), {"temperature": -1.0}, ConfigError, "temperature: expected"),
    ],
)
def test_wrong_inputs_are_named(decoder: Decoder, prompts: Any, kw: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        _answers(decoder, *prompts(*_prompts(LENGTHS, 14)), **kw)
