"""``config.json`` of a Hugging Face folder, in Megatron's names."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from mindspeed_odpo.config import ModelConfig
from mindspeed_odpo.errors import ConfigError, DataError

SUPPORTED = ("llama", "qwen2")


def read_json(folder: Path, name: str) -> dict[str, Any]:
    """A JSON file of a model folder; DataError where folder or file is missing or not a JSON object."""
    if not folder.is_dir():
        raise DataError(
            f"model folder {folder} does not exist: give the path of a Hugging Face folder (config.json, *.safetensors, tokenizer files)"
        )
    path = folder / name
    if not path.is_file():
        raise DataError(f"{path} does not exist: {folder} is not a Hugging Face model folder, or was copied incompletely")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise DataError(f"{path} is not valid JSON ({error}): copy the folder again") from error
    if not isinstance(content, dict):
        raise DataError(f"{path}: expected a JSON object, found a {type(content).__name__}")
    return content


def _rope(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Base and scaling under the names of ``rope_parameters`` (transformers 5); before, they were two keys of the top level."""
    parameters = raw.get("rope_parameters")
    if parameters is not None:
        return dict(parameters)
    scaling = dict(raw.get("rope_scaling") or {})
    scaling.setdefault("rope_type", scaling.pop("type", "default"))
    return {"rope_theta": raw.get("rope_theta", 10000.0), **scaling}


def _check_supported(path: Path, raw: Mapping[str, Any], rope: Mapping[str, Any]) -> None:
    """ConfigError for anything that would silently be computed differently here."""
    kind = raw.get("model_type")
    if kind not in SUPPORTED:
        raise ConfigError(f"{path}: model_type {kind} is not supported; supported: {', '.join(SUPPORTED)}")
    wanted = {
        "hidden_act": (raw.get("hidden_act", "silu"), "silu"),
        "attention_bias": (raw.get("attention_bias", False), False),
        "mlp_bias": (raw.get("mlp_bias", False), False),
        "use_sliding_window": (raw.get("use_sliding_window", False), False),
        "partial_rotary_factor": (rope.get("partial_rotary_factor", raw.get("partial_rotary_factor", 1.0)), 1.0),
        "quantization_config": (raw.get("quantization_config"), None),
    }
    for key, (value, only) in wanted.items():
        if value != only:
            raise ConfigError(f"{path}: {key} {value} is not supported; supported: {only}")
    if rope.get("rope_type", "default") not in ("default", "llama3"):
        raise ConfigError(f"{path}: rope_type {rope.get('rope_type')} is not supported; supported: default, llama3")


def read_model_config(folder: Path, name: str) -> ModelConfig:
    """Architecture of the model in ``folder``, called ``name``; nothing but ``config.json`` is read.

    ``vocab_size`` is the number of embedding rows that the folder has. DataError where the folder is missing or broken,
    ConfigError naming what is supported for any other architecture.
    """
    path = folder / "config.json"
    raw = read_json(folder, "config.json")
    rope = _rope(raw)
    _check_supported(path, raw, rope)
    try:
        heads, vocab = int(raw["num_attention_heads"]), int(raw["vocab_size"])
        return ModelConfig(
            name=name,
            num_layers=int(raw["num_hidden_layers"]),
            hidden_size=int(raw["hidden_size"]),
            ffn_hidden_size=int(raw["intermediate_size"]),
            num_attention_heads=heads,
            num_query_groups=int(raw.get("num_key_value_heads") or heads),
            kv_channels=int(raw.get("head_dim") or raw["hidden_size"] // heads),
            vocab_size=vocab,
            padded_vocab_size=vocab,
            max_position_embeddings=int(raw["max_position_embeddings"]),
            rotary_base=float(rope["rope_theta"]),
            norm_epsilon=float(raw["rms_norm_eps"]),
            add_qkv_bias=raw["model_type"] == "qwen2",
            untie_embeddings_and_output_weights=not raw.get("tie_word_embeddings", False),
            **_llama3_scaling(rope),
        )
    except KeyError as error:
        raise DataError(f"{path} has no {error.args[0]}: it is not a complete {raw['model_type']} config") from error


def _llama3_scaling(rope: Mapping[str, Any]) -> dict[str, Any]:
    if rope.get("rope_type", "default") != "llama3":
        return {}
    return {
        "rope_scaling_factor": float(rope["factor"]),
        "low_freq_factor": float(rope["low_freq_factor"]),
        "high_freq_factor": float(rope["high_freq_factor"]),
        "original_max_position_embeddings": int(rope["original_max_position_embeddings"]),
    }


def check_model_config(folder: Path, model: ModelConfig) -> None:
    """ConfigError naming every key where ``model`` (the yaml) differs from the folder's config.json.

    ``padded_vocab_size`` and ``rotary_interleaved`` are ours to choose (``hf/weights.py`` moves the rows), and
    ``max_position_embeddings`` may be smaller than the folder's.
    """
    found = read_model_config(folder, model.name)
    free = {"name", "padded_vocab_size", "rotary_interleaved"}
    if model.rope_scaling_factor is None and found.rope_scaling_factor is None:
        free |= {"low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}
    if model.max_position_embeddings <= found.max_position_embeddings:
        free.add("max_position_embeddings")
    differ = []
    for key in (field.name for field in fields(ModelConfig) if field.name not in free):
        ours, theirs = getattr(model, key), getattr(found, key)
        # An epsilon that went through fp32 is 9.99999975e-06 in config.json and 1e-5 in the yaml.
        same = math.isclose(ours, theirs, rel_tol=1e-6) if isinstance(ours, float) and isinstance(theirs, float) else ours == theirs
        if not same:
            differ.append(f"{key} is {ours} in the yaml, {theirs} in config.json")
    if differ:
        raise ConfigError(f"model {model.name} does not fit {folder}: {'; '.join(differ)}; take the model yaml that belongs to the folder")


def eos_token_ids(folder: Path) -> tuple[int, ...]:
    """Ids that end an answer: ``eos_token_id`` (one or a list) of generation_config.json, else of config.json; DataError without one."""
    names = [name for name in ("generation_config.json", "config.json") if name == "config.json" or (folder / name).is_file()]
    for name in names:
        ids = read_json(folder, name).get("eos_token_id")
        if ids is not None:
            return tuple(int(i) for i in ids) if isinstance(ids, list) else (int(ids),)
    raise DataError(f"{folder}: no eos_token_id in {' or '.join(names)}: an answer could never end; add it to generation_config.json")
