"""Hugging Face folders: config, weights both ways, export. Tiny random models; only the export test runs transformers."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from tiny import make_tiny_hf

from mindspeed_odpo.config import ModelConfig
from mindspeed_odpo.errors import ConfigError, DataError
from mindspeed_odpo.hf import weights as weights_module
from mindspeed_odpo.hf.config import check_model_config, eos_token_ids, read_model_config
from mindspeed_odpo.hf.weights import export_folder, hf_to_megatron, megatron_to_hf

torch.set_num_threads(1)
KINDS: dict[str, dict[str, Any]] = {"tied": {}, "untied": {"tied": False}, "qwen2": {"kind": "qwen2"}}


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    return make_tiny_hf(tmp_path / "source")


def _edit(folder: Path, file: str = "config.json", drop: tuple[str, ...] = (), **changes: Any) -> None:
    raw = json.loads((folder / file).read_text())
    (folder / file).write_text(json.dumps({key: value for key, value in {**raw, **changes}.items() if key not in drop}))


def _edit_weights(folder: Path, **changes: Any) -> None:
    """Set (a tensor) or drop (None) tensors of model.safetensors."""
    tensors = {**load_file(folder / "model.safetensors"), **changes}
    kept = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})


def _weights(folder: Path) -> list[tuple[str, torch.Tensor]]:
    return list(hf_to_megatron(folder, read_model_config(folder, "tiny")))


def test_qkv_rows_by_hand(tmp_path: Path) -> None:
    """Two groups of two heads of width 1: rows q0 q1 k0 v0, q2 q3 k1 v1; gate above up."""
    shape = {"hidden_size": 4, "intermediate_size": 2, "head_dim": 1, "num_hidden_layers": 1}
    folder = make_tiny_hf(tmp_path, kind="llama", **shape)
    row = torch.ones(1, 4)
    prefix = "model.layers.0."
    _edit_weights(
        folder,
        **{
            prefix + "self_attn.q_proj.weight": torch.tensor([[0.0], [1.0], [2.0], [3.0]]) * row,
            prefix + "self_attn.k_proj.weight": torch.tensor([[10.0], [11.0]]) * row,
            prefix + "self_attn.v_proj.weight": torch.tensor([[20.0], [21.0]]) * row,
            prefix + "mlp.gate_proj.weight": torch.tensor([[5.0], [6.0]]) * row,
            prefix + "mlp.up_proj.weight": torch.tensor([[7.0], [8.0]]) * row,
        },
    )
    weights = dict(_weights(folder))
    assert weights["decoder.layers.0.self_attention.linear_qkv.weight"][:, 0].tolist() == [0, 1, 10, 20, 2, 3, 11, 21]
    assert weights["decoder.layers.0.mlp.linear_fc1.weight"][:, 0].tolist() == [5, 6, 7, 8]


def test_interleaved_qkv_rows_by_hand(tmp_path: Path) -> None:
    """One group of two heads of width 4, rows 0 to 7 of q, 10 to 13 of k, 20 to 23 of v: within each head of q and k
    halves become neighbours (0 2 1 3), v stays; the biases of Qwen2 too."""
    shape = {"hidden_size": 8, "num_attention_heads": 2, "num_key_value_heads": 1, "num_hidden_layers": 1}
    folder = make_tiny_hf(tmp_path, kind="qwen2", **shape)
    rows = {"q": torch.arange(8.0), "k": torch.arange(10.0, 14.0), "v": torch.arange(20.0, 24.0)}
    at = "model.layers.0.self_attn."
    _edit_weights(folder, **{f"{at}{part}_proj.weight": row[:, None] * torch.ones(1, 8) for part, row in rows.items()})
    _edit_weights(folder, **{f"{at}{part}_proj.bias": row for part, row in rows.items()})
    weights = dict(hf_to_megatron(folder, replace(read_model_config(folder, "tiny"), rotary_interleaved=True)))
    expected = [0, 2, 1, 3, 4, 6, 5, 7, 10, 12, 11, 13, 20, 21, 22, 23]
    assert weights["decoder.layers.0.self_attention.linear_qkv.weight"][:, 0].tolist() == expected
    assert weights["decoder.layers.0.self_attention.linear_qkv.bias"].tolist() == expected


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("padded", [384, 512])
def test_there_and_back_is_bit_equal(kind: str, padded: int, interleaved: bool, tmp_path: Path) -> None:
    folder = make_tiny_hf(tmp_path, **KINDS[kind])
    config = replace(read_model_config(folder, "tiny"), padded_vocab_size=padded, rotary_interleaved=interleaved)
    ours = dict(hf_to_megatron(folder, config))
    assert ours["embedding.word_embeddings.weight"].shape == (padded, 32)
    back, source = dict(megatron_to_hf(ours.items(), config)), load_file(folder / "model.safetensors")
    assert back.keys() == source.keys()
    for name, tensor in source.items():
        assert back[name].dtype == tensor.dtype and torch.equal(back[name], tensor), name


def test_mutant_rows_moved_the_same_way_on_export(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Moving halves to neighbours a second time is not the way back (heads of 8 channels): the comparison above catches it."""
    config = replace(read_model_config(tiny, "tiny"), rotary_interleaved=True)
    ours, source = dict(hf_to_megatron(tiny, config)), load_file(tiny / "model.safetensors")
    monkeypatch.setattr(weights_module, "_to_halves", weights_module._to_neighbours)
    back = dict(megatron_to_hf(ours.items(), config))
    wrong = {name.split(".")[-2] for name in source if not torch.equal(back[name], source[name])}
    assert wrong == {"q_proj", "k_proj"}


@pytest.mark.parametrize("kind", KINDS)
def test_export_opens_in_transformers(kind: str, tmp_path: Path) -> None:
    """Config, tokenizer, template and bits survive; the export generates the same greedy tokens."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source, out = make_tiny_hf(tmp_path / "source", **KINDS[kind]), tmp_path / "out"
    export_folder(out, source, _weights(source), read_model_config(source, "tiny"), torch.float32)
    exported, original = load_file(out / "model.safetensors"), load_file(source / "model.safetensors")
    assert exported.keys() == original.keys() and all(torch.equal(exported[name], original[name]) for name in original)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "source"]
    replies = []
    for folder in (source, out):
        tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
        text = tokenizer.apply_chat_template([{"role": "user", "content": "hé"}], add_generation_prompt=True, tokenize=False)
        ids = tokenizer(text, return_tensors="pt").input_ids
        replies.append(model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=12).tolist())
    assert replies[0] == replies[1] and len(replies[0][0]) > 12


def test_export_in_bf16_and_in_shards(tiny: Path, tmp_path: Path) -> None:
    """Files of at most 20,000 bytes with an index that transformers and we read; config.json says bfloat16."""
    from transformers import AutoModelForCausalLM

    out = tmp_path / "out"
    export_folder(out, tiny, _weights(tiny), read_model_config(tiny, "tiny"), torch.bfloat16, shard_bytes=20_000)
    files = sorted(path.name for path in out.glob("*.safetensors"))
    assert len(files) > 1 and files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    assert json.loads((out / "config.json").read_text())["dtype"] == "bfloat16"
    model = AutoModelForCausalLM.from_pretrained(out)
    assert model.dtype == torch.bfloat16
    for (name, ours), (_, exact) in zip(_weights(out), _weights(tiny), strict=True):
        assert torch.equal(ours, exact.bfloat16()), name
    assert torch.equal(model.state_dict()["model.norm.weight"], load_file(tiny / "model.safetensors")["model.norm.weight"].bfloat16())


def test_export_replaces_an_export_and_nothing_else(tiny: Path, tmp_path: Path) -> None:
    config, items, out = read_model_config(tiny, "tiny"), _weights(tiny), tmp_path / "out"
    export_folder(out, tiny, items, config, torch.float32)
    (out / "stale").touch()
    with pytest.raises(DataError, match="did not come, the first is decoder.final_layernorm.weight"):
        export_folder(out, tiny, items[:-1], config, torch.float32)
    assert (out / "stale").exists(), "a failed export leaves the older one alone"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "source"], "and nothing of its own"
    export_folder(out, tiny, items, config, torch.float32)
    assert not (out / "stale").exists() and sorted(path.name for path in tmp_path.iterdir()) == ["out", "source"]
    (tmp_path / "mine").mkdir()
    with pytest.raises(DataError, match="is not a model folder"):
        export_folder(tmp_path / "mine", tiny, items, config, torch.float32)


def test_stray_head_of_a_tied_model(tiny: Path) -> None:
    """A second copy of the embedding is dropped; a head with other values contradicts the config."""
    plain = _weights(tiny)
    embedding = load_file(tiny / "model.safetensors")["model.embed_tokens.weight"]
    _edit_weights(tiny, **{"lm_head.weight": embedding.clone()})
    assert [name for name, _ in _weights(tiny)] == [name for name, _ in plain]
    _edit_weights(tiny, **{"lm_head.weight": embedding + 1})
    with pytest.raises(DataError, match="lm_head.weight differs from model.embed_tokens.weight"):
        _weights(tiny)


def test_wrong_tensors_are_named(tiny: Path, tmp_path: Path) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    tensor = load_file(tiny / "model.safetensors")[name]
    _edit_weights(tiny, **{name: tensor[:-1].clone()})
    with pytest.raises(DataError, match=rf"{name}: expected shape \[64, 32\], got \[63, 32\]"):
        _weights(tiny)
    _edit_weights(tiny, **{name: None})
    with pytest.raises(DataError, match=f"has no tensor {name}"):
        _weights(tiny)
    _edit_weights(tiny, **{name: tensor, "model.layers.1.mlp.up_proj.bias": tensor[:, 0].clone()})
    with pytest.raises(DataError, match="tensor model.layers.1.mlp.up_proj.bias .* has no place"):
        _weights(tiny)
    classifier = make_tiny_hf(tmp_path / "classifier", classifier=True)
    with pytest.raises(DataError, match="score.weight"):
        _weights(classifier)
    (tiny / "model.safetensors").unlink()
    with pytest.raises(DataError, match="model.safetensors does not exist.*as safetensors"):
        _weights(tiny)


def test_megatron_to_hf_is_strict(tiny: Path) -> None:
    config, items = read_model_config(tiny, "tiny"), _weights(tiny)
    with pytest.raises(DataError, match="weight decoder.layers.9.x .*no place"):
        list(megatron_to_hf([("decoder.layers.9.x", torch.zeros(1))], config))
    with pytest.raises(DataError, match="came twice"):
        list(megatron_to_hf([items[0], items[0]], config))
    with pytest.raises(DataError, match=rf"{items[0][0]}: expected shape \[384, 32\], got \[383, 32\]"):
        list(megatron_to_hf([(items[0][0], items[0][1][:-1])], config))


def test_read_model_config(tmp_path: Path) -> None:
    expected = ModelConfig("tiny", 2, 32, 64, 4, 2, 8, 384, 384, 512)
    assert read_model_config(make_tiny_hf(tmp_path / "a"), "tiny") == expected
    qwen2 = read_model_config(make_tiny_hf(tmp_path / "b", kind="qwen2", tied=False), "tiny")
    assert qwen2 == replace(expected, add_qkv_bias=True, untie_embeddings_and_output_weights=True)


def test_both_spellings_of_rope(tiny: Path) -> None:
    """``rope_parameters`` of transformers 5; ``rope_theta`` with ``rope_scaling`` of 4; the ``type`` of older ones."""
    numbers = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 3.0, "original_max_position_embeddings": 64}
    _edit(tiny, rope_parameters={"rope_type": "llama3", "rope_theta": 500.0, **numbers})
    new = read_model_config(tiny, "tiny")
    assert (new.rotary_base, new.rope_scaling_factor, new.high_freq_factor, new.original_max_position_embeddings) == (500.0, 8.0, 3.0, 64)
    for key in ("rope_type", "type"):
        _edit(tiny, drop=("rope_parameters",), rope_theta=500.0, rope_scaling={key: "llama3", **numbers})
        assert read_model_config(tiny, "tiny") == new
    _edit(tiny, rope_scaling=None)
    assert read_model_config(tiny, "tiny").rope_scaling_factor is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gpt2"}, "model_type gpt2 is not supported; supported: llama, qwen2"),
        ({"hidden_act": "gelu"}, "hidden_act gelu is not supported; supported: silu"),
        ({"attention_bias": True}, "attention_bias True"),
        ({"mlp_bias": True}, "mlp_bias True"),
        ({"use_sliding_window": True}, "use_sliding_window True"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1.0}}, "rope_type yarn is not supported; supported: default, llama3"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
    ],
)
def test_unsupported_models_are_refused(tiny: Path, changes: dict[str, Any], message: str) -> None:
    _edit(tiny, **changes)
    with pytest.raises(ConfigError, match=message):
        read_model_config(tiny, "tiny")


def test_missing_and_broken_folders(tiny: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"nowhere does not exist: give the path of a Hugging Face folder"):
        read_model_config(tmp_path / "nowhere", "tiny")
    with pytest.raises(DataError, match=r"config.json does not exist"):
        read_model_config(tmp_path, "tiny")
    _edit(tiny, drop=("rms_norm_eps",))
    with pytest.raises(DataError, match="has no rms_norm_eps"):
        read_model_config(tiny, "tiny")
    (tiny / "config.json").write_text("{")
    with pytest.raises(DataError, match="is not valid JSON"):
        read_model_config(tiny, "tiny")


def test_check_model_config_names_every_difference(tiny: Path) -> None:
    found = read_model_config(tiny, "tiny")
    check_model_config(tiny, replace(found, padded_vocab_size=512, max_position_embeddings=100, norm_epsilon=9.99999974e-06))
    check_model_config(tiny, replace(found, rotary_interleaved=True))
    with pytest.raises(ConfigError) as caught:
        check_model_config(tiny, replace(found, hidden_size=64, rotary_base=5e5, max_position_embeddings=1024))
    text = str(caught.value)
    assert "hidden_size is 64 in the yaml, 32 in config.json" in text and "rotary_base is 500000.0 in the yaml, 10000.0" in text
    assert "max_position_embeddings is 1024" in text and text.count(" in the yaml") == 3


def test_tiny_yaml_is_the_tiny_model(tiny: Path) -> None:
    path = Path(__file__).parents[2] / "configs/rlxf/model/tiny.yaml"
    raw = yaml.safe_load(path.read_text())["tiny"]
    found = read_model_config(tiny, "tiny")
    given = {field.name: raw[field.name] for field in fields(ModelConfig) if field.name in raw}
    assert len(given) == 11 and given == {key: getattr(found, key) for key in given}


def test_eos_token_ids(tiny: Path) -> None:
    assert eos_token_ids(tiny) == (2,)
    _edit(tiny, "generation_config.json", eos_token_id=[2, 7])
    assert eos_token_ids(tiny) == (2, 7)
    (tiny / "generation_config.json").unlink()
    _edit(tiny, eos_token_id=5)
    assert eos_token_ids(tiny) == (5,)
    _edit(tiny, eos_token_id=None)
    with pytest.raises(DataError, match="no eos_token_id in config.json"):
        eos_token_ids(tiny)
