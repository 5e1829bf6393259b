"""The one logging system: each message has its event key and its fields, in both formats."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

import pytest

from holdfast.errors import OutageError, StorageError
from holdfast.storage.object_store import retry
from holdfast.util.logs import get_logger, set_up_logging

log = get_logger("holdfast.somewhere")


def as_json(capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    return [json.loads(line) for line in capsys.readouterr().err.splitlines()]


def test_the_text_format_shows_the_fields_and_the_key(capsys: pytest.CaptureFixture[str]) -> None:
    set_up_logging("text", "agent", verbose=True)
    log.warning("fork-server-died", "the fork server died", wait_status=9, stderr="out of memory")
    line = capsys.readouterr().err
    assert line.endswith(" agent: ! the fork server died (wait_status=9 stderr='out of memory') [fork-server-died]\n")


def test_the_json_format_has_the_fields_and_the_key(capsys: pytest.CaptureFixture[str]) -> None:
    set_up_logging("json", "agent")
    log.warning("fork-server-died", "the fork server died", wait_status=9, stderr="out of memory")
    (line,) = as_json(capsys)
    assert str(line.pop("time")).endswith("Z")
    assert line == {
        "level": "warning",
        "source": "agent",
        "event": "fork-server-died",
        "message": "the fork server died",
        "wait_status": 9,
        "stderr": "out of memory",
    }


def test_a_field_does_not_replace_what_every_line_has(capsys: pytest.CaptureFixture[str]) -> None:
    set_up_logging("json", "agent")
    log.info("read", "read it", source="a file", level=3)
    (line,) = as_json(capsys)
    assert line["source"] == "agent" and line["level"] == "info"
    assert line["field_source"] == "a file" and line["field_level"] == 3


def test_warnings_of_storage_are_json_where_json_is_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    set_up_logging("json", "agent")

    def fail() -> None:
        raise OutageError("the bucket does not answer")

    now = iter(range(100))
    with pytest.raises(StorageError):
        retry(fail, 5.0, clock=lambda: float(next(now)), sleep=lambda _: None)
    lines = as_json(capsys)
    assert lines and all("the bucket does not answer" in str(line["message"]) for line in lines)
    assert {line["level"] for line in lines} == {"warning"}


def test_what_asyncio_reports_is_json_too(capsys: pytest.CaptureFixture[str]) -> None:
    set_up_logging("json", "agent")

    async def report() -> None:
        asyncio.get_running_loop().call_exception_handler({"message": "a task ended", "exception": ValueError("boom")})

    asyncio.run(report())
    (line,) = as_json(capsys)
    assert line["message"] == "a task ended" and "ValueError: boom" in str(line["exception"])


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_an_error_shows_its_traceback(log_format: str, capsys: pytest.CaptureFixture[str]) -> None:
    set_up_logging(log_format, "master")  # type: ignore[arg-type]
    try:
        raise ValueError("boom")
    except ValueError as error:
        log.error("step-failed", "a step failed", error=error, step=3)
    printed = capsys.readouterr().err
    assert "Traceback" in printed and "ValueError: boom" in printed and "a step failed" in printed


def test_debug_messages_are_shown_on_request(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    set_up_logging("json", "agent")
    log.debug("detail", "a detail")
    assert not as_json(capsys)
    monkeypatch.setenv("HOLDFAST_DEBUG", "1")
    set_up_logging("json", "agent")
    log.debug("detail", "a detail")
    assert [line["event"] for line in as_json(capsys)] == ["detail"]


def test_text_shows_a_person_notices_and_warnings_in_short_lines(capsys: pytest.CaptureFixture[str]) -> None:
    set_up_logging("text", "agent")
    log.info("detail", "a detail")
    log.notice("job-started", "job demo: 2 workers")
    log.warning("disk-slow", "the disk is slow")
    first, second = capsys.readouterr().err.splitlines()
    assert re.fullmatch(r"holdfast \d\d:\d\d:\d\d: job demo: 2 workers", first)
    assert re.fullmatch(r"holdfast \d\d:\d\d:\d\d: ! the disk is slow", second)


def test_verbose_text_shows_every_message_with_its_key(capsys: pytest.CaptureFixture[str]) -> None:
    set_up_logging("text", "agent", verbose=True)
    log.info("detail", "a detail")
    assert capsys.readouterr().err.endswith(" agent: a detail [detail]\n")


def test_json_has_every_message_and_is_for_those_who_ask_for_it(capsys: pytest.CaptureFixture[str]) -> None:
    set_up_logging("json", "agent")
    log.info("started", "started")
    log.notice("job-started", "job demo")
    assert [(line["event"], line["level"]) for line in as_json(capsys)] == [
        ("started", "info"),
        ("job-started", "notice"),
    ]
    set_up_logging("auto", "agent")  # stderr is no terminal here
    log.notice("job-started", "job demo")
    assert capsys.readouterr().err.startswith("holdfast ")
