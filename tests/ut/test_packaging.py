"""The wheel: what it holds, what it asks for, and that an installed copy finds its own configs without the checkout."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from email.parser import Parser
from importlib import metadata
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from a copy so that the checkout gets no build folders. No network: the build tools are installed."""
    pytest.importorskip("setuptools", minversion="77")
    source = tmp_path_factory.mktemp("source")
    for name in ("setup.py", "pyproject.toml", "MANIFEST.in", "LICENSE", "README.md"):
        if (ROOT / name).is_file():
            shutil.copy(ROOT / name, source)
    for name in ("mindspeed_odpo", "patches", "configs"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    out = tmp_path_factory.mktemp("wheel")
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--no-deps",
        "--no-build-isolation",
        "--no-index",
        "--wheel-dir",
        str(out),
        str(source),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    (built,) = out.glob("*.whl")
    return built


def test_wheel_contents(wheel: Path) -> None:
    """Every module and every YAML and JSONL is in it, patches and configs under the package's name, and nothing else."""
    held = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    wanted = {str(path.relative_to(ROOT)) for path in (ROOT / "mindspeed_odpo").rglob("*.py")}
    for folder, patterns in (("patches", ["*.py"]), ("configs", ["*.py", "*.yaml", "*.jsonl"])):
        wanted |= {f"mindspeed_odpo/{path.relative_to(ROOT)}" for pattern in patterns for path in (ROOT / folder).rglob(pattern)}
    assert held == wanted
    assert "mindspeed_odpo/configs/rlxf/online_dpo_quickstart_smollm2.yaml" in held


def test_wheel_metadata(wheel: Path) -> None:
    """Console script, licence and Python range; torch, megatron and transformers only with the extra, for a host pins its own."""
    archive = zipfile.ZipFile(wheel)
    info = next(name.partition("/")[0] for name in archive.namelist() if ".dist-info/" in name)
    assert "odpo = mindspeed_odpo.cli:main" in archive.read(f"{info}/entry_points.txt").decode()
    assert any(name.startswith(f"{info}/") and name.endswith("LICENSE") for name in archive.namelist())
    meta = Parser().parsestr(archive.read(f"{info}/METADATA").decode())
    assert set(meta["Requires-Python"].split(",")) == {">=3.10", "<3.13"}
    plain = [need for need in meta.get_all("Requires-Dist") if "extra ==" not in need]
    assert sorted(need.split("<")[0].split(">")[0] for need in plain) == ["hydra-core", "omegaconf", "ray", "rich"]
    standalone = {need.split(";")[0].strip() for need in meta.get_all("Requires-Dist") if 'extra == "standalone"' in need}
    assert {"torch==2.13.0", "megatron-core==0.16.1"} <= standalone


def test_installed_copy_finds_its_configs(wheel: Path, tmp_path: Path) -> None:
    """Unpacked as an install would, in a folder without the checkout: configs come from ``mindspeed_odpo.configs``."""
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    code = (
        "from mindspeed_odpo.config import config_root\nfrom mindspeed_odpo.launch import compose\nimport mindspeed_odpo.patches\n"
        "print(config_root())\nprint(compose('online_dpo_quickstart_smollm2', [])['training']['stage'])"
    )
    env = {**os.environ, "PYTHONPATH": str(tmp_path / "site")}
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120)
    assert done.stdout.splitlines() == [str(tmp_path / "site" / "mindspeed_odpo" / "configs"), "ray_online_dpo"], done.stderr


def test_editable_install_maps_the_top_level_folders(tmp_path: Path) -> None:
    """``pip install -e .``: ``mindspeed_odpo.configs`` and ``.patches`` are the folders at the top of the checkout."""
    try:
        dist = metadata.distribution("mindspeed-odpo")
    except metadata.PackageNotFoundError:
        pytest.skip("the package is not installed, it runs from PYTHONPATH")
    assert {entry.name: entry.value for entry in dist.entry_points} == {"odpo": "mindspeed_odpo.cli:main"}
    code = "import mindspeed_odpo.configs as c, mindspeed_odpo.patches as p\nprint(c.__path__[0], p.__path__[0])"
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == [str(ROOT / "configs"), str(ROOT / "patches")], done.stderr


def test_ci_runs_make_test() -> None:
    """CI calls ``make test`` and nothing else of weight."""
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    lines = script.read_text().splitlines()
    assert lines[:2] == ["#!/usr/bin/env bash", "set -euo pipefail"] and lines[-1] == "make test"


def test_constraints_fit_the_requirements() -> None:
    """Each pin in constraints.txt satisfies the range in setup.py, for Python 3.10 and for later ones."""
    from packaging.requirements import Requirement

    pins = [Requirement(line) for line in (ROOT / "constraints.txt").read_text().splitlines() if line and not line.startswith("#")]
    wanted: list[Requirement] = []
    namespace: dict[str, object] = {"__file__": str(ROOT / "setup.py"), "__name__": "setup"}
    code = (ROOT / "setup.py").read_text().replace("from setuptools import find_packages, setup", "find_packages = setup = lambda **kw: []")
    exec(compile(code, "setup.py", "exec"), namespace)
    for group in ("LIGHT", "STANDALONE", "DEV"):
        names = namespace[group]
        assert isinstance(names, list)
        wanted += [Requirement(text) for text in names]
    for version in ("3.10", "3.11", "3.12"):
        held = {p.name.lower(): str(p.specifier)[2:] for p in pins if p.marker is None or p.marker.evaluate({"python_version": version})}
        assert len(held) == sum(p.marker is None or p.marker.evaluate({"python_version": version}) for p in pins), (
            "a package is pinned twice"
        )
        for need in wanted:
            if need.name.lower() in held:
                assert need.specifier.contains(held[need.name.lower()]), f"{need} on Python {version}: {held[need.name.lower()]}"
