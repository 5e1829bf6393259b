"""`holdfast status`, `events` and `logs` as people and programs use them: real journals, real files, real processes."""

from __future__ import annotations

import asyncio
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, get_args

import msgspec
import pytest
from typer.testing import CliRunner

from holdfast.cli.events import KIND_WIDTH, EventLine
from holdfast.cli.logs import PrintedLogLine
from holdfast.cli.main import build_app
from holdfast.cli.run_flag_table import FLAGS
from holdfast.core.records import DurableRecord
from holdfast.core.sentences import sentence
from holdfast.errors import HoldfastError, UsageError
from holdfast.journal import JournalEntry
from holdfast.observe.failures import FailureRow
from holdfast.observe.summary import Summary
from support.live_master import TOKEN, LiveAgent, LiveMaster
from support.scenario import BOOM, COLLATERAL, JobOnDisk, write_output

HOLDFAST = (sys.executable, "-m", "holdfast")


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in [name for name in os.environ if name.startswith("HOLDFAST_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOLDFAST_STATE_DIR", str(tmp_path))


def ran(*arguments: str) -> tuple[str, str]:
    """What a command printed: stdout, stderr. A sentence for the user is raised."""
    result = CliRunner().invoke(build_app(), list(arguments))
    if result.exception:
        raise result.exception
    assert result.exit_code == 0
    return result.stdout, result.stderr


def said(*arguments: str) -> str:
    return ran(*arguments)[0]


def complaint(*arguments: str) -> str:
    with pytest.raises(UsageError) as raised:
        ran(*arguments)
    return str(raised.value)


def json_lines(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def running(state_dir: Path, **more: Any) -> JobOnDisk:
    """Two workers on node a, with output in files."""
    job = JobOnDisk(state_dir, **more).join("a", log_dir=str(state_dir / "logs")).pass_s(0.2).start("a")
    for local_rank in (0, 1):
        write_output(state_dir / "logs", 1, local_rank, f"out {local_rank}\n".encode(), f"err {local_rank}\n".encode())
    return job


# --- status


def test_status_shows_a_serving_job_with_its_nodes_workers_and_receipts(tmp_path: Path) -> None:
    job = running(tmp_path).restart_once()
    text = said("status", "demo")
    assert "job demo: serving for " in text
    assert "why: rank 1 on a exited with code 1: ValueError: boom" in text
    assert "view 2 of 2 ranks, nodes wanted 1, restarts 1 of 3 used, term 1, up " in text
    assert re.search(r"^a +host-a +present +0 +0-1 +2 running +5000 5001 +.* ago *$", text, re.MULTILINE)
    assert "incident 1 closed after 430 ms (detected 12 ms, decided 15 ms, rebuilt 0 ms, workers up 403 ms)" in text
    assert "no master" not in text, "the test holds the journal as a master does"
    job.close()


def test_status_says_when_the_journal_is_all_there_is(tmp_path: Path) -> None:
    running(tmp_path).close()
    assert "no master of this job runs on this machine" in said("status")
    assert json.loads(said("status", "-o", "json"))["master_seen"] is False


def test_status_of_a_failed_job_names_the_cause_and_where_to_read_on(tmp_path: Path) -> None:
    running(tmp_path, restarts=0).fail("a", 1, log_file="/logs/stderr.log", **BOOM).close()
    text = said("status")
    assert re.search(r"job demo: failed .* ago, exit code 1", text)
    assert "root cause: rank 1 on a, log /logs/stderr.log; `holdfast logs --failed` has its traceback" in text
    assert "1 stopping, 1 failed" in text
    assert "no master" not in text, "a finished job needs none"


def test_status_shows_an_incident_that_is_open(tmp_path: Path) -> None:
    running(tmp_path).fail("a", 1, **BOOM).offer("a").close()
    text = said("status")
    assert re.search(r"incident 1 open for .*: rank 1 on a exited with code 1: ValueError: boom; restart: ", text)


def test_status_before_anybody_joined(tmp_path: Path) -> None:
    JobOnDisk(tmp_path).close()
    text = said("status")
    assert "job demo: gathering for" in text and "no view yet" in text


def test_status_as_json_is_the_summary(tmp_path: Path) -> None:
    running(tmp_path, restarts=1).restart_once().fail("a", 0, **BOOM).close()
    summary = msgspec.json.decode(said("status", "-o", "json"), type=Summary)
    assert (summary.job_id, summary.phase, summary.restarts_used) == ("demo", "finished", 1)
    assert summary.ending is not None and summary.ending.cause is not None and summary.ending.cause.rank == 0
    assert summary.incidents[0].phases_s["workers up"] == pytest.approx(0.403, abs=1e-3)


def test_a_message_with_terminal_codes_or_markup_does_no_harm(tmp_path: Path) -> None:
    nasty = {"message": "\x1b]0;title\x07[red]x[/nope]", "traceback": "\x1b[2J"}
    JobOnDisk(tmp_path, restarts=0).join("a", host="[/host]").start("a").fail("a", 1, **nasty).close()
    for command in (["status"], ["events"], ["logs", "--failed"]):
        text = said(*command)
        assert "\x1b" not in text and "[red]x[/nope]" in text


def test_looking_at_a_journal_imports_neither_the_wire_nor_torch(tmp_path: Path) -> None:
    running(tmp_path).close()
    script = "import sys; from holdfast.cli.main import run_app; run_app(['status']); run_app(['logs'])"
    script += "; print(sorted({'holdfast.wire.control', 'torch'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


# --- which job


def test_the_state_directory_is_a_flag_too_and_a_wrong_one_is_a_sentence(tmp_path: Path) -> None:
    running(tmp_path / "elsewhere").close()
    assert "there is no job in" in complaint("status")
    assert "job demo" in said("status", "--state-dir", str(tmp_path / "elsewhere"))


@pytest.mark.parametrize("command", ["status", "events", "logs"])
def test_a_job_is_named_by_the_beginning_of_its_id(tmp_path: Path, command: str) -> None:
    for job_id in ("train-1", "train-2", "evaluate"):
        JobOnDisk(tmp_path, job_id).close()
    assert "train-1" in complaint(command, "train") and "train-2" in complaint(command, "train")
    ran(command, "ev")


# --- events


def test_the_example_in_the_docs_is_as_events_prints_it(tmp_path: Path) -> None:
    text = (Path(__file__).parents[2] / "docs/observing.md").read_text()
    lines = re.findall(r"^(\d{4}-\d\d-\d\d [\d:.]+) +(\d+)  (\S+) +(\S.*)$", text, re.MULTILINE)
    kinds = {str(record.__struct_config__.tag) for record in get_args(DurableRecord)}
    assert len(lines) == 20 and {kind for _, _, kind, _ in lines} <= kinds
    for at, seq, kind, rest in lines:
        assert f"{at}  {int(seq):>5}  {kind:<{KIND_WIDTH}}  {rest}" in text
    job = running(tmp_path).restart_once().succeed("a").close()
    written = {kind: anonymous(rest) for _, _, kind, rest in lines}
    assert written == {kind: anonymous(sentence(entry.record)) for entry in job.entries() if (kind := kind_of(entry))}


def kind_of(entry: JournalEntry) -> str:
    return str(entry.record.__struct_config__.tag)


def anonymous(text: str) -> str:
    """Return a sentence without what differs from job to job."""
    text = re.sub(r"the loss is NaN|boom", "MESSAGE", re.sub(r"\(vm\)|\(host-a\)", "(HOST)", text))
    return re.sub(r"\b(node|rank|worker|restart)s\b", r"\1", re.sub(r"\d+", "N", re.sub(r"\b[ab]\b", "NAME", text)))


def test_events_has_one_line_an_event_with_its_time_number_kind_and_sentence(tmp_path: Path) -> None:
    job = running(tmp_path).restart_once().close()
    lines = said("events").splitlines()
    assert len(lines) == len(job.entries())
    for line, entry in zip(lines, job.entries(), strict=True):
        when, seq, kind, text = re.fullmatch(r"(\S+ \S+) +(\d+)  (\S+) +(.*)", line).groups()  # type: ignore[union-attr]
        assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3}", when)
        assert (int(seq), kind, text) == (entry.seq, entry.record.__struct_config__.tag, sentence(entry.record))


def test_events_as_json_carries_the_record_itself(tmp_path: Path) -> None:
    job = running(tmp_path).restart_once().close()
    rows = json_lines(said("events", "-o", "json"))
    assert [set(row) for row in rows] == [{"seq", "at", "kind", "sentence", "record"}] * len(rows)
    records = [msgspec.convert(row["record"], DurableRecord) for row in rows]
    assert records == [entry.record for entry in job.entries()]
    assert [row["at"] for row in rows] == [record.at for record in records]


def test_events_after_a_number(tmp_path: Path) -> None:
    job = running(tmp_path).close()
    rows = json_lines(said("events", "-o", "json", "--after", "4"))
    assert [row["seq"] for row in rows] == [entry.seq for entry in job.entries()][4:] and rows
    assert said("events", "--after", "1000") == ""


# --- logs


def test_logs_shows_every_rank_with_its_prefix(tmp_path: Path) -> None:
    running(tmp_path).close()
    assert said("logs").splitlines() == ["[rank 0] out 0", "[rank 0] err 0", "[rank 1] out 1", "[rank 1] err 1"]


def test_one_rank_is_shown_as_it_is(tmp_path: Path) -> None:
    running(tmp_path).close()
    write_output(tmp_path / "logs", 1, 1, "naïve \x1b[1mbold\x1b[0m".encode())
    assert said("logs", "--rank", "1", "--stdout") == "out 1\nnaïve \x1b[1mbold\x1b[0m\n"
    assert said("logs", "--rank", "1", "--stderr", "--tail", "1") == "err 1\n"
    assert said("logs", "--rank", "1", "--stdout", "--tail", "0") == ""


def test_bytes_that_are_no_text_pass_through_and_are_marked_in_json(tmp_path: Path) -> None:
    running(tmp_path).close()
    write_output(tmp_path / "logs", 1, 0, b"\xff\xfe\n")
    result = CliRunner().invoke(build_app(), ["logs", "--rank", "0", "--stdout"])
    assert result.stdout_bytes == b"out 0\n\xff\xfe\n"
    assert json_lines(said("logs", "--rank", "0", "--stdout", "-o", "json"))[1]["text"] == "��"


def test_logs_as_json(tmp_path: Path) -> None:
    running(tmp_path).close()
    assert json_lines(said("logs", "-o", "json", "--stderr")) == [
        {"view": 1, "rank": 0, "node_id": "a", "stream": "stderr", "text": "err 0"},
        {"view": 1, "rank": 1, "node_id": "a", "stream": "stderr", "text": "err 1"},
    ]


def test_what_is_elsewhere_is_said_beside_the_output_not_in_it(tmp_path: Path) -> None:
    JobOnDisk(tmp_path).join("a", log_dir="/far/away").start("a").close()
    out, notes = ran("logs")
    assert out == ""
    assert "not on this machine: node a (host-a) has it in /far/away/attempt_0" in notes


def test_logs_before_the_first_view(tmp_path: Path) -> None:
    JobOnDisk(tmp_path).close()
    assert ran("logs") == (
        "",
        "holdfast: no workers have been started yet: `holdfast status` shows what the job waits for\n",
    )
    assert "no failure of a worker is recorded" in ran("logs", "--failed")[1]


def test_failures_come_from_the_journal_the_cause_first_and_collateral_folded(tmp_path: Path) -> None:
    job = running(tmp_path)
    tail = ("loading", "[rank1]: ValueError: boom")
    job.do(job.failed("a", 0, **COLLATERAL), job.failed("a", 1, log_tail=tail, log_file="/gone/stderr.log", **BOOM))
    job.close()
    text = said("logs", "--failed")
    assert text.index("rank 1 on a exited with code 1: ValueError: boom") < text.index("collateral")
    assert 'File "train.py", line 7' in text and "log: /gone/stderr.log" in text
    assert re.search(r"last lines of its log:\n +loading\n", text)
    assert text.count("ValueError: boom") == 2, "in the sentence and in the traceback; not again as the log's last line"
    assert "collateral, shown with --rank: 0" in text and "Connection reset" not in text
    assert "Connection reset by peer" in said("logs", "--failed", "--rank", "0")


def test_failures_as_json(tmp_path: Path) -> None:
    job = running(tmp_path)
    job.do(job.failed("a", 0, **COLLATERAL), job.failed("a", 1, **BOOM)).close()
    rows = [msgspec.json.decode(line, type=FailureRow) for line in said("logs", "--failed", "-o", "json").splitlines()]
    assert [(row.rank, row.root_cause, row.collateral) for row in rows] == [(1, True, False), (0, False, True)]
    assert rows[0].failure.traceback == BOOM["traceback"]


def test_failed_and_follow_exclude_each_other(tmp_path: Path) -> None:
    running(tmp_path).close()
    assert "give one of them" in complaint("logs", "--failed", "-f")


# --- following, in a process of its own


@contextmanager
def process(*arguments: str, stdout: int = subprocess.PIPE) -> Iterator[subprocess.Popen[str]]:
    """A command that runs while the test goes on; over when the block is."""
    child = subprocess.Popen(
        [*HOLDFAST, *arguments],
        env={name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"},
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield child
        child.wait(60)
    finally:
        child.kill()
        child.communicate()


def lines_until(stream: IO[str] | None, wanted: str) -> list[str]:
    assert stream is not None
    lines: list[str] = []
    for line in stream:
        lines.append(line.rstrip("\n"))
        if wanted in line:
            return lines
    raise AssertionError(f"ended without {wanted!r}: {lines}")


def test_events_follow_shows_each_event_as_it_comes_and_ends_with_the_job(tmp_path: Path) -> None:
    job = JobOnDisk(tmp_path)
    with process("events", "-f", "-o", "json") as child:
        lines = lines_until(child.stdout, "term-began")
        job.join("a")
        lines += lines_until(child.stdout, "view-formed")
        job.start("a").succeed("a")
        lines += lines_until(child.stdout, "job-finished")
        assert child.wait(60) == 0
    assert [json.loads(line)["seq"] for line in lines] == [entry.seq for entry in job.entries()]


def test_status_watch_prints_each_change_for_a_program(tmp_path: Path) -> None:
    job = JobOnDisk(tmp_path)
    with process("status", "--watch", "-o", "json") as child:
        lines_until(child.stdout, '"gathering"')
        running_now = job.join("a").start("a")
        lines_until(child.stdout, '"running"')
        running_now.succeed("a")
        last = lines_until(child.stdout, '"finished"')[-1]
        assert child.wait(60) == 0
    assert msgspec.json.decode(last, type=Summary).phase == "finished"


def test_status_watch_on_a_terminal_follows_the_job_to_its_end(tmp_path: Path) -> None:
    job = JobOnDisk(tmp_path)
    terminal, child_side = pty.openpty()
    try:
        with process("status", "--watch", stdout=child_side) as child:
            os.close(child_side)
            assert "\x1b[?25l" in screen_until(terminal, "gathering for"), "one page, drawn over again: no cursor"
            job.join("a").start("a")
            screen_until(terminal, "2 running")
            job.succeed("a")
            screen_until(terminal, "succeeded")
            while child.poll() is None:  # a terminal that nobody reads would hold it up
                read_some(terminal)
            assert child.returncode == 0
    finally:
        os.close(terminal)


def screen_until(terminal: int, wanted: str) -> str:
    text = ""
    while wanted not in text:
        text += read_some(terminal, wait_s=60)
    return text


def read_some(terminal: int, wait_s: float = 0.01) -> str:
    if not select.select([terminal], [], [], wait_s)[0]:
        assert wait_s < 1, "nothing came"
        return ""
    try:
        return os.read(terminal, 65_536).decode()
    except OSError:  # the other side is closed
        return ""


def test_logs_follow_goes_over_a_restart_and_ends_with_the_job(tmp_path: Path) -> None:
    job = running(tmp_path)
    with process("logs", "-f", "--stdout") as child:
        lines_until(child.stdout, "[rank 1] out 1")
        write_output(tmp_path / "logs", 1, 0, b"step 2\n")
        lines_until(child.stdout, "[rank 0] step 2")
        job.restart_once()
        write_output(tmp_path / "logs", 2, 1, b"again\n")
        lines_until(child.stdout, "[rank 1] again")
        lines_until(child.stderr, "view 2 begins")
        write_output(tmp_path / "logs", 2, 0, b"done")
        job.succeed("a")
        assert lines_until(child.stdout, "done") == ["[rank 0] done"]
        assert child.wait(60) == 0


@pytest.mark.parametrize("command", ["events -f", "events -f -o json", "logs -f", "logs -f -o json", "status --watch"])
def test_a_reader_that_goes_away_ends_the_command_quietly(tmp_path: Path, command: str) -> None:
    job = running(tmp_path)
    with process(*command.split()) as child:
        assert child.stdout is not None and child.stderr is not None
        child.stdout.readline()
        child.stdout.close()
        write_output(tmp_path / "logs", 1, 0, b"more\n")  # it learns of it when it has something to say
        job.pass_s(1).fail("a", 1, **BOOM)
        assert (child.wait(60), child.stderr.read()) == (0, "")
    job.close()


def test_control_c_ends_following_without_a_traceback(tmp_path: Path) -> None:
    job = running(tmp_path)
    with process("events", "-f") as child:
        lines_until(child.stdout, "workers-started")
        child.send_signal(signal.SIGINT)
        assert child.wait(60) == 130
        assert child.stderr is not None and "Traceback" not in child.stderr.read()
    job.close()


# --- a live master over the network


def outcome(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | environ
    return subprocess.run([*HOLDFAST, *arguments], env=environment, capture_output=True, text=True, timeout=60)


def against_master(state_dir: Path, *arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """The command's outcome while a master with one connected node lives."""

    async def scenario() -> subprocess.CompletedProcess[str]:
        async with LiveMaster(state_dir / "far") as master:
            agent = await LiveAgent.join(master)
            done = await asyncio.to_thread(outcome, *arguments, "--endpoint", master.endpoint, **environ)
            await agent.close()
            return done

    return asyncio.run(scenario())


def test_a_live_master_answers_whoever_has_the_token(tmp_path: Path) -> None:
    done = against_master(tmp_path, "status", "-o", "json", HOLDFAST_TOKEN=TOKEN)
    assert (done.returncode, done.stderr) == (0, "")
    summary = msgspec.json.decode(done.stdout, type=Summary)
    assert (summary.job_id, summary.view, summary.master_seen) == ("demo", 1, True)


def test_the_token_may_be_in_a_file(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text(TOKEN)
    done = against_master(tmp_path, "events", "dem", "--token-file", str(tmp_path / "secret"))
    assert done.returncode == 0 and "view 1 formed: 1 rank on 1 node" in done.stdout


def test_a_wrong_token_is_one_sentence(tmp_path: Path) -> None:
    done = against_master(tmp_path, "events", HOLDFAST_TOKEN="not-the-secret-of-this")
    assert done.returncode != 0 and done.stdout == ""
    assert done.stderr.startswith("holdfast: the master at 127.0.0.1:") and len(done.stderr.splitlines()) == 1
    assert "the variable HOLDFAST_TOKEN" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (["--endpoint", "host:x"], "--endpoint host:x: the port must be a number"),
        (["--endpoint", "127.0.0.1:1"], "put it into HOLDFAST_TOKEN"),
        (["--endpoint", "127.0.0.1:1", "--token-file", "/nowhere"], "cannot read the token file /nowhere"),
    ],
)
def test_a_remote_job_that_cannot_be_asked_for_is_a_sentence(arguments: list[str], hint: str) -> None:
    assert hint in complaint("status", *arguments)


@pytest.mark.parametrize("flags", [["--tls-cert", "c.pem"], ["--tls-key", "k.pem"], ["--tls-ca", "ca.pem"]])
def test_half_of_the_tls_flags_is_refused(monkeypatch: pytest.MonkeyPatch, flags: list[str]) -> None:
    monkeypatch.setenv("HOLDFAST_TOKEN", TOKEN)
    assert "--tls-cert FILE and --tls-key FILE" in complaint("events", "--endpoint", "127.0.0.1:1", *flags)


def test_a_certificate_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOLDFAST_TOKEN", TOKEN)
    flags = ["--tls-cert", "/nowhere.crt", "--tls-key", "/nowhere.key"]
    with pytest.raises(HoldfastError, match=r"cannot read /nowhere\.crt"):
        ran("events", "--endpoint", "127.0.0.1:1", *flags)


# --- docs/observing.md


def test_the_json_in_the_guide_has_the_shapes_that_are_printed() -> None:
    guide = (Path(__file__).parents[2] / "docs" / "observing.md").read_text()
    blocks = re.findall(r"```json\n(.*?)\n```", guide, re.DOTALL)
    for block, shape in zip(blocks, (Summary, EventLine, PrintedLogLine, FailureRow), strict=True):
        assert json.loads(msgspec.json.encode(msgspec.json.decode(block, type=shape))) == json.loads(block)


def test_every_flag_in_the_guide_exists() -> None:
    guide = (Path(__file__).parents[2] / "docs" / "observing.md").read_text()
    of_run = {flag.name for flag in FLAGS}
    commands = ("status", "events", "logs", "jobs", "jobs rm", "jobs prune")
    known = "".join(said(*command.split(), "--help") for command in commands)
    for flag in set(re.findall(r"--[a-z][a-z-]+", guide)) - of_run:
        assert flag in known, flag
