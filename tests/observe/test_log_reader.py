"""The workers' output: files that grow, views that follow each other, nodes that are elsewhere."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from pathlib import Path

import pytest

from holdfast.core.events import NodeLeft
from holdfast.errors import UsageError
from holdfast.journal import JournalEntry
from holdfast.observe import log_reader
from holdfast.observe.formatting import format_ranks
from holdfast.observe.log_locations import LogLocations
from holdfast.observe.log_reader import LogFilter, LogLine, LogNote, LogReader, Tail, follow_output, read_output
from holdfast.observe.source import JournalSource
from support.scenario import BOOM, JobOnDisk, incarnation_of, write_output

# --- one file


def test_lines_come_whole_and_only_once_as_the_file_grows(tmp_path: Path) -> None:
    tail = Tail(tmp_path / "log")
    assert list(tail.lines()) == []
    with tail.path.open("ab", buffering=0) as file:
        file.write(b"one\ntw")
        assert list(tail.lines()) == [b"one\n"]
        file.write(b"o\n")
        assert list(tail.lines()) == [b"two\n"]
        file.write(b"no end")
        assert list(tail.lines()) == []
        assert list(tail.lines(last=True)) == [b"no end"]
    assert list(tail.lines(last=True)) == []


def test_a_progress_bar_comes_state_by_state_and_windows_line_ends_stay_whole(tmp_path: Path) -> None:
    tail = Tail(tmp_path / "log")
    with tail.path.open("ab", buffering=0) as file:
        file.write(b"10%\r20%\r")
        assert list(tail.lines()) == [b"10%\r"]
        file.write(b"\nnext\n")
        assert list(tail.lines()) == [b"20%\r\n", b"next\n"]


def test_a_line_without_an_end_does_not_fill_the_memory(tmp_path: Path) -> None:
    tail = Tail(tmp_path / "log")
    tail.path.write_bytes(b"x" * (log_reader.LINE_BYTES_MAX + 1))
    assert b"".join(tail.lines()) == tail.path.read_bytes()


@pytest.mark.parametrize("block_bytes", [1, 2, 3, 7, 256 * 1024])
@pytest.mark.parametrize("text", [b"", b"a", b"a\n", b"a\nb", b"a\nb\n", b"\n\n\n", b"one\ntwo\nthree\nfour\n", b"\nx"])
@pytest.mark.parametrize("count", [0, 1, 2, 3, 9])
def test_the_last_lines_are_found_from_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: bytes, count: int, block_bytes: int
) -> None:
    monkeypatch.setattr(log_reader, "READ_BYTES_MAX", block_bytes)
    (tmp_path / "log").write_bytes(text)
    lines = text.splitlines(keepends=True)
    assert list(Tail(tmp_path / "log", count).lines(last=True)) == lines[max(len(lines) - count, 0) :]


def test_a_file_that_comes_later_is_news_from_its_first_line(tmp_path: Path) -> None:
    tail = Tail(tmp_path / "log", lines_max=1)
    assert list(tail.lines()) == []
    tail.path.write_bytes(b"one\ntwo\n")
    assert list(tail.lines()) == [b"one\n", b"two\n"]


# --- all workers, once


def running(tmp_path: Path, workers: int = 2) -> JobOnDisk:
    job = JobOnDisk(tmp_path, workers=workers).join("a", log_dir=str(tmp_path / "logs")).start("a")
    for local_rank in range(workers):
        write_output(tmp_path / "logs", 1, local_rank, f"out {local_rank}\n".encode(), f"err {local_rank}\n".encode())
    return job


def shown(job: JobOnDisk, choice: LogFilter) -> list[tuple[int, int, bytes] | str]:
    outputs = LogLocations()
    outputs.add(job.entries())
    return [plain(item) for item in read_output(outputs, choice)]


def plain(item: LogLine | LogNote) -> tuple[int, int, bytes] | str:
    return item.sentence if isinstance(item, LogNote) else (item.view, item.rank, item.text)


def test_every_rank_is_shown_both_streams(tmp_path: Path) -> None:
    assert shown(running(tmp_path), LogFilter()) == [
        (1, 0, b"out 0\n"),
        (1, 0, b"err 0\n"),
        (1, 1, b"out 1\n"),
        (1, 1, b"err 1\n"),
    ]


def test_one_rank_and_one_stream_can_be_chosen(tmp_path: Path) -> None:
    assert shown(running(tmp_path), LogFilter(rank=1, streams=("stderr",))) == [(1, 1, b"err 1\n")]


def test_the_newest_view_is_shown_unless_another_is_asked_for(tmp_path: Path) -> None:
    job = running(tmp_path, workers=2).restart_once()
    write_output(tmp_path / "logs", 2, 0, b"again\n")
    assert shown(job, LogFilter(rank=0)) == [(2, 0, b"again\n")]
    assert shown(job, LogFilter(rank=0, view=1, streams=("stdout",))) == [(1, 0, b"out 0\n")]


def test_a_rank_or_view_that_is_not_there_is_a_sentence(tmp_path: Path) -> None:
    job = running(tmp_path)
    with pytest.raises(UsageError, match="view 1 has no rank 2: its ranks are 0 to 1"):
        shown(job, LogFilter(rank=2))
    with pytest.raises(UsageError, match="no view 7: the newest is view 1"):
        shown(job, LogFilter(view=7))


def test_output_on_another_machine_is_named_with_its_node_and_directory(tmp_path: Path) -> None:
    job = JobOnDisk(tmp_path, nodes=(2, 2))
    job.join("a", log_dir=str(tmp_path / "logs")).join("b", log_dir="/far/away").start("a").start("b")
    write_output(tmp_path / "logs", 1, 0, b"here\n")
    write_output(tmp_path / "logs", 1, 1)
    assert shown(job, LogFilter()) == [
        "the output of ranks 2-3 in view 1 is not on this machine: node b (host-b) has it in /far/away/attempt_0",
        (1, 0, b"here\n"),
    ]


@pytest.mark.parametrize("log_dir", ["", "/dev/null"])
def test_a_node_that_keeps_no_files_says_so(tmp_path: Path, log_dir: str) -> None:
    job = JobOnDisk(tmp_path, workers=1).join("a", log_dir=log_dir).start("a")
    assert shown(job, LogFilter()) == ["the output of rank 0 in view 1 is in no file: node a (host-a) writes none"]


def test_before_the_workers_run_nothing_is_missed(tmp_path: Path) -> None:
    assert shown(JobOnDisk(tmp_path).join("a", log_dir="/far/away"), LogFilter()) == []


@pytest.mark.parametrize(
    ("ranks", "words"), [([], ""), ([4], "4"), ([0, 1, 2], "0-2"), ([5, 0, 1, 7, 8], "0-1, 5, 7-8")]
)
def test_ranks_in_a_few_words(ranks: list[int], words: str) -> None:
    assert format_ranks(ranks) == words


# --- following


def test_a_view_is_read_until_the_next_one_runs_and_then_no_more(tmp_path: Path) -> None:
    job, logs = running(tmp_path, workers=2), tmp_path / "logs"
    outputs = LogLocations()
    reader = LogReader(outputs, LogFilter(rank=0, streams=("stdout",)))

    def look() -> list[object]:
        outputs.add(job.entries())
        return [plain(item) for item in reader.read_new(last=False)]

    assert look() == [(1, 0, b"out 0\n")]
    job.fail("a", 1, **BOOM).offer("a")
    write_output(logs, 1, 0, b"last words\n")
    assert look() == ["view 2 begins", (1, 0, b"last words\n")]
    write_output(logs, 1, 0, b"very last, no end")
    job.start("a")
    write_output(logs, 2, 0, b"again\n")
    assert look() == [(1, 0, b"very last, no end"), (2, 0, b"again\n")]
    write_output(logs, 1, 0, b"nobody can have written this\n")
    assert look() == []


def test_a_worker_that_lives_on_is_read_on_where_it_was(tmp_path: Path) -> None:
    job = running(tmp_path, workers=2).settle("a").commit_step("a", 1).offer("a")
    outputs = LogLocations()
    outputs.add(job.entries())
    reader = LogReader(outputs, LogFilter(streams=("stdout",)))
    assert [plain(item) for item in reader.read_new(last=False)] == [(1, 0, b"out 0\n"), (1, 1, b"out 1\n")]
    seen = len(job.entries())
    job.fail("a", 1, **BOOM)
    outputs.add(job.entries()[seen:])
    write_output(tmp_path / "logs", 1, 0, b"still here\n")
    assert [plain(item) for item in reader.read_new(last=False)] == [(1, 0, b"still here\n")]
    seen = len(job.entries())
    job.start("a", 5_000, logs=("attempt_0/0", "attempt_1/1"))
    outputs.add(job.entries()[seen:])
    write_output(tmp_path / "logs", 1, 0, b"and here\n")
    write_output(tmp_path / "logs", 1, 1, b"last words\n")
    write_output(tmp_path / "logs", 2, 1, b"new\n")
    assert sorted(str(plain(item)) for item in reader.read_new(last=False)) == [
        "(1, 1, b'last words\\n')",
        "(2, 0, b'and here\\n')",
        "(2, 1, b'new\\n')",
        "view 2 begins",
    ]


async def until(items: AsyncGenerator[LogLine | LogNote, None], wanted: object) -> None:
    async with asyncio.timeout(30):
        async for item in items:
            if plain(item) == wanted:
                return
    raise AssertionError(f"ended without {wanted}")


def test_following_goes_on_into_the_next_view_and_ends_with_the_job(tmp_path: Path) -> None:
    job, logs = running(tmp_path, workers=2), tmp_path / "logs"

    async def watch() -> list[object]:
        async with aclosing(follow_output(JournalSource(job.path), LogFilter(streams=("stdout",)))) as items:
            await until(items, (1, 1, b"out 1\n"))
            write_output(logs, 1, 1, b"more\n")
            await until(items, (1, 1, b"more\n"))
            job.fail("a", 1, **BOOM).offer("a")
            await until(items, "view 2 begins")
            write_output(logs, 1, 0, b"last words\n")  # workers of view 1 are still being stopped
            await until(items, (1, 0, b"last words\n"))
            write_output(logs, 2, 0, b"again\n")
            job.start("a")
            await until(items, (2, 0, b"again\n"))
            write_output(logs, 2, 1, b"no end")
            job.succeed("a")
            return [plain(item) async for item in items]

    assert asyncio.run(watch()) == [(2, 1, b"no end")]


def test_following_one_view_ends_when_that_view_is_over(tmp_path: Path) -> None:
    job = running(tmp_path)

    async def watch() -> list[object]:
        async with aclosing(follow_output(JournalSource(job.path), LogFilter(view=1, rank=0))) as items:
            await until(items, (1, 0, b"err 0\n"))
            job.restart_once()
            async with asyncio.timeout(30):
                return [plain(item) async for item in items]

    assert asyncio.run(watch()) == []


def test_following_with_a_tail_skips_the_beginning_of_the_first_view_only(tmp_path: Path) -> None:
    job, logs = running(tmp_path, workers=2), tmp_path / "logs"
    write_output(logs, 1, 0, b"old\nnew\n")
    choice = LogFilter(rank=0, streams=("stdout",), lines_max=1)

    async def watch() -> list[object]:
        async with aclosing(follow_output(JournalSource(job.path), choice)) as items:
            first = plain(await anext(items))
            write_output(logs, 2, 0, b"one\ntwo\n")
            job.restart_once().succeed("a")
            return [first, *[plain(item) async for item in items]]

    assert asyncio.run(watch()) == [(1, 0, b"new\n"), "view 2 begins", (2, 0, b"one\n"), (2, 0, b"two\n")]


def test_following_starts_before_the_first_view_and_survives_a_smaller_world(tmp_path: Path) -> None:
    job, logs = JobOnDisk(tmp_path, nodes=(1, 2), workers=1), tmp_path / "logs"

    async def watch() -> list[object]:
        async with aclosing(follow_output(JournalSource(job.path), LogFilter(rank=1))) as items:
            waiting = asyncio.create_task(anext(items))
            job.join("a", log_dir=str(logs / "a")).join("b", log_dir=str(logs / "b"))
            write_output(logs / "b", 1, 0, b"from b\n")
            job.pass_s(1).do().start("a").start("b")
            first = plain(await waiting)
            job.do(NodeLeft(node_id="b", incarnation=incarnation_of("b")))
            job.offer("a").start("a").succeed("a")
            return [first, *[plain(item) async for item in items]]

    assert asyncio.run(watch()) == [
        (1, 1, b"from b\n"),
        "view 2 begins",
        "view 2 has no rank 1: its ranks are 0 to 0",
    ]


def test_what_ends_the_source_ends_the_following_with_its_sentence(tmp_path: Path) -> None:
    class Broken:
        async def pages(self) -> AsyncGenerator[list[JournalEntry], None]:
            yield []
            raise UsageError("the source is broken")

    async def watch() -> None:
        async for _ in follow_output(Broken(), LogFilter()):
            pass

    with pytest.raises(UsageError, match="the source is broken"):
        asyncio.run(watch())
