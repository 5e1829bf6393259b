"""The loss that the console shows, on the node of rank 0: where only a pipeline's last stage has one, it is told of it.

The ranks say it to one another at each commit, together with everything else (engine.py): for the step before, as a
step's loss may be logged after its commit. A number stands for rank and loss, of which the largest is taken: that of
the lowest rank that has a loss.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping

LOSS = "loss"
"""The name in `step.log` of the number that the console shows."""
NO_LOSS = -1
RANKS_END = 2**31
_FLOAT = struct.Struct("<f")
_BITS = struct.Struct("<I")


def loss_mark(rank: int, logged: Mapping[str, float]) -> int:
    """Return what a rank says of the loss that it has logged, which is the larger, the lower the rank is."""
    if LOSS not in logged:
        return NO_LOSS
    (bits,) = _BITS.unpack(_as_float32(logged[LOSS]))
    return (RANKS_END - 1 - rank) * 2**32 + int(bits)


def loss_of(mark: int) -> float | None:
    """Return the loss out of what a rank says, to seven digits; None if it has none."""
    return None if mark == NO_LOSS else float(_FLOAT.unpack(_BITS.pack(mark % 2**32))[0])


def _as_float32(loss: float) -> bytes:
    try:
        return _FLOAT.pack(loss)
    except OverflowError:
        return _FLOAT.pack(float("inf") if loss > 0 else float("-inf"))
