"""A launcher for tests: runs scripts through a real fork server, or through a real `python -u` to compare with."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import holdfast
from holdfast.agent.launch.launcher import Child, Launcher, process_request
from holdfast.wire.launch_messages import Mode, PreloadPlan, ScriptKind

DEADLINE_S = 20.0
# An absolute path, because workers run in directories of their own; one thread, as torchrun gives to each of several.
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(holdfast.__file__).parents[1]), "OMP_NUM_THREADS": "1"}
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
T = TypeVar("T")


class Result(NamedTuple):
    """Negative codes are signals."""

    code: int
    stdout: str
    stderr: str


class Nest:
    """One launcher and the loop it lives in, for synchronous tests. At its end nothing may be left of it."""

    def __init__(
        self, mode: Mode, preload: Sequence[str] = (), env: Mapping[str, str] = ENVIRONMENT, script: str = ""
    ) -> None:
        self._others = children()
        self._runner = asyncio.Runner()
        self.launcher = self.do(Launcher.start(mode, PreloadPlan(modules=tuple(preload), script=script), env))

    def __enter__(self) -> Nest:
        return self

    def __exit__(self, *_: object) -> None:
        self.do(self.launcher.close())
        self._runner.close()
        eventually(self._nothing_left, "all that this test has started is gone")

    def _nothing_left(self) -> bool:
        """Orphans that this process has inherited are reaped, but not killed."""
        for pid in children() - self._others:
            os.waitpid(pid, os.WNOHANG)
        return children() <= self._others

    def do(self, work: Coroutine[Any, Any, T]) -> T:
        return self._runner.run(work)

    def run(self, argv: Sequence[str], directory: Path, **choices: Any) -> Result:
        return self.do(self.run_async(argv, directory, **choices))

    async def run_async(self, argv: Sequence[str], directory: Path, **choices: Any) -> Result:
        with Output(directory) as output:
            child = await self.start(argv, directory, output, **choices)
            status = await child.wait()
            return Result(os.waitstatus_to_exitcode(status), *output.read())

    async def start(
        self,
        argv: Sequence[str],
        directory: Path,
        output: Output,
        *,
        kind: ScriptKind | None = "script",
        env: Mapping[str, str] = ENVIRONMENT,
        numa_binding: str = "",
    ) -> Child:
        common: dict[str, Any] = {
            "env": env,
            "cwd": str(directory),
            "local_rank": 0,
            "numa_binding": numa_binding,
        }
        request = process_request(argv, kind=kind, **common)
        return await self.launcher.launch(request, [output.stdout.fileno(), output.stderr.fileno()])


class Output:
    """Two files for a worker to write to."""

    _count = 0

    def __init__(self, directory: Path) -> None:
        Output._count += 1
        self._paths = [directory / f".output-{Output._count}-{name}" for name in ("stdout", "stderr")]
        self.stdout, self.stderr = (path.open("wb") for path in self._paths)

    def __enter__(self) -> Output:
        return self

    def __exit__(self, *_: object) -> None:
        for file, path in zip((self.stdout, self.stderr), self._paths, strict=True):
            file.close()
            path.unlink()

    def read(self) -> tuple[str, str]:
        first, second = (path.read_text() for path in self._paths)
        return first, second


def run_python(arguments: Sequence[str], directory: Path, env: Mapping[str, str] = ENVIRONMENT) -> Result:
    """Run a script with Python itself, with SIGHUP as a worker has it, though the tests may run under nohup."""
    command = [sys.executable, "-u", *arguments]
    with Output(directory) as output:
        ended = subprocess.run(
            command,
            cwd=directory,
            env=env,
            stdout=output.stdout,
            stderr=output.stderr,
            check=False,
            preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),
        )
        return Result(ended.returncode, *output.read())


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def eventually(condition: Callable[[], T], what: str) -> T:
    """Waits for the condition to become true."""
    deadline = time.monotonic() + DEADLINE_S
    while not (value := condition()):
        assert time.monotonic() < deadline, f"not within {DEADLINE_S} s: {what}"
        time.sleep(0.005)
    return value


async def eventually_async(condition: Callable[[], T], what: str) -> T:
    """The same, while the loop goes on."""
    deadline = time.monotonic() + DEADLINE_S
    while not (value := condition()):
        assert time.monotonic() < deadline, f"not within {DEADLINE_S} s: {what}"
        await asyncio.sleep(0.005)
    return value


def stat_fields(pid: int) -> list[bytes]:
    """Those after the name: state, parent, group, session, …; empty if there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return []


def is_running(pid: int) -> bool:
    """Zombies are not."""
    fields = stat_fields(pid)
    return bool(fields) and fields[0] not in (b"Z", b"X")


def children(parent: int | None = None) -> set[int]:
    """A process's, this one's if not told otherwise, zombies included."""
    me = str(os.getpid() if parent is None else parent).encode()
    pids = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
    return {pid for pid in pids if (fields := stat_fields(pid)) and fields[1] == me}


def lines_of_json(result: Result) -> list[Any]:
    assert result.code == 0, result
    return [json.loads(line) for line in result.stdout.splitlines()]
