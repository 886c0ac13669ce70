"""Prompt files and the prompt stream."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from byte_tokenizer import BOS, EOS, TEMPLATE, byte_tokenizer, ids, save_tokenizer

from mindspeed_odpo.config import DataConfig
from mindspeed_odpo.data.formats import read_rows
from mindspeed_odpo.data.prompts import Prompts, decode_answers, encode_plain, load_tokenizer
from mindspeed_odpo.errors import DataError
from mindspeed_odpo.train import begin_data
from mindspeed_odpo.types import Rollout

USER, BOT, SYS = 3, 4, 5


def write(folder: Path, *rows: object) -> Path:
    path = folder / "prompts.jsonl"
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return path


def stream(path: Path, batch: int = 2, longest: int = 64, seed: int = 0, template: str | None = TEMPLATE, **config) -> Prompts:
    return Prompts(DataConfig(path=path, **config), byte_tokenizer(template), longest, batch, seed)


# --- the file -------------------------------------------------------------------------------------------------------


def test_bom_crlf_blank_lines_and_emoji(tmp_path):
    """The same records as from a plain file; a variation selector and a line separator inside text survive (U+2028 is
    where str.splitlines would cut)."""
    text = "caf\u00e9 \u2764\ufe0f\u2028\U0001f468\u200d\U0001f469"
    rows = [{"prompt": text, "topic": None}, {"prompt": "b", "n": 3}]
    lines = [json.dumps(row, ensure_ascii=False).encode() for row in rows]
    path = tmp_path / "odd.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + lines[0] + b"\r\n\r\n  \r\n" + lines[1])
    assert read_rows(path, "prompt") == rows
    assert read_rows(path, "prompt")[0]["prompt"].encode() == text.encode()


def test_messages_keep_their_extra_keys(tmp_path):
    row = {"prompt": [{"role": "user", "content": "hi", "name": "a"}], "topic": "x"}
    assert read_rows(write(tmp_path, row), "prompt") == [row]


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"prompt": None}, ":2:prompt: expected text or a list of {role, content} messages, found null"),
        ({"prompt": 7}, ":2:prompt: expected text or a list of {role, content} messages, found a number (7)"),
        ({"prompt": []}, ":2:prompt: expected text or a list of {role, content} messages, found an empty list"),
        ({"prompt": ""}, ":2:prompt: expected text, found an empty string"),
        ({"prompt": " \n"}, ":2:prompt: expected text, found white space only"),
        ({"prompt": ["hi"]}, ":2:prompt[0]: expected a {role, content} message, found a string 'hi'"),
        ({"prompt": [{"role": "user"}]}, ":2:prompt[0].content: expected text, found null"),
        ({"prompt": [{"role": "user", "content": ""}]}, ":2:prompt[0].content: expected text, found an empty string"),
        (
            {"prompt": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]},
            ":2:prompt[1].role: the prompt ends with an answer (role 'assistant'); end it with the user's turn",
        ),
        ({"promt": "x"}, ":2:prompt: no such column; columns there: promt; did you mean 'promt'?; set prompt_key"),
        (["x"], ":2: expected a JSON object, found a list"),
        (None, ":2: expected a JSON object, found null"),
    ],
)
def test_a_bad_row_is_named(tmp_path, row, said):
    with pytest.raises(DataError) as error:
        read_rows(write(tmp_path, {"prompt": "fine"}, row), "prompt")
    assert f"prompts.jsonl{said}" in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "0 rows"),
        (b"\n \n", "0 rows"),
        (b'{"prompt": "a"} {"prompt": "b"}', "x.jsonl:1: not JSON, Extra data at column 17"),
        (b'{"prompt": "a"}\n{"prompt": "\xff"}', "x.jsonl:2: byte 13 of the line is not UTF-8"),
        (b'{"prompt": "a\\ud83d"}', "x.jsonl:1:prompt: half of a surrogate pair at character 2"),
    ],
)
def test_a_bad_file_is_named(tmp_path, content, said):
    (tmp_path / "x.jsonl").write_bytes(content)
    with pytest.raises(DataError) as error:
        read_rows(tmp_path / "x.jsonl", "prompt")
    assert said in str(error.value)


def test_a_missing_file_names_the_near_one(tmp_path):
    write(tmp_path, {"prompt": "x"})
    with pytest.raises(DataError, match=r"no such file.*did you mean 'prompts\.jsonl'"):
        read_rows(tmp_path / "prompt.jsonl", "prompt")


# --- rendering ------------------------------------------------------------------------------------------------------


def test_the_template_writes_the_only_bos(tmp_path):
    """Encoding the rendered text with special tokens would give BOS twice."""
    batch = stream(write(tmp_path, {"prompt": "hi"}), batch=1).batch(1)
    assert batch.ids.tolist() == [[BOS, USER, *ids("hi"), BOT]]


def test_without_template_text_gets_one_bos(tmp_path):
    path = write(tmp_path, {"prompt": "hi"}, {"prompt": "<s>hi"})
    batch = stream(path, template=None, shuffle=False).batch(1)
    assert batch.ids.tolist() == [[BOS, *ids("hi")]] * 2


def test_without_template_no_eos_stands_before_the_answer():
    assert encode_plain(byte_tokenizer(None, add_eos=True), "hi") == [BOS, *ids("hi")]


def test_without_template_turns_are_an_error(tmp_path):
    with pytest.raises(DataError, match="row 0 .* has 2 turns and the tokenizer no chat template"):
        stream(write(tmp_path, {"prompt": "hi"}), template=None, system_prompt="be kind")


def test_system_prompt_goes_first_unless_there_is_one(tmp_path):
    own = [{"role": "system", "content": "own"}, {"role": "user", "content": "b"}]
    prompts = stream(write(tmp_path, {"prompt": "a"}, {"prompt": own}), shuffle=False, system_prompt="sys")
    assert prompts.batch(1).ids.tolist() == [[BOS, SYS, *ids("sys"), USER, *ids("a"), BOT], [BOS, SYS, *ids("own"), USER, *ids("b"), BOT]]
    assert prompts.rows[1]["prompt"] == own


def test_a_role_that_the_template_refuses(tmp_path):
    with pytest.raises(DataError, match=r"row 0 .*refuses the turns \[critic\]: unknown role critic"):
        stream(write(tmp_path, {"prompt": [{"role": "critic", "content": "x"}]}))


def test_prompts_are_left_padded_with_a_mask(tmp_path):
    batch = stream(write(tmp_path, {"prompt": "abc"}, {"prompt": "d"}), shuffle=False).batch(1)
    assert batch.mask.tolist() == [[True] * 6, [False, False, True, True, True, True]]
    assert batch.ids[1, 2:].tolist() == [BOS, USER, *ids("d"), BOT]


def test_a_prompts_own_eos_stays_visible(tmp_path):
    """pad == eos here: a mask drawn from ``!= pad`` would hide the prompt's own </s>."""
    prompt = [{"role": "user", "content": "a</s>b"}]
    batch = stream(write(tmp_path, {"prompt": prompt}), batch=1).batch(1)
    assert EOS in batch.ids[0].tolist() and batch.mask.all()


def test_long_prompts_are_left_out_and_counted(tmp_path):
    """3 special tokens and the text: 'a' has 4 tokens, 'abcdef' 9."""
    prompts = stream(write(tmp_path, {"prompt": "abcdef"}, {"prompt": "a"}, {"prompt": "b"}), longest=8)
    assert len(prompts) == 2
    assert "1 of 3 prompts left out: longer than max_prompt_length 8 (the longest has 9 tokens)" in prompts.notices[0]
    assert {i for step in range(1, 5) for i in prompts.batch(step).index.tolist()} == {1, 2}


def test_a_prompt_of_exactly_the_limit_fits(tmp_path):
    prompts = stream(write(tmp_path, {"prompt": "abcdef"}), longest=9)
    assert len(prompts) == 1 and prompts.notices == ()


def test_no_prompt_fits(tmp_path):
    with pytest.raises(DataError, match="none of 2 prompts fits: the shortest has 4 tokens .*, max_prompt_length is 3; raise"):
        stream(write(tmp_path, {"prompt": "a"}, {"prompt": "bb"}), longest=3)


# --- the order ------------------------------------------------------------------------------------------------------


@pytest.fixture
def seven(tmp_path) -> Path:
    return write(tmp_path, *({"prompt": str(i), "n": i} for i in range(7)))


def test_an_epoch_visits_every_row_once(seven):
    prompts = stream(seven, batch=3)
    order = [i for step in range(1, 8) for i in prompts.batch(step).index.tolist()]
    epochs = [order[0:7], order[7:14], order[14:21]]
    assert all(sorted(epoch) == list(range(7)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3


def test_a_batch_depends_on_seed_and_step_alone(seven):
    """What a resumed run sees: iteration 9 first, in a fresh object."""
    used = stream(seven, batch=3, seed=5)
    walked = [used.batch(step).index.tolist() for step in range(1, 10)]
    assert stream(seven, batch=3, seed=5).batch(9).index.tolist() == walked[8]
    assert used.batch(2).index.tolist() == walked[1]
    assert [stream(seven, batch=3, seed=6).batch(step).index.tolist() for step in range(1, 10)] != walked


def test_file_order_without_shuffle_goes_over_the_end(seven):
    prompts = stream(seven, batch=3, shuffle=False)
    assert [prompts.batch(step).index.tolist() for step in (1, 2, 3, 4)] == [[0, 1, 2], [3, 4, 5], [6, 0, 1], [2, 3, 4]]
    batch = prompts.batch(3)
    assert [row["n"] for row in batch.rows] == [6, 0, 1] and batch.slot.tolist() == [0, 1, 2] and batch.step == 3
    assert prompts.epoch(7) == pytest.approx(3.0)


def test_a_batch_may_be_larger_than_the_data(seven):
    prompts = stream(seven, batch=10, shuffle=False)
    assert prompts.batch(2).index.tolist() == [3, 4, 5, 6, 0, 1, 2, 3, 4, 5]


def test_data_that_came_in_later_starts_at_its_first_row(seven, capsys):
    """Iteration 4 of a run that goes on from iteration 3 with another file takes what iteration 1 took of it; told once."""
    fresh, later = stream(seven, batch=2), stream(seven, batch=2)
    begin_data(later, began=3, first=3)
    assert "the data is not what iterations up to 3 were trained on: it starts at its first row" in capsys.readouterr().out
    for step in range(1, 9):
        assert later.batch(step + 3).index.tolist() == fresh.batch(step).index.tolist()
        assert (later.epoch(step + 3), later.epoch_index(step + 3)) == (fresh.epoch(step), fresh.epoch_index(step))
    with pytest.raises(ValueError, match="iterations of this data count from 4, got 3"):
        later.batch(3)
    begin_data(later, began=3, first=5)
    begin_data(fresh, began=0, first=0)
    assert capsys.readouterr().out == ""


def test_columns_and_first_step(seven):
    prompts = stream(seven)
    assert prompts.columns == ("prompt", "n")
    with pytest.raises(ValueError, match="from 1, got 0"):
        prompts.batch(0)


# --- tokenizer folders, answers -------------------------------------------------------------------------------------


def test_load_tokenizer(tmp_path):
    folder = save_tokenizer(tmp_path / "tok")
    assert load_tokenizer(folder).encode("hi", add_special_tokens=False) == ids("hi")
    with pytest.raises(DataError, match="tokenizer folder .*gone does not exist"):
        load_tokenizer(tmp_path / "gone")
    (tmp_path / "bare").mkdir()
    with pytest.raises(DataError, match="has no tokenizer: none of tokenizer.json"):
        load_tokenizer(tmp_path / "bare")


def test_answers_lose_special_tokens_and_padding():
    """One finished, one cut answer; ids keep the EOS. Padding is 0, which would decode to <unk>."""
    rows = torch.tensor([[[*ids("hi"), EOS, 0], ids("abcd")]])
    mask = torch.tensor([[[True, True, True, False], [True] * 4]])
    one = torch.ones(1, 1, dtype=torch.int64)
    rollout = Rollout(one, one.bool(), rows, mask, torch.tensor([[True, False]]), torch.tensor([0]), 0).check()
    texts, answer_ids = decode_answers(byte_tokenizer(), rollout)
    assert texts == [["hi", "abcd"]]
    assert answer_ids == [[[*ids("hi"), EOS], ids("abcd")]]
    plain = ids("!")[0]  # a model may end on a token that its tokenizer does not call special
    ended = replace(rollout, response_ids=torch.where(rows == EOS, plain, rows))
    assert decode_answers(byte_tokenizer(), ended)[0] == [["hi", "abcd"]]
