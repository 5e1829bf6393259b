"""The device of this process: which it is, and when it is touched.

    before the assignment    none. A context on another worker's device would take memory there, and a process that has
                             one cannot be given other devices by CUDA_VISIBLE_DEVICES any more
    in `hf.init()`           the device with the worker's number on its node becomes the current one, unless the script
                             has chosen another already
    in the same process      never another one: what was built lives there

The number is that of the worker's local rank when it started, and LOCAL_RANK says it to the script. With
`--virtual-local-rank` the process sees one device, as number 0.
"""

from __future__ import annotations

import re
import time
from typing import Any

import torch

from holdfast.errors import DeviceError, ScriptError
from holdfast.util.logs import get_logger

BUSY = re.compile(r"busy or unavailable|out of memory", re.IGNORECASE)
"""What a device says on which the context of a process that has died is still being removed."""
BUSY_TIMEOUT_S = 20.0
BUSY_PAUSE_S = 0.1

log = get_logger(__name__)


def accelerator_module() -> Any:
    """Return the module of torch that belongs to this machine's accelerator (`torch.cuda`, …); None if there is none.
    Touches no device."""
    if not torch.accelerator.is_available():
        return None
    kind = torch.accelerator.current_accelerator()
    return torch.get_device_module(kind) if kind is not None else None


def is_touched() -> bool:
    """Return whether this process has used an accelerator."""
    module = accelerator_module()
    return module is not None and bool(getattr(module, "is_initialized", lambda: False)())


def check_untouched(is_virtual: bool) -> None:
    """Deal with a spare that has used a device before it had a rank. ScriptError if it can then not be given its own
    any more: its driver has read CUDA_VISIBLE_DEVICES already."""
    if not is_touched():
        return
    text = (
        "this spare has used a device before it had a rank: call hf.init(), or read LOCAL_RANK, before the first"
        " tensor, seed or query on a device"
    )
    if is_virtual:
        raise ScriptError(f"{text}; with --virtual-local-rank it cannot change to its own device any more")
    log.warning("spare-touched-device", f"{text}; until it ends it occupies memory there")


def take(number: int, local_world_size: int) -> None:
    """Make the device with this number the current one, unless the script has chosen one. ScriptError if there is none
    with this number."""
    module = accelerator_module()
    if module is None or not hasattr(module, "set_device"):
        return
    if is_touched() and module.current_device() != 0:
        return  # the script has chosen
    count = int(module.device_count())
    if number >= count:
        kind = torch.accelerator.current_accelerator()
        raise ScriptError(
            f"worker {number} of {local_world_size} on this node has no device: the process sees {count} of type"
            f" {kind}. Start as many workers as there are devices (--nproc-per-node auto). Instances of a divided GPU"
            " (MIG) are seen one at a time: name them all in CUDA_VISIBLE_DEVICES and add --virtual-local-rank"
        )
    give_up_at = time.monotonic() + BUSY_TIMEOUT_S
    while True:
        try:
            module.set_device(number)
            return
        except RuntimeError as error:
            if not BUSY.search(str(error)):
                raise
            if time.monotonic() > give_up_at:
                raise DeviceError(
                    f"device {number} is still in use {BUSY_TIMEOUT_S:.0f} s after it was asked for ({error}): end the"
                    " process that uses it"
                ) from error
        time.sleep(BUSY_PAUSE_S)
