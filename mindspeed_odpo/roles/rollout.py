"""The rollout: answers prompts with the policy's weights of a known version."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import Tensor

from mindspeed_odpo.config import Config
from mindspeed_odpo.engine.generate import Decoder, uniforms_for
from mindspeed_odpo.hosts.standalone import Host
from mindspeed_odpo.types import PromptBatch, Rollout


class RolloutEngine:
    """One rank of the rollout engine ``megatron``: a decode module fed by the weight sync. With tensor parallelism above 1 all ranks
    of the process build one at the same time, after they have joined a group (``Host.init``)."""

    def __init__(self, config: Config, host: Host) -> None:
        self.config = config
        self.decoder = Decoder(config.rollout.model, config.bf16, host.device, host.tensor_group(config.rollout.parallel))
        self.eos_ids = host.eos_ids()

    def load_weights(self, version: int, items: Iterable[tuple[str, Tensor]]) -> None:
        self.decoder.load_weights(version, items)

    def weight_shapes(self) -> Mapping[str, tuple[int, ...]] | None:
        """Name -> shape of the whole tensors that a sync must bring."""
        return self.decoder.shapes

    def holds(self, name: str, whole: Tensor) -> bool:
        """Whether the last sync left of tensor ``name`` what it should."""
        return self.decoder.holds(name, whole)

    def generate(self, prompts: PromptBatch, greedy: bool = False) -> Rollout:
        """K sampled answers a prompt (one greedy answer with ``greedy``), ``prompts_per_call`` prompts at a time."""
        settings = self.config.rollout
        size = settings.prompts_per_call or len(prompts)
        parts = [self._generate(prompts.select(rows), greedy) for rows in _runs(len(prompts), size)]
        return Rollout.concat(parts).check()

    def _generate(self, prompts: PromptBatch, greedy: bool) -> Rollout:
        settings = self.config.rollout
        answers = 1 if greedy else settings.num_answers
        ids, mask, finished = self.decoder.generate(
            prompts.ids,
            prompts.mask,
            num_answers=answers,
            max_new_tokens=settings.max_new_tokens,
            eos_ids=self.eos_ids,
            uniforms=uniforms_for(self.config.seed, prompts.step, prompts.slot, answers, settings.max_new_tokens),
            temperature=settings.temperature,
            top_p=settings.top_p,
            top_k=settings.top_k,
            do_sample=settings.do_sample and not greedy,
        )
        return Rollout(
            prompt_ids=prompts.ids,
            prompt_mask=prompts.mask,
            response_ids=ids,
            response_mask=mask,
            finished=finished,
            prompt_index=prompts.index,
            policy_version=self.decoder.version,
        )


def _runs(total: int, size: int) -> list[list[int]]:
    return [list(range(start, min(start + size, total))) for start in range(0, total, size)]
