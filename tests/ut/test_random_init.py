"""``odpo convert random``: a Hugging Face folder of random weights from a model yaml and a tokenizer."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from byte_tokenizer import EOS, byte_tokenizer, save_tokenizer
from safetensors.torch import load_file

from mindspeed_odpo.cli import main
from mindspeed_odpo.errors import ConfigError
from mindspeed_odpo.hf.config import check_model_config, eos_token_ids
from mindspeed_odpo.hf.random_init import read_model

torch.set_num_threads(1)
MINIMIND_TOKENIZER = Path(__file__).parents[2] / "../shared/data/minimind/tok"
MINE = {
    "num_layers": 2,
    "hidden_size": 48,
    "ffn_hidden_size": 64,
    "num_attention_heads": 4,
    "group_query_attention": True,
    "num_query_groups": 2,
    "vocab_size": 300,
    "padded_vocab_size": 320,
    "max_position_embeddings": 128,
}


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    return save_tokenizer(tmp_path / "tokenizer")


def _random(out: Path, tokenizer: Path, *more: str, model: str = "tiny") -> int:
    return main(["convert", "random", "--model", model, "--tokenizer", str(tokenizer), "--out", str(out), *more])


def _own_model(folder: Path, text: str | None = None, **changes: Any) -> Path:
    """A config folder with ``model/mine.yaml``."""
    (folder / "model").mkdir(parents=True)
    (folder / "model" / "mine.yaml").write_text(json.dumps({"mine": {**MINE, **changes}}) if text is None else text)
    return folder


def test_folder_opens_in_transformers_with_its_tokenizer(tokenizer: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The model generates, the tokenizer and its template are the source's, an answer ends with its EOS, nothing else is left."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    out = tmp_path / "out"
    assert _random(out, tokenizer) == 0
    assert re.search(r"out: written, tiny, [\d,]+ parameters, seed 1234", capsys.readouterr().out)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "tokenizer"]
    check_model_config(out, read_model("tiny"))
    assert eos_token_ids(out) == (EOS,)
    loaded = AutoTokenizer.from_pretrained(out)
    messages = [{"role": "user", "content": "hé"}]
    ids = loaded.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=False)
    assert ids.tolist()[0] == byte_tokenizer().apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    model = AutoModelForCausalLM.from_pretrained(out)
    assert model.dtype == torch.float32 and model.generate(ids, max_new_tokens=3, do_sample=False).shape[1] > ids.shape[1]


def test_weights_follow_the_seed_and_the_stated_std(tokenizer: Path, tmp_path: Path) -> None:
    """Matrices and every row of the embedding (pad's too) have standard deviation 0.02, norms are 1; the torch generator
    of the caller stays where it was."""
    state = torch.get_rng_state()
    for name, seed in (("a", "7"), ("b", "7"), ("c", "8")):
        assert _random(tmp_path / name, tokenizer, "--seed", seed) == 0
    assert torch.equal(torch.get_rng_state(), state)
    a, b, c = (load_file(tmp_path / name / "model.safetensors") for name in "abc")
    assert all(torch.equal(a[name], b[name]) for name in a)
    for name, tensor in a.items():
        if "norm" in name:
            assert tensor.unique().tolist() == [1.0], name
        else:
            assert tensor.std().item() == pytest.approx(0.02, rel=0.1) and not torch.equal(tensor, c[name]), name
    assert a["model.embed_tokens.weight"].std(1).min() > 0.01


@pytest.mark.parametrize(
    ("changes", "kind"),
    [
        ({"untie_embeddings_and_output_weights": True, "kv_channels": 16}, "llama"),
        ({"add_qkv_bias": True, "rotary_base": 1e6}, "qwen2"),
        ({"rotary_interleaved": True}, "llama"),
        (
            {
                "rope_scaling_type": "llama3",
                "rope_scaling_factor": 8.0,
                "original_max_position_embeddings": 64,
                "high_freq_factor": 3.0,
            },
            "llama",
        ),
    ],
)
def test_models_of_ones_own(changes: dict[str, Any], kind: str, tokenizer: Path, tmp_path: Path) -> None:
    """``DIR/model/mine.yaml``: wide heads and an own head, Qwen2 with biases of 0, both rope layouts, Llama 3 rope. The folder
    has the true vocabulary, not the padded one, and transformers opens it with every weight in place."""
    from transformers import AutoModelForCausalLM

    folder, out = _own_model(tmp_path / "configs", **changes), tmp_path / "out"
    assert _random(out, tokenizer, "--config-dir", str(folder), model="mine") == 0
    check_model_config(out, read_model("mine", folder))
    raw = json.loads((out / "config.json").read_text())
    assert raw["model_type"] == kind and raw["vocab_size"] == 300
    weights, (model, report) = load_file(out / "model.safetensors"), AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    state = model.state_dict()
    assert all(torch.equal(state[name], tensor) for name, tensor in weights.items())
    assert ("lm_head.weight" in weights) == ("untie_embeddings_and_output_weights" in changes)
    assert all(not tensor.any() for name, tensor in weights.items() if name.endswith("bias"))


def test_ones_own_model_wins(tmp_path: Path) -> None:
    """``DIR/model/tiny.yaml`` stands before the packaged one; the others of the package are still there."""
    folder = _own_model(tmp_path)
    (folder / "model" / "tiny.yaml").write_text(json.dumps({"tiny": MINE}))
    assert read_model("tiny", folder).hidden_size == 48 and read_model("tiny").hidden_size == 32
    assert read_model("minimind-26m", folder).num_layers == 8


def _fails(capsys: pytest.CaptureFixture[str], *args: Any, **kw: Any) -> str:
    assert _random(*args, **kw) == 1
    text = capsys.readouterr().err
    assert text.startswith("error: ") and text.count("\n") == 1
    return text


def test_errors_are_told_in_one_line(tokenizer: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, mine = tmp_path / "out", _own_model(tmp_path / "configs")
    text = _fails(capsys, out, tokenizer, model="minimnd-26m")
    assert "no model 'minimnd-26m'" in text and "did you mean 'minimind-26m'?" in text
    assert "no folder at" in _fails(capsys, out, tokenizer, "--config-dir", str(tmp_path))
    small = _own_model(tmp_path / "small", vocab_size=265)
    text = _fails(capsys, out, tokenizer, "--config-dir", str(small), model="mine")
    assert "has 266 entries, vocab_size of model mine is 265" in text
    assert "does not exist" in _fails(capsys, out, tmp_path / "nowhere")
    bare = byte_tokenizer()
    bare.eos_token = None
    bare.save_pretrained(tmp_path / "bare")
    assert "has no eos_token" in _fails(capsys, out, tmp_path / "bare")
    assert not out.exists() and sorted(path.name for path in tmp_path.iterdir()) == ["bare", "configs", "small", "tokenizer"]
    out.mkdir()
    assert _random(out, tokenizer) == 0, "an empty folder may be there"
    before = (out / "model.safetensors").stat().st_mtime_ns
    assert "out is not empty" in _fails(capsys, out, tokenizer, "--config-dir", str(mine), model="mine")
    assert (out / "model.safetensors").stat().st_mtime_ns == before


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("mine: [", "mine.yaml: .*expected"),
        ("other: {num_layers: 1}", "expected the keys of the model under 'mine:'"),
        ("mine: {num_layer: 1}", r"unknown key 'model.mine.num_layer'; did you mean 'model.mine.num_layers'"),
        ("mine: {num_layers: 1, hidden_size: 8}", "num_attention_heads is not set"),
    ],
)
def test_broken_model_files(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        read_model("mine", _own_model(tmp_path, text))


def test_help_states_the_std(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["convert", "random", "--help"])
    assert "deviation 0.02" in " ".join(capsys.readouterr().out.split())


def test_minimind_with_its_own_tokenizer(tmp_path: Path) -> None:
    """The notebook's one-layer model: 6,096,384 parameters, EOS 2, a tokenizer as large as the vocabulary."""
    if not MINIMIND_TOKENIZER.is_dir():
        pytest.skip(f"MiniMind's tokenizer is not at {MINIMIND_TOKENIZER}")
    assert _random(tmp_path / "out", MINIMIND_TOKENIZER, model="minimind-1layer") == 0
    weights = load_file(tmp_path / "out" / "model.safetensors")
    assert sum(tensor.numel() for tensor in weights.values()) == 6_096_384 and eos_token_ids(tmp_path / "out") == (2,)
