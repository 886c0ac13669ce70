"""A reward model: a Hugging Face sequence classifier with one output."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForSequenceClassification

from mindspeed_odpo.data.prompts import as_messages, load_tokenizer, render
from mindspeed_odpo.errors import ConfigError, DataError, WorkerError


class ModelReward(ABC):
    """Scores of a ``...ForSequenceClassification`` folder with ``num_labels`` 1, whatever runs it.

    The model reads text in its own words: prompt and answer are rendered and encoded anew with its own tokenizer and chat
    template (the policy's ids mean something else to it); without a template, prompt text and answer text joined. The
    score is the head's output at the last real token. Too long for the model is an error, never cut.
    """

    def __init__(self, folder: Path, micro_batch_size: int) -> None:
        folder = Path(folder)
        if not (folder / "config.json").is_file():
            raise DataError(f"reward model folder {folder}: no config.json; expected a Hugging Face sequence classifier")
        labels = AutoConfig.from_pretrained(folder, local_files_only=True).num_labels
        if labels != 1:
            raise ConfigError(f"reward model {folder}: num_labels is {labels}, expected 1; a reward is one number an answer")
        self.tokenizer = load_tokenizer(folder)
        self._folder, self._micro = folder, micro_batch_size
        self._longest: int | None = None
        """Tokens that the model takes; None: any number."""

    def _check_vocabulary(self, rows: int) -> None:
        """``rows`` of the model's embedding."""
        if len(self.tokenizer) > rows:
            raise DataError(
                f"reward model {self._folder}: its tokenizer has {len(self.tokenizer)} ids, its embedding {rows} rows; they do not match"
            )

    def text(self, prompt: str | list[dict[str, Any]], answer: str) -> str:
        """What the reward model reads, special tokens of its template spelt out."""
        messages = as_messages(prompt)
        if not self.tokenizer.chat_template:
            return "\n\n".join(m["content"] for m in messages) + answer
        turns = [*messages, {"role": "assistant", "content": answer}]
        return render(self.tokenizer, turns, f"reward model {self._folder}", add_generation_prompt=False)

    def encode(self, prompt: str | list[dict[str, Any]], answer: str) -> list[int]:
        """Token ids of ``text``. A chat template spells its special tokens out, so the tokenizer must not add them again;
        without one the tokenizer adds its own, but no second BOS or EOS where the text has one."""
        text = self.text(prompt, answer)
        if self.tokenizer.chat_template:
            return self.tokenizer.encode(text, add_special_tokens=False)
        ids = self.tokenizer.encode(text, add_special_tokens=True)
        bos, eos = self.tokenizer.bos_token_id, self.tokenizer.eos_token_id
        if bos is not None and ids[:2] == [bos, bos]:
            ids = ids[1:]
        return ids[:-1] if eos is not None and ids[-2:] == [eos, eos] else ids

    def score(
        self,
        prompts: Sequence[Any],
        responses: Sequence[str],
        response_ids: Sequence[list[int]],
        rows: Sequence[Mapping[str, Any]],
        answers_per_prompt: int = 1,
    ) -> list[float | None]:
        """One float32 score for each of N answers. ``response_ids``, ``rows`` and ``answers_per_prompt`` are not read: the
        same call as a function's."""
        encoded = [self.encode(prompt, answer) for prompt, answer in zip(prompts, responses, strict=True)]
        for i, ids in enumerate(encoded):
            if not ids:
                raise WorkerError(f"reward model {self._folder}: prompt and answer {i} have no token; give it a chat template")
            if self._longest is not None and len(ids) > self._longest:
                raise WorkerError(
                    f"reward model {self._folder}: prompt and answer {i} have {len(ids)} tokens, it takes {self._longest}; "
                    "lower seq_length or max_prompt_length, or use a model with a longer context"
                )
        scores: list[float | None] = []
        for start in range(0, len(encoded), self._micro):
            scores += self._forward(encoded[start : start + self._micro])
        for i, value in enumerate(scores):
            if value is None or value != value or abs(value) == float("inf"):
                raise WorkerError(
                    f"reward model {self._folder}: score {i} is {value}, expected a finite number; answer: {responses[i][:80]!r}"
                )
        return scores

    @abstractmethod
    def _forward(self, encoded: list[list[int]]) -> list[float]:
        """One score for each sequence of token ids, none of them empty."""


class ClassifierReward(ModelReward):
    """A reward model that transformers runs: any architecture that it knows."""

    def __init__(self, folder: Path, micro_batch_size: int, bf16: bool, device: torch.device | str = "cpu") -> None:
        super().__init__(folder, micro_batch_size)
        model, info = AutoModelForSequenceClassification.from_pretrained(folder, local_files_only=True, output_loading_info=True)
        if info["missing_keys"]:  # transformers draws them at random: a base model without a head would score noise
            missing = ", ".join(sorted(info["missing_keys"])[:3])
            raise DataError(
                f"reward model {folder}: {len(info['missing_keys'])} weights are missing ({missing}); is it a trained classifier?"
            )
        self._check_vocabulary(model.get_input_embeddings().weight.shape[0])
        self.model = model.to(device=device, dtype=torch.bfloat16 if bf16 else torch.float32).eval()
        self._device = torch.device(device)
        self._longest = getattr(self.model.config.get_text_config(), "max_position_embeddings", None)

    @torch.no_grad()
    def _forward(self, encoded: list[list[int]]) -> list[float]:
        # transformers scores at the last id that is not pad. With pad == eos that is the token before a final EOS, so pad
        # with an id that ends no sequence of this batch; the attention mask hides the padding itself.
        last = {ids[-1] for ids in encoded}
        usual = self.tokenizer.pad_token_id
        pad = usual if usual is not None and usual not in last else next(i for i in range(len(last) + 1) if i not in last)
        self.model.config.get_text_config().pad_token_id = pad
        width = max(map(len, encoded))
        ids = torch.tensor([row + [pad] * (width - len(row)) for row in encoded], device=self._device)
        mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in encoded], device=self._device)
        return self.model(input_ids=ids, attention_mask=mask).logits.squeeze(-1).float().tolist()
