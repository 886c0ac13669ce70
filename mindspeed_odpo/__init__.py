"""Online DPO on Megatron: a plugin to MindSpeed-LLM that also runs on plain megatron-core."""

from __future__ import annotations

__version__ = "0.1.0"
