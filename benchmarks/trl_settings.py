"""TRL's settings for a config of ours: what the benchmarks that run TRL's trainer have in common."""

from __future__ import annotations

from typing import Any

from mindspeed_odpo.config import Config


def trl_config(config: Config, folder: str, **more: Any) -> Any:
    """TRL's ``OnlineDPOConfig`` with the batch, lengths, loss and optimizer of ``config``, on a CPU, for ``folder``; ``more``: its
    further arguments. Nothing is saved or reported, and every iteration is logged."""
    from trl.experimental.online_dpo import OnlineDPOConfig

    optimizer, rollout = config.actor.optimizer, config.rollout
    return OnlineDPOConfig(
        output_dir=folder,
        per_device_train_batch_size=config.global_batch_size,
        max_steps=config.train_iters,
        max_new_tokens=rollout.max_new_tokens,
        max_length=rollout.seq_length,
        beta=list(config.actor.loss.beta),
        loss_type=config.actor.loss.loss_type,
        missing_eos_penalty=config.pairs.missing_eos_penalty or None,
        learning_rate=optimizer.lr,
        lr_scheduler_type="constant",
        weight_decay=optimizer.weight_decay,
        adam_beta1=optimizer.adam_beta1,
        adam_beta2=optimizer.adam_beta2,
        adam_epsilon=optimizer.adam_eps,
        max_grad_norm=optimizer.clip_grad,
        gradient_checkpointing=False,
        train_sampling_strategy="sequential",
        dataloader_pin_memory=False,
        seed=config.seed,
        use_cpu=True,
        logging_steps=1,
        disable_tqdm=True,
        save_strategy="no",
        report_to=[],
        **more,
    )
