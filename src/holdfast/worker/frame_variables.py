"""The variables of a script's functions and modules that are running."""

from __future__ import annotations

import inspect
import sys
from types import FrameType
from typing import Any

WRITES_THROUGH = sys.version_info >= (3, 13)
"""Whether `f_locals` is a view of a frame's variables (PEP 667), not a dictionary that the frame keeps."""


def variables_of(frame: FrameType) -> dict[str, Any]:
    """Return a frame's variables by name. The dictionary that the frame would keep of them is emptied: it would hold
    the tensors of this step, such as the model's output, for as long as the function runs."""
    kept = frame.f_locals
    found = dict(kept)
    if frame.f_code.co_flags & inspect.CO_OPTIMIZED and not WRITES_THROUGH:  # else they are the variables themselves
        kept.clear()
    return found
