"""Which numbers are odd: not finite, or far from those before. Pure; what is done about them is the worker's business.

A loss is compared with the last ones as it is, a norm by its logarithm: norms differ by factors. Far is `deviations`
robust standard deviations (of the median of distances from the median), with a floor so that a run of equal numbers
does not make every change a spike: a loss must rise by half of itself, a norm to sevenfold, at the default of 8.
"""

from __future__ import annotations

import math
from collections import deque
from statistics import median

SEEN_MIN = 16
"""Before as many were seen, only what is not finite is odd: the first steps of a run are steep."""
SEEN_MAX = 64
DEVIATIONS = 8.0
TO_SIGMA = 1.4826
"""From the median distance to the standard deviation of a normal distribution."""
LOSS_FLOOR = 1 / 16
"""Of the median."""
NORM_FLOOR = 0.25
"""Of the logarithm."""


class AnomalyHistory:
    """The numbers of the last committed steps."""

    def __init__(self, *, is_norm: bool, deviations: float = DEVIATIONS) -> None:
        self._is_norm, self._deviations = is_norm, deviations
        self._seen: deque[float] = deque(maxlen=SEEN_MAX)

    def judge(self, value: float) -> str:
        """Return what is unusual about the value; empty if nothing is."""
        if not math.isfinite(value):
            return f"is {value}"
        if len(self._seen) < SEEN_MIN or self._deviations <= 0:
            return ""
        seen, now = list(self._seen), self._scaled(value)
        middle = median(seen)
        floor = NORM_FLOOR if self._is_norm else LOSS_FLOOR * abs(middle)
        sigma = max(TO_SIGMA * median(abs(one - middle) for one in seen), floor, 1e-12)
        if now - middle <= self._deviations * sigma:
            return ""
        usual = math.exp(middle) if self._is_norm else middle
        return f"is {value:.4g}, against {usual:.4g} in the last {len(seen)} steps"

    def add(self, value: float) -> None:
        """Add the value of a committed step. Values that are not finite are ignored."""
        if math.isfinite(value):
            self._seen.append(self._scaled(value))

    def _scaled(self, value: float) -> float:
        return math.log(max(value, 1e-30)) if self._is_norm else value
