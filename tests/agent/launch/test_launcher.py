"""The agent's side: every process it asks for runs once or not at all, is known, and is reaped with its true status."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.agent.launch.launcher import Child, Launcher, process_request
from holdfast.errors import LaunchError
from support.nest import (
    ENVIRONMENT,
    Nest,
    Output,
    Result,
    children,
    eventually,
    eventually_async,
    is_running,
    lines_of_json,
    run_python,
    stat_fields,
    write,
)

SLEEPER = "import time\nprint('here')\ntime.sleep(1000)"
PARENT = """
import os, signal, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
print(child.pid, flush=True)
{ending}
"""


@pytest.fixture(scope="module")
def nest() -> Iterator[Nest]:
    with Nest("cold") as nest:
        yield nest


def script(directory: Path, text: str, name: str = "script.py") -> list[str]:
    write(directory / name, text)
    return [name]


async def started_sleeper(nest: Nest, directory: Path, output: Output) -> Child:
    child = await nest.start(script(directory, SLEEPER, "sleeper.py"), directory, output)
    await eventually_async(lambda: output.read()[0] == "here\n", "the sleeper runs")
    return child


def test_the_launcher_itself_needs_no_torch(tmp_path: Path) -> None:
    code = "import sys, holdfast.agent.launch.launcher; print(sorted({'torch', 'numpy'} & set(sys.modules)))"
    assert run_python(["-c", code], tmp_path) == Result(0, "[]\n", "")


@pytest.mark.parametrize(
    ("ending", "code"),
    [("pass", 0), ("raise SystemExit(200)", 200), ("import os; os.kill(os.getpid(), 11)", -11)],
)
def test_a_status_is_the_true_one(nest: Nest, tmp_path: Path, ending: str, code: int) -> None:
    assert nest.run(script(tmp_path, ending), tmp_path).code == code


def test_many_are_started_at_once_and_each_is_itself(nest: Nest, tmp_path: Path) -> None:
    argv = script(tmp_path, "import os, sys\nprint(os.getpid())\nsys.exit(int(sys.argv[1]))")

    async def start_all() -> list[Result]:
        return await asyncio.gather(*[nest.run_async([*argv, str(number)], tmp_path) for number in range(40)])

    results = nest.do(start_all())
    assert [result.code for result in results] == list(range(40))
    assert len({result.stdout for result in results}) == 40


def test_an_environment_larger_than_any_buffer_gets_through(nest: Nest, tmp_path: Path) -> None:
    env = {**ENVIRONMENT, **{f"LARGE_{number}": "x" * 100_000 for number in range(20)}}
    argv = script(tmp_path, "import os\nprint(sum(len(value) for value in os.environ.values()))")

    async def start_three() -> list[Result]:
        return await asyncio.gather(*[nest.run_async(argv, tmp_path, env=env) for _ in range(3)])

    assert {result.stdout for result in nest.do(start_three())} == {f"{sum(map(len, env.values()))}\n"}


def test_one_that_is_too_large_is_refused_and_does_no_harm(nest: Nest, tmp_path: Path) -> None:
    argv = script(tmp_path, "pass")
    with pytest.raises(LaunchError, match="exceeds"):
        nest.run(argv, tmp_path, env={"X": "x" * 5_000_000})
    assert nest.run(argv, tmp_path).code == 0


def test_a_directory_that_is_not_there_is_a_sentence(nest: Nest, tmp_path: Path) -> None:
    nest.do(nest.launcher.ready())
    before = children()
    with pytest.raises(LaunchError, match=r"nowhere.*No such file"), Output(tmp_path) as output:
        nest.do(nest.start(["x.py"], tmp_path / "nowhere", output))
    nest.do(eventually_async(lambda: children() == before, "the failed newborn is reaped"))


def test_a_signal_reaches_the_worker_alone(nest: Nest, tmp_path: Path) -> None:
    async def stop() -> int:
        with Output(tmp_path) as output:
            child = await started_sleeper(nest, tmp_path, output)
            child.signal(signal.SIGTERM)
            status = await child.wait()
            child.signal(signal.SIGKILL)  # nobody there any more, and that is fine
            child.kill_group(signal.SIGKILL)
            return status

    assert nest.do(stop()) == signal.SIGTERM


def test_waiting_can_be_cancelled_and_repeated(nest: Nest, tmp_path: Path) -> None:
    async def wait_twice() -> list[int]:
        with Output(tmp_path) as output:
            child = await started_sleeper(nest, tmp_path, output)
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(child.wait(), 0.01)
            child.signal(signal.SIGKILL)
            return list(await asyncio.gather(child.wait(), child.wait()))

    assert nest.do(wait_twice()) == [signal.SIGKILL, signal.SIGKILL]


@pytest.mark.parametrize(
    ("ending", "survives"),
    [("os.kill(os.getpid(), signal.SIGKILL)", False), ("sys.exit(1)", False), ("sys.exit(0)", True)],
)
def test_what_a_failed_worker_leaves_behind_is_killed(nest: Nest, tmp_path: Path, ending: str, survives: bool) -> None:
    result = nest.run(script(tmp_path, PARENT.format(ending=ending)), tmp_path)
    grandchild = int(result.stdout)
    if survives:
        assert is_running(grandchild)
        os.kill(grandchild, signal.SIGKILL)
    eventually(lambda: not is_running(grandchild), "the grandchild is gone")
    assert nest.launcher.reap_orphans() == 1
    assert stat_fields(grandchild) == []


def test_so_is_what_a_stopped_worker_leaves_behind_even_if_it_ends_well(nest: Nest, tmp_path: Path) -> None:
    ending = "signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))\nprint('ready', flush=True)\nsignal.pause()"

    async def stop() -> int:
        with Output(tmp_path) as output:
            child = await nest.start(script(tmp_path, PARENT.format(ending=ending)), tmp_path, output)
            await eventually_async(lambda: "ready" in output.read()[0], "the worker is ready")
            child.signal(signal.SIGTERM)
            assert await child.wait() == 0
            return int(output.read()[0].split()[0])

    grandchild = nest.do(stop())
    eventually(lambda: not is_running(grandchild), "the grandchild is gone")
    assert nest.launcher.reap_orphans() == 1


def test_reaping_orphans_never_reaps_a_worker(nest: Nest, tmp_path: Path) -> None:
    """Orphans and workers end all the time while somebody reaps in every gap the loop leaves."""
    argv = script(
        tmp_path,
        "import os, sys\nif os.fork() == 0:\n    if os.fork() == 0: os._exit(0)\n    os._exit(0)\nos.wait()\n"
        "os._exit(int(sys.argv[1]))",
    )

    nest.do(nest.launcher.ready())
    before = children()

    async def reap_for_ever() -> None:
        while True:
            nest.launcher.reap_orphans()
            await asyncio.sleep(0)

    async def start_all() -> list[int]:
        reaper = asyncio.create_task(reap_for_ever())
        results = await asyncio.gather(*[nest.run_async([*argv, str(number)], tmp_path) for number in range(60)])
        reaper.cancel()
        return [result.code for result in results]

    assert nest.do(start_all()) == list(range(60))
    eventually(lambda: nest.launcher.reap_orphans() >= 0 and children() == before, "the last orphans have ended")


def test_orphans_that_others_wait_for_are_left_to_them(nest: Nest) -> None:
    pid = os.spawnlp(os.P_NOWAIT, "true", "true")
    eventually(lambda: not is_running(pid), "it has ended")
    assert nest.launcher.reap_orphans(frozenset({pid})) == 0
    assert os.waitpid(pid, 0) == (pid, 0)


def test_a_launch_that_is_given_up_leaves_no_process(nest: Nest, tmp_path: Path) -> None:
    argv = script(tmp_path, "open('ran', 'w').close()\nimport time; time.sleep(1000)")

    async def give_up() -> None:
        with Output(tmp_path) as output:
            launches = [asyncio.create_task(nest.start(argv, tmp_path, output)) for _ in range(10)]
            await asyncio.sleep(0)
            for launch in launches:
                launch.cancel()
            await asyncio.wait(launches)
        await eventually_async(lambda: children() == before, "all that was started has been killed and reaped")

    nest.do(nest.launcher.ready())
    before = children()
    nest.do(give_up())


def test_a_program_is_found_on_the_workers_path(nest: Nest, tmp_path: Path) -> None:
    program = write(
        tmp_path / "bin" / "tool", '#!/bin/sh\necho "$GIVEN $# $0"; pwd; ls -l /proc/self/fd | grep -c pipe\n'
    )
    program.chmod(0o755)
    env = {"PATH": f"{tmp_path}/bin:{os.environ['PATH']}", "GIVEN": "yes"}
    result = nest.run(["tool", "a", "b"], tmp_path, kind=None, env=env)
    # The one pipe is the shell's own.
    assert (result.code, result.stdout) == (0, f"yes 2 {program}\n{tmp_path}\n1\n")


def test_a_program_starts_with_default_signals(nest: Nest, tmp_path: Path) -> None:
    probe = "import json, signal; print(json.dumps([str(signal.getsignal(n)) for n in (1, 2, 15, 17)]))"
    [handlers] = lines_of_json(nest.run([sys.executable, "-c", probe], tmp_path, kind=None))
    assert handlers[0] == handlers[2] == handlers[3] == "0" and "default_int_handler" in handlers[1]
    result = nest.run(["sh", "-c", "kill -PIPE $$"], tmp_path, kind=None)
    assert result.code == -signal.SIGPIPE  # Python ignores it, and what is ignored stays so in a program


@pytest.mark.parametrize(("name", "code"), [("no-such-program", 127), ("./plain", 126)])
def test_a_program_that_cannot_be_run_writes_why(nest: Nest, tmp_path: Path, name: str, code: int) -> None:
    write(tmp_path / "plain", "not a program")
    env = {**ENVIRONMENT, "TORCHELASTIC_ERROR_FILE": str(tmp_path / "error.json")}
    result = nest.run([name], tmp_path, kind=None, env=env)
    assert (result.code, result.stdout) == (code, "")
    assert result.stderr.startswith(f"holdfast: cannot run '{name}': ")
    assert "Error" in json.loads((tmp_path / "error.json").read_text())["message"]["message"]


def test_workers_live_on_when_the_fork_server_is_killed(nest: Nest, tmp_path: Path) -> None:
    async def kill_server() -> None:
        with Output(tmp_path) as output:
            sleeper = await started_sleeper(nest, tmp_path, output)
            killed = nest.launcher.server_pid
            os.kill(killed, signal.SIGKILL)
            result = await nest.run_async(script(tmp_path, "print('from the next one')"), tmp_path)
            assert result == Result(0, "from the next one\n", "")
            assert nest.launcher.server_pid != killed
            assert not sleeper.ended
            sleeper.signal(signal.SIGUSR1)
            assert await sleeper.wait() == signal.SIGUSR1

    nest.do(kill_server())


def test_no_request_is_lost_or_run_twice_whenever_the_fork_server_dies(nest: Nest, tmp_path: Path) -> None:
    argv = script(tmp_path, "import sys\nopen('runs', 'ab', buffering=0).write(f'{sys.argv[1]}\\n'.encode())")
    chance = random.Random(7)
    deaths = 0
    launched: list[str] = []

    async def kill_servers() -> None:
        nonlocal deaths
        while True:
            await nest.launcher.ready()
            await asyncio.sleep(chance.uniform(0.0, 0.05))
            if nest.launcher.server_pid:
                os.kill(nest.launcher.server_pid, signal.SIGKILL)
                deaths += 1

    async def launch_for_ever(stream: int) -> None:
        """A launch may fail after two deaths, and is then known not to have run."""
        number = 0
        while deaths < 25:
            number += 1
            try:
                result = await nest.run_async([*argv, f"{stream}.{number}"], tmp_path)
            except LaunchError:
                continue
            assert result.code == 0, result
            launched.append(f"{stream}.{number}")

    async def launch_all() -> None:
        async with asyncio.TaskGroup() as streams:
            killer = streams.create_task(kill_servers())
            launchers = [streams.create_task(launch_for_ever(stream)) for stream in range(4)]
            await asyncio.wait(launchers)
            killer.cancel()

    nest.do(launch_all())
    assert len(launched) >= 4
    assert sorted((tmp_path / "runs").read_text().split()) == sorted(launched)
    nest.launcher.reap_orphans()


def test_a_fork_server_that_cannot_start_is_given_up_with_its_stderr(tmp_path: Path) -> None:
    with Nest("cold", env={"PYTHONHOME": str(tmp_path)}) as nest:
        with pytest.raises(LaunchError, match=r"(?s)died 3 times before it was ready.*encodings"):
            nest.do(nest.launcher.ready())
        with pytest.raises(LaunchError, match="died 3 times"):
            nest.run(["x.py"], tmp_path)


def test_python_itself_missing_is_a_sentence_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    with Nest("cold") as nest, pytest.raises(LaunchError, match=r"cannot be started.*No such file"):
        nest.do(nest.launcher.ready())


def test_closing_leaves_nothing_behind_even_in_the_middle_of_launches(nest: Nest, tmp_path: Path) -> None:
    nest.do(nest.launcher.ready())
    others = children()
    argv = script(tmp_path, SLEEPER)

    async def open_and_close() -> list[object]:
        launcher = await Launcher.start("cold", env=ENVIRONMENT)
        request = process_request(argv, env=ENVIRONMENT, cwd=str(tmp_path), local_rank=0, kind="script")
        with open(os.devnull, "wb") as null:
            streams = [null.fileno(), null.fileno()]
            launches = [asyncio.create_task(launcher.launch(request, streams)) for _ in range(20)]
            await asyncio.wait(launches, return_when=asyncio.FIRST_COMPLETED)
            await launcher.close()
            await launcher.close()  # again, and nothing happens
            outcomes = await asyncio.gather(*launches, return_exceptions=True)
            with pytest.raises(LaunchError, match="closed"):
                await launcher.launch(request, streams)
        for outcome in outcomes:
            if isinstance(outcome, Child):  # handed over before: the caller's
                outcome.kill_group(signal.SIGKILL)
                await outcome.wait()
        return list(outcomes)

    outcomes = nest.do(open_and_close())
    assert any(isinstance(outcome, LaunchError) for outcome in outcomes)
    nest.do(eventually_async(lambda: children() - others == set(), "nothing is left"))


class Rendezvous:
    """A listening socket for a store, and clients for it that speak just enough to know whether it is there."""

    def __init__(self) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self.listener.getsockname()[1]

    def is_open(self) -> bool:
        try:
            socket.create_connection(("127.0.0.1", self.port)).close()
        except ConnectionRefusedError:
            return False
        return True


SET_AND_GET = """
import sys, torch.distributed as dist
store = dist.TCPStore("127.0.0.1", int(sys.argv[1]), is_master=False)
store.set("key", "value")
print(store.get("key"))
"""


def test_stores_are_opened_closed_and_lost(tmp_path: Path) -> None:
    argv = script(tmp_path, SET_AND_GET)

    async def keep(nest: Nest) -> None:
        launcher = nest.launcher
        first, second, third = Rendezvous(), Rendezvous(), Rendezvous()
        # The client comes first, and waits in the backlog.
        client = asyncio.create_task(nest.run_async([*argv, str(first.port)], tmp_path))
        await launcher.stores.open(1, "127.0.0.1", first.listener)
        assert (await client).stdout == "b'value'\n"
        assert first.listener.fileno() == -1  # taken over: else closing the store would not close the port

        await launcher.stores.open(2, "127.0.0.1", second.listener)
        await launcher.stores.close(1)
        assert not first.is_open() and second.is_open()
        await launcher.stores.close(1)  # again, and nothing happens

        refused = Rendezvous()
        with pytest.raises(LaunchError, match="no store for view 2 at node-0"):
            await launcher.stores.open(2, "node-0", refused.listener)
        assert not refused.is_open()

        first_pid = launcher.stores.host_pid
        os.kill(first_pid, signal.SIGKILL)
        assert await launcher.stores.lost() == {2}
        assert not second.is_open() and launcher.stores.host_pid == 0
        await launcher.stores.open(3, "127.0.0.1", third.listener)
        assert third.is_open() and launcher.stores.host_pid not in (0, first_pid)

    with Nest("warm") as nest:
        nest.do(keep(nest))
        pids = [nest.launcher.server_pid, nest.launcher.stores.host_pid]
        assert all(map(is_running, pids))
    assert not any(map(stat_fields, pids))
