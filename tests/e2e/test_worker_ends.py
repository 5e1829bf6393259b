"""However a worker ends, the job's end names the rank, the kind of end and the cause, and the exit code is 1."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.core.faults.failures import Exited, Failure, NotStarted, OutOfMemory, Signalled
from holdfast.core.records import IncidentOpened, Outcome, WorkerFailedRecord
from support.jobs import SCRIPTS, SPAWN, STEPS, Place, marker

FORK = ("--start-method", "forkserver")


def run_to_failure(job: Place, *args: str, exit_code: int = 1) -> tuple[Failure, str]:
    """The cause the job ended with, and what the agent said."""
    agent = job.start("--standalone", *args)
    assert agent.wait() == exit_code
    end = job.journal.finished()
    assert (end.outcome, end.exit_code) == (Outcome.FAILED, exit_code)
    assert end.cause is not None
    assert [text.partition(": ")[0] for text in agent.logged("root-cause")] == ["root cause"]
    return end.cause, agent.said


@pytest.mark.parametrize(
    ("command", "end"),
    [
        ("exit 3", Exited(3)),
        ("exit 255", Exited(255)),
        ("kill 9", Signalled(signal.SIGKILL, "SIGKILL")),
        ("kill 11", Signalled(signal.SIGSEGV, "SIGSEGV")),
        ("kill 6", Signalled(signal.SIGABRT, "SIGABRT")),
    ],
)
def test_the_end_of_one_worker_is_the_end_of_the_job_and_is_named(tmp_path: Path, command: str, end: object) -> None:
    job = Place(tmp_path)
    job.tell(1, command)
    cause, _ = run_to_failure(job, "--nproc-per-node", "2", *SPAWN, STEPS)
    assert cause.end == end
    assert (cause.rank, cause.local_rank, cause.view) == (1, 1, 1)
    assert cause.pid == job.pid_of(rank=1)


@pytest.mark.parametrize("method", [SPAWN, FORK], ids=["spawn", "forkserver"])
def test_an_uncaught_exception_is_the_cause_without_record(tmp_path: Path, method: tuple[str, ...]) -> None:
    job = Place(tmp_path)
    job.tell(0, "raise ValueError lost the plot")
    cause, said = run_to_failure(job, *method, STEPS)
    assert cause.end == Exited(1)
    assert cause.exception == "ValueError"
    assert cause.message == "ValueError: lost the plot"
    assert cause.traceback.startswith("Traceback (most recent call last):")
    assert "steps.py" in cause.traceback and "in obey" in cause.traceback
    assert cause.traceback.endswith("ValueError: lost the plot")
    assert "holdfast/worker" not in cause.traceback
    assert cause.traceback in said


@pytest.mark.parametrize("method", [SPAWN, FORK], ids=["spawn", "forkserver"])
def test_an_exception_under_torch_record_is_the_cause(tmp_path: Path, method: tuple[str, ...]) -> None:
    cause, said = run_to_failure(Place(tmp_path), *method, str(SCRIPTS / "recorded.py"))
    assert cause.exception.endswith("RuntimeError")
    assert "the configuration cannot be read" in cause.message
    assert "invalid literal for int()" in cause.traceback
    assert Path(cause.error_file).is_file()
    assert "invalid literal for int()" in said


@pytest.fixture
def memory_cgroup() -> Iterator[Path]:
    """A cgroup that allows 48 MiB, of either version."""
    roots = (Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup"))
    root = next((root for root in roots if (root / "cgroup.procs").exists()), None)
    if root is None:
        pytest.skip("no cgroups here")
    group = root / f"holdfast-{marker()}"
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"cgroups cannot be made here: {error}")
    try:
        limit = group / ("memory.limit_in_bytes" if root.name == "memory" else "memory.max")
        if not limit.exists():
            pytest.skip("no memory controller here")
        limit.write_text(str(48 << 20))
        yield group
    finally:
        group.rmdir()


def test_a_worker_that_the_kernel_killed_for_memory_is_told_from_one_that_somebody_killed(
    tmp_path: Path, memory_cgroup: Path
) -> None:
    cause, said = run_to_failure(Place(tmp_path), *SPAWN, str(SCRIPTS / "eats_memory.py"), str(memory_cgroup))
    assert isinstance(cause.end, OutOfMemory)
    assert "oom_kill" in cause.end.evidence
    assert "memory ran out" in said


def test_a_program_that_cannot_be_started_is_a_failure_with_its_reason(tmp_path: Path) -> None:
    program = tmp_path / "program"
    program.write_text("#!/nonexistent/interpreter\n")
    program.chmod(0o755)
    cause, said = run_to_failure(Place(tmp_path), "--no-python", str(program))
    assert cause.end == Exited(127) or isinstance(cause.end, NotStarted)
    assert str(program) in said


@pytest.mark.parametrize("record", [(), ("--record",)], ids=["plain", "record"])
def test_the_culprit_of_a_broken_collective_is_the_cause_and_its_victim_is_not(
    tmp_path: Path, record: tuple[str, ...]
) -> None:
    job = Place(tmp_path)
    cause, said = run_to_failure(job, "--nproc-per-node", "2", str(SCRIPTS / "raises.py"), *record)
    assert cause.rank == 1
    assert cause.exception == "ValueError"
    assert cause.message == "ValueError: sample 2 is broken"
    assert "load_batch" in cause.traceback
    assert said.count("root cause: ") == 1


def test_the_culprit_is_the_cause_even_if_its_victim_is_gone_before_it(tmp_path: Path) -> None:
    job = Place(tmp_path)
    cause, _ = run_to_failure(job, "--nproc-per-node", "2", *SPAWN, str(SCRIPTS / "first_to_exit.py"))
    lost = [record.failure.rank for record in job.journal.of(WorkerFailedRecord)]
    assert lost == [0, 1]
    assert cause.rank == 1
    assert cause.message == "KeyError: 'the culprit'"


ENDS_ALONE = """
import os, threading
if os.environ["RANK"] == "1":
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()
"""


def test_a_worker_that_hangs_at_its_end_is_shown_and_ended(tmp_path: Path) -> None:
    script = tmp_path / "ends.py"
    script.write_text(ENDS_ALONE)
    job = Place(tmp_path)
    cause, said = run_to_failure(
        job, "--nproc-per-node", "2", *FORK, "--preload", "none", "--hang-timeout", "2", str(script)
    )
    assert cause.rank == 1
    assert "did not end after 1 other worker of its node had, and did nothing for " in cause.message
    assert 'ends.py", line 6' in said, "where it hangs"


def test_the_cause_is_the_headline_though_its_process_ends_long_after_those_of_its_victims(tmp_path: Path) -> None:
    job = Place(tmp_path)
    agent = job.start("--standalone", "--nproc-per-node", "2", str(SCRIPTS / "slow_end.py"), "3")
    assert agent.wait() == 1
    end = job.journal.finished()
    sentence = "exited with code 1: ValueError: sample 2 is broken"
    assert end.cause is not None and end.cause.rank == 1 and sentence in end.why
    (last,) = agent.logged("job-ended")
    assert sentence in last and last.count("ValueError") == 1
    assert [opened.cause for opened in job.journal.of(IncidentOpened)] == [
        f"rank 1 on {end.cause.node_id} failed: ValueError: sample 2 is broken"
    ]
    broken = re.search(r"Connection (closed|reset) by peer", agent.stderr)  # gloo finds either, by chance
    assert broken and broken[0] not in last, "what it broke is on the console, and not in the headline"


FAILS = """
import os, signal
from torch.distributed.elastic.multiprocessing.errors import record
@record
def main():
    if os.environ["RANK"] == "1":
        {what}
main()
"""


@pytest.mark.parametrize(
    ("what", "expected"),
    [
        ("raise ValueError('lost the plot')", ["ValueError: lost the plot", 1]),
        pytest.param("os.kill(os.getpid(), signal.SIGSEGV)", None, marks=pytest.mark.long),
    ],
    ids=["an exception", "a signal"],
)
def test_the_root_cause_is_in_the_error_file_of_the_launcher_itself(
    tmp_path: Path, what: str, expected: object
) -> None:
    """As torchrun leaves it there, which leaves nothing where the worker has left nothing."""
    script = tmp_path / "fails.py"
    script.write_text(FAILS.format(what=what))
    found: dict[str, list[object]] = {}
    for name in ("torchrun", "holdfast"):
        error_file = tmp_path / f"{name}.json"
        job, words = Place(tmp_path / name), ("--standalone", "--nproc-per-node", "2", str(script))
        start = job.torchrun if name == "torchrun" else job.start
        assert start(*words, env={"TORCHELASTIC_ERROR_FILE": str(error_file)}).wait() == 1
        if error_file.exists():
            message = json.loads(error_file.read_text())["message"]
            found[name] = [message["message"], message["errorCode"]]
            assert expected is None or "lost the plot" in message["extraInfo"]["py_callstack"]
    if expected is None:
        assert "torchrun" not in found
        assert found["holdfast"][1] == -signal.SIGSEGV
    else:
        assert found["holdfast"] == found["torchrun"] == expected
