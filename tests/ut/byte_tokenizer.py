"""A tokenizer small enough to count by hand: one token a byte, id = 10 + byte; ids below 10 are special."""

from __future__ import annotations

from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

SPECIAL = ["<unk>", "<s>", "</s>", "<user>", "<bot>", "<sys>", "<6>", "<7>", "<8>", "<9>"]
BOS, EOS = 1, 2
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{% if m.role not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('unknown role ' + m.role) }}{% endif %}"
    "{{ {'system': '<sys>', 'user': '<user>', 'assistant': '<bot>'}[m.role] }}{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<bot>{% endif %}"
)


def byte_alphabet() -> list[str]:
    """Byte -> the printable character that byte-level tokenizers write for it, in byte order."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(b) if b in plain else chr(next(others)) for b in range(256)]


def byte_tokenizer(template: str | None = TEMPLATE, add_eos: bool = False) -> PreTrainedTokenizerFast:
    """Encoding with special tokens puts a BOS in front (and an EOS behind with ``add_eos``), as Llama's does."""
    vocab = {token: i for i, token in enumerate(SPECIAL)} | {c: 10 + b for b, c in enumerate(byte_alphabet())}
    core = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    ends = "<s> $A </s>" if add_eos else "<s> $A"
    core.post_processor = processors.TemplateProcessing(single=ends, pair="<s> $A $B", special_tokens=[("<s>", BOS), ("</s>", EOS)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, unk_token="<unk>", bos_token="<s>", eos_token="</s>", pad_token="</s>")
    tokenizer.chat_template = template
    return tokenizer


def save_tokenizer(folder: Path, **options) -> Path:
    byte_tokenizer(**options).save_pretrained(folder)
    return folder


def ids(text: str) -> list[int]:
    return [10 + b for b in text.encode()]
