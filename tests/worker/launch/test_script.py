"""A script forked from the server cannot tell, but for the time it took, that it was not started by `python -u`."""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import py_compile
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.nest import ENVIRONMENT, Nest, Result, lines_of_json, run_python, write

PROBE = """
import gc, io, json, multiprocessing.process, os, signal, sys, threading
import __main__
print(json.dumps({
    "argv": sys.argv, "orig_argv": sys.orig_argv, "path": sys.path, "flags": list(sys.flags), "cwd": os.getcwd(),
    "main_is_me": __main__.__dict__ is globals(),
    "main": {k: repr(type(v)) for k, v in sorted(vars(__main__).items()) if k.startswith("__")},
    "file": __file__, "name": __name__, "package": __package__, "cached": __cached__,
    "spec": __spec__ and [__spec__.name, __spec__.origin, __spec__.parent],
    "loader": getattr(__loader__, "path", None) or repr(__loader__), "doc": __doc__,
    "streams": [
        (type(s.buffer).__name__, s.encoding, s.errors, s.line_buffering, s.write_through, s.newlines, s.name, s.mode)
        for s in (sys.stdout, sys.stderr)
    ],
    "signals": {int(s): repr(signal.getsignal(s)).split(" at ")[0] for s in sorted(signal.valid_signals())},
    "blocked": sorted(map(int, signal.pthread_sigmask(signal.SIG_BLOCK, []))),
    "descriptors": [fd for fd in range(3, 100) if os.path.exists(f"/proc/self/fd/{fd}")],
    "threads": len(os.listdir("/proc/self/task")), "thread": threading.current_thread().name, "gc": gc.isenabled(),
    "original_dir": multiprocessing.process.ORIGINAL_DIR, "env": dict(os.environ), "umask": os.umask(0o22),
}))
"""

ENDINGS = {
    "returns": "print('done')",
    "exits with None": "import sys; sys.exit()",
    "exits with a number": "raise SystemExit(3)",
    "exits with a number that does not fit": "raise SystemExit(-1)",
    "exits with a text": "import sys; sys.exit('a reason')",
    "exits with an object": "import sys; sys.exit({'a': 1})",
    "exits at once": "import os; print('x'); os._exit(9)",
    "raises": "def f():\n    raise ValueError('boom')\nf()",
    "raises from another": "try:\n    1 / 0\nexcept ZeroDivisionError as e:\n    raise KeyError('k') from e",
    "raises while handling": "try:\n    1 / 0\nexcept ZeroDivisionError:\n    [][1]",
    "raises a group": "raise ExceptionGroup('several', [ValueError(1), TypeError(2)])",
    "raises a base exception": "class Odd(BaseException): pass\nraise Odd('x')",
    "does not compile": "print('never')\nx = = 1",
    "is in another encoding": "# -*- coding: latin-1 -*-\nprint('plain')",
    "has a hook": "import sys\nsys.excepthook = lambda t, v, tb: print('hook', t, v, tb.tb_lineno)\n1 / 0",
    "has a hook that exits": "import sys\nsys.excepthook = lambda *a: sys.exit(7)\n1 / 0",
    "has a hook that raises": "import sys\ndef hook(*a):\n    raise OSError('hook')\nsys.excepthook = hook\n1 / 0",
    "is interrupted": "import os, signal\nos.kill(os.getpid(), signal.SIGINT)\nprint('never')",
    "is killed": "import os, signal\nprint('a', end='')\nos.kill(os.getpid(), signal.SIGKILL)",
    "is terminated": "import os, signal\nos.kill(os.getpid(), signal.SIGTERM)",
    "leaves a thread": (
        "import atexit, threading, time\natexit.register(print, 'atexit')\n"
        "said = threading.Event()\n"
        "threading.Thread(target=lambda: (said.wait(), time.sleep(0.05), print('worked'))).start()\n"
        "print('main done')\nsaid.set()"
    ),
    "leaves a thread and raises": (
        "import atexit, threading, time\natexit.register(print, 'atexit')\n"
        "threading.Thread(target=lambda: (time.sleep(0.05), print('worked'))).start()\n1 / 0"
    ),
    "leaves a file open": "import sys\nf = open(sys.argv[0] + '.txt', 'w')\nf.write('kept')",
    "has an object with a last wish": "class A:\n    def __del__(self): print('deleted')\na = A()",
    "looks at its annotations": "def f(x: int): pass\nprint(f.__annotations__)",
}


@pytest.fixture(scope="module")
def nest() -> Iterator[Nest]:
    """Cold: how a script is run does not depend on what was preloaded, and the end of a warm process takes 0.3 s."""
    with Nest("cold") as nest:
        yield nest


def compare(nest: Nest, directory: Path, *argv: str) -> Result:
    """Same code, same words; returns what both gave."""
    ours, theirs = nest.run(argv, directory), run_python(argv, directory)
    assert ours == theirs
    return ours


def test_everything_a_script_can_ask_about_itself_is_the_same(nest: Nest, warm: Nest, tmp_path: Path) -> None:
    write(tmp_path / "deep" / "probe.py", PROBE)
    argv = ["deep/probe.py", "--flag", "ä b"]
    theirs = lines_of_json(run_python(argv, tmp_path))
    assert lines_of_json(nest.run(argv, tmp_path)) == theirs
    assert lines_of_json(warm.run(argv, tmp_path)) == theirs
    assert theirs[0]["path"][0] == str(tmp_path / "deep")


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_script_ends_as_it_would_have(nest: Nest, tmp_path: Path, ending: str) -> None:
    write(tmp_path / "script.py", ENDINGS[ending])
    compare(nest, tmp_path, "./script.py")
    if ending == "leaves a file open":
        assert (tmp_path / "script.py.txt").read_text() == "kept"


def test_an_interrupted_script_dies_of_the_signal(nest: Nest, tmp_path: Path) -> None:
    write(tmp_path / "script.py", ENDINGS["is interrupted"])
    result = nest.run(["script.py"], tmp_path)
    assert result.code == -2 and result.stderr.endswith("KeyboardInterrupt\n")


@pytest.mark.parametrize("name", ["nowhere.py", "locked.py/x", "empty"])
def test_what_cannot_be_run_gets_the_words_of_python(nest: Nest, tmp_path: Path, name: str) -> None:
    (tmp_path / "empty").mkdir()
    write(tmp_path / "locked.py", "")
    assert compare(nest, tmp_path, name).code == (1 if name == "empty" else 2)


def test_links_zips_directories_and_compiled_files_are_scripts_too(nest: Nest, tmp_path: Path) -> None:
    source = write(tmp_path / "real" / "__main__.py", PROBE)
    (tmp_path / "link.py").symlink_to(source)
    py_compile.compile(str(source), cfile=str(tmp_path / "compiled.pyc"))
    with zipfile.ZipFile(tmp_path / "app.zip", "w") as archive:
        archive.write(source, "__main__.py")
    for name in ("link.py", "compiled.pyc", "real", "app.zip"):
        ours, theirs = nest.run([name, "a"], tmp_path), run_python([name, "a"], tmp_path)
        assert lines_of_json(ours) == lines_of_json(theirs), name


def test_a_module_runs_as_with_dash_m(nest: Nest, tmp_path: Path) -> None:
    write(tmp_path / "package" / "__init__.py", "import sys; print('parent sees', sys.argv)")
    write(tmp_path / "package" / "tool.py", PROBE)
    write(tmp_path / "package" / "__main__.py", "import sys; print(__spec__.name); sys.exit(4)")
    for name in ("package.tool", "package", "package.missing"):
        assert nest.run([name, "a"], tmp_path, kind="module") == run_python(["-m", name, "a"], tmp_path)


def test_a_path_runs_as_with_run_path(nest: Nest, tmp_path: Path) -> None:
    write(tmp_path / "script.py", "import sys; print(__name__, sys.argv, __file__); sys.exit(5)")
    result = nest.run(["script.py", "a"], tmp_path, kind="path")
    assert result == Result(5, "__main__ ['script.py', 'a'] script.py\n", "")


def test_what_main_defines_can_be_pickled_and_run_by_other_processes(warm: Nest, tmp_path: Path) -> None:
    write(
        tmp_path / "script.py",
        """
import multiprocessing, pickle
class Point:
    def __init__(self, x): self.x = x
def double(point): return Point(2 * point.x)
if __name__ == "__main__":
    print(pickle.loads(pickle.dumps(Point(1))).x)
    for method in ("fork", "spawn", "forkserver"):
        with multiprocessing.get_context(method).Pool(1) as pool:
            print(method, pool.map(double, [Point(21)])[0].x)
    from torch.utils.data import DataLoader
    print([batch.tolist() for batch in DataLoader([1, 2, 3], num_workers=2)])
""",
    )
    result = warm.run(["script.py"], tmp_path)
    assert result.stdout.split("\n") == ["1", "fork 42", "spawn 42", "forkserver 42", "[[1], [2], [3]]", ""], result


def test_no_two_workers_draw_the_same_numbers(warm: Nest, tmp_path: Path) -> None:
    write(
        tmp_path / "script.py",
        "import json, multiprocessing, random, numpy, torch\n"
        "print(json.dumps([random.random(), numpy.random.rand(), torch.rand(1).item(), torch.initial_seed(),"
        " multiprocessing.current_process().authkey.hex()]))",
    )
    first, second = (lines_of_json(warm.run(["script.py"], tmp_path))[0] for _ in range(2))
    assert all(mine != yours for mine, yours in zip(first, second, strict=True))


def test_the_environment_is_exactly_what_was_given_for_c_code_too(warm: Nest, tmp_path: Path) -> None:
    write(
        tmp_path / "script.py",
        "import ctypes, os\ngetenv = ctypes.CDLL(None).getenv\ngetenv.restype = ctypes.c_char_p\n"
        "print(sorted(os.environb.items()), getenv(b'GIVEN'), getenv(b'HOME'))",
    )
    given = {"GIVEN": "1", "NOT_UTF8": os.fsdecode(b"\xff")}
    result = warm.run(["script.py"], tmp_path, env=given)
    assert result.stdout == "[(b'GIVEN', b'1'), (b'NOT_UTF8', b'\\xff')] b'1' None\n"
    assert ctypes.CDLL(None).getenv(b"HOME")  # else the last one would prove nothing


@pytest.mark.parametrize(("given", "torch_threads"), [({"OMP_NUM_THREADS": "2"}, 2), ({"OMP_NUM_THREADS": "2,1"}, 2)])
def test_libraries_use_as_many_threads_as_the_worker_was_given(
    warm: Nest, tmp_path: Path, given: dict[str, str], torch_threads: int
) -> None:
    write(
        tmp_path / "script.py",
        "import numpy, torch, ctypes\n"
        "paths = {line.split()[-1] for line in open('/proc/self/maps') if 'openblas' in line}\n"
        "print(torch.get_num_threads(), [ctypes.CDLL(p).scipy_openblas_get_num_threads64_() for p in paths])",
    )
    environment = {"PATH": os.environ["PATH"], **given}
    ours = warm.run(["script.py"], tmp_path, env=environment)
    assert ours == run_python(["script.py"], tmp_path, environment)
    assert ours.stdout.startswith(f"{torch_threads} ")


def test_threads_started_for_a_worker_do_not_get_in_the_way_of_its_birth(warm: Nest, tmp_path: Path) -> None:
    """A thread that is there too early takes the signal for which a newborn waits."""
    write(tmp_path / "script.py", "import os; os._exit(0)")
    given = {**ENVIRONMENT, "OMP_NUM_THREADS": "2"}

    async def start_many() -> list[Result]:
        return await asyncio.gather(*[warm.run_async(["script.py"], tmp_path, env=given) for _ in range(20)])

    assert {result.code for result in warm.do(start_many())} == {0}


def error_file_of(nest: Nest, directory: Path, script: str) -> Any:
    write(directory / "script.py", script)
    path = directory / "error.json"
    nest.run(["script.py"], directory, env={**ENVIRONMENT, "TORCHELASTIC_ERROR_FILE": str(path)})
    assert list(directory.glob("*.tmp")) == []
    return json.loads(path.read_text()) if path.exists() else None


def test_an_uncaught_exception_is_written_down_without_record(nest: Nest, tmp_path: Path) -> None:
    before_s = time.time()
    content = error_file_of(nest, tmp_path, "class Odd(Exception): pass\ndef f():\n    raise Odd('boom')\nf()")
    message = content["message"]
    assert message["message"] == "Odd: boom"
    assert message["extraInfo"]["exception"] == "__main__.Odd"
    assert before_s <= message["extraInfo"]["timestamp_s"] <= time.time()
    assert message["extraInfo"]["timestamp"] == str(int(message["extraInfo"]["timestamp_s"]))
    lines = message["extraInfo"]["py_callstack"].splitlines()
    assert lines[1] == f'  File "{tmp_path}/script.py", line 4, in <module>'
    assert lines[-1] == "Odd: boom"


def test_a_builtin_exception_needs_no_module_and_a_hostile_one_no_text(nest: Nest, tmp_path: Path) -> None:
    content = error_file_of(nest, tmp_path, "class Odd(Exception):\n    def __str__(self): 1 / 0\nraise Odd")
    assert content["message"]["message"] == "Odd: <its text cannot be shown>"
    (tmp_path / "error.json").unlink()
    content = error_file_of(nest, tmp_path, "1 / 0")
    assert content["message"]["extraInfo"]["exception"] == "ZeroDivisionError"


def test_it_is_written_before_a_hook_that_ends_the_process(nest: Nest, tmp_path: Path) -> None:
    script = "import os, sys\nsys.excepthook = lambda *a: os._exit(8)\n1 / 0"
    assert error_file_of(nest, tmp_path, script)["message"]["message"] == "ZeroDivisionError: division by zero"


def test_what_record_wrote_stays(warm: Nest, tmp_path: Path) -> None:
    script = (
        "from torch.distributed.elastic.multiprocessing.errors import record\n"
        "@record\ndef main():\n    raise ValueError('first')\n"
        "try:\n    main()\nexcept ValueError:\n    raise KeyError('second')"
    )
    assert error_file_of(warm, tmp_path, script)["message"]["message"] == "ValueError: first"


@pytest.mark.parametrize("script", ["import sys; sys.exit(3)", "raise KeyboardInterrupt", "pass"])
def test_leaving_is_not_an_error(nest: Nest, tmp_path: Path, script: str) -> None:
    assert error_file_of(nest, tmp_path, script) is None


@pytest.mark.parametrize("mode", ["node", "no-such-mode"])
def test_a_binding_that_cannot_be_had_is_refused_in_one_sentence(warm: Nest, tmp_path: Path, mode: str) -> None:
    write(tmp_path / "script.py", "print('never')")
    result = warm.run(["script.py"], tmp_path, numa_binding=mode)
    assert (result.code, result.stdout, result.stderr.count("\n")) == (2, "", 1)
    assert result.stderr.startswith(f"holdfast: --numa-binding {mode} cannot be applied to local rank 0: ")
