"""Hugging Face weights to Megatron's and back.

Megatron keeps query, key and value of one layer in one matrix, group by group: for two groups of two heads each its rows
are ``q0 q1 k0 v0 q2 q3 k1 v1``. It keeps gate and up projection in one matrix too, gate first. Hugging Face's rope turns row i
of a head together with row ``i + d/2``; for a model with ``rotary_interleaved`` the rows of every query and key head are
moved so that these two become neighbours, 2i and ``2i + 1``: another order of the same sums. All are pure moves of rows:
there and back gives every bit again.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from mindspeed_odpo.config import ModelConfig
from mindspeed_odpo.errors import DataError, nearest
from mindspeed_odpo.hf.config import read_json

EMBEDDING, HEAD = "embedding.word_embeddings.weight", "output_layer.weight"
HF_EMBEDDING, HF_HEAD = "model.embed_tokens.weight", "lm_head.weight"
VALUE_HEAD, HF_VALUE_HEAD = "value_head.weight", "score.weight"
"""A reward model's head ``[1,H]``, in place of the language head."""
INDEX = "model.safetensors.index.json"
SHARD_BYTES = 5 * 10**9

_TOKENIZER = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "*.model",
    "*chat_template*",
)
"""Files of a tokenizer and its chat template: glob patterns."""


def _mapping(model: ModelConfig, value_head: bool = False) -> dict[str, tuple[str, ...]]:
    """Megatron's name -> the Hugging Face tensors that it is made of, for the whole model, in file order."""
    table: dict[str, tuple[str, ...]] = {EMBEDDING: (HF_EMBEDDING,)}
    for i in range(model.num_layers):
        ours, theirs = f"decoder.layers.{i}.", f"model.layers.{i}."
        table[ours + "input_layernorm.weight"] = (theirs + "input_layernorm.weight",)
        for kind in ("weight", "bias") if model.add_qkv_bias else ("weight",):
            qkv = tuple(f"{theirs}self_attn.{part}_proj.{kind}" for part in "qkv")
            table[ours + f"self_attention.linear_qkv.{kind}"] = qkv
        table[ours + "self_attention.linear_proj.weight"] = (theirs + "self_attn.o_proj.weight",)
        table[ours + "pre_mlp_layernorm.weight"] = (theirs + "post_attention_layernorm.weight",)
        table[ours + "mlp.linear_fc1.weight"] = (theirs + "mlp.gate_proj.weight", theirs + "mlp.up_proj.weight")
        table[ours + "mlp.linear_fc2.weight"] = (theirs + "mlp.down_proj.weight",)
    table["decoder.final_layernorm.weight"] = ("model.norm.weight",)
    if value_head:
        table[VALUE_HEAD] = (HF_VALUE_HEAD,)
    elif model.untie_embeddings_and_output_weights:
        table[HEAD] = (HF_HEAD,)
    return table


def _hf_shape(name: str, model: ModelConfig) -> tuple[int, ...]:
    query, kv = model.num_attention_heads * model.kv_channels, model.num_query_groups * model.kv_channels
    h, f = model.hidden_size, model.ffn_hidden_size
    if name in (HF_EMBEDDING, HF_HEAD):
        return (model.vocab_size, h)
    if name == HF_VALUE_HEAD:
        return (1, h)
    rows = {"q_proj": query, "k_proj": kv, "v_proj": kv, "o_proj": h, "gate_proj": f, "up_proj": f, "down_proj": h}
    columns = {"o_proj": query, "down_proj": f}
    part, kind = name.split(".")[-2:]
    if part not in rows:
        return (h,)  # a norm
    return (rows[part],) if kind == "bias" else (rows[part], columns.get(part, h))


def _group_widths(model: ModelConfig) -> list[int]:
    """Rows of query, key and value in one group."""
    return [model.num_attention_heads // model.num_query_groups * model.kv_channels, model.kv_channels, model.kv_channels]


def _to_neighbours(rows: Tensor, model: ModelConfig) -> Tensor:
    """Rows of whole heads: 0 1 2 3 4 5 of a head of 6 become 0 3 1 4 2 5."""
    return rows.unflatten(0, (-1, 2, model.kv_channels // 2)).transpose(1, 2).flatten(0, 2)


def _to_halves(rows: Tensor, model: ModelConfig) -> Tensor:
    """The inverse: 0 3 1 4 2 5 become 0 1 2 3 4 5."""
    return rows.unflatten(0, (-1, model.kv_channels // 2, 2)).transpose(1, 2).flatten(0, 2)


def _join(name: str, parts: list[Tensor], model: ModelConfig) -> Tensor:
    if ".linear_qkv." in name:
        if model.rotary_interleaved:
            parts = [*(_to_neighbours(part, model) for part in parts[:2]), parts[2]]
        groups = [
            part.view(model.num_query_groups, width, *part.shape[1:]) for part, width in zip(parts, _group_widths(model), strict=True)
        ]
        return torch.cat(groups, dim=1).flatten(0, 1)
    if name in (EMBEDDING, HEAD):
        padding = parts[0].new_zeros(model.padded_vocab_size - model.vocab_size, model.hidden_size)
        return torch.cat([parts[0], padding]) if len(padding) else parts[0]
    return torch.cat(parts) if len(parts) > 1 else parts[0]


def _split(name: str, tensor: Tensor, parts: tuple[str, ...], model: ModelConfig) -> list[Tensor]:
    rows = model.padded_vocab_size if name in (EMBEDDING, HEAD) else sum(_hf_shape(part, model)[0] for part in parts)
    if tuple(tensor.shape) != (rows, *_hf_shape(parts[0], model)[1:]):
        raise DataError(f"weight {name}: expected shape {[rows, *_hf_shape(parts[0], model)[1:]]}, got {list(tensor.shape)}")
    if ".linear_qkv." in name:
        grouped = tensor.unflatten(0, (model.num_query_groups, -1))
        query, key, value = (part.flatten(0, 1) for part in grouped.split(_group_widths(model), dim=1))
        if model.rotary_interleaved:
            query, key = _to_halves(query, model), _to_halves(key, model)
        return [query, key, value]
    if name in (EMBEDDING, HEAD):
        return [tensor[: model.vocab_size]]
    return list(tensor.chunk(2)) if ".linear_fc1." in name else [tensor]


class _Folder:
    """Tensors of a folder's safetensors files by name; a file is mapped, a tensor is read when asked for."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        if (folder / INDEX).is_file():
            self._file_of: dict[str, str] = read_json(folder, INDEX)["weight_map"]
            files = sorted(set(self._file_of.values()))
        else:
            files = ["model.safetensors"]
        for file in files:
            if not (folder / file).is_file():
                raise DataError(
                    f"{folder / file} does not exist: {folder} needs its weights as safetensors (transformers' save_pretrained writes them)"
                )
        self._open: dict[str, Any] = {file: safe_open(folder / file, framework="pt") for file in files}
        if files == ["model.safetensors"]:
            self._file_of = dict.fromkeys(self._open[files[0]].keys(), files[0])

    def names(self) -> set[str]:
        return set(self._file_of)

    def tensor(self, name: str) -> Tensor:
        file = self._file_of[name]
        if name not in self._open[file].keys():
            raise DataError(f"{self.folder / INDEX} says that {file} holds {name}, but it does not: copy the folder again")
        return self._open[file].get_tensor(name)


def hf_to_megatron(folder: Path, model: ModelConfig, value_head: bool = False) -> Iterator[tuple[str, Tensor]]:
    """The folder's weights in Megatron's names and layout, one at a time, in the dtype of the file.

    ``value_head``: of a sequence classifier with one label, which has ``score.weight`` and no language head. Rows of a padded
    vocabulary are zeros. DataError naming the tensor that is missing, has no place in the model or has
    another shape. A tied model's folder may hold the head a second time, but then with the embedding's values.
    """
    table = _mapping(model, value_head)
    source = _Folder(folder)
    wanted = {name for parts in table.values() for name in parts}
    missing, extra = sorted(wanted - source.names()), sorted(source.names() - wanted)
    extra = [name for name in extra if not name.endswith("rotary_emb.inv_freq")]  # Llama files of 2023; follows from the config
    if missing:
        raise DataError(
            f"{folder} has no tensor {missing[0]} ({len(missing)} missing): it is not a whole {model.num_layers}-layer model {model.name}"
            + (" with a value head" if value_head else "")
        )
    if not model.untie_embeddings_and_output_weights and HF_HEAD in extra:
        if not torch.equal(source.tensor(HF_HEAD), source.tensor(HF_EMBEDDING)):
            raise DataError(
                f"{folder}: {HF_HEAD} differs from {HF_EMBEDDING}, but tie_word_embeddings says they are one: set it to false "
                "(and untie_embeddings_and_output_weights: true in the model yaml), or take the tensor out"
            )
        extra.remove(HF_HEAD)
    if extra:
        raise DataError(f"{folder}: tensor {extra[0]} ({len(extra)} extra) has no place in model {model.name}{nearest(extra[0], wanted)}")
    for name, parts in table.items():
        tensors = [source.tensor(part) for part in parts]
        for part, tensor in zip(parts, tensors, strict=True):
            shape = _hf_shape(part, model)
            if tuple(tensor.shape) != shape:
                raise DataError(
                    f"{folder}: tensor {part}: expected shape {list(shape)}, got {list(tensor.shape)}: "
                    "config.json and weights do not belong together"
                )
        yield name, _join(name, tensors, model)


def megatron_to_hf(items: Iterable[tuple[str, Tensor]], model: ModelConfig) -> Iterator[tuple[str, Tensor]]:
    """The exact inverse of :func:`hf_to_megatron`; ``items`` in any order. A tied head is not written a second time.

    DataError for a name that the model does not have, a wrong shape, and (after the last item) one that did not come.
    """
    table = _mapping(model)
    missing = set(table)
    for name, tensor in items:
        if name not in missing:
            raise DataError(f"weight {name} came twice or has no place in model {model.name}{nearest(name, missing)}")
        missing.remove(name)
        yield from zip(table[name], _split(name, tensor, table[name], model), strict=True)
    if missing:
        raise DataError(f"{len(missing)} weights of model {model.name} did not come, the first is {min(missing)}")


def copy_tokenizer(source: Path, out: Path) -> None:
    """Copy the files of the tokenizer and its chat template from one folder to another."""
    for path in sorted({path for pattern in _TOKENIZER for path in source.glob(pattern)}):
        if path.is_file():
            shutil.copyfile(path, out / path.name)


def _write_shards(folder: Path, items: Iterable[tuple[str, Tensor]], dtype: torch.dtype, shard_bytes: int) -> None:
    """Safetensors in files of at most ``shard_bytes``, with an index when there are several. One file's tensors are in memory at a time."""
    files: list[list[str]] = []
    pending: dict[str, Tensor] = {}
    filled = total = 0

    def flush() -> None:
        save_file(pending, folder / f"{len(files)}.part", metadata={"format": "pt"})
        files.append(list(pending))
        pending.clear()

    for name, tensor in items:
        # A copy: what came may be half of a matrix in the model's own memory, and a file may not hold views.
        tensor = tensor.detach().to("cpu", dtype, copy=True).contiguous()
        if pending and filled + tensor.nbytes > shard_bytes:
            flush()
            filled = 0
        pending[name] = tensor
        filled += tensor.nbytes
        total += tensor.nbytes
    flush()
    if len(files) == 1:
        (folder / "0.part").rename(folder / "model.safetensors")
        return
    weight_map = {}
    for i, names in enumerate(files):
        file = f"model-{i + 1:05d}-of-{len(files):05d}.safetensors"
        (folder / f"{i}.part").rename(folder / file)
        weight_map.update(dict.fromkeys(names, file))
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2) + "\n")


def export_folder(
    out: Path,
    source: Path,
    items: Iterable[tuple[str, Tensor]],
    model: ModelConfig,
    dtype: torch.dtype,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write ``items`` (Megatron's names) as the Hugging Face folder ``out``, which transformers opens and generates with.

    Config, generation config, tokenizer and chat template come from ``source``, the folder that training started from.
    ``out`` appears whole or not at all; an older export there is replaced, anything else is left alone (DataError).
    """
    if out.exists() and not (out / "config.json").is_file():
        raise DataError(f"{out} exists and is not a model folder: move it away or export elsewhere")
    config = read_json(source, "config.json")
    for key in [key for key in ("dtype", "torch_dtype") if key in config] or ["torch_dtype"]:
        config[key] = str(dtype).removeprefix("torch.")
    partial, old = out.with_name(f".{out.name}.partial"), out.with_name(f".{out.name}.old")
    for folder in (partial, old):
        shutil.rmtree(folder, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        copy_tokenizer(source, partial)
        if (source / "generation_config.json").is_file():
            shutil.copyfile(source / "generation_config.json", partial / "generation_config.json")
        (partial / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
        _write_shards(partial, megatron_to_hf(items, model), dtype, shard_bytes)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    if out.exists():
        out.rename(old)
    partial.rename(out)
    shutil.rmtree(old, ignore_errors=True)
