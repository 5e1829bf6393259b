"""Reads the stacks of workers, for reports of hangs and for `holdfast stacks`.

A worker with a session is asked, and answers from a thread of its own. One that does not answer, because a call holds
the GIL, and one without a session get a signal on which they dump their stacks in C (wire/stack_dumps.py). Of a
process that can do neither (stopped, no Python, a clean interpreter) the kernel's view of it is returned.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
from collections.abc import Callable, Sequence
from pathlib import Path

from holdfast.agent.worker_processes import Worker
from holdfast.core.stacks import group_stacks
from holdfast.util.processes import is_stopped, read_or_empty
from holdfast.wire.control_messages import StackGroupMessage
from holdfast.wire.stack_dumps import STACKS_SIGNAL, readable_stacks
from holdfast.wire.worker_messages import ShowStacks

ANSWER_WAIT_S = 0.5
DUMP_WAIT_S = 2.0
DUMP_LOOK_S = 0.02
DUMP_QUIET_LOOKS = 5
"""A dump is complete when it has not grown for so many looks."""
DUMP_BYTES_MAX = 256 * 1024
STACK_CHARS_MAX = 16_000
NODE_CHARS_MAX = 300_000
"""All stacks of a node, so that they fit into one message to the master."""
CHILDREN_SHOWN_MAX = 8
COMMAND_CHARS_MAX = 120

_requests = itertools.count(1)


async def read_stacks(workers: Sequence[Worker], why_none: Callable[[int], str]) -> list[str]:
    """Return the stacks of each worker, or what `why_none` says of its process."""
    answers = await _ask([worker for worker in workers if worker.connection is not None])
    return list(await asyncio.gather(*[_stack_of(worker, answers, why_none) for worker in workers]))


async def _ask(workers: Sequence[Worker]) -> dict[str, str]:
    """Ask workers with a connection; return the answers that came in time, by the worker's nonce."""
    request = next(_requests)
    futures: dict[str, asyncio.Future[str]] = {}
    for worker in workers:
        futures[worker.nonce] = worker.stacks[request] = asyncio.get_running_loop().create_future()
        worker.send(ShowStacks(request))
    able = [futures[worker.nonce] for worker in workers if not is_stopped(worker.script_pid)]
    if able:
        await asyncio.wait(able, timeout=ANSWER_WAIT_S)
    for worker in workers:
        worker.stacks.pop(request, None)
    return {nonce: answer.result() for nonce, answer in futures.items() if answer.done() and not answer.cancelled()}


async def _stack_of(worker: Worker, answers: dict[str, str], why_none: Callable[[int], str]) -> str:
    pid = worker.script_pid or worker.pid
    if not pid:
        return "(its process is being started)"
    text = answers.get(worker.nonce, "")
    if not text and not is_stopped(pid) and not worker.ended:
        text = await dump(worker, pid)
    return (text or why_none(pid)).rstrip()[:STACK_CHARS_MAX] + children_text(pid)


async def dump(worker: Worker, pid: int) -> str:
    """Have a worker dump its stacks; return them, empty if it cannot."""
    if worker.stacks_descriptor < 0 or not handles(pid, STACKS_SIGNAL):
        return ""
    os.ftruncate(worker.stacks_descriptor, 0)
    try:
        signal.pidfd_send_signal(pidfd := os.pidfd_open(pid), STACKS_SIGNAL)
    except OSError:
        return ""
    os.close(pidfd)
    quiet = size = waited = 0
    while quiet < DUMP_QUIET_LOOKS and waited * DUMP_LOOK_S < DUMP_WAIT_S:
        await asyncio.sleep(DUMP_LOOK_S)  # the handler has no way to say that it is done
        if worker.stacks_descriptor < 0:
            return ""  # the worker has ended meanwhile
        before, size = size, os.fstat(worker.stacks_descriptor).st_size
        quiet = quiet + 1 if size and size == before else 0
        waited += 1
    text = os.pread(worker.stacks_descriptor, DUMP_BYTES_MAX, 0).decode(errors="replace")
    os.ftruncate(worker.stacks_descriptor, 0)
    return readable_stacks(text)


def handles(pid: int, number: int) -> bool:
    """Return whether a process has a handler for a signal."""
    lines = read_or_empty(f"/proc/{pid}/status").splitlines()
    caught = next((line.split()[1] for line in lines if line.startswith("SigCgt:")), "0")
    return bool(int(caught, 16) >> (number - 1) & 1)


def children_text(pid: int) -> str:
    """Return the command lines of a worker's child processes that are other programs, as a build of an extension."""
    program = _executable(pid)
    tasks = [read_or_empty(str(task / "children")).split() for task in Path(f"/proc/{pid}/task").glob("*")]
    children = [int(child) for task in tasks for child in task]
    words = [
        read_or_empty(f"/proc/{child}/cmdline").replace("\0", " ").strip()[:COMMAND_CHARS_MAX]
        for child in children
        if _executable(child) != program
    ]
    return "".join(f"\nchild process: {command}" for command in sorted(filter(None, words))[:CHILDREN_SHOWN_MAX])


def _executable(pid: int) -> str:
    try:
        return str(Path(f"/proc/{pid}/exe").readlink())
    except OSError:
        return ""


def grouped(stacks: Sequence[tuple[int, str]]) -> tuple[StackGroupMessage, ...]:
    """Return the stacks for a message, equal ones together, cut to what a message may hold."""
    found, left_chars = [], NODE_CHARS_MAX
    for ranks, stack in group_stacks(stacks):
        found.append(StackGroupMessage(ranks, stack[: max(left_chars, 0)]))
        left_chars -= len(stack)
    return tuple(found)
