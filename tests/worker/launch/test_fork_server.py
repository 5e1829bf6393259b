"""Workers are born fast, belong to the agent, and know nothing of the server they came from."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from holdfast.agent.launch.fork_server_process import command
from holdfast.agent.launch.launcher import process_request
from holdfast.wire.launch_messages import Mode, PreloadPlan
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
    stat_fields,
    write,
)

SLEEPER = "import time\nprint('here')\ntime.sleep(1000)"

DDP = """
import os, torch, torch.distributed as dist
dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8))
optimizer = torch.optim.Adam(model.parameters())
model(torch.ones(2, 8)).sum().backward()
optimizer.step()
print(dist.get_rank(), dist.get_world_size())
dist.destroy_process_group()
"""

AGENT = """
import asyncio, json, os, socket
from holdfast.agent.launch.launcher import Launcher, process_request
async def main():
    launcher = await Launcher.start("cold")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        await launcher.stores.open(1, "127.0.0.1", listener)
    sleeper = process_request(["sleeper.py"], kind="script", env=os.environ, cwd=os.getcwd(), local_rank=0)
    child = await launcher.launch(sleeper, [2, 2])
    print(json.dumps([launcher.server_pid, launcher.stores.host_pid, child.pid]), flush=True)
    await asyncio.sleep(1000)
asyncio.run(main())
"""

AGENT_OF_MANY = """
import asyncio, os
from holdfast.agent.launch.launcher import Launcher, process_request
async def main():
    launcher = await Launcher.start("cold")
    sleeper = process_request(["sleeper.py"], kind="script", env=os.environ, cwd=os.getcwd(), local_rank=0)
    await asyncio.gather(*[launcher.launch(sleeper, [1, 1]) for _ in range(30)])
    await asyncio.sleep(1000)
asyncio.run(main())
"""


def test_a_warm_server_is_ready_without_problems_and_with_one_thread(warm: Nest) -> None:
    ready = warm.do(warm.launcher.ready())
    assert (ready.mode, ready.problems) == ("warm", ())
    assert len(os.listdir(f"/proc/{warm.launcher.server_pid}/task")) == 1


def test_torch_is_there_before_the_script_asks_for_it(warm: Nest, tmp_path: Path) -> None:
    write(
        tmp_path / "script.py",
        "import json, sys\n"
        "names = 'torch', 'torch._dynamo', 'torch.distributed.fsdp', 'numpy', 'holdfast.wire.control'\n"
        "print(json.dumps([name in sys.modules for name in names]))",
    )
    assert lines_of_json(warm.run(["script.py"], tmp_path)) == [[True, True, True, True, False]]


def test_a_worker_is_born_in_a_fraction_of_what_importing_torch_takes(warm: Nest, tmp_path: Path) -> None:
    write(tmp_path / "script.py", "import time, torch\nprint(time.time())")
    warm.do(warm.launcher.ready())
    latencies_s = []
    for _ in range(5):
        asked_at = time.time()
        latencies_s.append(float(warm.run(["script.py"], tmp_path).stdout) - asked_at)
    assert min(latencies_s) < 0.2, latencies_s


def test_a_worker_is_the_agents_child_in_a_session_of_its_own(warm: Nest, tmp_path: Path) -> None:
    write(
        tmp_path / "script.py",
        "import ctypes, json, os\nsignal = ctypes.c_int()\nctypes.CDLL(None).prctl(2, ctypes.byref(signal))\n"
        "print(json.dumps([os.getpid(), os.getppid(), os.getpgid(0), os.getsid(0), signal.value]))",
    )
    [[pid, parent, group, session, death_signal]] = lines_of_json(warm.run(["script.py"], tmp_path))
    assert (parent, group, session, death_signal) == (os.getpid(), pid, pid, signal.SIGKILL)
    assert stat_fields(pid) == []  # reaped


def test_the_server_keeps_no_zombies(warm: Nest, tmp_path: Path) -> None:
    write(tmp_path / "script.py", "pass")
    assert warm.run(["script.py"], tmp_path).code == 0
    assert children(warm.launcher.server_pid) == set()


def test_a_worker_goes_by_the_name_of_its_script(warm: Nest, tmp_path: Path) -> None:
    write(tmp_path / "script.py", "print(open('/proc/self/cmdline').read().strip(chr(0)).split(chr(0)))")
    assert (
        warm.run(["script.py", "--lr", "1"], tmp_path).stdout == f"{[sys.executable, '-u', 'script.py', '--lr', '1']}\n"
    )
    long_argument = "x" * 10_000
    result = warm.run(["script.py", long_argument], tmp_path)
    assert result.code == 0 and "script.py" in result.stdout and long_argument not in result.stdout


def test_two_workers_take_their_first_ddp_step_on_a_kept_store(warm: Nest, tmp_path: Path) -> None:
    write(tmp_path / "script.py", DDP)

    async def train() -> list[Result]:
        listener = socket.create_server(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        await warm.launcher.stores.open(1, "127.0.0.1", listener)
        shared = {
            **ENVIRONMENT,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "WORLD_SIZE": "2",
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        }
        workers = [warm.run_async(["script.py"], tmp_path, env={**shared, "RANK": str(rank)}) for rank in range(2)]
        results = await asyncio.gather(*workers)
        await warm.launcher.stores.close(1)
        return results

    assert [(result.code, result.stdout) for result in warm.do(train())] == [(0, "0 2\n"), (0, "1 2\n")]


def test_the_server_ignores_what_a_terminal_or_an_operator_sends(warm: Nest, tmp_path: Path) -> None:
    warm.do(warm.launcher.ready())
    pid = warm.launcher.server_pid
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        os.kill(pid, number)
    write(tmp_path / "script.py", "pass")
    assert warm.run(["script.py"], tmp_path).code == 0
    assert warm.launcher.server_pid == pid
    assert os.getsid(pid) == pid != os.getsid(0)


@pytest.mark.parametrize("mode", ["warm", "cold"])
def test_the_server_ends_with_its_socket(mode: Mode) -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        server = subprocess.Popen(
            command(theirs.fileno(), mode, PreloadPlan()), env=ENVIRONMENT, pass_fds=[theirs.fileno()]
        )
    with ours:
        assert b"ready" in ours.recv(1000)
        assert server.poll() is None
    assert server.wait(10) == 0


def test_it_does_not_even_start_under_another_parent() -> None:
    arguments = command(0, "cold", PreloadPlan())
    position = arguments.index("--agent-pid") + 1
    arguments[position] = "1"
    assert subprocess.run(arguments, env=ENVIRONMENT, check=False).returncode == 75


def without_torch(directory: Path) -> dict[str, str]:
    """An environment in which preloading takes no time, because torch cannot be imported."""
    write(directory / "torch" / "__init__.py", "raise ImportError('no torch for you')")
    return {**ENVIRONMENT, "PYTHONPATH": f"{ENVIRONMENT['PYTHONPATH']}:{directory}"}


def test_where_torch_is_missing_workers_start_cold_and_it_is_said(tmp_path: Path) -> None:
    write(tmp_path / "script.py", "print('fine')")
    with Nest("warm", [], without_torch(tmp_path)) as nest:
        ready = nest.do(nest.launcher.ready())
        assert ready.mode == "cold"
        assert "no torch for you" in ready.problems[0]
        assert nest.run(["script.py"], tmp_path).stdout == "fine\n"


def test_nothing_is_imported_ahead_if_so_said(tmp_path: Path) -> None:
    write(tmp_path / "script.py", "import sys; print('torch' in sys.modules, 'numpy' in sys.modules)")
    with Nest("warm", ["none"]) as nest:
        ready = nest.do(nest.launcher.ready())
        assert (ready.mode, ready.problems) == ("warm", ())
        assert nest.run(["script.py"], tmp_path) == Result(0, "False False\n", "")


def test_preloaded_modules_are_imported_once_and_their_files_stay_open(tmp_path: Path) -> None:
    write(tmp_path / "slow.py", "import os\npid = os.getpid()\nfile = open(__file__)\nprint('loud')")
    write(tmp_path / "script.py", "import os, slow\nprint(slow.pid == os.getpid(), slow.file.read(6))")
    with Nest("warm", ["slow"], without_torch(tmp_path)) as nest:
        assert nest.run(["script.py"], tmp_path) == Result(0, "False import\n", "")


def test_a_module_that_cannot_be_preloaded_is_a_sentence_and_no_more(tmp_path: Path) -> None:
    write(tmp_path / "broken.py", "raise ValueError('not today')")
    write(tmp_path / "leaving.py", "import sys; sys.exit('I refuse')")
    write(tmp_path / "script.py", "print('fine')")
    with Nest("warm", ["broken", "leaving", "absent"], without_torch(tmp_path)) as nest:
        _, first, second, third = nest.do(nest.launcher.ready()).problems
        assert first == "--preload broken failed (ValueError: not today): workers import it themselves"
        assert "leaving failed (SystemExit: I refuse)" in second
        assert "absent failed (ModuleNotFoundError" in third
        assert nest.run(["script.py"], tmp_path).stdout == "fine\n"


THREADED = "import threading, time\nthreading.Thread(target=time.sleep, args=[99], daemon=True).start()"


def test_a_preloaded_module_that_starts_a_thread_is_left_out_and_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write(tmp_path / "threaded.py", THREADED)
    write(tmp_path / "calm.py", "")
    write(tmp_path / "script.py", "import sys\nprint('threaded' in sys.modules, 'calm' in sys.modules)")
    with (
        caplog.at_level("INFO", "holdfast"),
        Nest("warm", ["threaded", "calm"], without_torch(tmp_path)) as nest,
    ):
        assert nest.run(["script.py"], tmp_path).stdout == "False True\n"
        assert "threaded" not in "".join(nest.do(nest.launcher.ready()).problems)
    said = caplog.text
    assert "--preload threaded started threads (python)" in said
    assert said.count("restarting the fork server without it") == 1


def test_a_thread_that_comes_later_leaves_torch_alone(tmp_path: Path) -> None:
    """Started by a signal, so that no import can be blamed for it."""
    late = (
        "import signal, threading, time\n"
        "start = lambda *_: threading.Thread(target=time.sleep, args=[99], daemon=True).start()\n"
        "signal.signal(signal.SIGUSR1, start)"
    )
    write(tmp_path / "late.py", late)
    write(tmp_path / "script.py", "import sys\nprint('late' in sys.modules)")
    with Nest("warm", ["late"], without_torch(tmp_path)) as nest:
        assert nest.run(["script.py"], tmp_path).stdout == "True\n"
        server = nest.launcher.server_pid
        os.kill(server, signal.SIGUSR1)
        os.kill(server, signal.SIGCONT)
        eventually(lambda: len(os.listdir(f"/proc/{server}/task")) == 2, "the server has a second thread")
        assert nest.run(["script.py"], tmp_path).stdout == "False\n"
        assert nest.launcher.server_pid != server


def test_what_the_script_imports_at_its_top_is_imported_once(tmp_path: Path) -> None:
    installed = tmp_path / "site-packages"
    lazily = "def __getattr__(name):\n    import importlib\n    return importlib.import_module('heavy.lazy')"
    write(installed / "heavy" / "__init__.py", f"import os\npid = os.getpid()\n{lazily}")
    write(installed / "heavy" / "lazy.py", "import os\npid = os.getpid()")
    write(installed / "threaded.py", THREADED)
    write(installed / "broken.py", "raise ValueError('only in a worker')")
    write(installed / "brings_neighbour.py", "import neighbour")
    write(installed / "neighbour.py", "")
    work = tmp_path / "work"
    write(work / "neighbour.py", "mine = True")
    write(
        work / "script.py",
        "import os\nfrom heavy import Model\nimport heavy, threaded, brings_neighbour\n"
        "try:\n    import broken\nexcept ValueError:\n    pass\nimport neighbour\n"
        "print(heavy.pid == os.getpid(), Model.pid == os.getpid(), neighbour.mine)",
    )
    env = without_torch(installed)
    with Nest("warm", ["auto"], env, script=str(work / "script.py")) as nest:
        assert nest.run([str(work / "script.py")], work, env=env) == Result(0, "False False True\n", "")
        ready = nest.do(nest.launcher.ready())
        assert (ready.imported, ready.unsafe) == (("heavy",), {})


def test_pyarrow_starts_no_thread_in_the_server_and_workers_do_not_see_how(tmp_path: Path) -> None:
    write(
        tmp_path / "script.py",
        "import os, pyarrow\nprint(os.environ.get('JE_ARROW_MALLOC_CONF'), pyarrow.array([1, 2]).sum())",
    )
    with Nest("warm", ["auto"], script=str(tmp_path / "script.py")) as nest:
        assert nest.run(["script.py"], tmp_path) == Result(0, "None 3\n", "")
        assert nest.do(nest.launcher.ready()).imported == ("pyarrow",)


def test_numpy_leaves_no_threads_in_the_server_whatever_the_environment_says(tmp_path: Path) -> None:
    write(tmp_path / "script.py", "import numpy, os\nprint(os.environ.get('OPENBLAS_NUM_THREADS'))")
    given = {name: value for name, value in ENVIRONMENT.items() if not name.endswith("_NUM_THREADS")}
    with Nest("warm", [], given) as nest:
        assert nest.run(["script.py"], tmp_path, env=given) == Result(0, "None\n", "")


def start_agent(code: str, directory: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", code]
    return subprocess.Popen(command, cwd=directory, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)


def test_nothing_outlives_an_agent_that_is_killed(tmp_path: Path) -> None:
    write(tmp_path / "sleeper.py", SLEEPER)
    with start_agent(AGENT, tmp_path) as agent:
        assert agent.stdout is not None
        [pids] = lines_of_json(Result(0, agent.stdout.readline().decode(), ""))
        assert all(map(is_running, pids)) and len(pids) == 3
        agent.kill()
    eventually(lambda: not any(map(is_running, pids)), "all three are gone")
    for pid in pids:
        reap_if_inherited(pid)


def test_an_agent_killed_while_workers_are_being_born_leaves_none(tmp_path: Path) -> None:
    """Wherever a birth is cut off, the newborn notices that its parent is not the agent."""
    write(tmp_path / "sleeper.py", "import os, time\nprint(os.getpid(), flush=True)\ntime.sleep(1000)")
    before = children()
    with start_agent(AGENT_OF_MANY, tmp_path) as agent:
        assert agent.stdout is not None
        for _ in range(4):
            agent.stdout.readline()
        agent.kill()
        agent.stdout.read()  # up to the end of file: nobody holds the pipe any more
    eventually(lambda: not any(map(is_running, children() - before)), "all are gone")
    for pid in children() - before:
        reap_if_inherited(pid)


def reap_if_inherited(pid: int) -> None:
    """This process may have become a subreaper in another test."""
    try:
        os.waitpid(pid, 0)
    except ChildProcessError:
        return


def test_workers_hold_no_pipe_of_each_other(warm: Nest, tmp_path: Path) -> None:
    """Else a reader of one worker's output would wait for all of them."""
    write(tmp_path / "sleeper.py", SLEEPER)
    write(tmp_path / "script.py", "pass")

    async def overlap() -> None:
        with Output(tmp_path) as output:
            reading, writing = os.pipe()
            first, second = await asyncio.gather(
                warm.launcher.launch(
                    process_request(["script.py"], kind="script", env=ENVIRONMENT, cwd=str(tmp_path), local_rank=0),
                    [writing, writing],
                ),
                warm.start(["sleeper.py"], tmp_path, output),
            )
            os.close(writing)
            await first.wait()
            await eventually_async(lambda: "here" in output.read()[0], "the sleeper runs")
            assert os.read(reading, 1) == b""
            os.close(reading)
            second.kill_group(signal.SIGKILL)
            assert await second.wait() == signal.SIGKILL

    warm.do(overlap())
