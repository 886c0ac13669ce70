"""Packaging. ``patches/`` and ``configs/`` lie at the top of the repository and install as parts of the package."""

from __future__ import annotations

import re
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent
VERSION = re.search(r'^__version__ = "(.+)"$', (ROOT / "mindspeed_odpo" / "__init__.py").read_text(), re.MULTILINE).group(1)
MAPPED = {"mindspeed_odpo.patches": "patches", "mindspeed_odpo.configs": "configs"}

# What a host (MindSpeed-LLM) does not pin itself. torch, megatron and transformers are the host's business there, and
# come with the extra "standalone" elsewhere.
LIGHT = ["hydra-core>=1.3.2,<1.4", "omegaconf>=2.3,<2.4", "ray>=2.10,<3", "rich>=13"]
STANDALONE = [
    "accelerate>=1.1",
    "gguf>=0.10",
    "megatron-core==0.16.1",
    "numpy>=1.26",
    "packaging",
    "psutil",
    "safetensors>=0.4.3",
    "tensorboard>=2.15",
    "torch==2.13.0",
    "transformers>=5.20,<6",
    "vaderSentiment~=3.3.2",
]
# The peer that losses and whole runs are compared with, in the tests too. It has no version for Python 3.10: skipped there.
TRL = ['datasets>=3; python_version >= "3.11"', 'trl==1.16.0; python_version >= "3.11"']
DEV = ["mypy>=1.15", "pytest>=8", "pytest-cov>=6", "pytest-timeout>=2.3", "ruff~=0.17.6", "setuptools>=77", "wheel", *TRL]

readme = ROOT / "README.md"
setup(
    name="mindspeed-odpo",
    version=VERSION,
    description="Online DPO on Megatron: a plugin to MindSpeed-LLM that also runs on plain megatron-core",
    long_description=readme.read_text(encoding="utf-8") if readme.is_file() else "",
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.10,<3.13",
    packages=[*find_packages(include=["mindspeed_odpo", "mindspeed_odpo.*"]), *MAPPED],
    package_dir=MAPPED,
    package_data={"mindspeed_odpo.configs": ["rlxf/*.yaml", "rlxf/model/*.yaml", "data/*.jsonl"]},
    install_requires=LIGHT,
    extras_require={"standalone": STANDALONE, "dev": DEV, "benchmark": [*TRL, "matplotlib>=3.8"]},
    entry_points={"console_scripts": ["odpo = mindspeed_odpo.cli:main"]},
)
