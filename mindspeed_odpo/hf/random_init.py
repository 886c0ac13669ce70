"""A Hugging Face folder with random weights: where training from scratch starts."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from mindspeed_odpo.config import ModelConfig, config_root, parse_model
from mindspeed_odpo.errors import ConfigError, DataError, nearest
from mindspeed_odpo.hf.config import check_model_config
from mindspeed_odpo.hf.weights import copy_tokenizer

STD = 0.02
"""Standard deviation of every matrix; transformers' and Megatron's own default."""


def read_model(name: str, extra_dir: Path | None = None) -> ModelConfig:
    """The architecture ``model/NAME.yaml`` of the packaged configs, or of ``extra_dir``, which wins.

    ConfigError for a folder or a name that is not there, and for what :func:`parse_model` refuses.
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    folders = [config_root() / "rlxf" / "model"]
    if extra_dir is not None:
        folders.insert(0, extra_dir.expanduser().absolute() / "model")
        if not folders[0].is_dir():
            raise ConfigError(f"--config-dir: no folder at {folders[0]}: model files lie in DIR/model")
    files = {path.stem: path for folder in reversed(folders) for path in sorted(folder.glob("*.yaml"))}
    if name not in files:
        raise ConfigError(
            f"--model: no model '{name}' in {' or '.join(map(str, folders))}{nearest(name, files)} (there are: {', '.join(sorted(files))})"
        )
    try:
        tree = OmegaConf.to_container(OmegaConf.load(files[name]), resolve=True)
    except (OmegaConfBaseException, YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{files[name]}: {' '.join(str(error).split())}") from error
    if not isinstance(tree, dict) or not isinstance(tree.get(name), dict):
        raise ConfigError(f"{files[name]}: expected the keys of the model under '{name}:'")
    return parse_model(name, {str(key): value for key, value in tree[name].items()})


def write_random(out: Path, model: ModelConfig, tokenizer: Path, seed: int) -> None:
    """Write ``model`` in fp32 into the folder ``out``, with weights that follow from ``seed`` and the tokenizer of ``tokenizer``.

    Matrices and embedding are normal with :data:`STD`, norms 1, biases 0. A Qwen2 folder where the model has qkv biases,
    else a Llama folder. BOS, EOS and pad ids are the tokenizer's; an answer ends with that EOS. ``out`` appears whole or not
    at all. DataError where it holds something already, and for a tokenizer that is missing or has no EOS; ConfigError for
    one with more entries than ``vocab_size``.
    """
    if not 0 <= seed < 2**63:
        raise ConfigError(f"--seed: must be in 0..{2**63 - 1}, got {seed}")
    out = out.expanduser().absolute()
    if out.exists() and not (out.is_dir() and next(out.iterdir(), None) is None):
        raise DataError(f"--out: {out} is not empty: remove it or choose another folder")
    from mindspeed_odpo.data.prompts import load_tokenizer

    loaded = load_tokenizer(tokenizer.expanduser().absolute())
    if len(loaded) > model.vocab_size:
        raise ConfigError(
            f"the tokenizer in {tokenizer} has {len(loaded)} entries, vocab_size of model {model.name} is {model.vocab_size}: "
            "they do not belong together"
        )
    if loaded.eos_token_id is None:
        raise DataError(f"the tokenizer in {tokenizer} has no eos_token: an answer could never end; add it to tokenizer_config.json")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(f"--out: {out.parent} cannot be made ({error.strerror}); choose another folder") from error
    work = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
    try:
        made = work / "made"
        _write_model(made, model, seed, {name: getattr(loaded, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")})
        copy_tokenizer(tokenizer.expanduser().absolute(), made)
        check_model_config(made, model)
        os.replace(made, out)
    finally:
        shutil.rmtree(work)


def _write_model(out: Path, model: ModelConfig, seed: int, ids: dict[str, int | None]) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": model.rotary_base}
    if model.rope_scaling_factor is not None:
        rope |= {
            "rope_type": "llama3",
            "factor": model.rope_scaling_factor,
            "low_freq_factor": model.low_freq_factor,
            "high_freq_factor": model.high_freq_factor,
            "original_max_position_embeddings": model.original_max_position_embeddings,
        }
    shape: dict[str, Any] = {
        "vocab_size": model.vocab_size,
        "hidden_size": model.hidden_size,
        "intermediate_size": model.ffn_hidden_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_attention_heads,
        "num_key_value_heads": model.num_query_groups,
        "head_dim": model.kv_channels,
        "max_position_embeddings": model.max_position_embeddings,
        "rms_norm_eps": model.norm_epsilon,
        "rope_parameters": rope,
        "tie_word_embeddings": not model.untie_embeddings_and_output_weights,
        "initializer_range": STD,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        made = Qwen2ForCausalLM(Qwen2Config(**shape)) if model.add_qkv_bias else LlamaForCausalLM(LlamaConfig(**shape))
    # Only now: a config that knew the pad id would have made its embedding zero, and pad is often the EOS.
    for name, value in ids.items():
        setattr(made.config, name, value)
        setattr(made.generation_config, name, value)
    made.save_pretrained(out)
