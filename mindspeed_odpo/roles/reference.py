"""The reference: the policy as it was before training, frozen. It gives one log-probability an answer."""

from __future__ import annotations

from torch import Tensor

from mindspeed_odpo.config import Config, is_checkpoint
from mindspeed_odpo.engine.checkpoint import load_checkpoint
from mindspeed_odpo.engine.forward import answer_logps
from mindspeed_odpo.hosts.standalone import Host
from mindspeed_odpo.types import Rollout


class Reference:
    """One data-parallel rank of the reference. Same precision and same forward as the actor, so that policy ==
    reference gives a log-ratio of zero and a loss of ln 2."""

    def __init__(self, config: Config, host: Host) -> None:
        self.config = config
        self.host = host
        self.chunks = host.build_model(config.reference.model, config.reference.parallel, trainable=False)
        if is_checkpoint(config.reference.load):
            load_checkpoint(config.reference.load, self.chunks, None, config.reference.model)
        else:
            host.load_hf(self.chunks, config.reference.load, config.reference.model)

    def logps(self, rollout: Rollout) -> Tensor:
        """f32 ``[P,K]``, summed over answer tokens with the EOS."""
        rollout.check()
        return answer_logps(self.chunks, rollout, self.config.reference.micro_batch_size, self.host.device)
