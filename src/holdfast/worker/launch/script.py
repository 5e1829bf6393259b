"""Runs the user's code inside a forked interpreter as `python -u script.py …` would have run it.

What has to be as in a fresh interpreter, and where it is easy to miss:

    sys.argv, sys.orig_argv    argv[0] is the script as given; for a module, runpy puts its file there
    sys.path[0]                a script's own directory (links resolved), a module's working directory, a zip itself
    __main__                   a real module in sys.modules: classes in it are pickled by name, and the children that
                               multiprocessing spawns import `__main__.__file__` again
    SystemExit                 left to the interpreter: it knows None, numbers and everything else
    other exceptions           through sys.excepthook, which the user may have replaced, without our frames; code 1
    KeyboardInterrupt          the same, and then death by SIGINT, so that a parent sees the signal
    the end                    the interpreter's own: threads joined, atexit, streams flushed

So the code runs on a shallow stack, and every way out of it is a return or an exception that leaves the main module.
"""

from __future__ import annotations

import builtins
import importlib.machinery
import io
import os
import pkgutil
import runpy
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from types import CodeType, ModuleType, TracebackType
from typing import NoReturn

from holdfast.wire.launch_messages import ScriptKind
from holdfast.worker.launch.error_file import tell_agent, write_error_file
from holdfast.worker.launch.shadowed_modules import forget_shadowed

CANNOT_OPEN_EXIT_CODE = 2

_is_ended_well = False
_main_pid = 0
"""The process in which the user's code was started."""
_failure_listeners: list[Callable[[], None]] = []

_OUR_FILES = frozenset({__file__, "<frozen runpy>", runpy.__file__})


def run(kind: ScriptKind, argv: Sequence[str]) -> None:
    """Returns if the user's code ends well; otherwise raises what ends the interpreter in the right way."""
    runners: dict[ScriptKind, Callable[[Sequence[str]], None]] = {
        "script": run_script,
        "module": run_module,
        "path": run_path,
    }
    global _is_ended_well, _main_pid
    _main_pid = os.getpid()
    failure: BaseException | None = None
    try:
        runners[kind](argv)
        _is_ended_well = True
    except SystemExit as leaving:
        _is_ended_well = leaving.code in (None, 0)
        if not _is_ended_well:
            _tell_of_failure()
        raise
    except BaseException as error:  # the outermost frame of the user's program
        failure = error
    if failure is not None:  # outside the handler: a hook's own error must not look like a consequence of ours
        end_badly(failure)


def has_ended_well() -> bool:
    """Return whether the user's code has come to an end without an error. False where it was not started from here."""
    return _is_ended_well


def on_failure(listener: Callable[[], None]) -> None:
    """Have the listener called as soon as the user's code has ended with an error, before the interpreter comes down.
    Never called where the code was not started from here."""
    _failure_listeners.append(listener)


def _tell_of_failure() -> None:
    if os.getpid() != _main_pid:
        return  # a process that the script has forked: its failure is the script's own affair
    if not _failure_listeners:
        tell_agent()
    while _failure_listeners:
        _failure_listeners.pop()()


def end_badly(error: BaseException) -> NoReturn:
    trace = without_our_frames(error.__traceback__)
    if isinstance(error, KeyboardInterrupt):
        show(error, trace)
        sys.excepthook = lambda *_: None  # it has been shown; the interpreter still has to die of it
        raise error
    write_error_file(error, trace)  # first: a user's excepthook may end the process
    _tell_of_failure()
    show(error, trace)
    sys.exit(1)


def run_script(argv: Sequence[str]) -> None:
    path = absolute(argv[0])
    sys.argv, sys.orig_argv = list(argv), [sys.executable, "-u", *argv]
    if pkgutil.get_importer(path) is not None:  # a directory or a zip with a __main__.py
        search_first(path)
        install_main()
        run_as_main("__main__", alter_argv=False)
        return
    if not sys.flags.safe_path:
        search_first(str(Path(os.path.realpath(path)).parent))
    code = read_code(path)
    main = install_main()
    main.__file__, main.__cached__ = path, None  # type: ignore[attr-defined]
    loader = importlib.machinery.SourcelessFileLoader if path.endswith(".pyc") else importlib.machinery.SourceFileLoader
    main.__loader__ = loader("__main__", path)
    exec(code, main.__dict__)


def run_module(argv: Sequence[str]) -> None:
    """Run a module as `python -m` does. While the module is being looked for, argv[0] is "-m"."""
    sys.argv, sys.orig_argv = ["-m", *argv[1:]], [sys.executable, "-u", "-m", *argv]
    if not sys.flags.safe_path:
        search_first(str(Path.cwd()))
    install_main()
    run_as_main(argv[0], alter_argv=True)


def search_first(directory: str) -> None:
    """Put a directory at the head of the search path. Its modules are the user's, whatever was imported before."""
    sys.path.insert(0, directory)
    forget_shadowed(directory)


def run_path(argv: Sequence[str]) -> None:
    """Run a file as torchrun's `--run-path` does."""
    sys.argv, sys.orig_argv = list(argv), [sys.executable, "-u", *argv]
    install_main()
    runpy.run_path(argv[0], run_name="__main__")


def run_as_main(name: str, alter_argv: bool) -> None:
    # Private, but it is the very function the interpreter itself calls by name for `-m` and for zips.
    runpy._run_module_as_main(name, alter_argv)  # type: ignore[attr-defined]


def install_main() -> ModuleType:
    """Install an empty main module, as the interpreter makes it, in place of the fork server's."""
    main = ModuleType("__main__")
    main.__dict__.update(__annotations__={}, __builtins__=builtins)
    main.__loader__ = importlib.machinery.BuiltinImporter
    sys.modules["__main__"] = main
    if "multiprocessing" in sys.modules:
        sys.modules["__mp_main__"] = main  # by this name, classes of the main module come back from spawned children
    return main


def absolute(path: str) -> str:
    """Return an absolute path as the interpreter makes it: not normalised, so that tracebacks name files as they always
    have."""
    return path if path.startswith("/") else f"{Path.cwd()}/{path}"


def read_code(path: str) -> CodeType:
    """Source or .pyc. A script that cannot be opened gets the interpreter's own words."""
    try:
        with io.open_code(path) as file:
            content = file.read()
    except OSError as error:
        write_error_file(error)
        sys.stderr.write(f"{sys.executable}: can't open file {path!r}: [Errno {error.errno}] {error.strerror}\n")
        sys.exit(CANNOT_OPEN_EXIT_CODE)
    compiled = pkgutil.read_code(io.BytesIO(content))
    return compile(content, path, "exec", dont_inherit=True) if compiled is None else compiled


def without_our_frames(trace: TracebackType | None) -> TracebackType | None:
    while trace is not None and trace.tb_frame.f_code.co_filename in _OUR_FILES:
        trace = trace.tb_next
    return trace


def show(error: BaseException, trace: TracebackType | None) -> None:
    """Show an uncaught exception as the interpreter does."""
    sys.last_type, sys.last_value, sys.last_traceback = type(error), error, trace
    try:
        sys.excepthook(type(error), error.with_traceback(trace), trace)
    except SystemExit:
        raise
    except BaseException as hook_error:  # whatever a user's hook raises
        sys.stderr.write("Error in sys.excepthook:\n")
        traceback.print_exception(hook_error.with_traceback(without_our_frames(hook_error.__traceback__)))
        sys.stderr.write("\nOriginal exception was:\n")
        sys.__excepthook__(type(error), error, trace)
