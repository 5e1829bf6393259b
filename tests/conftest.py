"""What a test must not leave behind: processes, shared memory, mounts, network namespaces, interfaces.

`leak_guard` gives the test an id, which all its processes carry in their environment (support/jobs.py) and which the
names of its namespaces and interfaces contain. What is found of it afterwards fails the test, and is removed.
"""

from __future__ import annotations

import logging
import os
import secrets
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

from holdfast.util.logs import LOGGERS
from support import jobs, references

LAST_BREATH_S = 3.0
"""For processes that were killed and have not quite gone, or see their parent's end in a moment."""
TAIL_CHARS_MAX = 6_000

failed = pytest.StashKey[bool]()

# A shell starts what it puts into the background with Ctrl-C and Ctrl-\\ ignored, and children inherit that: the tests'
# must not.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGQUIT, signal.SIG_DFL)


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):  # of several processes, the one that starts the others
        os.environ[references.DIRECTORY] = tempfile.mkdtemp(prefix="holdfast-references-")


def pytest_unconfigure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        shutil.rmtree(os.environ.pop(references.DIRECTORY), ignore_errors=True)


@pytest.fixture(autouse=True)
def loggers_restored() -> Iterator[None]:
    loggers = [logging.getLogger(name) for name in LOGGERS]
    before = [(logger.handlers[:], logger.level, logger.propagate) for logger in loggers]
    yield
    for logger, (handlers, level, propagate) in zip(loggers, before, strict=True):
        logger.handlers[:], logger.propagate = handlers, propagate
        logger.setLevel(level)


@pytest.fixture
def leak_guard(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The test's id."""
    marker = secrets.token_hex(4)
    monkeypatch.setenv(jobs.MARKER, marker)
    shared_before = shared_memory()
    jobs.agents.clear()
    yield marker
    left = [*end_processes(marker), *remove_snapshots(marker), *remove_mounts(tmp_path), *remove_networks(marker)]
    left += [f"shared memory {name}" for name in unused_memory(shared_before)]
    if left and not request.node.stash.get(failed, False):
        pytest.fail("left behind: " + "; ".join(left), pytrace=False)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Show what the agents of a failed test said."""
    report = yield
    if call.when == "call" and report.failed:
        item.stash[failed] = True
        for index, agent in enumerate(jobs.agents):
            report.sections.append((f"agent {index}: {' '.join(agent.arguments)}", agent.stderr[-TAIL_CHARS_MAX:]))
    return report


def end_processes(marker: str) -> list[str]:
    """Kill the test's processes that are still there; what they were."""
    deadline = time.monotonic() + LAST_BREATH_S
    running = [agent for agent in jobs.agents if agent.is_running]
    while not running and (found := jobs.marked_processes(marker)) and time.monotonic() < deadline:
        time.sleep(jobs.POLL_S)
    found = jobs.marked_processes(marker)
    told = [f"process {process.pid} ({' '.join(process.arguments)[:200]})" for process in found]
    while found:
        for process in found:
            try:
                os.kill(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        for agent in jobs.agents:
            agent.process.poll()
        time.sleep(jobs.POLL_S)
        found = jobs.marked_processes(marker)
    for agent in jobs.agents:
        agent.process.wait()
    return told


def remove_snapshots(marker: str) -> list[str]:
    """Remove what agents kept in memory. Those that were killed leave it, to be found by their next life; those that
    came to an end do not."""
    root = jobs.snapshot_dir(marker)
    left = [f"snapshot {path}" for path in root.rglob("*") if path.is_file()]
    shutil.rmtree(root, ignore_errors=True)
    return left if all(agent.process.returncode >= 0 for agent in jobs.agents) else []


def shared_memory() -> dict[str, int]:
    """Inodes by name. A semaphore's maps show the name it was made under, not the one it has: only inodes tell."""
    found = {}
    for entry in Path("/dev/shm").iterdir():
        if entry.is_dir():
            continue  # snapshots, of this test or one beside it: `remove_snapshots` looks after them
        try:
            found[entry.name] = entry.stat().st_ino
        except OSError:
            continue
    return found


def unused_memory(before: dict[str, int]) -> list[str]:
    """New files that no process has had open or mapped for a while. They stay: they may be somebody else's, whose
    next process is about to start."""
    deadline = time.monotonic() + LAST_BREATH_S
    while True:
        used = inodes_in_use()
        unused = [name for name, inode in shared_memory().items() if before.get(name) != inode and inode not in used]
        if not unused or time.monotonic() > deadline:
            return sorted(unused)
        time.sleep(jobs.POLL_S)


def inodes_in_use() -> set[int]:
    """Of all that is mapped or open from /dev/shm."""
    found = set()
    for directory in Path("/proc").glob("[0-9]*"):
        try:
            maps = (directory / "maps").read_text(errors="replace").splitlines()
            found |= {int(line.split()[4]) for line in maps if "/dev/shm/" in line}
            links = [link for link in (directory / "fd").iterdir() if os.readlink(link).startswith("/dev/shm/")]
            found |= {link.stat().st_ino for link in links}
        except OSError:
            continue
    return found


def remove_mounts(directory: Path) -> list[str]:
    """Unmount what is mounted below the test's directory."""
    points = [line.split()[1] for line in Path("/proc/mounts").read_text().splitlines()]
    left = [point for point in points if Path(point).is_relative_to(directory)]
    for point in left:
        subprocess.run(["umount", "--lazy", point], check=True)
    return [f"mount {point}" for point in left]


def remove_networks(marker: str) -> list[str]:
    """Delete network namespaces and interfaces whose names contain the test's id."""
    left = []
    for directory, command in (("/run/netns", ["ip", "netns", "del"]), ("/sys/class/net", ["ip", "link", "del"])):
        for entry in Path(directory).glob(f"*{marker}*"):
            subprocess.run([*command, entry.name], check=False, capture_output=True)
            left.append(f"{directory}/{entry.name}")
    return left
