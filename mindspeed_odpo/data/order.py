"""Which rows of the data an iteration takes: a function of (seed, iteration), without state."""

from __future__ import annotations

import random
from collections.abc import Sequence


class Order:
    """The endless, seeded walk over the usable rows of a data file.

    Epoch e visits every usable row once, in an order drawn from (seed, e), or in file order with ``shuffle`` False.
    Iteration n (from 1) takes positions ``[(n-1)*B, n*B)`` of the epochs laid end to end; a batch may span two epochs. There
    is no state to save: a resumed run sees what an unbroken one would.

    ``began``: the iteration after which this data came in. 0, unless a run went on from a checkpoint with another file, which
    then starts at its first position.
    """

    def __init__(self, usable: Sequence[int], batch_size: int, seed: int, shuffle: bool) -> None:
        self.usable, self.shuffle = list(usable), shuffle
        self._batch_size, self._seed = batch_size, seed
        self._last: tuple[int, list[int]] = (-1, [])
        self.began = 0

    def __len__(self) -> int:
        """Usable rows."""
        return len(self.usable)

    def _epoch(self, epoch: int) -> list[int]:
        if self._last[0] != epoch:
            order = list(self.usable)
            if self.shuffle:
                random.Random(f"{self._seed}/{epoch}").shuffle(order)
            self._last = (epoch, order)
        return self._last[1]

    def rows(self, step: int) -> list[int]:
        """Rows of the file that iteration ``step`` (from 1) takes, ``batch_size`` of them."""
        if step <= self.began:
            raise ValueError(f"iterations of this data count from {self.began + 1}, got {step}")
        size, step = len(self.usable), step - self.began
        positions = range((step - 1) * self._batch_size, step * self._batch_size)
        return [self._epoch(p // size)[p % size] for p in positions]

    def epochs(self, step: int) -> float:
        """Passes over the data when iteration ``step`` is done."""
        return (step - self.began) * self._batch_size / len(self.usable)

    def epoch_index(self, step: int) -> int:
        """The epoch, from 0, in which the first row of iteration ``step`` stands."""
        return (step - self.began - 1) * self._batch_size // len(self.usable)
