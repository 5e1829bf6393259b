"""torch's watchdogs end a process by SIGABRT: no crash, but what a healthy rank suffers when another one goes."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from holdfast.agent.autopsy import examine
from holdfast.agent.worker_logs import WorkerLogFiles
from holdfast.checks.accelerators.cuda import Cuda
from holdfast.core.faults.failures import is_collateral
from holdfast.core.faults.fault_table import BUILT_IN, with_accelerator

PREFIX = "[rank1]:[E1118 07:16:23.332 ProcessGroupNCCL.cpp:1895] [PG ID 0 PG GUID 0(default_pg) Rank 1] "
ENDED = "Process group watchdog thread terminated with exception: "
REMOTE = "NCCL error in: NCCLUtils.hpp:301, remote process exited or there was a network error, NCCL version 2.27.5"
SLOW = "[Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=6, OpType=ALLREDUCE) ran for 600000 ms"
STUCK = "Terminating the process after attempting to dump debug info, due to ProcessGroupNCCL watchdog hang."
ILLEGAL = "CUDA error: an illegal memory access was encountered"


def thrown(what: str, kind: str = "c10::DistBackendError") -> list[str]:
    return [f"terminate called after throwing an instance of '{kind}'", f"  what():  {what}"]


@pytest.mark.parametrize(
    ("lines", "fault", "collateral"),
    [
        ([PREFIX + ENDED + REMOTE, "Exception raised from …", *thrown(ENDED + REMOTE)], "connection-lost", True),
        ([PREFIX + SLOW, *thrown(ENDED + SLOW)], "collective-timeout", True),
        ([PREFIX + SLOW, *thrown(ENDED + SLOW, "std::runtime_error")], "collective-timeout", True),
        (["step 5", PREFIX + STUCK, "frame #0: …"], "collective-timeout", True),
        ([PREFIX + ENDED + ILLEGAL, *thrown(ENDED + ILLEGAL)], "gpu-launch-failure", False),
        ([PREFIX + SLOW, *["step"] * 60], "aborted", False),
        ([PREFIX + SLOW, *thrown("std::bad_alloc", "std::bad_alloc")], "aborted", False),
    ],
    ids=["peer-gone", "timeout", "other-type", "heartbeat", "sticky-device", "long-ago", "of-something-else"],
)
def test_the_abort_of_a_watchdog_is_distinguished_from_a_crash(
    tmp_path: Path, lines: list[str], fault: str, collateral: bool
) -> None:
    stderr = tmp_path / "stderr"
    stderr.write_text("\n".join([*lines, ""]))
    failure = examine(
        -signal.SIGABRT,
        node_id="a",
        view=1,
        rank=1,
        local_rank=1,
        pid=7,
        ended_at=1.0,
        files=WorkerLogFiles(stderr_path=str(stderr)),
        table=with_accelerator(BUILT_IN, Cuda.faults),
    )
    assert failure is not None and failure.fault is not None
    assert (failure.fault.name, is_collateral(failure)) == (fault, collateral)
