"""Reward functions and the reward model."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from byte_tokenizer import BOS, EOS, TEMPLATE, ids, save_tokenizer
from transformers import BertConfig, BertForSequenceClassification, LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification

from mindspeed_odpo.config import RewardFunction
from mindspeed_odpo.errors import ConfigError, DataError, WorkerError
from mindspeed_odpo.rewards.function import FunctionReward, load_function
from mindspeed_odpo.rewards.model import ClassifierReward

torch.set_num_threads(1)
ANSWERS = ["a", "bb", "ccc", "dddd"]


def reward(folder: Path, source: str, *names: str, weights: tuple[float, ...] = ()) -> FunctionReward:
    path = folder / "rewards.py"
    path.write_text(source)
    names = names or ("f",)
    return FunctionReward(tuple(RewardFunction(f"{path}:{n}", w) for n, w in zip(names, weights or (1.0,) * len(names), strict=True)))


def score(judge, answers: list[str] = ANSWERS, **columns: list) -> list[float | None]:
    rows = [{"prompt": "p", **{key: values[i] for key, values in columns.items()}} for i in range(len(answers))]
    return judge.score(prompts=["p"] * len(answers), responses=answers, response_ids=[ids(a) for a in answers], rows=rows)


# --- finding the function -------------------------------------------------------------------------------------------


def test_load_from_module_and_file(tmp_path, monkeypatch):
    (tmp_path / "pkg_of_rewards").mkdir()
    (tmp_path / "pkg_of_rewards" / "short.py").write_text("def f(responses):\n    return [1.0 for _ in responses]\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert load_function("pkg_of_rewards.short:f")(responses=[1]) == [1.0]
    monkeypatch.chdir(tmp_path)
    assert load_function("pkg_of_rewards/short.py:f")(responses=[1, 2]) == [1.0, 1.0]


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("nothing", "expected 'package.module:name' or 'path/to/file.py:name'"),
        ("no_such_pkg.mod:f", "no module 'no_such_pkg'"),
        ("json.no_such:f", "no module 'json.no_such'"),
        ("json:dumbs", "json has no 'dumbs'; did you mean 'dumps'?"),
        ("json:__name__", "'__name__' is a str, not a function"),
        ("rewrds.py:f", "rewrds.py; did you mean 'rewards.py'?"),
        ("rewards.py:lenght", "rewards.py has no 'lenght'; did you mean 'length'?"),
        ("broken.py:f", "loading broken.py failed: SyntaxError"),
        ("raising.py:f", "loading raising.py failed: ModuleNotFoundError: No module named 'missing_dependency' ("),
        ("raising:f", "importing raising failed: ModuleNotFoundError: No module named 'missing_dependency' ("),
    ],
)
def test_a_function_that_is_not_there(tmp_path, monkeypatch, target, said):
    (tmp_path / "rewards.py").write_text("def length(responses):\n    return [len(r) for r in responses]\n")
    (tmp_path / "broken.py").write_text("def f(:\n")
    (tmp_path / "raising.py").write_text("\nimport missing_dependency\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError) as error:
        load_function(target)
    assert said in str(error.value) and f"reward function '{target}'" in str(error.value)
    if "raising" in target:
        assert str(error.value).endswith("raising.py:2)")
    sys.modules.pop("raising", None)


# --- calling it -----------------------------------------------------------------------------------------------------


def test_a_function_gets_what_it_declares(tmp_path):
    judge = reward(tmp_path, "def f(responses, topic, scale=2):\n    return [scale * len(r) + len(t) for r, t in zip(responses, topic)]\n")
    assert score(judge, topic=["", "x", "xy", "xyz"]) == [2.0, 5.0, 8.0, 11.0]


def test_kwargs_get_everything(tmp_path):
    source = (
        "def f(responses, **rest):\n    assert sorted(rest) == ['n', 'prompt', 'prompts', 'response_ids'], rest\n    return rest['n']\n"
    )
    assert score(reward(tmp_path, source), n=[1, 2, 3, 4]) == [1.0, 2.0, 3.0, 4.0]


def test_prompts_and_ids_line_up(tmp_path):
    judge = reward(tmp_path, "def f(prompts, response_ids):\n    return [len(p) * len(i) for p, i in zip(prompts, response_ids)]\n")
    assert score(judge) == [1.0, 2.0, 3.0, 4.0]


def test_one_call_a_batch(tmp_path):
    judge = reward(tmp_path, "calls = []\ndef f(responses):\n    calls.append(1)\n    return [len(calls)] * len(responses)\n")
    assert score(judge) == [1.0] * 4


def test_a_column_that_some_rows_lack_is_none_there(tmp_path):
    judge = reward(tmp_path, "def f(responses, n):\n    return [0.0 if v is None else v for v in n]\n")
    rows = [{"prompt": "p", "n": 5}, {"prompt": "p"}]
    assert judge.score(prompts=["p", "p"], responses=["a", "b"], response_ids=[[1], [2]], rows=rows) == [5.0, 0.0]


def test_a_required_parameter_without_column(tmp_path):
    judge = reward(tmp_path, "def f(responses, topik):\n    return [0.0]\n")
    with pytest.raises(
        ConfigError, match="needs 'topik', there are: prompts, responses, response_ids, prompt, topic; did you mean 'topic'"
    ):
        judge.check(["prompt", "topic"])
    with pytest.raises(ConfigError, match="needs 'topik'"):
        score(judge, topic=["x"] * 4)


def test_positional_only_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="'responses' is positional-only"):
        reward(tmp_path, "def f(responses, /):\n    return [0.0]\n")


def test_a_column_named_like_an_argument(tmp_path):
    judge = reward(tmp_path, "def f(responses):\n    return [0.0] * len(responses)\n")
    with pytest.raises(DataError, match="column 'responses' .* rename the column"):
        score(judge, responses=["gold"] * 4)
    assert judge.score(prompts=["p"], responses=["a"], response_ids=[[1]], rows=[{"prompts": "p"}]) == [0.0]


# --- what it returns ------------------------------------------------------------------------------------------------


def returning(folder: Path, value: str) -> FunctionReward:
    return reward(folder, f"import torch, numpy as np\ndef f(responses):\n    return {value}\n")


@pytest.mark.parametrize(
    "value",
    [
        "[True, 2, 3.0, 0.5]",
        "[torch.tensor(1), torch.tensor(2.0), np.float32(3), np.float64(0.5)]",
        "torch.tensor([1, 2, 3, 0.5])",
        "np.array([1, 2, 3, 0.5])",
        "(np.bool_(True), 2, np.int64(3), 0.5)",
    ],
)
def test_numbers_of_every_kind(tmp_path, value):
    scores = score(returning(tmp_path, value))
    assert scores == [1.0, 2.0, 3.0, 0.5] and all(type(s) is float for s in scores)


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("[1.0]", "expected 4 scores, got 1"),
        ("[1.0] * 5", "expected 4 scores, got 5"),
        ("[]", "expected 4 scores, got 0"),
        ("1.0", "expected a list of 4 scores, got float"),
        ("None", "expected a list of 4 scores, got NoneType"),
        ("'1234'", "expected a list of 4 scores, got str"),
        ("(x for x in responses)", "expected a list of 4 scores, got generator"),
        ("torch.ones(4, 1)", "expected 4 scores, got an array of shape [4, 1]"),
        ("torch.tensor(1.0)", "expected 4 scores, got an array of shape []"),
        ("[1, float('nan'), 2, 3]", "score 1 is nan, expected a finite number or None; answer: 'bb'"),
        ("torch.tensor([1, 2, float('nan'), 3])", "score 2 is nan"),
        ("[1, 2, 3, -float('inf')]", "score 3 is -inf"),
        ("[1, 2, 3, 1e39]", "score 3 is 1e+39"),
        ("[1, 2, 3, 10**400]", "score 3 is 1000"),
        ("[1, 2, '0.5', 3]", "score 2 is a str, expected a number or None; answer: 'ccc'"),
        ("[1, 2, [3.0], 3]", "score 2 is a list"),
    ],
)
def test_a_wrong_answer_is_named(tmp_path, value, said):
    """One value for four answers would be broadcast without a word (seen in another trainer); NaN would become 0."""
    with pytest.raises(WorkerError) as error:
        score(returning(tmp_path, value))
    assert said in str(error.value) and f"reward function '{tmp_path / 'rewards.py'}:f'" in str(error.value)


def test_a_long_answer_is_cut_in_the_message(tmp_path):
    with pytest.raises(WorkerError) as error:
        score(returning(tmp_path, "[float('nan')]"), answers=["x" * 200])
    assert "x" * 80 in str(error.value) and "x" * 81 not in str(error.value)


def test_none_is_no_score(tmp_path):
    assert score(returning(tmp_path, "[None, -0.8, 0, None]")) == [None, -0.8, 0.0, None]


def test_weighted_sum_and_none_of_any(tmp_path):
    source = "def f(responses):\n    return [1, 2, None, 4]\ndef g(responses):\n    return [10, None, 30, 40]\n"
    assert score(reward(tmp_path, source, "f", "g", weights=(2.0, 0.5))) == [7.0, None, None, 28.0]


def test_an_exception_names_its_line(tmp_path):
    source = "def helper(r):\n    raise ValueError('bad answer')\ndef f(responses):\n    return [helper(r) for r in responses]\n"
    with pytest.raises(WorkerError) as error:
        score(reward(tmp_path, source))
    path = tmp_path / "rewards.py"
    assert str(error.value) == f"reward function '{path}:f' raised ValueError: bad answer ({path}:2)"
    assert isinstance(error.value.__cause__, ValueError)


# --- the reward model -----------------------------------------------------------------------------------------------

RM_TEMPLATE = "{{ bos_token }}{% for m in messages %}[{{ m.role }}] {{ m.content }}{{ eos_token }}{% endfor %}"


def llama(**options) -> LlamaConfig:
    shape = {"vocab_size": 300, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaConfig(**{**shape, "max_position_embeddings": 64, "num_labels": 1, "initializer_range": 0.3, **options})


@pytest.fixture
def classifier(tmp_path) -> Path:
    """A random Llama classifier whose pad id is its EOS id, as many published ones have."""
    torch.manual_seed(0)
    LlamaForSequenceClassification(llama(pad_token_id=EOS)).save_pretrained(tmp_path / "rm")
    return save_tokenizer(tmp_path / "rm", template=RM_TEMPLATE)


def by_hand(folder: Path, sequence: list[int]) -> float:
    """The head on the hidden state of the last token, alone and unpadded."""
    model = LlamaForSequenceClassification.from_pretrained(folder).float().eval()
    with torch.no_grad():
        hidden = model.model(input_ids=torch.tensor([sequence])).last_hidden_state[0, -1]
        return float(model.score.weight[0] @ hidden)


def test_the_model_reads_its_own_template(classifier):
    judge = ClassifierReward(classifier, 2, bf16=False)
    assert judge.text("hi", "yo") == "<s>[user] hi</s>[assistant] yo</s>"
    assert judge.encode("hi", "yo") == [BOS, *ids("[user] hi"), EOS, *ids("[assistant] yo"), EOS]
    turns = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    assert judge.text(turns, "a") == "<s>[system] s</s>[user] u</s>[assistant] a</s>"


def test_scores_equal_single_runs_by_hand(classifier):
    """Sequences end with EOS = pad. transformers alone would score the token before it, and the padding moves nothing."""
    judge = ClassifierReward(classifier, 3, bf16=False)
    sequences = [[BOS, *ids("[user] p"), EOS, *ids(f"[assistant] {a}"), EOS] for a in ANSWERS]
    wanted = [by_hand(classifier, s) for s in sequences]
    assert score(judge) == pytest.approx(wanted, abs=1e-5)
    before_eos = [by_hand(classifier, s[:-1]) for s in sequences]
    assert min(abs(w - b) for w, b in zip(wanted, before_eos, strict=True)) > 1e-3  # the mistake would show


def test_micro_batches_change_nothing(classifier):
    one, all_at_once = (score(ClassifierReward(classifier, m, bf16=False)) for m in (1, 4))
    assert one == pytest.approx(all_at_once, abs=1e-5)


def test_bf16_is_near(classifier):
    low, full = (score(ClassifierReward(classifier, 4, bf16=b)) for b in (True, False))
    assert low != full and low == pytest.approx(full, abs=0.05 * max(map(abs, full)) + 0.02)


def test_without_template_texts_are_joined(classifier):
    save_tokenizer(classifier, template=None)
    (classifier / "chat_template.jinja").unlink(missing_ok=True)
    judge = ClassifierReward(classifier, 2, bf16=False)
    assert judge.encode("hi ", "yo") == [BOS, *ids("hi yo")]


def test_an_encoder_classifier(tmp_path):
    """The head of BERT reads the first token; nothing in our padding depends on Llama."""
    torch.manual_seed(0)
    config = BertConfig(vocab_size=300, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, num_labels=1)
    model = BertForSequenceClassification(config).eval()
    model.save_pretrained(tmp_path)
    judge = ClassifierReward(save_tokenizer(tmp_path, template=TEMPLATE), 4, bf16=False)
    with torch.no_grad():
        wanted = [float(model(input_ids=torch.tensor([judge.encode("p", a)])).logits) for a in ANSWERS]
    assert score(judge) == pytest.approx(wanted, abs=1e-5)


def test_num_labels_must_be_one(tmp_path):
    LlamaForSequenceClassification(llama(num_labels=3)).save_pretrained(tmp_path)
    save_tokenizer(tmp_path)
    with pytest.raises(ConfigError, match="num_labels is 3, expected 1"):
        ClassifierReward(tmp_path, 2, bf16=False)


def test_a_language_model_without_head_is_refused(tmp_path):
    """transformers would draw the head at random and score noise."""
    LlamaForCausalLM(llama(tie_word_embeddings=True)).save_pretrained(tmp_path)
    save_tokenizer(tmp_path)
    with pytest.raises(DataError, match=r"1 weights are missing \(score.weight\)"):
        ClassifierReward(tmp_path, 2, bf16=False)


def test_a_missing_folder(tmp_path):
    with pytest.raises(DataError, match="reward model folder .*gone: no config.json"):
        ClassifierReward(tmp_path / "gone", 2, bf16=False)


def test_too_long_is_an_error_not_a_cut(classifier):
    judge = ClassifierReward(classifier, 2, bf16=False)
    with pytest.raises(WorkerError, match="prompt and answer 1 have 103 tokens, it takes 64"):
        score(judge, answers=["a", "x" * 80])


def test_a_tokenizer_of_another_model(tmp_path):
    LlamaForSequenceClassification(llama(vocab_size=100)).save_pretrained(tmp_path)
    save_tokenizer(tmp_path)
    with pytest.raises(DataError, match="its tokenizer has 266 ids, its embedding 100 rows"):
        ClassifierReward(tmp_path, 2, bf16=False)


def test_a_model_that_gives_nan(classifier):
    judge = ClassifierReward(classifier, 2, bf16=False)
    judge.model.score.weight.data.fill_(float("nan"))
    with pytest.raises(WorkerError, match="score 0 is nan"):
        score(judge)


def test_scores_are_plain_floats(classifier):
    scores = score(ClassifierReward(classifier, 2, bf16=False))
    assert all(type(s) is float for s in scores) and np.float32(scores[0]) == scores[0]
