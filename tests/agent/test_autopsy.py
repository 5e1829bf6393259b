"""Real ends of real processes, and what is made of them."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from holdfast.agent.autopsy import ERROR_FILE_BYTES_MAX, MESSAGE_CHARS_MAX, examine
from holdfast.agent.out_of_memory import MemoryWatch
from holdfast.agent.worker_logs import LogPlan, WorkerLogFiles, WorkerLogs
from holdfast.core.faults.failures import (
    LOG_LINE_CHARS_MAX,
    LOG_TAIL_LINES_MAX,
    TRACEBACK_CHARS_MAX,
    Exited,
    Failure,
    OutOfMemory,
    Signalled,
    describe,
    is_collateral,
)

ENDED_AT = 1_000_000.25
CHILD = [sys.executable, "-E", "-c"]


@pytest.fixture
def files(tmp_path: Path) -> Iterator[WorkerLogFiles]:
    logs = WorkerLogs(LogPlan(run_dir=tmp_path / "run", redirects=3))
    opened = logs.open(1, 0, 0)
    yield opened
    opened.close()
    logs.close()


def run(files: WorkerLogFiles, *command: str, **environment: str) -> int:
    child = subprocess.run(
        command, stdout=files.stdout_fd, stderr=files.stderr_fd, timeout=60, env={**os.environ, **environment}
    )
    return child.returncode


def look(exit_code: int, files: WorkerLogFiles, watch: MemoryWatch | None = None, pid: int = 77) -> Failure | None:
    return examine(
        exit_code,
        node_id="node-a",
        view=1,
        rank=5,
        local_rank=1,
        pid=pid,
        ended_at=ENDED_AT,
        files=files,
        memory_evidence=watch.evidence if watch else lambda pid: "",
    )


def fail(exit_code: int, files: WorkerLogFiles, watch: MemoryWatch | None = None, pid: int = 77) -> Failure:
    failure = look(exit_code, files, watch, pid)
    assert failure is not None
    assert "\n" not in failure.message
    assert msgspec.json.decode(msgspec.json.encode(failure), type=Failure) == failure  # it must fit the wire
    return failure


def fail_with_stderr(files: WorkerLogFiles, text: str, exit_code: int = 1) -> Failure:
    Path(files.stderr_path).write_bytes(text.encode("utf-8", "surrogateescape"))
    return fail(exit_code, files)


def test_success_is_no_failure_whatever_was_written(files: WorkerLogFiles) -> None:
    Path(files.error_file).write_text('{"message": "handled"}')
    code = "import traceback\ntry: 1/0\nexcept Exception: traceback.print_exc()"
    assert look(run(files, *CHILD, code), files) is None


def test_uncaught_exception_is_read_from_stderr(files: WorkerLogFiles) -> None:
    failure = fail(run(files, *CHILD, "print('before')\ndef f(): raise ValueError('boom')\nf()"), files)
    assert failure.end == Exited(1)
    assert (failure.exception, failure.message) == ("ValueError", "ValueError: boom")
    assert failure.traceback.startswith("Traceback (most recent call last):\n")
    assert failure.traceback.endswith("in f\nValueError: boom")
    assert failure.log_tail[-1] == "ValueError: boom"
    assert failure.log_file == files.stderr_path
    assert (failure.failed_at, failure.error_file) == (ENDED_AT, "")
    assert describe(failure) == "rank 5 on node-a exited with code 1: ValueError: boom"
    assert (failure.view, failure.local_rank, failure.pid) == (1, 1, 77)


def test_a_chain_of_exceptions_is_complete_and_named_by_its_last(files: WorkerLogFiles) -> None:
    code = """
import logging, traceback
try: raise OSError('an earlier one, handled')
except OSError: traceback.print_exc()
print('going on', flush=True)
try:
    try: raise KeyError('root')
    except KeyError as error: raise ValueError('middle') from error
except ValueError:
    raise RuntimeError('top\\nsecond line')
"""
    failure = fail(run(files, *CHILD, code), files)
    assert (failure.exception, failure.message) == ("RuntimeError", "RuntimeError: top second line")
    assert "KeyError: 'root'" in failure.traceback
    assert "ValueError: middle" in failure.traceback
    assert failure.traceback.endswith("RuntimeError: top\nsecond line")
    assert "an earlier one" not in failure.traceback


def test_what_the_interpreter_ignores_while_shutting_down_is_not_the_cause(files: WorkerLogFiles) -> None:
    code = """
class Loud:
    def __del__(self): raise OSError('too late')
keep = Loud()
raise ValueError('cause')
"""
    failure = fail(run(files, *CHILD, code), files)
    assert "too late" in Path(files.stderr_path).read_text()
    assert failure.message == "ValueError: cause"
    assert failure.traceback.endswith("\nValueError: cause")


@pytest.mark.parametrize("prefix", ["", "[rank0]: "])
def test_what_torch_logs_right_after_the_traceback_is_no_part_of_it(files: WorkerLogFiles, prefix: str) -> None:
    lines = ("Traceback (most recent call last):", '  File "train.py", line 1, in <module>', "ValueError: cause")
    text = "".join(f"{prefix}{line}\n" for line in lines)
    failure = fail_with_stderr(files, text + "[rank0]:[W801 12:00:00.1 x.cpp:9] Warning: group not destroyed\n")
    assert failure.message == "ValueError: cause"


@pytest.mark.parametrize(
    ("code", "exception", "message"),
    [
        ("x = (", "SyntaxError", "SyntaxError: '(' was never closed"),
        ("if True:\nx = 1", "IndentationError", "IndentationError: expected an indented block after 'if'"),
    ],
)
def test_syntax_error_of_the_script_itself(
    files: WorkerLogFiles, tmp_path: Path, code: str, exception: str, message: str
) -> None:
    script = tmp_path / "train.py"
    script.write_text(code)
    failure = fail(run(files, sys.executable, str(script)), files)
    assert failure.exception == exception
    assert failure.message.startswith(message)
    assert f'File "{script}"' in failure.traceback


def test_exception_group_is_named_by_the_group(files: WorkerLogFiles) -> None:
    failure = fail(run(files, *CHILD, "raise ExceptionGroup('two', [ValueError('a'), OSError('b')])"), files)
    assert failure.exception == "ExceptionGroup"
    assert failure.message == "ExceptionGroup: two (2 sub-exceptions)"
    assert "OSError: b" in failure.traceback


def test_data_loaders_inner_traceback_is_kept_out_of_the_message(files: WorkerLogFiles) -> None:
    failure = fail_with_stderr(
        files,
        "Traceback (most recent call last):\n"
        '  File "train.py", line 3, in <module>\n    next(loader)\n'
        "RuntimeError: Caught KeyError in DataLoader worker process 0.\n"
        'Original Traceback (most recent call last):\n  File "x.py", line 9, in __getitem__\nKeyError: 7\n\n',
    )
    assert failure.message == "RuntimeError: Caught KeyError in DataLoader worker process 0."
    assert failure.traceback.endswith("KeyError: 7")


TORCH = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")
TORCH_CODE = """
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record
class MyError(RuntimeError): pass
@record
def main():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    raise MyError("boom\\n\\nthird line")
main()
"""


@TORCH
def test_torchs_rank_prefix_is_stripped(files: WorkerLogFiles) -> None:
    failure = fail(run(files, *CHILD, TORCH_CODE, TORCHELASTIC_ERROR_FILE=""), files)
    assert "[rank0]: Traceback" in Path(files.stderr_path).read_text()
    assert failure.exception.endswith("MyError")
    assert failure.message.endswith("MyError: boom")
    assert failure.traceback.startswith("Traceback")
    assert "[rank0]" not in failure.traceback


@TORCH
def test_torchs_error_file_comes_first(files: WorkerLogFiles) -> None:
    failure = fail(run(files, *CHILD, TORCH_CODE, TORCHELASTIC_ERROR_FILE=files.error_file), files)
    assert (failure.exception, failure.message) == ("MyError", "MyError: boom third line")
    assert failure.traceback.endswith("MyError: boom\n\nthird line")
    assert failure.error_file == files.error_file


def record(message: object = "ValueError: boom", **extra: Any) -> str:
    return json.dumps({"message": {"message": message, "extraInfo": extra}})


@pytest.mark.parametrize(
    ("content", "exception", "message"),
    [
        (record(), "ValueError", "ValueError: boom"),
        (record(exception="my.pkg.MyError"), "my.pkg.MyError", "ValueError: boom"),
        (record("no type here"), "", "no type here"),
        (record("Odd: \ud800 half"), "Odd", "Odd: ? half"),
        ('{"message": "error: plain string"}', "", "error: plain string"),
        ('{"message": {"message": "A: b", "extraInfo": []}}', "A", "A: b"),
        # From here on the file is of no use, and stderr is asked.
        ("", "OSError", "OSError: from stderr"),
        (record()[:-5], "OSError", "OSError: from stderr"),
        ("\x00\x01 not json", "OSError", "OSError: from stderr"),
        ("[" * 100_000, "OSError", "OSError: from stderr"),
        ("[1]", "OSError", "OSError: from stderr"),
        ('{"message": 3}', "OSError", "OSError: from stderr"),
        (record(message={}), "OSError", "OSError: from stderr"),
        (record("x" * ERROR_FILE_BYTES_MAX), "OSError", "OSError: from stderr"),
    ],
    ids=lambda value: value[:40].replace("\x00", ""),
)
def test_error_files(files: WorkerLogFiles, content: str, exception: str, message: str) -> None:
    Path(files.error_file).write_text(content)
    failure = fail_with_stderr(files, "Traceback (most recent call last):\n  File x\nOSError: from stderr\n")
    assert (failure.exception, failure.message) == (exception, message)


@pytest.mark.parametrize(
    ("extra", "failed_at"),
    [
        ({"timestamp_s": ENDED_AT - 3.5, "timestamp": "5"}, ENDED_AT - 3.5),
        ({"timestamp_s": ENDED_AT + 9}, ENDED_AT),  # nobody fails after his end
        ({"timestamp": str(int(ENDED_AT))}, ENDED_AT),  # whole seconds say less than the end does
        ({"timestamp": str(int(ENDED_AT) - 8)}, int(ENDED_AT) - 7.0),  # but a slow end says less than they do
        ({"timestamp": int(ENDED_AT) - 8}, int(ENDED_AT) - 7.0),
        ({"timestamp": "yesterday"}, ENDED_AT),
        ({"timestamp_s": None, "timestamp": [1]}, ENDED_AT),
        ({"timestamp_s": float("nan")}, ENDED_AT),
        ({"timestamp_s": 10**400}, ENDED_AT),
        ({}, ENDED_AT),
    ],
)
def test_moment_of_the_failure(files: WorkerLogFiles, extra: dict[str, Any], failed_at: float) -> None:
    Path(files.error_file).write_text(record(**extra))
    assert fail(1, files).failed_at == failed_at


def test_error_file_speaks_for_a_worker_killed_while_it_was_dying(files: WorkerLogFiles) -> None:
    Path(files.error_file).write_text(record("RuntimeError: Connection closed by peer"))
    failure = fail(-signal.SIGKILL, files)
    assert failure.end == Signalled(9, "SIGKILL")
    assert is_collateral(failure)


def test_a_killed_worker_did_not_die_of_an_exception_it_had_survived(files: WorkerLogFiles) -> None:
    code = """
import os, signal, traceback
try: raise ConnectionResetError('handled')
except OSError: traceback.print_exc()
os.kill(os.getpid(), signal.SIGKILL)
"""
    failure = fail(run(files, *CHILD, code), files)
    assert failure.end == Signalled(9, "SIGKILL")
    assert (failure.exception, failure.message, failure.traceback) == ("", "", "")
    assert failure.log_tail[-1] == "ConnectionResetError: handled"
    assert describe(failure) == "rank 5 on node-a killed by SIGKILL"


def test_segmentation_fault_shows_what_faulthandler_wrote(files: WorkerLogFiles) -> None:
    failure = fail(run(files, sys.executable, "-X", "faulthandler", "-c", "import ctypes; ctypes.string_at(0)"), files)
    assert failure.end == Signalled(11, "SIGSEGV")
    assert failure.message == "Fatal Python error: Segmentation fault"
    assert "most recent call first" in failure.traceback


def test_cxx_exception_that_nobody_caught_is_named(files: WorkerLogFiles) -> None:
    code = """
import faulthandler, os
faulthandler.enable()
os.write(2, b"terminate called after throwing an instance of 'c10::DistBackendError'\\n  what():  NCCL gone\\n")
os.abort()
"""
    failure = fail(run(files, *CHILD, code), files)
    assert failure.end == Signalled(6, "SIGABRT")
    assert (failure.exception, failure.message) == ("DistBackendError", "c10::DistBackendError: NCCL gone")
    assert "Fatal Python error: Aborted" in failure.traceback
    assert is_collateral(failure)


def test_keyboard_interrupt(files: WorkerLogFiles) -> None:
    code = "import os, signal\nsignal.signal(2, signal.default_int_handler)\nos.kill(os.getpid(), 2)\nsignal.pause()"
    failure = fail(run(files, *CHILD, code), files)
    assert failure.end == Signalled(2, "SIGINT")
    assert (failure.exception, failure.message) == ("KeyboardInterrupt", "KeyboardInterrupt")


def test_unnamed_signal(files: WorkerLogFiles) -> None:
    assert fail(-40, files).end == Signalled(40, "signal 40")


def test_shells_exit_code_is_translated(files: WorkerLogFiles) -> None:
    failure = fail(run(files, "sh", "-c", "sh -c 'kill -TERM $$'; exit $?"), files)
    assert failure.end == Exited(143)
    assert failure.message == "exit code 143 is 128 + 15: a shell's code for a command killed by SIGTERM"
    assert fail(200, files).message == ""


def test_crash_below_a_shell_is_found(files: WorkerLogFiles) -> None:
    crash = f"{sys.executable} -X faulthandler -c 'import ctypes; ctypes.string_at(0)'; exit $?"
    failure = fail(run(files, "sh", "-c", crash), files)
    assert failure.end == Exited(139)
    assert failure.message.startswith("Fatal Python error: Segmentation fault; exit code 139 is 128 + 11")


def test_end_without_any_trace_shows_the_last_of_stdout(files: WorkerLogFiles) -> None:
    failure = fail(run(files, *CHILD, "import os; os.write(1, b'giving up'); os._exit(3)"), files)
    assert failure.end == Exited(3)
    assert (failure.exception, failure.message, failure.traceback) == ("", "", "")
    assert (failure.log_tail, failure.log_file) == (("giving up",), files.stdout_path)


def test_everything_is_bounded(files: WorkerLogFiles) -> None:
    frames = "".join(f'  File "deep.py", line {n}, in f\n    f()\n' for n in range(3000))
    text = f"Traceback (most recent call last):\n{frames}ValueError: {'m' * 5000}\nlast words\n"
    failure = fail_with_stderr(files, "noise\n" * 1000 + text)
    assert len(failure.traceback) == TRACEBACK_CHARS_MAX
    assert failure.traceback.startswith("Traceback (most")
    assert failure.traceback.endswith("last words")
    assert len(failure.message) == MESSAGE_CHARS_MAX
    assert failure.message.startswith("ValueError: mmm")
    assert len(failure.log_tail) == LOG_TAIL_LINES_MAX
    assert max(map(len, failure.log_tail)) == LOG_LINE_CHARS_MAX


@pytest.mark.parametrize("text", ["Traceback (most recent call last):", "\udcff\x00\n" * 9, "terminate called without"])
def test_half_a_traceback_and_junk_are_tolerated(files: WorkerLogFiles, text: str) -> None:
    for exit_code in (1, 134, -signal.SIGABRT):
        assert fail_with_stderr(files, text, exit_code).exception == ""


def test_workers_without_files_have_an_end_all_the_same() -> None:
    failure = fail(-11, WorkerLogFiles())
    assert (failure.end, failure.log_file, failure.error_file) == (Signalled(11, "SIGSEGV"), "", "")


# Out of memory, for real: a memory cgroup with a limit, and a process that moves into it and allocates.

LIMIT_BYTES = 64 * 2**20
VICTIM = """
import os, sys
with open(sys.argv[1] + "/cgroup.procs", "w") as file: file.write(str(os.getpid()))
print("moved", flush=True)
sys.stdin.readline()
hog = bytearray(512 * 2**20)
"""


def make_memory_group() -> Path:
    legacy = Path("/sys/fs/cgroup/memory")
    parent = legacy if (legacy / "memory.limit_in_bytes").exists() else Path("/sys/fs/cgroup")
    group = parent / f"holdfast_test_{os.getpid()}_{time.monotonic_ns()}"
    group.mkdir()
    try:
        limit = "memory.limit_in_bytes" if parent == legacy else "memory.max"
        (group / limit).write_text(str(LIMIT_BYTES))
        for swap, value in (("memory.memsw.limit_in_bytes", LIMIT_BYTES), ("memory.swap.max", 0)):
            with contextlib.suppress(OSError):
                if (group / swap).exists():
                    (group / swap).write_text(str(value))
    except OSError:
        group.rmdir()
        raise
    return group


@pytest.fixture
def memory_group() -> Iterator[Path]:
    try:
        group = make_memory_group()
    except OSError as error:
        pytest.skip(f"memory cgroups cannot be made here: {error}")
    yield group
    deadline = time.monotonic() + 10
    while True:
        try:
            group.rmdir()
            return
        except OSError:  # the kernel is still taking the last process out
            assert time.monotonic() < deadline, f"{group} cannot be removed"
            time.sleep(0.01)


class Victim:
    """A process in the group that waits for a word, then takes more memory than there is."""

    def __init__(self, group: Path, watch: MemoryWatch) -> None:
        command = [*CHILD, VICTIM, str(group)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.pid = self.process.pid
        watch.watch(self.pid)
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == b"moved\n"

    def __enter__(self) -> Victim:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            assert stream is not None
            with contextlib.suppress(BrokenPipeError):
                stream.close()

    def run_out_of_memory(self) -> int:
        assert self.process.stdin is not None
        self.process.stdin.write(b"\n")
        self.process.stdin.flush()
        return self.process.wait(60)

    def kill(self) -> int:
        self.process.kill()
        return self.process.wait(60)


def test_out_of_memory_is_distinguished_from_kill_9(files: WorkerLogFiles, memory_group: Path) -> None:
    watch = MemoryWatch()
    with Victim(memory_group, watch) as victim, Victim(memory_group, watch) as bystander:
        watch.sample()
        assert isinstance(fail(victim.run_out_of_memory(), files, watch, victim.pid).end, OutOfMemory)
        again = fail(-signal.SIGKILL, files, watch, victim.pid).end
        # The same group, whose counter has risen since this one started; but that kill is explained.
        assert fail(bystander.kill(), files, watch, bystander.pid).end == Signalled(9, "SIGKILL")
    assert again == OutOfMemory(f"cgroup /{memory_group.name}: oom_kill 0 → 1, limit 64 MiB")
    watch.forget(victim.pid)
    assert watch.evidence(victim.pid) == ""


def test_kill_9_alone_is_not_out_of_memory(files: WorkerLogFiles, memory_group: Path) -> None:
    watch = MemoryWatch()
    with Victim(memory_group, watch) as victim:
        watch.sample()
        assert fail(victim.kill(), files, watch, victim.pid).end == Signalled(9, "SIGKILL")


def test_move_that_no_sample_saw_leaves_the_machines_counter(files: WorkerLogFiles, memory_group: Path) -> None:
    watch = MemoryWatch()
    with Victim(memory_group, watch) as victim:
        code = victim.run_out_of_memory()
        watch.sample()  # too late for the group, and the rise must not be forgotten by it
        end = fail(code, files, watch, victim.pid).end
    assert isinstance(end, OutOfMemory)
    assert end.evidence.startswith("the machine ran out of memory: /proc/vmstat oom_kill ")


def test_shells_137_names_the_evidence(files: WorkerLogFiles, memory_group: Path) -> None:
    watch = MemoryWatch()
    with Victim(memory_group, watch) as victim:
        watch.sample()
        victim.run_out_of_memory()
        message = fail(137, files, watch, victim.pid).message
    assert message.endswith(f"killed by SIGKILL; cgroup /{memory_group.name}: oom_kill 0 → 1, limit 64 MiB")


# Other kernels and mounts, as files.

UNIFIED_MOUNT = "35 25 0:30 {root} {point} rw - cgroup2 cgroup2 rw\n"
LEGACY_MOUNT = "36 25 0:31 {root} {point} rw - cgroup cgroup rw,memory\n"


class Kernel:
    """A made-up /proc and /sys/fs/cgroup."""

    def __init__(self, directory: Path, mount: str, membership: str, root: str = "/") -> None:
        self.proc = directory / "proc"
        self.point = directory / "sys fs"
        escaped = str(self.point).replace(" ", "\\040")
        self.put(self.proc / "self" / "mountinfo", "junk\n" + mount.format(root=root, point=escaped))
        self.put(self.proc / "42" / "cgroup", membership)
        self.kills(0)

    def put(self, path: Path, text: str) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def kills(self, count: int) -> None:
        self.put(self.proc / "vmstat", f"nr_free_pages 1\noom_kill {count}\n")


def test_cgroup_v2_with_the_limit_of_a_parent(tmp_path: Path) -> None:
    kernel = Kernel(tmp_path, UNIFIED_MOUNT, "0::/pod/box\n")
    kernel.put(kernel.point / "pod" / "memory.max", f"{200 * 2**20}\n")
    kernel.put(kernel.point / "pod" / "box" / "memory.max", "max\n")
    kernel.put(kernel.point / "pod" / "box" / "memory.events", "oom 3\noom_kill 2\n")
    watch = MemoryWatch(kernel.proc)
    watch.watch(42)
    assert watch.evidence(42) == ""
    kernel.put(kernel.point / "pod" / "box" / "memory.events", "oom 4\noom_kill 3\n")
    kernel.put(kernel.proc / "42" / "cgroup", "0::/\n")
    watch.sample()
    assert watch.evidence(42) == "cgroup /pod/box: oom_kill 2 → 3, limit 200 MiB"


def test_hybrid_mounts_in_a_container_that_sees_a_part_of_the_tree(tmp_path: Path) -> None:
    mounts = UNIFIED_MOUNT.replace("{point}", "/nowhere") + LEGACY_MOUNT
    kernel = Kernel(tmp_path, mounts, "4:cpu,memory:/docker/abc\n0::/docker/abc\n", root="/docker/abc")
    kernel.put(kernel.point / "memory.oom_control", "oom_kill_disable 0\noom_kill 0\n")
    kernel.put(kernel.point / "memory.limit_in_bytes", f"{2**63 - 4096}\n")
    watch = MemoryWatch(kernel.proc)
    watch.watch(42)
    kernel.put(kernel.point / "memory.oom_control", "oom_kill_disable 0\noom_kill 1\n")
    assert watch.evidence(42) == "cgroup /docker/abc: oom_kill 0 → 1, no limit: the machine ran out of memory"


def test_a_zombie_that_seems_to_be_in_the_root_is_searched_in_its_last_cgroup(tmp_path: Path) -> None:
    kernel = Kernel(tmp_path, LEGACY_MOUNT, "4:memory:/job\n")
    kernel.put(kernel.point / "memory.oom_control", "oom_kill 0\n")
    kernel.put(kernel.point / "job" / "memory.oom_control", "oom_kill 0\n")
    watch = MemoryWatch(kernel.proc)
    watch.watch(42)
    kernel.put(kernel.point / "job" / "memory.oom_control", "oom_kill 1\n")
    kernel.put(kernel.proc / "42" / "cgroup", "4:memory:/\n")
    watch.sample()
    assert watch.evidence(42).startswith("cgroup /job: oom_kill 0 → 1")


def test_one_kill_of_the_machines_counter_explains_one_process(tmp_path: Path) -> None:
    kernel = Kernel(tmp_path, "", "")
    watch = MemoryWatch(kernel.proc)
    kernel.kills(5)
    watch.watch(42)
    watch.watch(43)
    kernel.kills(6)
    assert "oom_kill 5 → 6" in watch.evidence(42)
    assert watch.evidence(43) == ""


def test_old_rise_of_the_machines_counter_says_nothing(tmp_path: Path) -> None:
    kernel = Kernel(tmp_path, "", "")
    watch = MemoryWatch(kernel.proc)
    watch.watch(42)
    kernel.kills(1)
    for _ in range(5):
        watch.sample()
    assert watch.evidence(42) == ""
    kernel.kills(2)
    watch.sample()
    assert "oom_kill 1 → 2" in watch.evidence(42)


def test_rise_before_the_start_says_nothing(tmp_path: Path) -> None:
    kernel = Kernel(tmp_path, "", "")
    watch = MemoryWatch(kernel.proc)
    kernel.kills(1)
    watch.watch(42)
    assert watch.evidence(42) == ""


@pytest.mark.parametrize("membership", ["", "junk", "::::", "0::/gone/away\n", "4:memory:/x\n", "0::/../../etc\n"])
def test_unreadable_kernel_is_no_evidence_and_no_error(tmp_path: Path, membership: str) -> None:
    kernel = Kernel(tmp_path, UNIFIED_MOUNT + LEGACY_MOUNT, membership)
    kernel.put(kernel.point / "x" / "memory.oom_control", "oom_kill many\n")
    watch = MemoryWatch(kernel.proc)
    watch.watch(42)
    watch.watch(43)
    watch.sample()
    (kernel.proc / "vmstat").unlink()
    assert (watch.evidence(42), watch.evidence(43), watch.evidence(44)) == ("", "", "")


def test_a_kill_that_the_kernels_log_ascribes_to_another_process_is_no_evidence(tmp_path: Path) -> None:
    kernel = Kernel(tmp_path, UNIFIED_MOUNT, "0::/\n")
    watch = MemoryWatch(kernel.proc)
    watch.watch(42)
    kernel.kills(1)
    (kernel.proc / "kmsg").write_text("6,1,1,-;Memory cgroup out of memory: Killed process 77 (python) total-vm:1kB\n")
    assert watch.evidence(42) == ""
    (kernel.proc / "kmsg").write_text("6,1,1,-;Out of memory: Killed process 42 (python) total-vm:1kB\n")
    assert "ran out of memory" in watch.evidence(42)
