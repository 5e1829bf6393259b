"""`holdfast drain` and `holdfast resize` against a real master, with agents that say what a test has them say."""

from __future__ import annotations

import asyncio
import json
import os
import stat
import sys
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from holdfast.core import events as e
from holdfast.core.records import JobResized, NodeDraining
from holdfast.core.settings import Settings
from holdfast.errors import WireError
from holdfast.journal import read_entries
from holdfast.wire.control import ClientConnection, connect
from holdfast.wire.control_messages import Acknowledge, EventReport, OperatorAnswer, OperatorRequest
from support.live_master import SILENCE_TIMEOUT_S, TOKEN
from support.scenario import hello, incarnation_of

SETTINGS = Settings(nodes_min=1, nodes_max=2)
WAIT_S = 60.0


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in [name for name in os.environ if name.startswith("HOLDFAST_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOLDFAST_STATE_DIR", str(tmp_path))
    monkeypatch.setenv("HOLDFAST_TOKEN", TOKEN)


class Done(NamedTuple):
    code: int
    stdout: str
    stderr: str


async def holdfast(*arguments: str) -> Done:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "holdfast",
        *arguments,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    stdout, stderr = await asyncio.wait_for(process.communicate(), WAIT_S)
    assert process.returncode is not None
    return Done(process.returncode, stdout.decode(), stderr.decode())


class MasterProcess:
    """The master of a job of one to two nodes."""

    def __init__(self, state_dir: Path, job_id: str) -> None:
        self.directory = state_dir / "jobs" / job_id
        self.arguments = ["--state-dir", str(state_dir), "--job-id", job_id, "--nnodes", "1:2", "--settle", "30"]
        self.arguments += ["--silence-timeout", SILENCE_TIMEOUT_S]
        self.port = 0

    async def start(self) -> None:
        ready_read, ready_write = os.pipe()
        where = ["--port", str(self.port), "--ready-fd", str(ready_write)]
        self.process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "holdfast", "master", *self.arguments, *where),
            stderr=asyncio.subprocess.DEVNULL,
            pass_fds=(ready_write,),
        )
        os.close(ready_write)
        with os.fdopen(ready_read) as ready:
            self.port = int(await asyncio.to_thread(ready.readline))

    async def end(self) -> None:
        if self.process.returncode is None:
            self.process.kill()
        await self.process.wait()

    @property
    def endpoint(self) -> str:
        return f"127.0.0.1:{self.port}"

    def records(self, kind: type) -> list[Any]:
        entries = read_entries(self.directory / "journal.sqlite")
        return [entry.record for entry in entries if isinstance(entry.record, kind)]


class Agent:
    """A node with one worker."""

    def __init__(self, node_id: str, line: ClientConnection) -> None:
        self.node_id, self._line, self._number = node_id, line, 0

    async def report(self, kind: type, **facts: Any) -> None:
        await self.send(kind(node_id=self.node_id, incarnation=incarnation_of(self.node_id), **facts))

    async def send(self, event: e.Event) -> None:
        """Returns when the journal has it."""
        self._number += 1
        await self._line.send(EventReport(self._number, 0, event))
        while await self._line.receive() != Acknowledge(self._number):
            pass


@asynccontextmanager
async def job_of(
    state_dir: Path, *nodes: str, job_id: str = "demo"
) -> AsyncIterator[tuple[MasterProcess, list[Agent]]]:
    master = MasterProcess(state_dir, job_id)
    await master.start()
    lines = []
    try:
        agents = []
        for port, node_id in enumerate(nodes, 29_001):
            line = await connect("127.0.0.1", master.port, token=TOKEN, role="agent", tls=None, timeout_s=10)
            lines.append(line)
            agents.append(Agent(node_id, line))
            await agents[-1].send(hello(node_id, SETTINGS, port, workers=1))
        yield master, agents
    finally:
        for line in lines:
            await line.close()
        await master.end()


def run(scenario: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(scenario, WAIT_S))


async def asked(master: MasterProcess, ask: OperatorRequest) -> OperatorAnswer:
    line = await connect("127.0.0.1", master.port, token=TOKEN, role="watcher", tls=None, timeout_s=10)
    try:
        await line.send(ask)
        answer = await line.receive()
    finally:
        await line.close()
    assert isinstance(answer, OperatorAnswer)
    return answer


# --- drain


def test_a_node_that_is_drained_is_on_its_way_out_when_the_command_returns(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with job_of(tmp_path, "a", "b") as (master, _):
            done = await holdfast("drain", "b")
            assert (done.code, done.stdout) == (0, "node b leaves the job\n"), done.stderr
            (draining,) = master.records(NodeDraining)
            assert (draining.node_id, draining.incarnation, draining.signal) == ("b", incarnation_of("b"), 0)
            assert "asked for by" in draining.why

    run(scenario())


def test_drained_twice_is_drained_once(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with job_of(tmp_path, "a", "b") as (master, _):
            for arguments in (["--job", "de"], ["--endpoint", master.endpoint, "--job", "de"]):
                assert (await holdfast("drain", "b", *arguments)).code == 0
            assert len(master.records(NodeDraining)) == 1

    run(scenario())


@pytest.mark.parametrize("by", ["job", "address"])
def test_waiting_for_a_drain_ends_when_the_node_is_gone_and_not_before(tmp_path: Path, by: str) -> None:
    async def scenario() -> None:
        async with job_of(tmp_path, "a", "b") as (master, (_, b)):
            more = ["--endpoint", master.endpoint] if by == "address" else []
            waiting = asyncio.create_task(holdfast("drain", "b", "--wait", *more))
            while not master.records(NodeDraining):
                await asyncio.sleep(0.02)
            assert not waiting.done()
            await b.report(e.NodeLeft)
            done = await waiting
            assert (done.code, done.stdout) == (0, "node b leaves the job\nnode b has left\n"), done.stderr

    run(scenario())


def test_a_drain_that_leaves_too_few_says_that_the_job_will_wait(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with job_of(tmp_path, "a") as (_, __):
            done = await holdfast("drain", "a")
            assert done.code == 0
            assert "with 0 of at least 1 node left it waits for others" in done.stdout

    run(scenario())


# --- resize


def test_a_job_that_is_resized_wants_another_number_of_nodes(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with job_of(tmp_path, "a", "b") as (master, _):
            done = await holdfast("resize", "1")
            assert (done.code, done.stdout) == (0, "job demo is to have 1 node, 2 are here\n"), done.stderr
            assert [record.nodes for record in master.records(JobResized)] == [1]

    run(scenario())


def test_a_resized_job_goes_on_with_the_flags_it_was_started_with(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with job_of(tmp_path, "a", "b") as (master, _):
            assert (await holdfast("resize", "1")).code == 0
            await master.end()
            await master.start()
            assert (await asked(master, OperatorRequest(e.ResizeRequested(nodes=2, why="")))).accepted

    run(scenario())


# --- refusals


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["drain", "c"], "job demo has no node c: its nodes are a, b"),
        (["resize", "0"], "not 0"),
        (["resize", "1000000"], "not 1000000"),
    ],
)
def test_what_cannot_be_done_is_said_with_exit_code_1(tmp_path: Path, arguments: list[str], why: str) -> None:
    async def scenario() -> None:
        async with job_of(tmp_path, "a", "b") as (master, _):
            before = len(read_entries(master.directory / "journal.sqlite"))
            for more in ([], ["--endpoint", master.endpoint]):
                done = await holdfast(*arguments, *more)
                assert (done.code, done.stdout) == (1, "")
                assert done.stderr.startswith("holdfast: ") and why in done.stderr
            assert len(read_entries(master.directory / "journal.sqlite")) == before

    run(scenario())


def test_a_node_that_has_left_cannot_be_drained(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with job_of(tmp_path, "a", "b") as (_, (__, b)):
            await b.report(e.NodeLeft)
            done = await holdfast("drain", "b")
            assert (done.code, done.stderr) == (1, "holdfast: node b has left: its nodes are a\n")

    run(scenario())


def test_a_finished_job_is_asked_in_vain(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with job_of(tmp_path, "a", "b") as (master, agents):
            for agent in agents:
                await agent.report(e.WorkersStarted, view=1, pids=(4_000,))
                await agent.report(e.WorkerSucceeded, view=1, local_rank=0)
            for more in ([], ["--endpoint", master.endpoint]):  # by its journal; by its master, which sees agents off
                done = await holdfast("drain", "a", *more)
                assert (done.code, done.stderr) == (
                    1,
                    "holdfast: job demo is over, it has succeeded: all workers succeeded\n",
                )

    run(scenario())


def test_another_job_at_the_address_that_was_written_down_is_left_alone(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with job_of(tmp_path, "a", job_id="gone") as (gone, _):
            pass  # killed: its address stays
        async with job_of(tmp_path, "a", "b", job_id="other") as (other, _):
            (gone.directory / "master.json").write_bytes((other.directory / "master.json").read_bytes())
            done = await holdfast("drain", "b", "--job", "gone")
            assert (done.code, done.stderr) == (1, "holdfast: this master runs job other, not gone\n")
            assert not other.records(NodeDraining)

    run(scenario())


def test_a_job_that_was_named_must_be_the_one_that_answers(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with job_of(tmp_path, "a", "b") as (master, _):
            done = await holdfast("drain", "b", "--endpoint", master.endpoint, "--job", "other")
            assert done.code == 2 and "runs job demo, not other" in done.stderr

    run(scenario())


def test_a_wrong_token_gets_nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        async with job_of(tmp_path, "a", "b") as (master, _):
            monkeypatch.setenv("HOLDFAST_TOKEN", "another-secret-altogether")
            done = await holdfast("drain", "b")
            assert done.code == 5
            assert "did not let us in with the token from the variable HOLDFAST_TOKEN" in done.stderr
            assert not master.records(NodeDraining)

    run(scenario())


def test_where_no_master_is_the_sentence_says_how_to_find_one(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with job_of(tmp_path, "a"):
            pass  # killed
        done = await holdfast("drain", "a")
        assert done.code == 5 and "the master of job demo does not run on this machine" in done.stderr
        (tmp_path / "jobs/demo/master.json").unlink()
        done = await holdfast("drain", "a")
        assert done.code == 5 and "no master has written its address beside the journal" in done.stderr

    run(scenario())


# --- the address


def test_a_master_that_is_killed_and_comes_back_on_another_port_is_found(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with job_of(tmp_path, "a", "b") as (master, _):
            old = master.port
            await master.end()
            draining = asyncio.create_task(holdfast("drain", "b"))
            master.port = 0
            await master.start()
            assert master.port != old
            assert (await draining).code == 0

    run(scenario())


def test_the_address_is_for_its_owner_and_gone_when_the_job_is_over(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with job_of(tmp_path, "a", "b") as (master, agents):
            file = master.directory / "master.json"
            assert json.loads(file.read_text()) == {"host": "127.0.0.1", "port": master.port}
            assert stat.S_IMODE(file.stat().st_mode) == 0o600
            for agent in agents:
                await agent.report(e.WorkersStarted, view=1, pids=(4_000,))
                await agent.report(e.WorkerSucceeded, view=1, local_rank=0)
            for agent in agents:
                await agent.report(e.NodeLeft)
            assert await master.process.wait() == 0
            assert not file.exists()

    run(scenario())


# --- strangers


@pytest.mark.parametrize("event", [e.DrainRequested(node_id="a", why=""), e.ResizeRequested(nodes=1, why="")])
def test_an_agent_that_asks_as_operators_do_is_turned_away(tmp_path: Path, event: e.Event) -> None:
    async def scenario() -> None:
        async with job_of(tmp_path, "a", "b") as (master, (a, _)):
            with pytest.raises(WireError, match="not its to send"):
                await a.send(event)
            assert not master.records(NodeDraining) and not master.records(JobResized)

    run(scenario())
