"""The rollout engine ``megatron``: a small decode module of our own, filled by the weight sync.

It keeps the weights under Megatron's names and in Megatron's layout, so that a sync is a copy. A GPTModel with an
inference context gives the same tokens about four times slower: what costs there is around the linears, not in them.
This module imports torch alone.

Limits: Llama and Qwen2 shapes (RMSNorm, SwiGLU, rotary positions over the whole head, grouped queries). Tensor parallelism as
in Megatron (Shoeybi et al. 2019, arXiv:1909.08053): each rank keeps its query groups, its gate and up rows and its rows of the
vocabulary; two all-reduces a layer, one behind the embedding, and the logits gathered, so that every rank draws every token.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from mindspeed_odpo.config import ModelConfig
from mindspeed_odpo.engine.sampling import check_sampling, sample, uniforms_for
from mindspeed_odpo.errors import ConfigError, WorkerError, nearest

__all__ = ["Decoder", "check_tensor_parallel", "rope_tables", "tensor_group", "tensor_part", "uniforms_for", "weight_shapes"]


def weight_shapes(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Megatron's name -> shape of every tensor that one weight sync must bring, no more and no less.

    ``linear_qkv``: for each query group the rows of its query heads, then its key, then its value.
    ``linear_fc1``: gate rows, then up rows. ``output_layer.weight`` only with an untied head.
    """
    h, f, d = model.hidden_size, model.ffn_hidden_size, model.kv_channels
    heads, groups = model.num_attention_heads, model.num_query_groups
    qkv = (heads + 2 * groups) * d
    shapes: dict[str, tuple[int, ...]] = {"embedding.word_embeddings.weight": (model.padded_vocab_size, h)}
    for i in range(model.num_layers):
        at = f"decoder.layers.{i}."
        shapes[at + "input_layernorm.weight"] = (h,)
        shapes[at + "self_attention.linear_qkv.weight"] = (qkv, h)
        if model.add_qkv_bias:
            shapes[at + "self_attention.linear_qkv.bias"] = (qkv,)
        shapes[at + "self_attention.linear_proj.weight"] = (h, heads * d)
        shapes[at + "pre_mlp_layernorm.weight"] = (h,)
        shapes[at + "mlp.linear_fc1.weight"] = (2 * f, h)
        shapes[at + "mlp.linear_fc2.weight"] = (h, f)
    shapes["decoder.final_layernorm.weight"] = (h,)
    if model.untie_embeddings_and_output_weights:
        shapes["output_layer.weight"] = (model.padded_vocab_size, h)
    return shapes


def check_tensor_parallel(model: ModelConfig, size: int) -> None:
    """ConfigError unless query groups, MLP width and padded vocabulary of ``model`` divide evenly by ``size`` ranks."""
    cures = {"num_query_groups": "", "ffn_hidden_size": "", "padded_vocab_size": f", or set make_vocab_size_divisible_by to {size}"}
    for name, cure in cures.items():
        if getattr(model, name) % size:
            raise ConfigError(
                f"rollout: {name} {getattr(model, name)} of model {model.name} does not divide by the {size} tensor-parallel ranks: "
                f"use a divisor of it as inference_tensor_model_parallel_size{cure}"
            )


def tensor_group(size: int, timeout_minutes: float) -> tuple[int, int, dist.ProcessGroup]:
    """(rank, size, group) of this rank's run of ``size`` ranks in a world that has been joined, whatever Megatron's groups are. A
    collective of all ranks."""
    rank, timeout = dist.get_rank(), timedelta(minutes=timeout_minutes)
    starts = range(0, dist.get_world_size(), size)
    groups = [dist.new_group(list(range(start, start + size)), timeout=timeout) for start in starts]
    return rank % size, size, groups[rank // size]


def tensor_part(name: str, whole: Tensor, rank: int, size: int) -> Tensor:
    """The part of a whole tensor of :func:`weight_shapes` that tensor-parallel rank ``rank`` of ``size`` keeps; a view where it can be.

    Example, two ranks: of ``linear_fc1`` (gate rows 0..f-1, up rows f..2f-1) rank 0 keeps the first half of the gate rows, then
    the first half of the up rows; of ``linear_qkv`` the first half of the query groups.
    """
    if name.endswith("linear_fc1.weight"):
        return whole.unflatten(0, (2, -1)).chunk(size, 1)[rank].flatten(0, 1)
    if name.endswith(("linear_proj.weight", "linear_fc2.weight")):
        return whole.chunk(size, 1)[rank]
    return whole if "layernorm" in name else whole.chunk(size, 0)[rank]


def rope_tables(model: ModelConfig, length: int, dtype: torch.dtype, device: torch.device | str = "cpu") -> tuple[Tensor, Tensor]:
    """cos and sin ``[length, kv_channels]`` of positions 0.. ``length - 1``; sin is negated for the first channel of a pair.

    With the sign in the table, a rotation is ``x * cos + swapped(x) * sin`` with the channels of each pair swapped, nothing
    to negate: by ``x.roll(d / 2)`` where pairs are halves, neighbour by neighbour with ``rotary_interleaved``.
    With ``rope_scaling_factor`` (Llama 3): waves longer than ``original / low_freq_factor`` are slowed by the factor,
    waves shorter than ``original / high_freq_factor`` are not, and those between move linearly in frequency.
    """
    d = model.kv_channels
    turns = 1.0 / model.rotary_base ** (torch.arange(0, d, 2, dtype=torch.float32, device=device) / d)
    if model.rope_scaling_factor is not None:
        waves = model.original_max_position_embeddings * turns / (2 * math.pi)  # full turns within the original context
        kept = ((waves - model.low_freq_factor) / (model.high_freq_factor - model.low_freq_factor)).clamp(0, 1)
        turns = turns * kept + turns * (1 - kept) / model.rope_scaling_factor
    angles = torch.outer(torch.arange(length, dtype=torch.float32, device=device), turns)
    cos, sin = angles.cos(), angles.sin()
    if model.rotary_interleaved:
        return cos.repeat_interleave(2, 1).to(dtype), torch.stack([-sin, sin], -1).flatten(1).to(dtype)
    return torch.cat([cos, cos], 1).to(dtype), torch.cat([-sin, sin], 1).to(dtype)


class _Running:
    """The rows that are still being answered: their keys and values, where they start, and which answers they are.

    ``kv`` ``[L, 2, N, groups, S + R, d]``; ``rows`` i64 ``[n]`` is the number p * K + k of each live row. Live rows lie at
    the front of ``kv``, in any order.
    """

    def __init__(self, kv: Tensor, pads: Tensor, dtype: torch.dtype) -> None:
        n, length = len(pads), kv.shape[-2]
        self.kv = kv
        self.pads = pads
        self.rows = torch.arange(n, device=pads.device)
        self.bias: Tensor | None = None  # -inf on padding, made once: SDPA would turn a bool mask into it in every layer
        if bool(pads.any()):
            padding = torch.arange(length, device=pads.device) < pads[:, None]
            self.bias = torch.zeros(n, length, dtype=dtype, device=pads.device).masked_fill_(padding, -math.inf)

    def drop(self, ended: Tensor, token: Tensor, used: int) -> Tensor:
        """Remove the rows of bool ``ended [n]``; returns ``token [n]`` for the rows that stay. ``used``: filled slots.

        The last live rows move into the holes, so that the work goes with the rows that end, not with all that stay.
        """
        keep = int((~ended).sum())
        holes = ended[:keep].nonzero()[:, 0]
        movers = (~ended[keep:]).nonzero()[:, 0] + keep
        for hole, mover in zip(holes.tolist(), movers.tolist(), strict=True):
            self.kv[:, :, hole, :, :used] = self.kv[:, :, mover, :, :used]
        order = torch.arange(keep, device=ended.device)
        order[holes] = movers
        self.rows, self.pads = self.rows[order], self.pads[order]
        if self.bias is not None:
            self.bias = self.bias[order]
        return token[order]


class Decoder:
    """Samples answers from weights that arrive by :meth:`load_weights`.

    ``bf16``: weights, activations and cache in bfloat16, else float32; sampling is float32 with float64 sums.
    ``tp_group``: (rank, size, process group) of the tensor-parallel ranks that answer together; None: this rank alone. All of
    them make the same calls with the same arguments and get the same answers.
    ``version``: which weights it holds; None before the first complete load, or after one that failed.

    Raises ConfigError where the model has experts or does not divide by the ranks (:func:`check_tensor_parallel`).
    """

    def __init__(
        self,
        model: ModelConfig,
        bf16: bool,
        device: torch.device | str = "cpu",
        tp_group: tuple[int, int, dist.ProcessGroup] | None = None,
    ) -> None:
        self.model = model
        self.dtype = torch.bfloat16 if bf16 else torch.float32
        self.device = torch.device(device)
        self.version: int | None = None
        self.tp_rank, self.tp_size, self._group = (0, 1, None) if tp_group is None else tp_group
        if model.num_experts:
            raise ConfigError(f"rollout: model {model.name} has {model.num_experts} experts, this engine decodes dense models only")
        check_tensor_parallel(model, self.tp_size)
        self._groups = model.num_query_groups // self.tp_size
        self._shapes = weight_shapes(model)
        self._weights = {
            name: torch.zeros(
                tensor_part(name, torch.empty(shape, device="meta"), self.tp_rank, self.tp_size).shape, dtype=self.dtype, device=self.device
            )
            for name, shape in self._shapes.items()
        }
        w = self._weights
        self._embedding = w["embedding.word_embeddings.weight"]
        self._first_id = self.tp_rank * len(self._embedding)
        # The rows above vocab_size are only there for even splits: cut off here or behind the gathering, they stand outside
        # the softmax.
        self._head = w.get("output_layer.weight", self._embedding)
        if self._group is None:
            self._head = self._head[: model.vocab_size]
        self._layers = [
            (
                w[f"decoder.layers.{i}.input_layernorm.weight"],
                w[f"decoder.layers.{i}.self_attention.linear_qkv.weight"],
                w.get(f"decoder.layers.{i}.self_attention.linear_qkv.bias"),
                w[f"decoder.layers.{i}.self_attention.linear_proj.weight"],
                w[f"decoder.layers.{i}.pre_mlp_layernorm.weight"],
                w[f"decoder.layers.{i}.mlp.linear_fc1.weight"],
                w[f"decoder.layers.{i}.mlp.linear_fc2.weight"],
            )
            for i in range(model.num_layers)
        ]

    @torch.no_grad()
    def load_weights(self, version: int, items: Iterable[tuple[str, Tensor]]) -> None:
        """Copy one complete set of weights (:func:`weight_shapes`, any order, dtype and device) in place, with a cast.
        They come whole; under tensor parallelism this rank's part is kept.

        Raises WorkerError for a tensor that is missing, unknown, sent twice or of another shape. After an error, also
        one raised by ``items`` itself, ``version`` is None and nothing can be generated: some tensors are already new.
        """
        self.version = None
        missing = dict(self._weights)
        for name, tensor in items:
            if name not in self._weights:
                raise WorkerError(f"weight sync, version {version}: unknown tensor {name}{nearest(name, missing)}")
            if name not in missing:
                raise WorkerError(f"weight sync, version {version}: {name} was sent twice")
            own, shape = missing.pop(name), self._shapes[name]
            if tensor.shape != shape:
                raise WorkerError(f"weight sync, version {version}: {name}: expected {list(shape)}, got {list(tensor.shape)}")
            own.copy_(tensor_part(name, tensor, self.tp_rank, self.tp_size))
        if missing:
            raise WorkerError(f"weight sync, version {version}: {len(missing)} tensors are missing, the first is {next(iter(missing))}")
        self.version = version

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Of the whole tensors that one sync must bring."""
        return self._shapes

    def holds(self, name: str, whole: Tensor) -> bool:
        """Whether what is kept of a tensor is, bit for bit, this rank's part of ``whole``."""
        part = tensor_part(name, whole, self.tp_rank, self.tp_size).to(self.device, self.dtype).contiguous()
        return torch.equal(self._weights[name].view(torch.uint8), part.view(torch.uint8))

    @torch.inference_mode()
    def generate(
        self,
        prompt_ids: Tensor,
        prompt_mask: Tensor,
        *,
        num_answers: int,
        max_new_tokens: int,
        eos_ids: Sequence[int],
        uniforms: Tensor,
        temperature: float = 1.0,
        top_p: float = 1.0,
        top_k: int = 0,
        do_sample: bool = True,
        watch: Callable[[int, Tensor, Tensor], None] | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """K answers to each of P prompts.

        ``prompt_ids`` i64, ``prompt_mask`` bool ``[P, S]``, left-padded (what stands on padding does not matter).
        ``uniforms`` f64 ``[P, K, R]`` in [0, 1), the only source of chance (:func:`uniforms_for`), unused when greedy
        (``do_sample=False`` or temperature 0). An answer ends with the first of ``eos_ids``, or after ``max_new_tokens``.

        Returns ``response_ids`` i64 and ``response_mask`` bool ``[P, K, R']`` with R' the longest answer of this call, and
        ``finished`` bool ``[P, K]`` (ended by an EOS). The EOS belongs to the answer; behind it ids are 0 and the mask False.

        Example, K=2, eos_ids [2]: ``[[[5, 2, 0], [5, 6, 7]]]``, ``[[[T, T, F], [T, T, T]]]``, ``[[T, F]]``.

        ``watch(token, rows, logits)`` sees the logits ``[n, vocab_size]`` before each draw; ``rows`` are p * K + k.

        Raises WorkerError without weights, for inputs of a wrong shape, logits that are not finite, or tensor-parallel ranks
        that were asked different things or drew different tokens; ConfigError for sampling settings out of range or more
        tokens than the model has positions.
        """
        temperature = temperature if do_sample else 0.0
        check_sampling(temperature, top_p, top_k)
        prompts = self._check(prompt_ids, prompt_mask, num_answers, max_new_tokens, uniforms)
        settings = (self.version, num_answers, max_new_tokens, tuple(eos_ids), temperature, top_p, top_k)
        self._agree("asked the same", settings, prompt_ids.masked_fill(~prompt_mask, 0), uniforms)
        total = prompts * num_answers
        home = prompt_ids.device
        mask = prompt_mask.to(self.device)
        first = int(mask.any(0).int().argmax())  # columns that are padding in every row cost time and change nothing
        mask = mask[:, first:]
        ids = prompt_ids.to(self.device)[:, first:].masked_fill(~mask, 0)
        width = ids.shape[1]
        cos, sin = rope_tables(self.model, width + max_new_tokens, self.dtype, self.device)
        chance = uniforms.to(self.device).reshape(total, -1)
        eos = torch.tensor(list(eos_ids), dtype=torch.int64, device=self.device)
        answers = torch.zeros(total, max_new_tokens, dtype=torch.int64, device=self.device)
        lengths = torch.zeros(total, dtype=torch.int64, device=self.device)
        finished = torch.zeros(total, dtype=torch.bool, device=self.device)

        logits, kv = self._prefill(ids, mask, num_answers, max_new_tokens, cos, sin)
        running = _Running(kv, (~mask).sum(1).repeat_interleave(num_answers), self.dtype)
        for j in range(max_new_tokens):
            rows = running.rows
            if watch is not None:
                watch(j, rows, logits)

            def label(row: int, rows: Tensor = rows, j: int = j) -> str:
                prompt, answer = divmod(int(rows[row]), num_answers)
                return f"weights version {self.version}, prompt {prompt}, answer {answer}, token {j}"

            token = sample(logits, chance[rows, j], temperature, top_p, top_k, label=label)
            ended = torch.isin(token, eos)
            answers[rows, j] = token
            lengths[rows] = j + 1
            finished[rows] = ended
            if j + 1 == max_new_tokens:
                break
            slot = width + j
            if bool(ended.any()):
                token = running.drop(ended, token, slot)
                if len(token) == 0:
                    break
            at = slot - running.pads
            logits = self._step(token, slot, running, cos[at][:, None, None], sin[at][:, None, None])

        self._agree("giving the same answers", (), answers, lengths)
        longest = int(lengths.max())
        real = torch.arange(longest, device=self.device) < lengths[:, None]
        shape = (prompts, num_answers)
        return (
            answers[:, :longest].view(*shape, longest).to(home),
            real.view(*shape, longest).to(home),
            finished.view(shape).to(home),
        )

    def _check(self, ids: Tensor, mask: Tensor, num_answers: int, max_new_tokens: int, uniforms: Tensor) -> int:
        """Number of prompts P."""
        if self.version is None:
            raise WorkerError("rollout: no complete set of weights has been loaded; sync the policy's weights before generating")
        if num_answers < 1 or max_new_tokens < 1:
            raise ConfigError(f"rollout: expected at least 1 answer and 1 new token, got {num_answers} and {max_new_tokens}")
        if ids.dim() != 2 or len(ids) == 0 or ids.dtype != torch.int64 or mask.shape != ids.shape or mask.dtype != torch.bool:
            raise WorkerError(
                f"rollout: expected prompt_ids int64 and prompt_mask bool [P, S], P >= 1,"
                f" got {ids.dtype} {list(ids.shape)} and {mask.dtype} {list(mask.shape)}"
            )
        empty = (~mask.any(1)).nonzero()
        if len(empty):
            raise WorkerError(f"rollout: prompt {int(empty[0, 0])} has no token, its mask is all False; drop empty prompts from the data")
        ragged = (mask[:, :-1] & ~mask[:, 1:]).any(1).nonzero()
        if len(ragged):
            raise WorkerError(f"rollout: prompt {int(ragged[0, 0])} is not left-padded: its mask goes from True to False")
        real = ids[mask]
        if int(real.min()) < 0 or int(real.max()) >= self.model.vocab_size:
            raise WorkerError(
                f"rollout: prompt ids lie in {int(real.min())}..{int(real.max())}, the model has {self.model.vocab_size};"
                " is this the model's tokenizer?"
            )
        longest = int(mask.sum(1).max())
        if longest + max_new_tokens > self.model.max_position_embeddings:
            raise ConfigError(
                f"rollout: a prompt of {longest} tokens and {max_new_tokens} new ones exceed max_position_embeddings"
                f" {self.model.max_position_embeddings}; shorten max_prompt_length or the answers"
            )
        shape = (len(ids), num_answers, max_new_tokens)
        if uniforms.shape != shape or uniforms.dtype != torch.float64:
            raise WorkerError(f"rollout: expected uniforms float64 {list(shape)}, got {uniforms.dtype} {list(uniforms.shape)}")
        if float(uniforms.min()) < 0 or float(uniforms.max()) >= 1:
            raise WorkerError(f"rollout: uniforms must lie in [0, 1), got {float(uniforms.min())}..{float(uniforms.max())}")
        return len(ids)

    def _prefill(self, ids: Tensor, mask: Tensor, copies: int, room: int, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Every prompt once: logits ``[P * copies, vocab_size]`` of its next token, and the cache with ``room`` free slots.

        Positions count from the first real token. Padding sees itself alone (a row without any key would be NaN).
        """
        m = self.model
        p, t = ids.shape
        groups, d = self._groups, m.kv_channels
        share = m.num_attention_heads // m.num_query_groups
        kv = torch.empty(m.num_layers, 2, p * copies, groups, t + room, d, dtype=self.dtype, device=self.device)
        at = (mask.cumsum(1) - 1).clamp_(min=0)
        cos, sin = cos[at][:, :, None, None], sin[at][:, :, None, None]
        seen: Tensor | None = None
        if not bool(mask.all()):
            square = torch.ones(t, t, dtype=torch.bool, device=self.device)
            seen = ((square.tril() & mask[:, None]) | torch.eye(t, dtype=torch.bool, device=self.device))[:, None]
        x = self._embed(ids)
        for i, (norm1, qkv, bias, proj, norm2, fc1, fc2) in enumerate(self._layers):
            h = F.linear(self._norm(x, norm1), qkv, bias).view(p, t, groups, share + 2, d)
            qk, v = h[..., : share + 1, :], h[..., share + 1, :].transpose(1, 2)
            qk = self._rotate(qk, cos, sin)
            q, k = qk[..., :share, :].flatten(2, 3).transpose(1, 2), qk[..., share, :].transpose(1, 2)
            for cache, new in zip(kv[i], (k, v), strict=True):
                cache.unflatten(0, (p, copies))[..., :t, :] = new[:, None]
            k, v = k.repeat_interleave(share, 1), v.repeat_interleave(share, 1)
            a = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, is_causal=seen is None)
            x = x + self._sum(F.linear(a.transpose(1, 2).flatten(2), proj))
            x = x + self._mlp(self._norm(x, norm2), fc1, fc2)
        return self._logits(x[:, -1]).repeat_interleave(copies, 0), kv

    def _step(self, token: Tensor, slot: int, running: _Running, cos: Tensor, sin: Tensor) -> Tensor:
        """Logits ``[n, vocab_size]`` behind ``token [n]``, whose keys and values go to ``slot`` of the cache."""
        m = self.model
        n = len(token)
        groups, d = self._groups, m.kv_channels
        share = m.num_attention_heads // m.num_query_groups
        live = running.kv[:, :, :n, :, : slot + 1]
        new = live[..., slot, :]
        bias = None if running.bias is None else running.bias[:, None, None, : slot + 1]
        x = self._embed(token)
        for i, (norm1, qkv, qkv_bias, proj, norm2, fc1, fc2) in enumerate(self._layers):
            h = F.linear(self._norm(x, norm1), qkv, qkv_bias).view(n, groups, share + 2, d)
            qk = h[:, :, : share + 1]
            qk = self._rotate(qk, cos, sin)
            new_k, new_v = new[i].unbind(0)
            new_k.copy_(qk[:, :, share])
            new_v.copy_(h[:, :, share + 1])
            k, v = live[i].unbind(0)
            # A group's query heads stand where queries of one head would: grouped attention without copies of k and v.
            a = F.scaled_dot_product_attention(qk[:, :, :share], k, v, attn_mask=bias)
            x = x + self._sum(F.linear(a.flatten(1), proj))
            x = x + self._mlp(self._norm(x, norm2), fc1, fc2)
        return self._logits(x)

    def _rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """``x [..., kv_channels]`` turned by its position's row of :func:`rope_tables`."""
        d = self.model.kv_channels
        swapped = x.unflatten(-1, (d // 2, 2)).flip(-1).flatten(-2) if self.model.rotary_interleaved else x.roll(d // 2, -1)
        return torch.addcmul(x * cos, swapped, sin)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, (self.model.hidden_size,), weight, self.model.norm_epsilon)

    def _mlp(self, x: Tensor, fc1: Tensor, fc2: Tensor) -> Tensor:
        gate, up = F.linear(x, fc1).chunk(2, -1)
        return self._sum(F.linear(F.silu(gate) * up, fc2))

    def _embed(self, ids: Tensor) -> Tensor:
        if self._group is None:
            return F.embedding(ids, self._embedding)
        own = ids - self._first_id
        here = (own >= 0) & (own < len(self._embedding))
        return self._sum(F.embedding(own.masked_fill(~here, 0), self._embedding) * here[..., None])

    def _logits(self, x: Tensor) -> Tensor:
        logits = F.linear(self._norm(x, self._weights["decoder.final_layernorm.weight"]), self._head)
        if self._group is None:
            return logits
        # Every rank holds the same bytes after this, so that the same uniform number draws the same token on each.
        parts = [torch.empty_like(logits) for _ in range(self.tp_size)]
        dist.all_gather(parts, logits, group=self._group)
        return torch.cat(parts, -1)[..., : self.model.vocab_size]

    def _sum(self, x: Tensor) -> Tensor:
        """``x`` summed over the tensor-parallel ranks, in place."""
        if self._group is not None:
            dist.all_reduce(x, group=self._group)
        return x

    def _agree(self, what: str, settings: tuple[object, ...], *tensors: Tensor) -> None:
        """WorkerError unless settings and tensors are the same on every tensor-parallel rank."""
        if self._group is None:
            return
        total = hashlib.sha256(repr((settings, [tuple(tensor.shape) for tensor in tensors])).encode())
        for tensor in tensors:
            total.update(tensor.cpu().contiguous().numpy())
        own = torch.tensor([int.from_bytes(total.digest()[:8], "little", signed=True)], device=self.device)
        found = [torch.empty_like(own) for _ in range(self.tp_size)]
        dist.all_gather(found, own, group=self._group)
        other = next((rank for rank, digest in enumerate(found) if not torch.equal(digest, found[0])), None)
        if other is not None:
            raise WorkerError(
                f"rollout, weights version {self.version}: tensor-parallel ranks 0 and {other} were not {what}: all of them must get the "
                "same prompts, uniforms, settings and weights"
            )
