"""The launcher: overrides, config folders, exit codes, one-line errors, and nothing heavy imported before it is needed."""

from __future__ import annotations

import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path

import pytest

from mindspeed_odpo import cli
from mindspeed_odpo.config import Config
from mindspeed_odpo.errors import ConfigError, WorkerError
from mindspeed_odpo.launch import compose, main

ROOT = Path(__file__).parents[2]
ACTOR = "actor_rollout_ref.actor_rollout"


@pytest.fixture
def given(tmp_path: Path) -> list[str]:
    """Arguments that make the packaged tiny config complete: a folder, prompts and a reward."""
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "config.json").write_text("{}")
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "hello"}\n')
    folder = tmp_path / "hf"
    loads = [f"{ACTOR}.load={folder}", f"actor_rollout_ref.ref.load={folder}", f"training.tokenizer_name_or_path={folder}"]
    return [
        "--config-name",
        "online_dpo_tiny",
        f"{ACTOR}.data_path={tmp_path}/prompts.jsonl",
        *loads,
        f"training.run_dir={tmp_path}/run",
        "reward.functions=r.py:length",
    ]


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Config]:
    """Configs that reached ``train.run``, which does nothing else here."""
    configs: list[Config] = []
    fake_train(monkeypatch, configs.append)
    return configs


def fake_train(monkeypatch: pytest.MonkeyPatch, run: Callable[[Config], None]) -> None:
    module = types.ModuleType("mindspeed_odpo.train")
    module.run = run  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "mindspeed_odpo.train", module)


def test_overrides_reach_the_run(given: list[str], started: list[Config], capsys: pytest.CaptureFixture[str]) -> None:
    """Keys that the YAML holds and keys that it does not hold are set alike, without ``+``; the plan is printed first."""
    assert main([*given, "training.train_iters=2", f"{ACTOR}.top_p=0.9", f"{ACTOR}.dpo_loss_type=ipo", "+training.timeout_minutes=1"]) == 0
    (config,) = started
    assert (config.train_iters, config.rollout.top_p, config.actor.loss.loss_type, config.timeout_minutes) == (2, 0.9, "ipo", 1.0)
    out = capsys.readouterr().out
    assert "micro_batch_size: 2 pairs = 4 sequences" in out and "top_p 0.9" in out


def test_check_starts_nothing(given: list[str], started: list[Config], capsys: pytest.CaptureFixture[str]) -> None:
    """``odpo check`` prints the plan and the notices only."""
    assert cli.main(["check", *given, f"{ACTOR}.clip_ratio=0.2"]) == 0
    assert started == []
    assert capsys.readouterr().out.startswith(f"ignored, no meaning in DPO: {ACTOR}.clip_ratio\nmodel        tiny: 2 layers")


def test_the_plan_says_each_role_s_layout(given: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Four shared ranks: the policy cut twice, the reference like it, the rollout with a layout of its own."""
    sizes = [f"{ACTOR}.{name}_model_parallel_size=2" for name in ("tensor", "pipeline", "inference_tensor")]
    ranks = [f"{ACTOR}.num_gpus_for_train=4", *(f"resource_pool.{name}=[4]" for name in ("actor_rollout", "ref", "reward"))]
    assert cli.main(["check", *given, *sizes, *ranks]) == 0
    out = capsys.readouterr().out
    assert "placement    colocate: actor, rollout, reference and reward take turns on ranks 0-3\n" in out
    assert (
        "layout       policy: TP 2 x PP 2 x DP 1 = 4 ranks\n"
        "             rollout: TP 2 x DP 2 = 4 ranks\n"
        "             reference: TP 2 x PP 2 x DP 1 = 4 ranks\n"
        "             reward: TP 1 x DP 4 = 4 ranks\n"
    ) in out
    assert cli.main(["check", *given, *sizes, *ranks[:-1], "resource_pool.reward=[2]"]) == 1
    assert "resource_pool.reward: 2 ranks" in capsys.readouterr().err


def test_odpo_train_is_the_same(given: list[str], started: list[Config]) -> None:
    assert cli.main(["train", *given, "training.seed=5"]) == 0
    assert started[0].seed == 5


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("training.trainiters=5", "unknown key 'training.trainiters'; did you mean 'training.train_iters'?"),
        ("dpo.betta=0.2", f"unknown key 'dpo.betta'; did you mean '{ACTOR}.dpo_beta'?"),
        ("+training.seed=1", "An item is already at 'training.seed'"),
        ("~training.sed", "'training.sed' does not exist"),
        ("training.seed=1,2", "Ambiguous value"),
        ("training.seed=[1", "no viable alternative"),
        ("training.run_name=${nothing}", "Interpolation key 'nothing' not found"),
        ("training.train_iters=???", "Missing mandatory value: train_iters"),
        ("model=tinyy", "Could not find 'model/tinyy'"),
        ("seed", "override 'seed': expected key=value"),
    ],
)
def test_wrong_overrides(given: list[str], started: list[Config], capsys: pytest.CaptureFixture[str], override: str, words: str) -> None:
    """One line on stderr, exit code 1, and the run does not start."""
    assert main([*given, override]) == 1
    err = capsys.readouterr().err
    assert err.startswith("error: ") and words in err and err.count("\n") == 1
    assert started == []


def test_unknown_config_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--config-name", "online_dpo_tinny"]) == 1
    err = capsys.readouterr().err
    assert "no config 'online_dpo_tinny'" in err and "did you mean 'online_dpo_tiny'?" in err


def test_config_dir(tmp_path: Path, given: list[str], started: list[Config], capsys: pytest.CaptureFixture[str]) -> None:
    """A folder of one's own: its configs win and may use packaged model files, and its own model files before those."""
    (tmp_path / "my" / "model").mkdir(parents=True)
    text = (ROOT / "configs" / "rlxf" / "online_dpo_tiny.yaml").read_text()
    (tmp_path / "my" / "mine.yaml").write_text(text.replace("train_iters: 3", "train_iters: 7"))
    assert main([*given, "--config-dir", str(tmp_path / "my"), "--config-name", "mine"]) == 0
    assert (started[0].train_iters, started[0].actor.model.name) == (7, "tiny")
    assert main([*given, "--config-dir", str(tmp_path / "my")]) == 0  # a packaged config, with the folder given
    assert started[1].train_iters == 3
    model = (ROOT / "configs" / "rlxf" / "model" / "tiny.yaml").read_text().replace("num_layers: 2", "num_layers: 1")
    (tmp_path / "my" / "model" / "tiny.yaml").write_text(model)
    assert main([*given, f"--config-dir={tmp_path / 'my'}", "--config-name=mine.yaml"]) == 0
    assert started[2].actor.model.num_layers == 1
    assert main([*given, "--config-dir", str(tmp_path / "none")]) == 1
    assert f"no folder at {tmp_path / 'none'}" in capsys.readouterr().err


def test_broken_yaml(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "broken.yaml").write_text("training: [1\n")
    assert main(["--config-dir", str(tmp_path), "--config-name", "broken"]) == 1
    err = capsys.readouterr().err
    assert "broken.yaml" in err and "line 2" in err and err.count("\n") == 1


def test_cfg_job_prints_the_composed_yaml(given: list[str], started: list[Config], capsys: pytest.CaptureFixture[str]) -> None:
    """What is printed is a YAML with model, overrides and all, and can be composed again."""
    from omegaconf import OmegaConf

    assert main([*given, "--cfg", "job", "training.seed=9"]) == 0
    printed = OmegaConf.to_container(OmegaConf.create(capsys.readouterr().out))
    assert printed == compose("online_dpo_tiny", [*given[2:], "training.seed=9"]) and started == []
    assert isinstance(printed, dict) and printed["training"]["seed"] == 9 and printed["model"]["tiny"]["num_layers"] == 2


def test_exit_codes_of_the_run(given: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A told error is one line and 1, Ctrl-C one line and 130, a bug keeps its traceback."""

    def fails(error: BaseException) -> Callable[[Config], None]:
        def run(config: Config) -> None:
            raise error

        return run

    fake_train(monkeypatch, fails(WorkerError("the reward returned 3 scores for 4 answers")))
    assert main(given) == 1
    assert capsys.readouterr().err == "error: the reward returned 3 scores for 4 answers\n"
    fake_train(monkeypatch, fails(KeyboardInterrupt()))
    assert main(given) == 130
    assert capsys.readouterr().err == "interrupted\n"
    fake_train(monkeypatch, fails(ZeroDivisionError("a bug")))
    with pytest.raises(ZeroDivisionError):
        main(given)


def test_compose_can_be_called_twice() -> None:
    """Hydra's global state does not stay behind, not even after an error."""
    with pytest.raises(ConfigError):
        compose("online_dpo_tiny", ["training.seed=[1"])
    assert compose("online_dpo_tiny", ["training.seed=4"])["training"]["seed"] == 4


def run_python(*arguments: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], cwd=cwd, capture_output=True, text=True, timeout=120)


def test_ray_gpt_in_a_process_of_its_own(tmp_path: Path) -> None:
    """The launcher users type, from another folder: a missing model is one line and exit code 1, no warning above it."""
    done = run_python(str(ROOT / "ray_gpt.py"), "--config-name", "online_dpo_tiny", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (1, "")
    cure = "give a Hugging Face folder (config.json, safetensors, tokenizer)"
    assert done.stderr == f"error: {ACTOR}.load: no model folder at {tmp_path}/models/tiny: {cure}\n"


@pytest.mark.parametrize(
    "arguments", [["--help"], ["train", "--help"], ["check", "training.sed=1"], ["convert", "--help"], ["check", "--keys"]]
)
def test_nothing_heavy_is_imported_early(arguments: list[str]) -> None:
    """Help and config errors must come at once: neither torch nor megatron, Ray or transformers is imported for them."""
    code = (
        "import sys\nfrom mindspeed_odpo.cli import main\n"
        f"try:\n    main({arguments!r})\nexcept SystemExit:\n    pass\n"
        "heavy = {'torch', 'megatron', 'ray', 'transformers', 'numpy'} & set(sys.modules)\nsys.exit(f'imported {heavy}' if heavy else 0)"
    )
    done = run_python("-c", code)
    assert done.returncode == 0, done.stderr


def test_importing_the_package_imports_nothing_else() -> None:
    code = "import sys\nbefore = set(sys.modules)\nimport mindspeed_odpo\nprint(sorted(set(sys.modules) - before - {'__future__'}))"
    assert run_python("-c", code).stdout == "['mindspeed_odpo']\n"
