"""`holdfast`: finds the command's module and runs it. Modules are imported only when they are needed: `holdfast run` is
an agent, and must be light and quick to start."""

from __future__ import annotations

import os
import shlex
import signal
import sys
from collections.abc import Sequence
from io import TextIOWrapper
from pathlib import Path
from typing import TYPE_CHECKING, Any

from holdfast import exit_codes
from holdfast.errors import HoldfastError, JournalError, UsageError, WireError

if TYPE_CHECKING:
    import typer

EPILOG = "`holdfast run --help`, `holdfast check --help` and `holdfast master --help` show the flags of those commands."

SENTENCE_CHARS_MAX = 4_000


def main(argv: Sequence[str] | None = None) -> None:
    """Run a command and exit with its code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    prepare_streams()
    try:
        code = _run_command(arguments)
        sys.stdout.flush()
    except HoldfastError as error:
        print_error(error)
        code = exit_code_of(error)
    except KeyboardInterrupt:
        code = exit_codes.SIGNAL_BASE + signal.SIGINT
    except BrokenPipeError:
        drop_output()
        code = exit_codes.SUCCESS
    except OSError as error:  # the rest of what the system refuses: a name too long, no permission, a full disk
        drop_output()
        print_error(HoldfastError(system_sentence(error)))
        code = exit_codes.WORKER_FAILED
    sys.exit(code)


def prepare_streams() -> None:
    """Make sure that there are three standard streams, and that every character can be written to them: without, the
    next file that is opened would be taken for one of them."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest number that is free: this one
    if sys.stdout is None:
        sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115  # for as long as the process lives
    if sys.stderr is None:
        sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def drop_output() -> None:
    """Drop what is not written yet if it cannot be written: Python would try again at its end, and complain."""
    try:
        sys.stdout.flush()
    except OSError:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stdout.fileno())
        os.close(null)


def system_sentence(error: OSError) -> str:
    """Return what the system refused, and of which file."""
    reason = error.strerror or str(error) or type(error).__name__
    return f"{reason}: {os.fsdecode(error.filename)}" if isinstance(error.filename, str | bytes) else reason


def print_error(error: HoldfastError) -> None:
    """Print what is wrong to stderr: cut, on one line, and without what a terminal would obey; below it the commands
    that help, each on a line of its own, for copying."""
    from holdfast.observe.formatting import printable

    text, commands = (error.sentence, error.commands) if isinstance(error, UsageError) else (str(error), ())
    cut = text if len(text) <= SENTENCE_CHARS_MAX else f"{text[: SENTENCE_CHARS_MAX - 3]}..."
    line = " ".join(printable(cut).split("\n")).encode(errors="backslashreplace").decode()
    print("\n".join([f"holdfast: {line}", *(f"  {printable(command)}" for command in commands)]), file=sys.stderr)


def _run_command(arguments: list[str]) -> int:
    match arguments[:1]:
        case ["--version" | "version"]:
            from holdfast import __version__

            print(__version__)
            return exit_codes.SUCCESS
        case ["run"]:
            from holdfast.cli.run import run

            return run(arguments[1:])
        case ["check"]:
            from holdfast.cli.check import check

            return check(arguments[1:])
        case ["master"]:
            from holdfast.cli.master import master

            return master(arguments[1:])
        case ["completion"]:
            from holdfast.cli.completion import completion

            return completion(arguments[1:])
        case ["complete-words"]:
            from holdfast.cli.completion import complete_words

            return complete_words(arguments[1:])
        case _:
            return run_app(arguments)


# --- the commands other than run, check and master, by typer


def run_app(arguments: list[str]) -> int:
    """Parse and run one of the other commands; return the exit code. Raise UsageError for a mistake in the command
    line."""
    import typer

    from holdfast.cli.option_mistakes import mistake_sentence

    for word in arguments:
        if any("\ud800" <= character <= "\udfff" for character in word):
            raise UsageError(f"{word!a:.80} is not UTF-8 text: give it in UTF-8")
    mistake: type[Any] = typer.BadParameter.__mro__[1]  # UsageError of click, which newer versions of typer include
    try:
        code = build_app()(args=arguments, prog_name="holdfast", standalone_mode=False)
    except SystemExit as exit_request:  # after a broken pipe
        return int(exit_request.code or 0)
    except typer.Abort:
        return exit_codes.WORKER_FAILED
    except mistake as error:
        said, command = mistake_sentence(error), error.ctx.command_path if error.ctx else "holdfast"
        if not said:
            return exit_codes.USAGE  # no words were given: the help has been shown
        if command == "holdfast" and _is_for_run(arguments[0]):
            raise UsageError(f"{said}; a script is started by holdfast run {shlex.join(arguments)}") from None
        raise UsageError(f"{said}; {command} --help says what there is") from None
    return int(code or exit_codes.SUCCESS)


def _is_for_run(word: str) -> bool:
    """Return whether the first word is a script or one of torchrun's flags, so that only `run` is missing."""
    from holdfast.cli.run_flag_table import FLAGS

    return Path(word).is_file() or any(word.partition("=")[0] in flag.spellings for flag in FLAGS)


def build_app() -> typer.Typer:
    """Return the program with all commands."""
    import typer

    from holdfast.cli import (
        checkpoints,
        cost_plans,
        data,
        doctor,
        drain_resize,
        events,
        explain,
        init_script,
        job_list,
        job_stacks,
        logs,
        nodes,
        simulate,
        status,
    )

    app = typer.Typer(
        help="Keeps distributed PyTorch training running. `holdfast --version` prints the version.",
        epilog=EPILOG,
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
    )
    app.command("run", help="Run a training script on this node, with torchrun's flags and more.")(_listed_for_help)
    app.command("check", help="Check nodes: their devices, speed, disks and links.")(_listed_for_help)
    app.command("master", help="Run a job's master alone, without an agent.")(_listed_for_help)
    for module in (
        status,
        events,
        explain,
        job_stacks,
        logs,
        init_script,
        job_list,
        checkpoints,
        data,
        nodes,
        drain_resize,
        cost_plans,
        simulate,
        doctor,
    ):
        module.register(app)
    app.command("completion", help="Print the script that completes commands and flags in a shell.")(_listed_for_help)
    app.command("version", help="Print the version.")(_listed_for_help)
    return app


def _listed_for_help() -> None:
    """Do nothing: the command is handled before typer, and listed for `holdfast --help`."""


def exit_code_of(error: HoldfastError) -> int:
    table: list[tuple[type[HoldfastError], int]] = [
        (UsageError, exit_codes.USAGE),
        (JournalError, exit_codes.NO_MASTER),
        (WireError, exit_codes.NO_MASTER),
    ]
    return next((code for kind, code in table if isinstance(error, kind)), exit_codes.WORKER_FAILED)
