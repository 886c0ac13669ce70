"""``python -m mindspeed_odpo``: the same as the ``odpo`` command."""

from __future__ import annotations

import sys

from mindspeed_odpo.cli import main

if __name__ == "__main__":
    sys.exit(main())
