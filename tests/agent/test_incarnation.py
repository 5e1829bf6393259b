"""When an agent may take the id of a node whose process it can see."""

from __future__ import annotations

import os
import subprocess
import sys

from holdfast.agent.incarnation import is_holder_dead, new_incarnation
from holdfast.core.orders import Refuse
from holdfast.util.processes import boot_id, machine_id


def refusal(pid: int, machine: str = "", boot: str = "") -> Refuse:
    return Refuse(
        why="a node with this id is alive",
        retry_after_s=1.0,
        rejoin=False,
        holder="one",
        holder_pid=pid,
        holder_machine_id=machine or machine_id(),
        holder_boot_id=boot or boot_id(),
    )


def test_only_a_process_of_this_machine_and_boot_can_be_known_to_be_dead() -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert is_holder_dead(refusal(process.pid)), "a process that has ended and was not waited for"
    process.wait()
    assert is_holder_dead(refusal(process.pid))
    assert not is_holder_dead(refusal(process.pid, machine="another"))
    assert not is_holder_dead(refusal(process.pid, boot="another"))
    assert not is_holder_dead(refusal(os.getpid()))
    assert not is_holder_dead(refusal(0)), "unknown"


def test_no_two_incarnations_have_one_name() -> None:
    assert new_incarnation() != new_incarnation()
