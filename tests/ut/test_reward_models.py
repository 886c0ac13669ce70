"""Reward models: what they read, where they score, what they refuse, run by transformers and by megatron-core."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from byte_tokenizer import BOS, EOS, TEMPLATE, ids, save_tokenizer
from transformers import (
    AutoModelForSequenceClassification,
    BertConfig,
    BertForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    Qwen2Config,
    Qwen2ForSequenceClassification,
)

from mindspeed_odpo import device

device.setup()

from mindspeed_odpo.config import ParallelConfig  # noqa: E402
from mindspeed_odpo.errors import ConfigError, DataError, WorkerError  # noqa: E402
from mindspeed_odpo.hosts.standalone import Host  # noqa: E402
from mindspeed_odpo.rewards.megatron import MegatronReward  # noqa: E402
from mindspeed_odpo.rewards.model import ClassifierReward, ModelReward  # noqa: E402

pytestmark = pytest.mark.usefixtures("single_rank")
ANSWERS = ["a", "bb", "ccc", "dddd"]
RM_TEMPLATE = "{{ bos_token }}{% for m in messages %}[{{ m.role }}] {{ m.content }}{{ eos_token }}{% endfor %}"
ENGINES = ("hf", "megatron")


def open_reward(engine: str, folder: Path, micro: int = 2, bf16: bool = False) -> Any:
    if engine == "hf":
        return ClassifierReward(folder, micro, bf16)
    return MegatronReward(folder, micro, Host(SimpleNamespace(bf16=bf16, forwarded={})), ParallelConfig())  # type: ignore[arg-type]


def score(reward: ModelReward, answers: list[str] = ANSWERS) -> list[float | None]:
    """Token ids of no meaning to this tokenizer stand for the policy's."""
    n = len(answers)
    return reward.score(prompts=["p"] * n, responses=answers, response_ids=[[7]] * n, rows=[{"prompt": "p"}] * n, answers_per_prompt=2)


def shape(**options: Any) -> dict[str, Any]:
    tiny = {"vocab_size": 300, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    return {**tiny, "max_position_embeddings": 64, "num_labels": 1, "initializer_range": 0.3, **options}


def save_random(model: torch.nn.Module, folder: Path) -> None:
    """Norms and biases random too, so that a forgotten one shows."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(0.0, 0.2)
            elif "norm" in name:
                parameter.uniform_(0.5, 1.5)
    model.save_pretrained(folder)  # type: ignore[operator]


@pytest.fixture
def classifier(tmp_path: Path) -> Path:
    """A random Llama classifier whose pad id is its EOS id, as many published ones have; its template ends with EOS."""
    torch.manual_seed(0)
    save_random(LlamaForSequenceClassification(LlamaConfig(**shape(pad_token_id=EOS, num_key_value_heads=1))), tmp_path / "rm")
    return save_tokenizer(tmp_path / "rm", template=RM_TEMPLATE)


@pytest.fixture
def qwen2(tmp_path: Path) -> Path:
    torch.manual_seed(1)
    model = Qwen2ForSequenceClassification(Qwen2Config(**shape(pad_token_id=EOS, num_key_value_heads=2, tie_word_embeddings=True)))
    save_random(model, tmp_path / "qwen2")
    return save_tokenizer(tmp_path / "qwen2", template=RM_TEMPLATE)


def sequence(answer: str) -> list[int]:
    """Prompt "p" and the answer in the reward model's template, by hand: one BOS in front, one EOS behind."""
    return [BOS, *ids("[user] p"), EOS, *ids(f"[assistant] {answer}"), EOS]


def alone(folder: Path, sequence: list[int]) -> float:
    """What transformers' classifier says of one unpadded sequence. Without a pad id it scores at the last token."""
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    model.config.pad_token_id = None
    with torch.no_grad():
        return float(model(input_ids=torch.tensor([sequence])).logits)


# --- what it reads --------------------------------------------------------------------------------------------------


def test_it_reads_its_own_template(classifier):
    reward = ClassifierReward(classifier, 2, bf16=False)
    assert reward.text("hi", "yo") == "<s>[user] hi</s>[assistant] yo</s>"
    assert reward.encode("hi", "yo") == [BOS, *ids("[user] hi"), EOS, *ids("[assistant] yo"), EOS]
    turns = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    assert reward.text(turns, "a") == "<s>[system] s</s>[user] u</s>[assistant] a</s>"


@pytest.mark.parametrize("adds_eos", [False, True])
def test_a_template_that_spells_bos_and_eos_out_gets_no_second_ones(classifier, adds_eos):
    """Though the tokenizer adds a BOS, and with ``adds_eos`` an EOS, to all that it encodes."""
    save_tokenizer(classifier, template=RM_TEMPLATE, add_eos=adds_eos)
    assert ClassifierReward(classifier, 2, bf16=False).encode("p", "a") == sequence("a")


def without_template(folder: Path, **options: Any) -> ClassifierReward:
    save_tokenizer(folder, template=None, **options)
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    return ClassifierReward(folder, 2, bf16=False)


def test_without_template_texts_are_joined(classifier):
    assert without_template(classifier).encode("hi ", "yo") == [BOS, *ids("hi yo")]
    assert without_template(classifier, add_eos=True).encode("hi ", "yo") == [BOS, *ids("hi yo"), EOS]


def test_a_text_that_spells_its_own_bos_or_eos_gets_no_second_one(classifier):
    reward = without_template(classifier, add_eos=True)
    assert reward.encode("<s>hi ", "yo</s>") == [BOS, *ids("hi yo"), EOS]


def test_a_tokenizer_that_names_no_bos_and_eos(classifier):
    reward = without_template(classifier)
    reward.tokenizer.bos_token = reward.tokenizer.eos_token = None
    assert reward.encode("hi ", "yo") == [BOS, *ids("hi yo")]  # its post-processor's own BOS stays


@pytest.mark.parametrize("engine", ENGINES)
def test_nothing_to_read(classifier, engine):
    reward = open_reward(engine, classifier)
    reward.tokenizer.chat_template = "{{ '' }}"
    with pytest.raises(WorkerError, match="prompt and answer 0 have no token"):
        score(reward)


# --- where it scores ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("kind", ["classifier", "qwen2"])
def test_scores_equal_transformers_on_single_sequences(request, engine, kind):
    """Unequal lengths, and the last token is EOS = pad: transformers on the padded batch would score the token before it."""
    folder = request.getfixturevalue(kind)
    wanted = [alone(folder, sequence(a)) for a in ANSWERS]
    assert score(open_reward(engine, folder, micro=3)) == pytest.approx(wanted, abs=1e-5)
    before_eos = [alone(folder, sequence(a)[:-1]) for a in ANSWERS]
    assert min(abs(w - b) for w, b in zip(wanted, before_eos, strict=True)) > 1e-3  # the mistake would show


@pytest.mark.parametrize("engine", ENGINES)
def test_micro_batches_and_padding_change_nothing(classifier, engine):
    """A short sequence alone, beside its like, and beside one three times as long."""
    one, two, all_at_once = (score(open_reward(engine, classifier, m)) for m in (1, 2, 4))
    assert one == pytest.approx(all_at_once, abs=1e-6) and two == pytest.approx(all_at_once, abs=1e-6)
    reward = open_reward(engine, classifier, 2)
    assert score(reward, ["a", "x" * 40])[0] == pytest.approx(one[0], abs=1e-6)


@pytest.mark.parametrize("engine", ENGINES)
def test_bf16_is_near(classifier, engine):
    low, full = (score(open_reward(engine, classifier, 4, b)) for b in (True, False))
    assert low != full and low == pytest.approx(full, abs=0.05 * max(map(abs, full)) + 0.02)


def test_the_value_head_stays_fp32(classifier):
    (model,) = open_reward("megatron", classifier, bf16=True).chunks
    assert model.value_head.weight.dtype == torch.float32
    assert {p.dtype for name, p in model.named_parameters() if name != "value_head.weight"} == {torch.bfloat16}
    assert not any(p.requires_grad for p in model.parameters()) and not model.training


def test_an_encoder_classifier(tmp_path):
    """The head of BERT reads the first token; nothing in our padding depends on Llama."""
    torch.manual_seed(0)
    model = BertForSequenceClassification(BertConfig(**shape(num_hidden_layers=1, initializer_range=0.02))).eval()
    model.save_pretrained(tmp_path)
    reward = ClassifierReward(save_tokenizer(tmp_path, template=TEMPLATE), 4, bf16=False)
    with torch.no_grad():
        wanted = [float(model(input_ids=torch.tensor([reward.encode("p", a)])).logits) for a in ANSWERS]
    assert score(reward) == pytest.approx(wanted, abs=1e-5)


@pytest.mark.parametrize("engine", ENGINES)
def test_scores_are_plain_floats(classifier, engine):
    scores = score(open_reward(engine, classifier))
    assert all(type(s) is float for s in scores) and np.float32(scores[0]) == scores[0]


# --- what is refused ------------------------------------------------------------------------------------------------


def test_an_encoder_is_not_for_megatron(tmp_path):
    BertForSequenceClassification(BertConfig(**shape(num_hidden_layers=1))).save_pretrained(tmp_path)
    save_tokenizer(tmp_path)
    with pytest.raises(ConfigError, match="model_type bert is not supported; supported: llama, qwen2"):
        open_reward("megatron", tmp_path)


@pytest.mark.parametrize("engine", ENGINES)
def test_num_labels_must_be_one(tmp_path, engine):
    LlamaForSequenceClassification(LlamaConfig(**shape(num_labels=3))).save_pretrained(tmp_path)
    save_tokenizer(tmp_path)
    with pytest.raises(ConfigError, match="num_labels is 3, expected 1"):
        open_reward(engine, tmp_path)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(
    ("engine", "said"),
    [
        ("hf", r"1 weights are missing \(score.weight\); is it a trained classifier"),
        ("megatron", r"has no tensor score.weight \(1 missing\): it is not a whole 2-layer model reward with a value head"),
    ],
)
def test_a_language_model_without_value_head_is_refused(tmp_path, engine, said, tied):
    """transformers would draw the head at random and score noise."""
    LlamaForCausalLM(LlamaConfig(**shape(tie_word_embeddings=tied))).save_pretrained(tmp_path)
    save_tokenizer(tmp_path)
    with pytest.raises(DataError, match=said):
        open_reward(engine, tmp_path)


def test_a_head_of_another_width_is_named(classifier):
    from safetensors.torch import load_file, save_file

    weights = load_file(classifier / "model.safetensors")
    save_file({**weights, "score.weight": torch.zeros(1, 8)}, classifier / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(DataError, match=r"tensor score.weight: expected shape \[1, 16\], got \[1, 8\]"):
        open_reward("megatron", classifier)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_missing_folder(tmp_path, engine):
    with pytest.raises(DataError, match="reward model folder .*gone: no config.json"):
        open_reward(engine, tmp_path / "gone")


@pytest.mark.parametrize("engine", ENGINES)
def test_too_long_is_an_error_not_a_cut(classifier, engine):
    with pytest.raises(WorkerError, match="prompt and answer 1 have 103 tokens, it takes 64"):
        score(open_reward(engine, classifier), ["a", "x" * 80])


def test_a_model_without_longest_takes_any_length(classifier):
    reward = ClassifierReward(classifier, 2, bf16=False)
    reward._longest = None  # as of a config without max_position_embeddings
    assert len(score(reward, ["a", "x" * 80])) == 2


@pytest.mark.parametrize("engine", ENGINES)
def test_a_tokenizer_of_another_model(tmp_path, engine):
    LlamaForSequenceClassification(LlamaConfig(**shape(vocab_size=100))).save_pretrained(tmp_path)
    save_tokenizer(tmp_path)
    with pytest.raises(DataError, match="its tokenizer has 266 ids, its embedding 100 rows"):
        open_reward(engine, tmp_path)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_model_that_gives_nan(classifier, engine):
    reward = open_reward(engine, classifier)
    head = reward.model.score if engine == "hf" else reward.chunks[-1].value_head
    head.weight.data.fill_(float("nan"))
    with pytest.raises(WorkerError, match="score 0 is nan, expected a finite number; answer: 'a'"):
        score(reward)
