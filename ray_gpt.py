"""The launcher users of MindSpeed-LLM know: ``python ray_gpt.py --config-name NAME [key=value ...]``."""

from __future__ import annotations

import sys

from mindspeed_odpo.launch import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
