"""Who aborts collectives: in a session Holdfast does, and torch's watchdogs must not.

torch's NCCL watchdog answers an error or a time-out of a collective with the end of the process, up to a minute later
and whether or not the communicator was aborted meanwhile; its heartbeat monitor does the same if an abort takes long. A
survivor that has recovered, and trains, would be killed by it. torch says of its own abort that it "should be used with
TORCH_NCCL_ASYNC_ERROR_HANDLING turned off (i.e. set to 0)".

The variables are read when a communicator is made, so `hf.init()` is early enough. A value that the user has set stays,
with a warning. Scripts without a session keep torchrun's.
"""

from __future__ import annotations

from collections.abc import MutableMapping

from holdfast.core.environment_variables import AGENT_DEFAULTS_VARIABLE

SESSION_VALUES = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",  # else the watchdog ends the process
    "TORCH_NCCL_ENABLE_MONITORING": "0",  # else the heartbeat monitor does
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",  # else it dumps first, holding a lock that the main thread needs
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "1",  # it sleeps four times as long, dump or not
    "TORCH_NCCL_PROPAGATE_ERROR": "0",  # else an error on one rank ends all
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "1",  # torch's default: what ends a process whose context is broken
    "TORCH_NCCL_NONBLOCKING_TIMEOUT": "180",  # seconds for a communicator to connect; an abort ends it before
    "HCCL_ASYNC_ERROR_HANDLING": "0",  # the same of Ascend's
}
"""As torch 2.13's ProcessGroupNCCL.hpp and NCCLUtils.hpp name them, and torch_npu."""
TEARS_DOWN = "torch's watchdog then ends workers that Holdfast repairs, whatever TORCH_NCCL_ASYNC_ERROR_HANDLING says"
HARMFUL = {
    "TORCH_NCCL_BLOCKING_WAIT": "each collective then blocks the host until its own time-out",
    "TORCH_NCCL_DESYNC_DEBUG": TEARS_DOWN,
    "TORCH_DISTRIBUTED_DEBUG": TEARS_DOWN,
}
"""Those that are off by default, and must be. The last is harmful in one of its levels only."""
OFF = frozenset({"", "0", "n", "no", "f", "false", "off", "info"})
"""What torch takes for off, in any case of letters, and the levels of TORCH_DISTRIBUTED_DEBUG below DETAIL."""
OLD_NAMES = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "NCCL_ASYNC_ERROR_HANDLING",
    "TORCH_NCCL_BLOCKING_WAIT": "NCCL_BLOCKING_WAIT",
    "TORCH_NCCL_DESYNC_DEBUG": "NCCL_DESYNC_DEBUG",
}
"""Which torch reads too."""


def silence(environment: MutableMapping[str, str], has_device: bool = True) -> list[str]:
    """Set what a session needs, where it is not the user's. A sentence for each variable of the user's that is
    otherwise; without a device none has a watchdog to wake."""
    ours = set(environment.get(AGENT_DEFAULTS_VARIABLE, "").split(","))
    problems = []
    for name, value in SESSION_VALUES.items():
        by_user = [one for one in (name, OLD_NAMES.get(name, name)) if one in environment and one not in ours]
        if by_user and (found := environment[by_user[0]]) != value:
            problems.append(
                f"{by_user[0]}={found} is set: torch may end or abort workers that Holdfast repairs. Unset it, or set"
                f" {name}={value}, as a session does otherwise"
            )
            continue
        environment[name] = value
    for name, why in HARMFUL.items() if has_device else ():
        for known in dict.fromkeys((name, OLD_NAMES.get(name, name))):
            if environment.get(known, "").lower() not in OFF:
                problems.append(f"{known}={environment[known]} is set: {why}. Unset it")
    return problems
