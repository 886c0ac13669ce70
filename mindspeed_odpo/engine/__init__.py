"""All that touches megatron.core. Importing this package prepares the device first, whichever module comes first."""

from __future__ import annotations

from mindspeed_odpo import device

device.setup()
