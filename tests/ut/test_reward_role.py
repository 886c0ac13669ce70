"""The reward role: from token ids of a rollout to scores [P,K], for all four kinds, and named wrong versions that are caught.

The policy's tokenizer (``tiny``: a byte is 3 + its place among printable characters) and the reward model's (``byte_tokenizer``:
a byte is 10 + byte) give the same text different ids; both have pad == eos.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from byte_tokenizer import BOS, EOS, ids, save_tokenizer
from tiny import _tokenizer, make_tiny_hf
from transformers import AutoModelForSequenceClassification

from mindspeed_odpo import cli, device

device.setup()

from mindspeed_odpo.config import PairsConfig, RewardConfig, RewardFunction, parse  # noqa: E402
from mindspeed_odpo.engine.value_head import values  # noqa: E402
from mindspeed_odpo.errors import ConfigError, WorkerError  # noqa: E402
from mindspeed_odpo.hosts.standalone import Host  # noqa: E402
from mindspeed_odpo.launch import compose  # noqa: E402
from mindspeed_odpo.pairs import make_pairs  # noqa: E402
from mindspeed_odpo.rewards import function as function_module  # noqa: E402
from mindspeed_odpo.rewards.function import FunctionReward, UserFunction  # noqa: E402
from mindspeed_odpo.rewards.judge import JudgeReward  # noqa: E402
from mindspeed_odpo.rewards.megatron import MegatronReward  # noqa: E402
from mindspeed_odpo.rewards.model import ClassifierReward, ModelReward  # noqa: E402
from mindspeed_odpo.roles import reward as role_module  # noqa: E402
from mindspeed_odpo.roles.reward import Reward  # noqa: E402
from mindspeed_odpo.types import PromptBatch, Rollout  # noqa: E402

DOCS = Path(__file__).parents[2] / "docs" / "rewards.md"
pytestmark = pytest.mark.usefixtures("single_rank")
ANSWERS = [["short", "a longer one"], ["x", ""]]
POLICY_EOS = 2
RM_TEMPLATE = "{{ bos_token }}{% for m in messages %}[{{ m.role }}] {{ m.content }}{{ eos_token }}{% endfor %}"
FUNCTIONS = """
seen = []

def text(responses, response_ids, word):
    seen.append((responses, response_ids, word))
    return [float(len(r)) for r in responses]

def some(responses):
    return [None if r == "x" else -1.0 for r in responses]

def one(responses):
    return [1.0]

def first_place(first, second):
    seen.append((first, second))
    return [0] * len(first)

def longer(first, second):
    return [int(len(b) > len(a)) for a, b in zip(first, second)]
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``policy``: a tokenizer; ``rm``: a classifier; ``rewards.py``."""
    root = tmp_path_factory.mktemp("reward")
    _tokenizer().save_pretrained(root / "policy")
    make_tiny_hf(root / "rm", classifier=True)
    save_tokenizer(root / "rm", template=RM_TEMPLATE)
    (root / "rewards.py").write_text(FUNCTIONS)
    return root


def batch() -> tuple[Rollout, PromptBatch]:
    """Two prompts, two answers each; all but "a longer one" end with EOS, which is the padding too."""
    encoded = [[_tokenizer().encode(a, add_special_tokens=False) + [POLICY_EOS] for a in row] for row in ANSWERS]
    encoded[0][1].pop()
    width = max(len(answer) for row in encoded for answer in row) + 1
    response = torch.tensor([[a + [POLICY_EOS] * (width - len(a)) for a in row] for row in encoded])
    lengths = torch.tensor([[len(a) for a in row] for row in encoded])
    mask = torch.arange(width)[None, None] < lengths[..., None]
    prompt, seen, index = torch.tensor([[1, 70], [1, 71]]), torch.ones(2, 2, dtype=torch.bool), torch.arange(2)
    rows = tuple({"prompt": f"p{i}", "word": f"w{i}"} for i in range(2))
    finished = torch.tensor([[True, False], [True, True]])
    return Rollout(prompt, seen, response, mask, finished, index, 0).check(), PromptBatch(1, prompt, seen, index, index, rows).check()


def role(folder: Path, **reward: Any) -> Reward:
    config = SimpleNamespace(
        reward=RewardConfig(**reward),
        data=SimpleNamespace(prompt_key="prompt"),
        bf16=False,
        tokenizer=folder / "policy",
        forwarded={},
    )
    return Reward(config, Host(config))  # type: ignore[arg-type]


def function_role(folder: Path, *names: str) -> Reward:
    return role(folder, functions=tuple(RewardFunction(f"{folder / 'rewards.py'}:{name}") for name in names))


def judge_role(folder: Path, name: str) -> Reward:
    return role(folder, judge=f"{folder / 'rewards.py'}:{name}")


def model_role(folder: Path, engine: str) -> Reward:
    return role(folder, load=folder / "rm", engine=engine, micro_batch_size=3)


def seen(reward: UserFunction) -> list[Any]:
    return reward._function.__globals__["seen"]  # type: ignore[no-any-return,attr-defined]


# --- the checks, each of which a wrong version below must fail --------------------------------------------------------


def texts_hold_no_special_tokens(folder: Path) -> None:
    reward = function_role(folder, "text")
    assert reward.score(*batch()).tolist() == [[5.0, 12.0], [1.0, 0.0]]
    responses, response_ids, word = seen(reward.scorer._functions[0][0])[-1]  # type: ignore[attr-defined]
    assert responses == ["short", "a longer one", "x", ""] and word == ["w0", "w0", "w1", "w1"]
    assert [i[-1] == POLICY_EOS for i in response_ids] == [True, False, True, True] and response_ids[3] == [POLICY_EOS]


def none_is_nan(folder: Path) -> None:
    scores = function_role(folder, "some").score(*batch())
    assert scores.dtype == torch.float32 and scores.isnan().tolist() == [[False, False], [True, False]]
    pairs = make_pairs(scores, batch()[0], PairsConfig(missing_eos_penalty=0.5))
    assert pairs.keep.tolist() == [[True], [False]] and (int(pairs.chosen[0]), int(pairs.rejected[0])) == (0, 1)


def one_score_for_four_answers_is_refused(folder: Path) -> None:
    try:
        function_role(folder, "one").score(*batch())
    except WorkerError as error:
        assert "expected 4 scores, got 1" in str(error)
    else:
        raise AssertionError("one score was spread over four answers")


def a_place_lover_says_nothing(folder: Path) -> None:
    assert judge_role(folder, "first_place").score(*batch()).tolist() == [[0.5, 0.5], [0.5, 0.5]]


def the_better_answer_scores_one(folder: Path) -> None:
    """The longer one of two."""
    scores = judge_role(folder, "longer").score(*batch())
    assert scores.tolist() == [[0.0, 1.0], [1.0, 0.0]]
    assert make_pairs(scores, batch()[0], PairsConfig()).chosen.tolist() == [[1], [0]]


def by_hand() -> list[list[int]]:
    """What the reward model must read: its own ids and template, one BOS, one EOS, nothing of the policy's."""
    flat = [(f"p{i}", answer) for i, row in enumerate(ANSWERS) for answer in row]
    return [[BOS, *ids(f"[user] {prompt}"), EOS, *ids(f"[assistant] {answer}"), EOS] for prompt, answer in flat]


def models_read_their_own_words(folder: Path) -> None:
    for engine in ("hf", "megatron"):
        reward, read = model_role(folder, engine), []
        reward.scorer._forward = lambda encoded, read=read: read.extend(encoded) or [0.0] * len(encoded)  # type: ignore[attr-defined]
        reward.score(*batch())
        assert read == by_hand()


def models_score_at_the_last_real_token(folder: Path) -> None:
    """Against transformers on one unpadded sequence at a time."""
    model = AutoModelForSequenceClassification.from_pretrained(folder / "rm", dtype=torch.float32).eval()
    model.config.pad_token_id = None
    with torch.no_grad():
        wanted = [float(model(input_ids=torch.tensor([sequence])).logits) for sequence in by_hand()]
    for engine in ("hf", "megatron"):
        assert model_role(folder, engine).score(*batch()).flatten().tolist() == pytest.approx(wanted, abs=1e-4)


CHECKS: tuple[Callable[[Path], None], ...] = (
    texts_hold_no_special_tokens,
    none_is_nan,
    one_score_for_four_answers_is_refused,
    a_place_lover_says_nothing,
    the_better_answer_scores_one,
    models_read_their_own_words,
    models_score_at_the_last_real_token,
)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_the_role(folder, check):
    check(folder)


# --- wrong versions ---------------------------------------------------------------------------------------------------


def special_tokens_kept(patch: pytest.MonkeyPatch) -> None:
    right = role_module.decode_answers

    def decode(tokenizer, rollout):
        _, found = right(tokenizer, rollout)
        return [[tokenizer.decode(a) for a in row] for row in found], found

    patch.setattr(role_module, "decode_answers", decode)


def none_counts_as_zero(patch: pytest.MonkeyPatch) -> None:
    right = function_module._number
    patch.setattr(function_module, "_number", lambda where, value, response: right(where, value or 0.0, response))


def one_score_is_spread(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(UserFunction, "__call__", lambda self, offered, count, *_: self._function(offered["responses"]) * count)


def judge_asked_in_one_order(patch: pytest.MonkeyPatch) -> None:
    right = JudgeReward._ask

    def ask(self, questions, *rest):
        half = right(self, questions[: len(questions) // 2], *rest)
        return half + [None if v is None else 1 - v for v in half]

    patch.setattr(JudgeReward, "_ask", ask)


def verdicts_read_backwards(patch: pytest.MonkeyPatch) -> None:
    right = JudgeReward._ask
    patch.setattr(JudgeReward, "_ask", lambda self, *a: [None if v is None else 1 - v for v in right(self, *a)])


def policy_ids_scored(patch: pytest.MonkeyPatch) -> None:
    def score(self, prompts, responses, response_ids, rows, answers_per_prompt):
        return self._forward(response_ids)

    patch.setattr(ModelReward, "score", score)


def template_text_gets_special_tokens_again(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ModelReward, "encode", lambda self, prompt, answer: self.tokenizer.encode(self.text(prompt, answer)))


def scored_at_the_last_column(patch: pytest.MonkeyPatch) -> None:
    def forward(self, encoded):
        width = max(map(len, encoded))
        padded = torch.tensor([row + [0] * (width - len(row)) for row in encoded])
        return values(self.chunks, padded, torch.full((len(encoded),), width - 1), self._device).tolist()

    patch.setattr(MegatronReward, "_forward", forward)


def scored_at_the_last_id_that_is_not_pad(patch: pytest.MonkeyPatch) -> None:
    def forward(self, encoded):
        width = max(map(len, encoded))
        self.model.config.pad_token_id = self.tokenizer.pad_token_id
        padded = torch.tensor([row + [self.tokenizer.pad_token_id] * (width - len(row)) for row in encoded])
        with torch.no_grad():
            return self.model(input_ids=padded).logits.squeeze(-1).tolist()

    patch.setattr(ClassifierReward, "_forward", forward)


MUTANTS = {
    special_tokens_kept: texts_hold_no_special_tokens,
    none_counts_as_zero: none_is_nan,
    one_score_is_spread: one_score_for_four_answers_is_refused,
    judge_asked_in_one_order: a_place_lover_says_nothing,
    verdicts_read_backwards: the_better_answer_scores_one,
    policy_ids_scored: models_read_their_own_words,
    template_text_gets_special_tokens_again: models_read_their_own_words,
    scored_at_the_last_column: models_score_at_the_last_real_token,
    scored_at_the_last_id_that_is_not_pad: models_score_at_the_last_real_token,
}


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_a_mutant_of_the_reward_is_caught(folder, monkeypatch, mutant):
    mutant(monkeypatch)
    with pytest.raises(AssertionError):
        MUTANTS[mutant](folder)


# --- which kind, and what is told before a run ------------------------------------------------------------------------


def test_the_config_picks_the_kind(folder):
    assert isinstance(function_role(folder, "some").scorer, FunctionReward)
    assert isinstance(judge_role(folder, "longer").scorer, JudgeReward)
    assert isinstance(model_role(folder, "hf").scorer, ClassifierReward)
    assert isinstance(model_role(folder, "megatron").scorer, MegatronReward)


def test_a_split_batch_gives_the_same_scores(folder):
    """The answers of a prompt are compared on whatever rank has the prompt."""
    rollout, prompts = batch()
    for reward in (judge_role(folder, "longer"), function_role(folder, "text"), model_role(folder, "megatron")):
        parts = [reward.score(rollout.select([i]), prompts.select([i])) for i in range(2)]
        assert torch.cat(parts).tolist() == [pytest.approx(row, abs=1e-6) for row in reward.score(rollout, prompts).tolist()]


def preflight(folder: Path, tmp_path: Path, *reward: str) -> None:
    """``Host.preflight`` of the packaged tiny config with the rewards of ``folder``."""
    policy = make_tiny_hf(tmp_path / "hf")
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "hello", "word": "w"}\n')
    actor = "actor_rollout_ref.actor_rollout"
    loads = [f"{actor}.load={policy}", f"actor_rollout_ref.ref.load={policy}", f"training.tokenizer_name_or_path={policy}"]
    Host(parse(compose("online_dpo_tiny", [*loads, f"{actor}.data_path={tmp_path}/prompts.jsonl", *reward]), "tiny")).preflight()


def test_a_judge_is_checked_before_a_rank_starts(folder, tmp_path):
    preflight(folder, tmp_path, f"reward.judge={folder}/rewards.py:longer")
    with pytest.raises(ConfigError, match="judge '.*:text' needs 'responses', there are: prompts, first, second, prompt, word"):
        preflight(folder, tmp_path, f"reward.judge={folder}/rewards.py:text")


def test_a_classifier_that_megatron_cannot_run_is_told_before_a_rank_starts(folder, tmp_path):
    preflight(folder, tmp_path, f"reward.load={folder}/rm", "reward.engine=megatron")
    (tmp_path / "bert").mkdir()
    (tmp_path / "bert" / "config.json").write_text('{"model_type": "bert"}')
    with pytest.raises(ConfigError, match="model_type bert is not supported"):
        preflight(folder, tmp_path, f"reward.load={tmp_path}/bert", "reward.engine=megatron")


# --- the page ---------------------------------------------------------------------------------------------------------


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", DOCS.read_text(encoding="utf-8"), flags=re.S)


@pytest.fixture
def documented(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with the page's Python files and the folder that its YAML names."""
    for code in blocks("python"):
        (tmp_path / code.split("\n")[0].removeprefix("# ")).write_text(code)
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "my_reward_model").symlink_to(folder / "rm")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_what_the_page_shows_runs(documented):
    """Each YAML through the parser, its reward over the batch. Prompt 0 wants three words, prompt 1 one;
    "short" and "x" have one word, "a longer one" three, "" none."""
    policy, rollout, prompts = make_tiny_hf(documented / "hf"), *batch()
    rows = tuple({"prompt": "p", "topic": "short", "words": n} for n in (3, 1))
    kinds = []
    for text in blocks("yaml"):
        actor = "actor_rollout_ref.actor_rollout"
        tree = {**compose("online_dpo_tiny", [f"{actor}.load={policy}", f"training.tokenizer_name_or_path={policy}"])}
        tree["actor_rollout_ref"]["ref"].pop("load")
        config = parse({**tree, **yaml.safe_load(text)}, "tiny")
        reward = Reward(config, Host(config))
        kinds.append(type(reward.scorer))
        scores = reward.score(rollout, replace(prompts, rows=rows))
        if kinds[-1] is FunctionReward:
            assert scores.tolist() == [
                pytest.approx([1 - 0.5 * 6 / 100, -0.5 * 12 / 100]),
                pytest.approx([-0.5 * 2 / 100, float("nan")], nan_ok=True),
            ]
        if kinds[-1] is JudgeReward:
            assert scores.tolist() == [[0.0, 1.0], [1.0, 0.0]]
    assert kinds == [FunctionReward, JudgeReward, ClassifierReward, MegatronReward]


def test_the_page_shows_a_command_that_runs(documented, capsys):
    (command,) = re.findall(r"^    odpo (check .*)$", DOCS.read_text(encoding="utf-8"), flags=re.M)
    policy = make_tiny_hf(documented / "hf")
    actor = "actor_rollout_ref.actor_rollout"
    loads = [f"{actor}.load={policy}", f"actor_rollout_ref.ref.load={policy}", f"training.tokenizer_name_or_path={policy}"]
    assert cli.main([*command.split(), *loads]) == 0
    assert "iterations" in capsys.readouterr().out
