"""A tiny random Hugging Face folder with a working tokenizer, for tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

TEMPLATE = (
    "{% for m in messages %}{{ '<s>' + m['role'] + '\n' + m['content'] + '</s>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<s>assistant\n' }}{% endif %}"
)


def _tokenizer() -> Any:
    """Byte level: one id a byte (3 to 258) after <unk> 0, <s> 1 and </s> 2; pad is </s>, as in SmolLM2."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = ["<unk>", "<s>", "</s>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate([*special, *alphabet])}, merges=[], unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens([AddedToken(token, special=True) for token in special])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="<unk>", bos_token="<s>", eos_token="</s>", pad_token="</s>")
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def make_tiny_hf(
    folder: Path,
    kind: str = "llama",
    tied: bool = True,
    vocab: int = 384,
    seed: int = 0,
    classifier: bool = False,
    **config: Any,
) -> Path:
    """Write a 2-layer fp32 model (``configs/rlxf/model/tiny.yaml``) of ``kind`` llama or qwen2 into ``folder`` and return it.

    Weights have standard deviation 0.2, so that logits differ by several units; norms and biases are random too, so that
    a forgotten one shows. ``classifier``: a LlamaForSequenceClassification with one label, a reward model. ``config``: more
    keys of the Hugging Face config, such as ``rope_parameters``.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification, Qwen2Config, Qwen2ForCausalLM

    shape: dict[str, Any] = {
        "vocab_size": vocab,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "initializer_range": 0.2,
        "tie_word_embeddings": tied,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if classifier:
            model = LlamaForSequenceClassification(LlamaConfig(**{**shape, "num_labels": 1, **config}))
        elif kind == "qwen2":
            model = Qwen2ForCausalLM(Qwen2Config(**{**shape, **config}))
        else:
            model = LlamaForCausalLM(LlamaConfig(**{**shape, **config}))
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith("bias"):
                    parameter.normal_(0.0, 0.2)
                elif "norm" in name:
                    parameter.uniform_(0.5, 1.5)
    model.save_pretrained(folder)
    _tokenizer().save_pretrained(folder)
    return folder
