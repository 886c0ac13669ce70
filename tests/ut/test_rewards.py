"""Reward functions: found, called by name, their scores checked and added up."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from byte_tokenizer import ids

from mindspeed_odpo.config import RewardFunction
from mindspeed_odpo.errors import ConfigError, DataError, WorkerError
from mindspeed_odpo.rewards.function import FunctionReward, load_function

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
    judge.check(["prompt", "topik"])


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


def test_parameters_that_cannot_be_read():
    with pytest.raises(ConfigError, match="reward function 'builtins:max': its parameters cannot be read; wrap it in a Python function"):
        FunctionReward((RewardFunction("builtins:max"),))


def test_a_file_in_a_folder_that_is_not_there(tmp_path):
    with pytest.raises(ConfigError, match="no file .*/gone/r.py$"):
        load_function(f"{tmp_path}/gone/r.py:f")
