"""The user's failover extension: which names load, and that nothing it does holds up or breaks a recovery."""

from __future__ import annotations

import asyncio
import itertools
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from holdfast import failover
from holdfast.core.events import Event, NodeLeft, WorkerFailed
from holdfast.core.faults.failures import Exited, Failure, Signalled
from holdfast.core.records import Outcome, WorkerFailedRecord
from holdfast.errors import UsageError
from holdfast.failover import (
    DynamicAgentFailoverExtension,
    DynamicFailoverExtension,
    Extension,
    FailoverStrategy,
    FailureInfo,
    ask,
    load,
)
from holdfast.master.failover_extension import MasterAdviser
from support.jobs import SPAWN, STEPS, Place

NORMAL, NODE, ABORTION = (
    FailoverStrategy.NORMAL_FAILOVER,
    FailoverStrategy.NODE_FAILOVER,
    FailoverStrategy.ABORTION_FAILOVER,
)
_modules = itertools.count()


def failure(**changed: Any) -> Failure:
    first = Failure(node_id="a", view=3, rank=5, local_rank=1, pid=7, end=Exited(2), failed_at=1.0, traceback="Boom")
    return msgspec.structs.replace(first, **changed)


class Answers(DynamicFailoverExtension):
    """Answers with what it was made with, calls it if it can be called."""

    def __init__(self, answer: Any) -> None:
        self.answer = answer
        self.told: list[FailureInfo] = []

    def get_user_failover_strategy(self, failure_info: FailureInfo) -> FailoverStrategy:
        self.told.append(failure_info)
        return self.answer() if callable(self.answer) else self.answer  # type: ignore[no-any-return]


def asked(extension: Extension, *args: Any, **more: Any) -> FailoverStrategy:
    return asyncio.run(ask(extension, *(args or (failure(),)), **more))


@pytest.fixture
def short_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failover, "TIME_LIMIT_S", 0.1)


# --- asking


@pytest.mark.parametrize("strategy", FailoverStrategy)
def test_what_the_extension_answers_counts(strategy: FailoverStrategy) -> None:
    assert asked(Answers(strategy)) is strategy


@pytest.mark.parametrize("base", [DynamicFailoverExtension, DynamicAgentFailoverExtension])
def test_the_base_classes_leave_it_to_the_ladder(base: type[Extension]) -> None:
    assert asked(base()) is NORMAL


def test_an_extension_gets_the_failure_and_the_history() -> None:
    extension = Answers(NORMAL)
    before = [failure(rank=rank, node_id="ab"[rank % 2]) for rank in range(failover.HISTORY_MAX + 4)]
    asked(extension, failure(end=Signalled(9, "SIGKILL")), before, restart_count=2)
    info = extension.told[0]
    assert (info.rank, info.local_rank, info.node_id, info.view) == (5, 1, "a", 3)
    assert (info.exit_code, info.traceback, info.restart_count) == (-9, "Boom", 2)
    assert [earlier.rank for earlier in info.history] == list(range(4, failover.HISTORY_MAX + 4))
    assert {earlier.node_id for earlier in info.node_history} == {"a"}
    with pytest.raises(AttributeError):
        info.restart_count = 3  # type: ignore[misc]


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise ValueError("not even its own name")


def raises(error: BaseException) -> Any:
    def work() -> None:
        raise error

    return work


@pytest.mark.parametrize(
    "answer",
    [
        raises(ValueError("bad day")),
        raises(SystemExit(3)),
        raises(KeyboardInterrupt()),
        raises(Unspeakable()),
        None,
        "abortion",
        FailoverStrategy,
    ],
    ids=["error", "exit", "interrupt", "unspeakable", "nothing", "word", "class"],
)
def test_whatever_is_no_strategy_means_normal(answer: Any) -> None:
    assert asked(Answers(answer)) is NORMAL


def test_one_that_hangs_means_normal_and_is_asked_again_only_once_it_has_come_back(short_limit: None) -> None:
    release = threading.Event()
    answers: Iterator[Callable[[], Any]] = iter([lambda: release.wait(60) and NODE, lambda: NODE])
    extension = Answers(lambda: next(answers)())
    assert asked(extension) is NORMAL
    assert asked(extension) is NORMAL
    assert len(extension.told) == 1, "it was not bothered while it hung"
    release.set()
    for thread in failover._user_code.stuck:
        thread.join(60)
    assert asked(extension) is NODE


def test_several_failures_at_once_are_asked_about_one_after_the_other() -> None:
    inside = threading.Lock()

    def alone() -> FailoverStrategy:
        assert inside.acquire(blocking=False), "two calls at once"
        inside.release()
        return NODE

    async def all_at_once() -> list[FailoverStrategy]:
        extension = Answers(alone)
        found = await asyncio.gather(*(ask(extension, failure(rank=rank)) for rank in range(16)))
        assert len(extension.told) == 16
        return found

    assert set(asyncio.run(all_at_once())) == {NODE}


def test_a_call_that_never_returns_does_not_keep_the_process_from_ending() -> None:
    code = """
import asyncio, threading
from holdfast import failover
from holdfast.core.events import Event, NodeLeft, WorkerFailed
from holdfast.core.faults.failures import Exited, Failure
class Hangs(failover.DynamicFailoverExtension):
    def get_user_failover_strategy(self, failure_info):
        threading.Event().wait()
failover.TIME_LIMIT_S = 0.05
lost = Failure(node_id="a", view=1, rank=0, local_rank=0, pid=1, end=Exited(1), failed_at=0.0)
print(asyncio.run(failover.ask(Hangs(), lost)).name)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines()[-1] == "NORMAL_FAILOVER"


# --- the master's side


def failed(rank: int, **changed: Any) -> WorkerFailed:
    lost = failure(rank=rank, local_rank=rank, **changed)
    return WorkerFailed(node_id="a", incarnation="a.1", view=3, failure=lost)


def advised(adviser: MasterAdviser, *events: Event) -> list[Event]:
    return asyncio.run(adviser.advise(events, restart_count=1))


def test_the_order_of_events_stays_and_only_failures_get_advice() -> None:
    gone = NodeLeft(node_id="a", incarnation="a.1")
    extension = Answers(NODE)
    first, second, third = advised(MasterAdviser(extension), failed(0), gone, failed(1))
    assert second is gone
    assert [(e.failure.rank, e.failure.advice) for e in (first, third)] == [(0, NODE), (1, NODE)]  # type: ignore[union-attr]
    assert [info.restart_count for info in extension.told] == [1, 1]


def test_a_batch_waits_for_one_time_limit_whatever_the_number_of_failures(short_limit: None) -> None:
    release = threading.Event()
    extension = Answers(lambda: release.wait(60) and NODE)
    try:
        found = advised(MasterAdviser(extension), *(failed(rank) for rank in range(100)))
        assert {event.failure.advice for event in found} == {NORMAL}  # type: ignore[union-attr]
        assert len(extension.told) == 1
    finally:
        release.set()
        for thread in failover._user_code.stuck:
            thread.join(60)


def test_what_was_heard_before_or_judged_on_the_node_is_not_asked_about_again() -> None:
    extension = Answers(NODE)
    adviser = MasterAdviser(extension)
    adviser.learn([WorkerFailedRecord(at=1.0, failure=failed(0).failure, late=False)])
    repeated, judged, new = advised(adviser, failed(0), failed(1, advice=ABORTION), failed(2))
    assert [event.failure.advice for event in (repeated, judged, new)] == [NORMAL, ABORTION, NODE]  # type: ignore[union-attr]
    assert [(info.rank, len(info.history)) for info in extension.told] == [(2, 1)]


def test_without_an_extension_nothing_waits() -> None:
    assert not MasterAdviser(None).has_to_say(failed(0))


# --- loading


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Writes a module into the working directory; its name."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))

    def write(text: str) -> str:
        name = f"users_extension_{next(_modules)}"
        (tmp_path / f"{name}.py").write_text("import holdfast.failover as hf\n" + text)
        return name

    return write


def test_a_class_of_the_working_directory_is_found_and_what_it_imports_later_too(module: Any) -> None:
    helper = module("NODE = hf.FailoverStrategy.NODE_FAILOVER\n")
    name = module(
        "class Mine(hf.DynamicAgentFailoverExtension):\n"
        "    def get_user_failover_strategy(self, failure_info):\n"
        f"        import {helper}\n"
        f"        return {helper}.NODE\n"
    )
    extension = load(f"{name}::Mine")
    assert isinstance(extension, DynamicAgentFailoverExtension)
    assert asked(extension) is NODE
    assert sys.path[0] != str(Path.cwd())


def test_the_working_directory_comes_before_the_rest_of_the_path(
    module: Any, tmp_path_factory: pytest.TempPathFactory
) -> None:
    name = module("class Mine(hf.DynamicFailoverExtension): here = True\n")
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    (elsewhere / f"{name}.py").write_text("Mine = 3\n")
    sys.path.insert(0, str(elsewhere))
    assert load(f"{name}::Mine").here  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "name", ["", "::", "module", "module::", "::Class", "a b::C", "module:Class", "a::b::C", "a/b::C"]
)
def test_a_name_of_another_form_is_refused(name: str) -> None:
    with pytest.raises(UsageError, match="give module::Class, as in"):
        load(name)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("raise ValueError('bad\\nday')\n", r"cannot be imported, .* \(ValueError: bad day\)"),
        ("raise SystemExit(3)\n", "cannot be imported"),
        ("import no_such_module_at_all\n", "No module named 'no_such_module_at_all'"),
        ("def broken(:\n", "SyntaxError"),
        ("", "has no Mine"),
        ("Mine = 3\n", "Mine is not a class derived from holdfast.DynamicFailoverExtension or"),
        ("class Mine: pass\n", "Mine is not a class derived from"),
        ("Mine = hf.DynamicFailoverExtension()\n", "Mine is not a class derived from"),
        (
            "class Mine(hf.DynamicFailoverExtension):\n    def __init__(self, more): pass\n",
            r"making a Mine failed \(TypeError: .*'more'\)",
        ),
    ],
)
def test_a_name_that_leads_nowhere_is_refused_with_one_sentence(module: Any, text: str, why: str) -> None:
    name = module(text)
    with pytest.raises(UsageError, match=why) as refused:
        load(f"{name}::Mine")
    assert str(refused.value).startswith(f"--dynamic-failover-extension {name}::Mine: ")
    assert "\n" not in str(refused.value)


def test_a_module_that_is_not_there_is_named() -> None:
    with pytest.raises(UsageError, match="No module named 'no_such_module_at_all'"):
        load("no_such_module_at_all::Mine")


# --- jobs

ABORTS = """
import pathlib
import holdfast.failover as hf

class Aborts(hf.DynamicFailoverExtension):
    def get_user_failover_strategy(self, failure_info):
        told = pathlib.Path("told")
        told.write_text(f"{failure_info.node_id} {failure_info.exit_code} {len(failure_info.history)}")
        return hf.FailoverStrategy.ABORTION_FAILOVER
"""


@pytest.mark.usefixtures("leak_guard")
def test_a_job_whose_extension_says_abort_ends_though_restarts_are_left(tmp_path: Path) -> None:
    job = Place(tmp_path)
    (tmp_path / "extension.py").write_text(ABORTS)
    flags = ("--standalone", "--node-id", "a", "--max-restarts", "3")
    agent = job.start(*flags, "--dynamic_failover_extension", "extension::Aborts", *SPAWN, STEPS)
    job.journal.wait_for_workers(1)
    job.tell(0, "exit 3")
    assert agent.wait() == 1
    assert (tmp_path / "told").read_text() == "a 3 0"
    assert [lost.failure.advice for lost in job.journal.of(WorkerFailedRecord)] == [ABORTION]
    assert job.journal.finished().outcome is Outcome.FAILED
    assert job.journal.view() == 1, "nothing was started again"


@pytest.mark.usefixtures("leak_guard")
def test_an_extension_that_hangs_costs_its_time_limit_and_nothing_else(tmp_path: Path) -> None:
    job = Place(tmp_path)
    text = "import threading\n" + ABORTS.replace('told = pathlib.Path("told")', "threading.Event().wait()")
    (tmp_path / "extension.py").write_text(text)
    flags = ("--standalone", "--max-restarts", "1", "--dynamic-failover-extension", "extension::Aborts")
    agent = job.start(*flags, *SPAWN, STEPS)
    job.journal.wait_for_workers(1)
    job.tell(0, "exit 3")
    job.journal.wait_for_workers(1, view=2)
    job.finish()
    assert agent.wait() == 0
    assert job.journal.term() == 1, "the master did not take its wait for an absence of its own"


@pytest.mark.usefixtures("leak_guard")
def test_a_name_that_does_not_load_is_refused_before_anything_starts(tmp_path: Path) -> None:
    job = Place(tmp_path)
    agent = job.start("--standalone", "--dynamic-failover-extension", "extension::Aborts", *SPAWN, STEPS)
    assert agent.wait() == 2
    assert "No module named 'extension'" in agent.stderr
    assert job.journal.path is None
