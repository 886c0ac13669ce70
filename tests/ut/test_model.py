"""The Megatron policy model against transformers, in one process on the CPU."""

from __future__ import annotations

import math
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tiny import make_tiny_hf

from mindspeed_odpo import device
from mindspeed_odpo.config import ModelConfig, ParallelConfig
from mindspeed_odpo.device import cpu
from mindspeed_odpo.engine import model as model_module
from mindspeed_odpo.engine.model import PolicyModel, RMSNorm, build_model, rope_inv_freq, transformer_config
from mindspeed_odpo.engine.parallel import destroy, init_parallel, init_single
from mindspeed_odpo.engine.weights import buckets, load_named, named_weights, unwrap
from mindspeed_odpo.errors import ConfigError, DataError, HostError
from mindspeed_odpo.hf.config import read_model_config
from mindspeed_odpo.hf.weights import hf_to_megatron, megatron_to_hf

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 3.0,
    "original_max_position_embeddings": 64,
}
KINDS: dict[str, dict[str, Any]] = {
    "llama-tied": {},
    "llama-untied": {"tied": False},
    "llama3-rope": {"rope_parameters": LLAMA3},
    "qwen2-bias": {"kind": "qwen2"},
    "wide-heads": {"head_dim": 16, "num_key_value_heads": 1, "tied": False},
    "no-groups": {"num_key_value_heads": 4},
}


@pytest.fixture(scope="module", autouse=True)
def _group() -> Any:
    torch.set_num_threads(1)
    init_single()
    yield
    destroy()


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_hf(tmp_path_factory.mktemp("tiny"))


def _load(folder: Path, *, bf16: bool = False, trainable: bool = True, **changes: Any) -> PolicyModel:
    config = replace(read_model_config(folder, "tiny"), **changes)
    (model,) = build_model(config, ParallelConfig(), bf16, trainable=trainable)
    load_named([model], hf_to_megatron(folder, config))
    return model


def _ids(rows: int, length: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(3, 259, (rows, length), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def _hf_logits(folder: Path, ids: torch.Tensor) -> torch.Tensor:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()(ids).logits


@pytest.mark.parametrize("kind", KINDS)
def test_logits_equal_transformers(kind: str, tmp_path: Path) -> None:
    """fp32 logits of 3 rows of 150 tokens, beyond the 64 where Llama 3's scaling starts, to 1e-4."""
    folder = make_tiny_hf(tmp_path, **KINDS[kind])
    ids = _ids(3, 150)
    with torch.no_grad():
        ours = _load(folder)(ids)
    theirs = _hf_logits(folder, ids)
    assert theirs.std() > 0.5, "flat logits prove nothing"
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("kind", ["llama-tied", "llama3-rope", "qwen2-bias", "wide-heads"])
def test_both_rope_layouts_compute_the_folder(kind: str, interleaved: bool, tmp_path: Path) -> None:
    """fp32 logits of 3 rows of 100 tokens equal transformers to 1e-5 of their size in either layout, and the model's weights go
    back into the folder's tensors bit for bit."""
    from safetensors.torch import load_file

    folder, ids = make_tiny_hf(tmp_path, **KINDS[kind]), _ids(3, 100)
    model = _load(folder, rotary_interleaved=interleaved)
    assert model.config.rotary_interleaved == interleaved
    theirs = _hf_logits(folder, ids)
    with torch.no_grad():
        torch.testing.assert_close(model(ids), theirs, atol=1e-5 * theirs.abs().max().item(), rtol=0)
    returned = dict(megatron_to_hf(named_weights([model]), replace(read_model_config(folder, "tiny"), rotary_interleaved=interleaved)))
    source = load_file(folder / "model.safetensors")
    assert returned.keys() == source.keys() and all(torch.equal(returned[name], source[name]) for name in source)


def test_mutant_rope_layout(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Interleaved rope on rows that were not moved, halves on rows that were, angles laid out for halves: each is far from
    the folder's logits."""
    ids = _ids(2, 40)
    right, rope = _load(tiny), PolicyModel._rope

    def wrong(rows: bool, layout: bool) -> PolicyModel:
        config = read_model_config(tiny, "tiny")
        (model,) = build_model(replace(config, rotary_interleaved=layout), ParallelConfig(), False, trainable=False)
        load_named([model], hf_to_megatron(tiny, replace(config, rotary_interleaved=rows)))
        return model

    with torch.no_grad():
        expected = right(ids)
        for rows, layout in ((False, True), (True, False)):
            assert (wrong(rows, layout)(ids) - expected).abs().max() > 0.1
        angles = wrong(True, True)
        torch.testing.assert_close(angles(ids), expected, atol=1e-4, rtol=0)
        monkeypatch.setattr(PolicyModel, "_rope", lambda self, positions: rope(right, positions))
        assert (angles(ids) - expected).abs().max() > 0.1


@pytest.mark.parametrize("interleaved", [False, True])
def test_decoder_logits_equal_the_policy_s(interleaved: bool, tiny: Path) -> None:
    """A weight sync into the rollout's decoder: 12 greedy tokens behind prompts of 9 and 4 tokens, logits to 1e-4."""
    from mindspeed_odpo.engine.generate import Decoder, uniforms_for

    model = _load(tiny, rotary_interleaved=interleaved, trainable=False)
    decoder = Decoder(replace(read_model_config(tiny, "tiny"), rotary_interleaved=interleaved), bf16=False)
    decoder.load_weights(1, named_weights([model]))
    ids, mask, seen = _ids(2, 9), torch.arange(9) >= torch.tensor([[0], [5]]), []
    answers, _, _ = decoder.generate(
        ids,
        mask,
        num_answers=1,
        max_new_tokens=12,
        eos_ids=[],
        uniforms=uniforms_for(0, 1, torch.arange(2), 1, 12),
        do_sample=False,
        watch=lambda j, rows, logits: seen.append(logits.clone()),
    )
    for row in range(2):
        whole = torch.cat([ids[row][mask[row]], answers[row, 0]])
        with torch.no_grad():
            expected = model(whole[None])[0, -13:-1]
        torch.testing.assert_close(torch.stack(seen)[:, row], expected, atol=1e-4, rtol=0)


def test_llama3_scaling_by_hand() -> None:
    """d=4, base 10000: speeds 1 and 0.01 turn 628 / 2 pi = 99.95 and 0.9995 times in the original length: with the factors
    1 and 4 the first is kept, the second divided by 8. With low factor 0.5 it keeps (0.9995 - 0.5) / 3.5 of itself."""
    base = dict.fromkeys(("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups", "vocab_size"), 1)
    plain = ModelConfig(name="x", kv_channels=4, padded_vocab_size=1, max_position_embeddings=1, **base)
    assert rope_inv_freq(plain).tolist() == pytest.approx([1.0, 0.01])
    scaled = replace(plain, rope_scaling_factor=8.0, original_max_position_embeddings=628)
    assert rope_inv_freq(scaled).tolist() == pytest.approx([1.0, 0.00125])
    keep = (6.28 / (2 * math.pi) - 0.5) / 3.5
    blended = rope_inv_freq(replace(scaled, low_freq_factor=0.5)).tolist()
    assert blended == pytest.approx([1.0, 0.01 * (keep + (1 - keep) / 8)])


def test_padded_vocabulary_stands_outside(tiny: Path) -> None:
    """512 embedding rows for 384 ids: the same logits and log-probs, whatever stands in the padding; its gradient is 0."""
    ids, where, targets = _ids(2, 12), (torch.tensor([0, 1]), torch.tensor([4, 9])), torch.tensor([7, 300])
    plain, padded = _load(tiny), _load(tiny, padded_vocab_size=512)
    weight = padded.embedding.word_embeddings.weight
    assert weight.shape == (512, 32) and weight[384:].abs().sum() == 0
    with torch.no_grad():
        weight[384:] = 50.0
    assert torch.equal(padded(ids), plain(ids))
    logps = padded(ids, select=where, targets=targets)
    assert torch.equal(logps, plain(ids, select=where, targets=targets))
    logps.sum().backward()
    assert weight.grad[384:].abs().sum() == 0 and weight.grad[:384].abs().sum() > 0


@pytest.mark.parametrize("tied", [True, False])
def test_selected_log_probs_equal_full_logits(tied: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Log-probs and all gradients of 5 chosen positions equal those through ``[N,T,V]`` logits; the head sees 5 rows only."""
    folder = make_tiny_hf(tmp_path, tied=tied)
    ids, row, column, targets = _ids(3, 20), torch.tensor([0, 0, 1, 2, 2]), torch.tensor([3, 4, 18, 0, 7]), torch.tensor([9, 2, 40, 383, 5])
    full, chosen = _load(folder), _load(folder)
    expected = F.log_softmax(full(ids), -1)[row, column].gather(1, targets[:, None]).squeeze(1)
    seen = []
    original = model_module.token_logps
    monkeypatch.setattr(
        model_module, "token_logps", lambda hidden, *rest, **group: seen.append(tuple(hidden.shape)) or original(hidden, *rest)
    )
    monkeypatch.setattr(PolicyModel, "head", None)
    got = chosen(ids, None, None, select=(row, column), targets=targets)
    assert got.dtype == torch.float32 and seen == [(5, 32)]
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=0)
    expected.sum().backward()
    got.sum().backward()
    for (name, a), (_, b) in zip(full.named_parameters(), chosen.named_parameters(), strict=True):
        torch.testing.assert_close(b.grad, a.grad, atol=1e-4, rtol=1e-4, msg=lambda m, name=name: f"{name}: {m}")


def test_selected_hidden_states_and_head(tiny: Path) -> None:
    model, ids, where = _load(tiny), _ids(2, 10), (torch.tensor([1, 0]), torch.tensor([3, 9]))
    hidden = model(ids, select=where)
    assert hidden.shape == (2, 32) and hidden.dtype == torch.float32
    torch.testing.assert_close(model.head(hidden), model(ids)[where])
    with pytest.raises(ValueError, match="targets without select"):
        model(ids, targets=where[0])


def test_right_padding_changes_nothing(tiny: Path) -> None:
    """Logits at real positions do not depend on what or how much stands to the right."""
    model, ids = _load(tiny), _ids(2, 9)
    wide = torch.cat([ids, torch.full((2, 6), 2)], 1)
    with torch.no_grad():
        torch.testing.assert_close(model(wide)[:, :9], model(ids), atol=1e-5, rtol=0)


def test_left_padding_needs_mask_and_positions(tiny: Path) -> None:
    """With a mask over the padding and positions from the first real token, a left-padded row equals the unpadded one;
    without both it does not."""
    model, ids, pad = _load(tiny), _ids(1, 9), 4
    wide = torch.cat([torch.full((1, pad), 2), ids], 1)
    t = wide.shape[1]
    hidden = torch.ones(t, t, dtype=torch.bool).triu(1)
    hidden[pad:, :pad] = True
    positions = (torch.arange(t) - pad).clamp(min=0)[None]
    with torch.no_grad():
        expected = model(ids)
        torch.testing.assert_close(model(wide, positions, hidden[None, None])[:, pad:], expected, atol=1e-4, rtol=0)
        assert (model(wide)[:, pad:] - expected).abs().max() > 0.1


def test_positions_are_used_row_by_row(tiny: Path) -> None:
    """Two rows with one set of tokens, the second at every other position: only the first equals the default."""
    model, ids = _load(tiny), _ids(1, 9).expand(2, -1)
    positions = torch.stack([torch.arange(9), 2 * torch.arange(9)])
    with torch.no_grad():
        got, default = model(ids, positions), model(ids)
    torch.testing.assert_close(got[0], default[0], atol=1e-5, rtol=0)
    assert (got[1] - default[1]).abs().max() > 0.1


def test_policy_and_reference_round_alike_in_bf16(tiny: Path) -> None:
    """Same weights: the trainable model with gradients and the frozen one without give the same bits, so step 0 is ln 2."""
    policy, reference = _load(tiny, bf16=True), _load(tiny, bf16=True, trainable=False)
    assert not any(p.requires_grad for p in reference.parameters()) and not reference.training
    ids, where, targets = _ids(2, 30), (torch.tensor([0, 1]), torch.tensor([11, 28])), torch.tensor([7, 8])
    with torch.no_grad():
        frozen = reference(ids, select=where, targets=targets)
    trained = policy(ids, select=where, targets=targets)
    assert trained.requires_grad and torch.equal(trained.detach(), frozen)
    exact = _load(tiny)(ids, select=where, targets=targets)
    torch.testing.assert_close(frozen, exact, atol=0.3, rtol=0)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_rms_norm_value_and_gradient(dtype: torch.dtype, tolerance: float) -> None:
    """Against torch's in fp64, with a gradient that is not contiguous."""
    config = transformer_config(_any_config(), ParallelConfig(), bf16=dtype == torch.bfloat16)
    norm = RMSNorm(config, 16, eps=1e-3)
    torch.manual_seed(0)
    with torch.no_grad():
        norm.weight.uniform_(0.5, 2.0)
    x = torch.randn(5, 3, 16).to(dtype).requires_grad_()
    grad = torch.randn(3, 5, 16).to(dtype)
    x64, w64 = x.detach().double().requires_grad_(), norm.weight.detach().double().requires_grad_()
    out, out64 = norm(x), F.rms_norm(x64, (16,), w64, 1e-3)
    out.transpose(0, 1).backward(grad)
    out64.transpose(0, 1).backward(grad.double())
    for got, exact in ((out, out64), (x.grad, x64.grad), (norm.weight.grad, w64.grad)):
        assert got.dtype == dtype
        torch.testing.assert_close(got.double(), exact, atol=tolerance * exact.abs().max().item(), rtol=tolerance)


def _any_config() -> ModelConfig:
    return ModelConfig("x", 2, 16, 32, 4, 2, 4, 64, 64, 128)


def test_forwarded_keys() -> None:
    config = transformer_config(_any_config(), ParallelConfig(), False, {"recompute_granularity": "selective"})
    assert config.recompute_granularity == "selective"
    with pytest.raises(ConfigError, match="recompute_granularty=full.*did you mean 'recompute_granularity'"):
        transformer_config(_any_config(), ParallelConfig(), False, {"recompute_granularty": "full"})
    with pytest.raises(ConfigError, match=r"rotary_interleaved=True: fixed to False by the model"):
        transformer_config(_any_config(), ParallelConfig(), False, {"rotary_interleaved": True})
    with pytest.raises(ConfigError, match=r"hidden_dropout=0.1: fixed to 0.0"):
        transformer_config(_any_config(), ParallelConfig(), False, {"hidden_dropout": 0.1})


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"tensor": 0}, "tensor_model_parallel_size=0: must be 1 or more"),
        ({"virtual": 2}, "virtual_pipeline_model_parallel_size=2: model chunks are stages of a pipeline, and .* is 1"),
        ({"expert": 2, "context": 3}, "expert_model_parallel_size=2: must divide the 3 data- and context-parallel ranks"),
    ],
)
def test_parallel_sizes_that_do_not_go_together(sizes: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        init_parallel(ParallelConfig(**sizes), 0, "127.0.0.1", 1, 0, 1.0)


@pytest.mark.parametrize(
    ("sizes", "changes", "message"),
    [
        ({"tensor": 3}, {}, "tensor_model_parallel_size=3: num_attention_heads is 4 in model x, not a whole number a rank"),
        ({"tensor": 4}, {}, "tensor_model_parallel_size=4: num_query_groups is 2 in model x"),
        ({"tensor": 2}, {"padded_vocab_size": 65}, "padded_vocab_size is 65 in model x.*or pad the vocabulary further"),
        ({"pipeline": 3}, {}, "pipeline_model_parallel_size=3: 2 layers of model x do not divide into 3 equal parts"),
        ({"pipeline": 2, "virtual": 2}, {}, "pipeline_model_parallel_size=2 with 2 chunks each: 2 layers of model x .* 4 equal parts"),
    ],
)
def test_a_model_that_does_not_divide(sizes: dict[str, int], changes: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        transformer_config(replace(_any_config(), **changes), ParallelConfig(**sizes), False)


def test_a_model_that_was_not_loaded_is_nan(tiny: Path) -> None:
    (model,) = build_model(read_model_config(tiny, "tiny"), ParallelConfig(), False, trainable=False)
    assert model(_ids(1, 4)).isnan().all()


def test_named_weights_and_wrappers(tiny: Path) -> None:
    """Names carry no wrapper prefix; a tied head comes once; what comes is the model's own memory."""
    from mindspeed_odpo.engine.optimizer import wrap_for_training

    model = _load(tiny, bf16=True)
    wrapped = wrap_for_training([model], True, ParallelConfig())
    assert unwrap(wrapped[0]) is model
    names = [name for name, _ in named_weights(wrapped)]
    assert len(names) == len(set(names)) == 14 and "output_layer.weight" not in names
    assert "embedding.word_embeddings.weight" in names and "decoder.layers.1.mlp.linear_fc2.weight" in names
    with torch.no_grad():
        dict(named_weights(wrapped))["decoder.final_layernorm.weight"].fill_(3.0)
    assert model.decoder.final_layernorm.weight.unique().tolist() == [3.0]
    untied = _any_config()
    untied = replace(untied, untie_embeddings_and_output_weights=True)
    assert "output_layer.weight" in dict(named_weights(build_model(untied, ParallelConfig(), False, trainable=True)))


def test_load_named_is_strict(tiny: Path) -> None:
    model = _load(tiny)
    good = [(name, tensor.clone()) for name, tensor in named_weights([model])]
    name, tensor = good[3]
    with pytest.raises(DataError, match=f"1 of the model's 14 weights did not come, the first is {name}"):
        load_named([model], good[:3] + good[4:])
    with pytest.raises(DataError, match=f"weight {name}s .*no place in the model; did you mean '{name}'"):
        load_named([model], [*good, (name + "s", tensor)])
    with pytest.raises(DataError, match=f"weight {name} came twice"):
        load_named([model], [*good, good[3]])
    with pytest.raises(DataError, match=rf"weight {name}: expected shape \[64, 32\], got \[31, 32\]"):
        load_named([model], [(name, tensor[:31])])


def test_buckets_keep_order_and_size() -> None:
    """Of 40, 40, 200, 8 bytes in buckets of 100: [40, 40], [200] alone, [8]."""
    items = [(name, torch.zeros(n, dtype=torch.uint8)) for name, n in (("a", 40), ("b", 40), ("c", 200), ("d", 8))]
    assert [[name for name, _ in bucket] for bucket in buckets(items, size=100)] == [["a", "b"], ["c"], ["d"]]
    assert list(buckets([])) == []


def test_setup_is_idempotent_and_leaves_torch_usable() -> None:
    """A context such as transformers' "meta" still reaches the factories that the CPU layer wraps."""
    assert device.setup() == device.setup() == "cpu" and device.device() == torch.device("cpu") and device.backend() == "gloo"
    wrapped = torch.zeros
    cpu.install()
    assert torch.zeros is wrapped
    for factory in (torch.zeros, torch.ones, torch.empty):
        with torch.device("meta"):
            assert factory(3).is_meta
        assert factory(3, device="cuda").device.type == "cpu"
    assert not torch.cuda.is_available()


def test_setup_after_megatron_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "_installed", False)
    assert "megatron.core" in sys.modules
    with pytest.raises(HostError, match=r"call setup\(\) first"):
        cpu.install()


def test_real_smollm2() -> None:
    """SmolLM2-135M: its yaml fits the folder, fp32 logits equal transformers to 1e-4, weights come back bit-equal."""
    import yaml
    from safetensors.torch import load_file

    root = Path(__file__).parents[2]
    folder = Path(os.environ.get("ODPO_SMOLLM2") or root / "models" / "smollm2-135m")
    if not folder.is_dir():
        pytest.skip(f"{folder} is missing: set ODPO_SMOLLM2 or run make quickstart")
    from mindspeed_odpo.hf.config import check_model_config

    raw = yaml.safe_load((root / "configs/rlxf/model/smollm2-135m.yaml").read_text())["smollm2-135m"]
    config = read_model_config(folder, "smollm2-135m")
    check_model_config(folder, replace(config, **{key: value for key, value in raw.items() if key in vars(config)}))
    model = _load(folder, trainable=False)
    ids = torch.randint(3, 40000, (2, 40), generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(model(ids), _hf_logits(folder, ids), atol=1e-4, rtol=0)
    source = load_file(folder / "model.safetensors")
    returned = dict(megatron_to_hf(named_weights([model]), config))
    assert returned.keys() == source.keys()
    assert all(torch.equal(tensor, source[name]) for name, tensor in returned.items())
