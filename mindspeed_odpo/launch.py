"""The Hydra entry shared by ``ray_gpt.py`` and ``odpo train``: compose, parse, print the plan, run.

Hydra's own decorator is not used: with it a key that the YAML does not hold could only be set with ``+key=value``, and
its errors run over many lines. Here every plain ``key=value`` may add a key, and the key table says which names are right.
"""

from __future__ import annotations

import argparse
import logging
import sys
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mindspeed_odpo.config import config_root, parse
from mindspeed_odpo.errors import ConfigError, exit_code, nearest
from mindspeed_odpo.plan import describe

DEFAULT_CONFIG = "online_dpo_quickstart_smollm2"

_EPILOG = """\
overrides: key=value sets a key by its full path, ~key removes one, model=NAME picks model files:
  training.train_iters=5 actor_rollout_ref.actor_rollout.lr=2e-5 reward.functions=my_package.rewards:politeness
All keys: docs/configuration.md. To print the plan and start nothing: odpo check."""


def main(argv: Sequence[str] | None = None, *, check_only: bool = False, prog: str | None = None) -> int:
    """Run (or only check) one config. Returns the exit code: 0, 1 for a told error, 130 for Ctrl-C."""
    return exit_code(lambda: _main(sys.argv[1:] if argv is None else argv, check_only, prog))


def _main(argv: Sequence[str], check_only: bool, prog: str | None) -> int:
    parser = argparse.ArgumentParser(
        prog=prog,
        description="Check a config and print its plan." if check_only else "Train a policy by online DPO.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--config-name", "-cn", default=DEFAULT_CONFIG, metavar="NAME", help=f"YAML without suffix (default: {DEFAULT_CONFIG})"
    )
    parser.add_argument(
        "--config-dir",
        "-cd",
        metavar="DIR",
        help="a folder of your own with configs and model files; its configs win over the packaged ones",
    )
    parser.add_argument("--config-path", "-cp", metavar="DIR", help="the same, under Hydra's other name")
    parser.add_argument("--cfg", "-c", choices=("job",), help="print the composed YAML and stop")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="overrides in Hydra's syntax")
    options = parser.parse_intermixed_args(argv)
    name = options.config_name.removesuffix(".yaml").removesuffix(".yml")
    tree = compose(name, options.overrides, options.config_dir or options.config_path)
    if options.cfg:
        from omegaconf import OmegaConf

        print(OmegaConf.to_yaml(OmegaConf.create(dict(tree))), end="")
        return 0
    config = parse(tree, name)
    for line in (*config.notices, describe(config)):
        print(line, flush=True)
    if check_only:
        return 0

    from mindspeed_odpo.train import run  # torch, megatron and Ray come in here, after every check of the config

    run(config)
    return 0


def compose(name: str, overrides: Sequence[str], extra_dir: str | Path | None = None) -> Mapping[str, Any]:
    """The resolved tree of ``NAME.yaml`` with its model files and overrides. Raises ConfigError in one line."""
    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir
    from hydra.core.global_hydra import GlobalHydra
    from hydra.errors import HydraException
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    logging.getLogger("hydra").setLevel(logging.ERROR)
    packaged = (config_root() / "rlxf").absolute()
    folders = [packaged]
    if extra_dir is not None:
        folders.insert(0, Path(extra_dir).expanduser().absolute())
        if not folders[0].is_dir():
            raise ConfigError(f"--config-dir: no folder at {folders[0]}")
    available = sorted({path.stem for folder in folders for path in folder.glob("*.yaml")})
    if name not in available:
        raise ConfigError(
            f"no config '{name}' in {' or '.join(map(str, folders))}{nearest(name, available)} (there are: {', '.join(available)})"
        )
    groups = {path.name for folder in folders for path in folder.iterdir() if path.is_dir()}
    # Hydra wants the main config in its first folder; the other one still offers its model files.
    folders.sort(key=lambda folder: not (folder / f"{name}.yaml").is_file())
    search = [f"hydra.searchpath=['file://{folder}']" for folder in folders[1:]]
    GlobalHydra.instance().clear()
    # A config without _self_ in its defaults, as upstream's all are, is right: its own keys win over the model files'.
    warnings.filterwarnings("ignore", message=".*Defaults list is missing `_self_`", category=UserWarning)
    try:
        with initialize_config_dir(str(folders[0]), version_base="1.3", job_name=name):
            composed = hydra_compose(name, [*search, *_may_add(overrides, groups)])
        tree = OmegaConf.to_container(composed, resolve=True, throw_on_missing=True)
    except (HydraException, OmegaConfBaseException) as error:
        cause = error.__cause__ if isinstance(error.__cause__, (HydraException, OmegaConfBaseException)) else None
        raise ConfigError(f"config '{name}': {_one_line(error, cause)}") from error
    except Exception as error:
        if type(error).__module__.partition(".")[0] != "yaml":
            raise
        raise ConfigError(f"config '{name}': {_one_line(error)}") from error
    if not isinstance(tree, dict):
        raise ConfigError(f"config '{name}': expected sections with keys, got a {type(tree).__name__}")
    return {str(key): value for key, value in tree.items()}


def _may_add(overrides: Sequence[str], groups: set[str]) -> list[str]:
    """``a.b=1`` -> ``++a.b=1``: set or add; the parser judges the name. Config groups and Hydra's own keys stay as they are."""
    out = []
    for text in overrides:
        key, equals, _ = text.partition("=")
        if (not equals and not text.startswith("~")) or not key.strip("+~ "):
            raise ConfigError(f"override '{text}': expected key=value")
        plain = equals and key[:1] not in "+~" and key.partition("@")[0] not in groups and not key.startswith("hydra.")
        out.append(f"++{text}" if plain else text)
    return out


def _one_line(*errors: BaseException | None) -> str:
    parts = [" ".join(str(error).split()) for error in errors if error is not None]
    return ": ".join(dict.fromkeys(part for part in parts if part))
