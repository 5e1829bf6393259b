"""Background tasks: a bug ends the process, a cancellation does not."""

from __future__ import annotations

import asyncio
import logging
import subprocess
import sys
import textwrap

import pytest

from holdfast import exit_codes
from holdfast.errors import WireError
from holdfast.util import tasks
from holdfast.util.tasks import TaskSet, end_process_on_bugs


async def never_end() -> None:
    await asyncio.Event().wait()


def test_a_bug_in_a_background_task_ends_the_process_with_its_traceback() -> None:
    program = """
        import asyncio
        from holdfast.util.logs import set_up_logging
        from holdfast.util.tasks import TaskSet

        async def watch():
            raise AssertionError("the watch is broken")

        async def main():
            TaskSet().start(watch())
            await asyncio.sleep(60)

        set_up_logging("text", "test", verbose=True)
        asyncio.run(main())
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, timeout=50, check=False
    )
    assert done.returncode == exit_codes.INTERNAL_ERROR
    assert "in watch" in done.stderr and "AssertionError: the watch is broken" in done.stderr
    assert "[internal-error]" in done.stderr


def test_on_bug_is_called_once_with_the_exception(caplog: pytest.LogCaptureFixture) -> None:
    bugs: list[BaseException] = []

    async def fail() -> None:
        raise ValueError("no")

    async def main() -> None:
        tasks = TaskSet(bugs.append)
        tasks.start(fail(), "the failing one")
        await tasks.drain()

    with caplog.at_level(logging.ERROR, logger="holdfast"):
        asyncio.run(main())
    assert [str(bug) for bug in bugs] == ["no"]
    assert [record.__dict__["holdfast_event"] for record in caplog.records] == ["internal-error"]


def test_close_cancels_and_waits_until_every_task_has_cleaned_up() -> None:
    cleaned_up: list[str] = []
    bugs: list[BaseException] = []

    async def work(tasks: TaskSet) -> None:
        try:
            await never_end()
        finally:
            await asyncio.sleep(0.01)
            cleaned_up.append("first")
            tasks.start(late())

    async def late() -> None:
        try:
            await never_end()
        finally:
            cleaned_up.append("late")

    async def main() -> int:
        tasks = TaskSet(bugs.append)
        tasks.start(work(tasks))
        await asyncio.sleep(0)
        await tasks.close()
        return len(tasks)

    assert asyncio.run(main()) == 0
    assert cleaned_up[0] == "first" and not bugs


def test_a_task_that_ends_or_is_cancelled_leaves_the_set() -> None:
    async def main() -> tuple[int, int]:
        tasks = TaskSet(lambda error: pytest.fail(str(error)))
        ending, cancelled = tasks.start(asyncio.sleep(0)), tasks.start(never_end())
        before = len(tasks)
        await ending
        cancelled.cancel()
        await asyncio.wait({cancelled})
        await asyncio.sleep(0)
        return before, len(tasks)

    assert asyncio.run(main()) == (2, 0)


@pytest.mark.parametrize(
    ("error", "is_bug"),
    [(AssertionError("a bug"), True), (ConnectionResetError("reset"), False), (WireError("x"), False)],
)
def test_a_bug_in_a_callback_of_the_loop_ends_the_process_and_a_broken_connection_does_not(
    monkeypatch: pytest.MonkeyPatch, error: Exception, is_bug: bool
) -> None:
    bugs: list[BaseException] = []
    monkeypatch.setattr(tasks, "end_process", bugs.append)

    def fail() -> None:
        raise error

    async def main() -> None:
        end_process_on_bugs(asyncio.get_running_loop())
        asyncio.get_running_loop().call_soon(fail)
        await asyncio.sleep(0.01)

    asyncio.run(main())
    assert bugs == ([error] if is_bug else [])
