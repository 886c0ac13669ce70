"""Files of recorded preferences: what becomes of a row as token ids and masks, and which rows an iteration takes.

The byte tokenizer makes every id countable by hand. That a model's log-probabilities follow the masks is shown in
test_train_offline.py.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from byte_tokenizer import BOS, EOS, byte_tokenizer, ids
from byte_tokenizer import TEMPLATE as OPEN
from tokenizers import Tokenizer, models
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from mindspeed_odpo.config import DataConfig
from mindspeed_odpo.data import preferences as module
from mindspeed_odpo.data.formats import read_preferences
from mindspeed_odpo.data.preferences import EMPTY, IDENTICAL, KEPT, Preferences, Speller, cut_tokens
from mindspeed_odpo.data.prompts import Prompts
from mindspeed_odpo.errors import DataError

USER, BOT, SYS = 3, 4, 5
NEWLINE = ids("\n")[0]
CLOSED = (
    "{{ bos_token }}{% for m in messages %}{{ {'system': '<sys>', 'user': '<user>', 'assistant': '<bot>'}[m.role] }}{{ m.content }}"
    "{% if m.role == 'assistant' %}{{ '</s>\n' }}{% endif %}{% endfor %}{% if add_generation_prompt %}<bot>{% endif %}"
)
"""As most templates do: an EOS and a line end behind every answer. ``OPEN`` writes neither."""


def turns(*contents: str) -> list[dict[str, str]]:
    """User and assistant in turn, the user first."""
    return [{"role": ("user", "assistant")[i % 2], "content": content} for i, content in enumerate(contents)]


def write(folder: Path, *rows: object) -> Path:
    path = folder / "pairs.jsonl"
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return path


def stream(path: Path, batch: int = 1, seq_length: int = 64, template: str | None = CLOSED, seed: int = 0, **config) -> Preferences:
    return Preferences(DataConfig(path=path, **config), byte_tokenizer(template), (EOS,), seq_length, batch, seed)


def sides(rollout, row: int = 0) -> list[tuple[list[int], list[bool]]]:
    """For chosen and rejected: all ids that are read, and which of them count."""
    prompt = rollout.prompt_ids[row][rollout.prompt_mask[row]].tolist()
    out = []
    for k in range(2):
        real = rollout.response_mask[row, k]
        out.append((prompt + rollout.response_ids[row, k][real].tolist(), [False] * len(prompt) + rollout.counted[row, k][real].tolist()))
    return out


def first(path: Path, **config) -> list[tuple[list[int], list[bool]]]:
    return sides(stream(path, **config).batch(1)[0])


# --- the file -------------------------------------------------------------------------------------------------------


def test_three_forms_are_one(tmp_path):
    """Text beside a prompt, answers as messages beside a prompt, whole dialogues."""
    whole = {"chosen": turns("q", "a"), "rejected": turns("q", "b")}
    beside = {"prompt": "q", "chosen": "a", "rejected": "b"}
    as_messages = {
        "prompt": turns("q"),
        "chosen": [{"role": "assistant", "content": "a"}],
        "rejected": [{"role": "assistant", "content": "b"}],
    }
    rows = read_preferences(write(tmp_path, whole, beside, as_messages), "prompt", "chosen", "rejected")
    assert [(row.chosen, row.rejected) for row in rows] == [(turns("q", "a"), turns("q", "b"))] * 3
    assert [row.where.rpartition("/")[2] for row in rows] == ["pairs.jsonl:1", "pairs.jsonl:2", "pairs.jsonl:3"]


def test_columns_may_have_other_names(tmp_path):
    path = write(tmp_path, {"ask": "q", "good": "a", "bad": "b"})
    assert first(path, prompt_key="ask", chosen_key="good", rejected_key="bad")[0][0] == [BOS, USER, *ids("q"), BOT, *ids("a"), EOS]


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"prompt": "q", "chosen": "a"}, ":2:rejected: no such column; columns there: prompt, chosen; set rejected_key"),
        ({"chosen": "a", "rejected": "b"}, ":2:prompt: no such column"),
        ({"prompt": "q", "chosen": None, "rejected": "b"}, ":2:chosen: expected text or a list of {role, content} messages, found null"),
        ({"prompt": "q", "chosen": "a", "rejected": [{"role": "assistant"}]}, ":2:rejected[0].content: expected text, found null"),
        ({"chosen": turns("q"), "rejected": turns("q", "a")}, ":2:chosen[0].role: the dialogue ends with role 'user'"),
        ({"prompt": "q", "chosen": "a", "rejected": turns("q", "a")}, ":2: 'rejected' is a whole dialogue, 'chosen' an answer alone"),
        ({"prompt": "", "chosen": "a", "rejected": "b"}, ":2:prompt: expected text, found an empty string"),
        ({"prompt": "q", "chosen": "a\ud83d", "rejected": "b"}, ":2:chosen: half of a surrogate pair at character 2"),
    ],
)
def test_a_bad_row_is_named(tmp_path, row, said):
    path = tmp_path / "pairs.jsonl"
    path.write_text("\n".join(json.dumps(r) for r in ({"prompt": "q", "chosen": "a", "rejected": "b"}, row)))
    with pytest.raises(DataError) as error:
        read_preferences(path, "prompt", "chosen", "rejected")
    assert f"pairs.jsonl{said}" in str(error.value) and "\n" not in str(error.value)


# --- answer_mask: answer --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("template", [OPEN, CLOSED])
@pytest.mark.parametrize("ending", ["", "</s>", "</s></s>"])
def test_an_answer_ends_with_exactly_one_eos(tmp_path, template, ending):
    """Whether the template, the file, both or none of them write it; nothing follows it, for a rollout's answer ends there."""
    (chosen, counted), (rejected, _) = first(write(tmp_path, {"prompt": "q", "chosen": "ab" + ending, "rejected": "c"}), template=template)
    assert chosen == [BOS, USER, *ids("q"), BOT, *ids("ab"), EOS]
    assert counted == [False] * 4 + [True] * 3
    assert rejected == [BOS, USER, *ids("q"), BOT, *ids("c"), EOS]


def test_a_row_looks_like_a_rollout(tmp_path):
    """Left-padded prompts, right-padded answers, pad == eos: masks come from lengths, so the prompt's own </s> stays visible
    and each answer keeps its EOS."""
    path = write(tmp_path, {"prompt": "a</s>", "chosen": "x", "rejected": "yz"}, {"prompt": "abcd", "chosen": "x", "rejected": ""})
    rollout, pairs = stream(path, batch=2, shuffle=False).batch(1)
    assert rollout.prompt_ids.tolist() == [[0, 0, BOS, USER, *ids("a"), EOS, BOT], [BOS, USER, *ids("abcd"), BOT]]
    assert rollout.prompt_mask.tolist() == [[False] * 2 + [True] * 5, [True] * 7]
    assert rollout.response_ids.tolist() == [[[*ids("x"), EOS, 0], [*ids("yz"), EOS]], [[*ids("x"), EOS, 0], [EOS, 0, 0]]]
    assert rollout.lengths().tolist() == [[2, 3], [2, 1]]
    assert rollout.loss_mask is None and rollout.finished.all() and rollout.policy_version == 0
    assert rollout.prompt_index.tolist() == [0, 1]
    assert (pairs.chosen.tolist(), pairs.rejected.tolist(), pairs.reason.tolist()) == ([[0], [0]], [[1], [1]], [[KEPT], [EMPTY]])


def test_prompts_are_those_of_a_rollout(tmp_path):
    """The same ids as the online trainer renders, with the same system prompt and one BOS."""
    path = write(
        tmp_path, {"prompt": "q", "chosen": "a", "rejected": "b"}, {"prompt": turns("q", "a", "r"), "chosen": "c", "rejected": "d"}
    )
    for system in (None, "be kind"):
        rollout, _ = stream(path, batch=2, system_prompt=system, shuffle=False).batch(1)
        prompts = Prompts(DataConfig(path, system_prompt=system, shuffle=False), byte_tokenizer(CLOSED), 64, 2, 0).batch(1)
        assert rollout.prompt_ids.tolist() == prompts.ids.tolist()
        assert (rollout.prompt_ids == BOS).sum(1).tolist() == [1, 1]


def test_the_prompt_of_three_turns_is_all_before_the_last(tmp_path):
    """And answers that begin alike are not cut: their common beginning counts."""
    path = write(tmp_path, {"chosen": turns("q", "a", "r", "xy1"), "rejected": turns("q", "a", "r", "xy2")})
    (chosen, counted), _ = first(path)
    before = [BOS, USER, *ids("q"), BOT, *ids("a"), EOS, NEWLINE, USER, *ids("r"), BOT]
    assert chosen == [*before, *ids("xy1"), EOS]
    assert counted == [False] * len(before) + [True] * 4


@pytest.mark.parametrize(
    ("rejected", "said"),
    [
        (turns("q", "a", "other", "y"), r"turn 3 of chosen (user 'r') is not turn 3 of rejected (user 'other')"),
        (turns("q", "y"), "chosen has 4 turns, rejected 2"),
    ],
)
def test_unequal_turns_are_an_error_with_a_cure(tmp_path, rejected, said):
    path = write(tmp_path, {"chosen": turns("q", "a", "r", "x"), "rejected": rejected})
    with pytest.raises(DataError) as error:
        stream(path)
    assert f"pairs.jsonl:1: {said}" in str(error.value) and "or set answer_mask: dialogue" in str(error.value)
    stream(path, answer_mask="dialogue")


def test_an_eos_amid_an_answer_is_an_error(tmp_path):
    path = write(tmp_path, {"prompt": "q", "chosen": "a</s>b", "rejected": "c"})
    with pytest.raises(DataError, match=r"pairs\.jsonl:1: turn 2: 3 tokens follow the end-of-answer token '</s>'"):
        stream(path)


def test_without_a_template_text_follows_text(tmp_path):
    path = write(tmp_path, {"prompt": "ab", "chosen": "c", "rejected": "d"})
    assert first(path, template=None)[0] == ([BOS, *ids("abc"), EOS], [False] * 3 + [True] * 2)
    with pytest.raises(DataError, match="answer_mask: dialogue needs a chat template"):
        stream(path, template=None, answer_mask="dialogue")


def test_edges_fall_between_tokens():
    """a and b merge into one token: across an edge they stay two, and so do later edges of the same text; elsewhere they merge."""
    vocab = {"a": 0, "b": 1, "x": 2, "ab": 3}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE(vocab=vocab, merges=[("a", "b")])))
    assert cut_tokens(tokenizer, "xabx", [1]) == ([2, 3, 2], [1])
    assert cut_tokens(tokenizer, "xabx", [2]) == ([2, 0, 1, 2], [2])
    assert cut_tokens(tokenizer, "xabxabab", [2, 5, 6]) == ([2, 0, 1, 2, 0, 1, 3], [2, 5, 6])


# --- answer_mask: dialogue ------------------------------------------------------------------------------------------


def spell(mask: str, dialogue, template: str = CLOSED, seq_length: int = 64):
    return Speller(DataConfig(Path("x"), answer_mask=mask), byte_tokenizer(template), (EOS,), seq_length).spell(dialogue, "x:1")


HEADLESS = CLOSED.replace("{{ bos_token }}", "")


@pytest.mark.parametrize(("mask", "targets"), [("dialogue", [0, 0, 1, 1, 1, 0, 0]), ("dialogue_shifted", [0, 0, 0, 1, 1, 1, 0])])
def test_masks_by_hand(mask, targets):
    """Eight tokens, the assistant's turn is 3 to 5 (a, EOS, line end): of the seven targets 2 to 4 count; one late where shifted."""
    record = spell(mask, turns("q", "a", "r"), HEADLESS, seq_length=8)
    assert record.ids == [USER, *ids("q"), BOT, *ids("a"), EOS, NEWLINE, USER, *ids("r")]
    assert [int(c) for c in record.counted[1:]] == targets


def test_every_assistant_turn_counts_and_users_may_differ(tmp_path):
    path = write(tmp_path, {"chosen": turns("q", "a", "r", "b"), "rejected": turns("q", "c", "other", "d")})
    rollout, pairs = stream(path, answer_mask="dialogue").batch(1)
    (chosen, counted), (rejected, counted_too) = sides(rollout)
    assert chosen == [BOS, USER, *ids("q"), BOT, *ids("a"), EOS, NEWLINE, USER, *ids("r"), BOT, *ids("b"), EOS, NEWLINE]
    assert [i for i, c in enumerate(counted) if c] == [4, 5, 6, 10, 11, 12]
    assert [i for i, c in enumerate(counted_too) if c] == [4, 5, 6, 14, 15, 16]
    assert rollout.prompt_ids.tolist() == [[BOS, USER, *ids("q"), BOT]]
    assert rollout.counted_lengths().tolist() == [[6, 6]] and rollout.lengths().tolist() == [[9, 13]]
    assert pairs.keep.all() and rollout.finished.all()


def test_what_comes_before_the_first_answer_is_the_prompt(tmp_path):
    """Two dialogues whose first user turns differ share no more than the beginning; what differs is read and does not count."""
    path = write(tmp_path, {"chosen": turns("ab", "x"), "rejected": turns("ac", "x")})
    rollout, _ = stream(path, answer_mask="dialogue").batch(1)
    assert rollout.prompt_ids.tolist() == [[BOS, USER, *ids("a")]]
    assert rollout.counted[0, 0].tolist() == [False, False, True, True, True]


def test_dialogues_without_a_common_token_are_an_error(tmp_path):
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    with pytest.raises(DataError, match=r"pairs\.jsonl:1: chosen and rejected have no first token in common"):
        stream(write(tmp_path, {"chosen": turns("a", "x"), "rejected": turns("b", "x")}), template=template, answer_mask="dialogue")


def test_a_dialogue_that_the_template_leaves_open_gets_one_eos():
    record = spell("dialogue", turns("q", "a", "r", "b"), OPEN)
    assert record.ids[-3:] == [BOT, *ids("b"), EOS] and record.ids.count(EOS) == 1
    assert record.finished and record.counted[-2:] == [True, True]
    assert not spell("dialogue_shifted", turns("q", "a"), OPEN).finished


def test_a_shifted_mask_reaches_one_token_into_the_padding():
    """Padded to seq_length, the old data set also asked for the token behind the last line end; a full row has none."""
    long, full = spell("dialogue_shifted", turns("q", "a")), spell("dialogue_shifted", turns("q", "a"), seq_length=7)
    assert long.ids == [*full.ids, EOS]  # pad == eos here
    assert long.counted == [False] * 5 + [True] * 3 and full.counted == [False] * 5 + [True] * 2


def test_a_template_that_rewrites_former_turns_is_an_error():
    """Only the last answer is written out: no beginning of the dialogue is a beginning of its text."""
    forgetful = (
        "<s>{% for m in messages %}{% if loop.last or m.role == 'user' %}{{ m.content }}|{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<bot>{% endif %}"
    )
    with pytest.raises(DataError, match=r"x:1: the chat template writes the whole dialogue otherwise .* turn 2 \(they part at character 5"):
        spell("dialogue", turns("q", "a", "r", "b"), forgetful)


# --- which rows -----------------------------------------------------------------------------------------------------


def check_both_sides_are_measured(path: Path) -> None:
    data = stream(path, seq_length=16)
    assert len(data) == 1 and data.usable == (1,)
    assert "1 of 2 rows left out: chosen or rejected is longer than seq_length 16 (the longest has 25 tokens)" in data.notices[0]


@pytest.fixture
def one_long(tmp_path) -> Path:
    """4 tokens of prompt and an EOS: 'a' makes 6, twenty letters 25; only the rejected answer of row 0 is long."""
    return write(tmp_path, {"prompt": "q", "chosen": "a", "rejected": "b" * 20}, {"prompt": "q", "chosen": "a", "rejected": "b" * 11})


def test_a_row_with_one_long_side_is_left_out_and_counted(one_long):
    check_both_sides_are_measured(one_long)


def test_no_row_fits(one_long):
    with pytest.raises(DataError, match="none of 2 rows fits: the longer dialogue of the shortest has 16 tokens, seq_length is 15; raise"):
        stream(one_long, seq_length=15)


def test_rows_that_train_nothing_are_counted(tmp_path):
    path = write(
        tmp_path,
        {"prompt": "q", "chosen": "a", "rejected": "a"},
        {"prompt": "q", "chosen": "a", "rejected": " "},
        {"prompt": "q", "chosen": "a", "rejected": "b"},
    )
    data = stream(path, batch=3, shuffle=False)
    _, pairs = data.batch(1)
    assert pairs.reason.tolist() == [[IDENTICAL], [EMPTY], [KEPT]] and pairs.keep.tolist() == [[False], [False], [True]]
    assert [note.partition(": ")[2] for note in data.notices] == [
        "1 of 3 rows train nothing: an empty answer",
        "1 of 3 rows train nothing: two identical answers",
    ]


def test_a_file_that_cannot_train_is_an_error(tmp_path):
    with pytest.raises(DataError, match="no row can train: .*1 of 1 rows train nothing: two identical answers; give rows"):
        stream(write(tmp_path, {"prompt": "q", "chosen": "a", "rejected": "a"}))


@pytest.fixture
def seven(tmp_path) -> Path:
    return write(tmp_path, *({"prompt": str(i), "chosen": "a", "rejected": "b"} for i in range(7)))


def test_the_order_is_that_of_prompts_and_has_no_state(seven):
    """A resumed run asks a fresh object for iteration 9 first."""
    data = stream(seven, batch=3, seed=5)
    prompts = Prompts(DataConfig(seven), byte_tokenizer(CLOSED), 64, 3, 5)
    walked = [data.batch(step)[0].prompt_index.tolist() for step in range(1, 10)]
    assert walked == [prompts.batch(step).index.tolist() for step in range(1, 10)]
    assert stream(seven, batch=3, seed=5).batch(9)[0].prompt_index.tolist() == walked[8]


def test_epochs(seven):
    """7 rows, 3 an iteration: iteration 3 begins in the first epoch with row 6, iteration 4 in the second."""
    data = stream(seven, batch=3)
    assert [data.epoch_index(step) for step in range(1, 7)] == [0, 0, 0, 1, 1, 2]
    assert data.epoch(7) == pytest.approx(3.0)


def test_the_digest_sees_tokens_and_masks(seven, tmp_path):
    base = stream(seven).digest()
    assert stream(seven, seed=3, batch=2).digest() == base  # order is no content
    assert stream(seven, answer_mask="dialogue").digest() != base
    assert stream(seven, system_prompt="s").digest() != base


# --- MiniMind's vectors ---------------------------------------------------------------------------------------------

MINIMIND = Path(__file__).parents[2] / ".." / "shared" / "data" / "minimind"
VECTORS = {
    "dpo_data": [[(79, 24, 25), (73, 19, 20)], [(89, 31, 32), (87, 29, 30)]],
    "tiny_dpo": [[(64, 21, 22), (47, 4, 5)], [(72, 27, 28), (56, 11, 12)]],
}
"""Of each row, chosen and rejected: tokens, targets of the old mask within them, targets of the right one."""


@pytest.mark.skipif(not MINIMIND.is_dir(), reason=f"no MiniMind tokenizer and data in {MINIMIND}")
@pytest.mark.parametrize("name", VECTORS)
def test_minimind_vectors(name):
    """The old mask has one more target behind the row's end, in the padding."""
    tokenizer = AutoTokenizer.from_pretrained(MINIMIND / "tok")
    found = {}
    for mask in ("dialogue", "dialogue_shifted"):
        data = Preferences(DataConfig(MINIMIND / f"{name}.jsonl", answer_mask=mask, shuffle=False), tokenizer, (2,), 512, 2, 0)
        found[mask] = [sides(data.batch(1)[0], row) for row in range(2)]
    for row, wanted in enumerate(VECTORS[name]):
        for k, (length, old, right) in enumerate(wanted):
            read, counted = found["dialogue"][row][k]
            assert (len(read), sum(counted)) == (length, right)
            read, counted = found["dialogue_shifted"][row][k]
            assert (len(read), sum(counted[:length]), sum(counted)) == (length + 1, old, old + 1)
            assert read[length] == tokenizer.pad_token_id


# --- mutants --------------------------------------------------------------------------------------------------------


def _double_eos(monkeypatch):
    monkeypatch.setattr(Speller, "_without_eos", lambda self, turn: turn)
    monkeypatch.setattr(Speller, "_end", lambda self, ids, turn, where: len(ids))


def _prompt_of_two_turns(monkeypatch):
    right = Speller.spell
    monkeypatch.setattr(Speller, "spell", lambda self, dialogue, where: right(self, dialogue[:2], where))


def _common_text_is_prompt(monkeypatch):
    class Greedy(list):
        def index(self, value):  # as if the first counted token did not bound the prompt
            return len(self)

    right = Speller.spell

    def spell(self, dialogue, where):
        record = right(self, dialogue, where)
        return module.Recorded(record.ids, Greedy(record.counted), record.finished)

    monkeypatch.setattr(Speller, "spell", spell)


def _length_of_chosen_twice(monkeypatch):
    right = module._row

    def row(record, speller):
        made = right(record, speller)
        return module._Row(made.prompt, made.answers, made.counted, made.finished, made.reason, len(made.prompt) + len(made.answers[0]))

    monkeypatch.setattr(module, "_row", row)


@pytest.mark.parametrize(
    ("mutant", "check"),
    [
        (_double_eos, lambda folder, path: test_an_answer_ends_with_exactly_one_eos(folder, CLOSED, "</s>")),
        (_prompt_of_two_turns, lambda folder, path: test_the_prompt_of_three_turns_is_all_before_the_last(folder)),
        (_common_text_is_prompt, lambda folder, path: test_the_prompt_of_three_turns_is_all_before_the_last(folder)),
        (_length_of_chosen_twice, lambda folder, path: check_both_sides_are_measured(path)),
    ],
)
def test_mutant_is_caught(mutant, check, monkeypatch, tmp_path, one_long):
    """Two EOS; a dialogue taken for its first two turns; a prompt that swallows what the answers have in common; a length filter
    that looks at chosen twice."""
    (tmp_path / "other").mkdir()
    check(tmp_path / "other", one_long)
    mutant(monkeypatch)
    with pytest.raises((AssertionError, DataError)):
        check(tmp_path / "other", one_long)


def test_mutant_mask_off_by_one_is_caught():
    """What the option dialogue_shifted reproduces on purpose must not be what dialogue does."""
    with pytest.raises(AssertionError):
        record = spell("dialogue_shifted", turns("q", "a", "r"), HEADLESS, seq_length=8)
        assert [int(c) for c in record.counted[1:]] == [0, 0, 1, 1, 1, 0, 0]
