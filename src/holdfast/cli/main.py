"""`holdfast`: finds the command's module and lets it work. Modules are imported only when they are needed:
`holdfast run` is an agent, and must be light and quick to start."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from holdfast.cli import exit_codes
from holdfast.errors import HoldfastError, JournalError, RefusedError, UsageError, WireError


def main(argv: Sequence[str] | None = None) -> None:
    """Run a command and exit with its code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        code = _run_command(arguments)
    except HoldfastError as error:
        print(f"holdfast: {error}", file=sys.stderr)
        code = _code_of(error)
    sys.exit(code)


def _run_command(arguments: list[str]) -> int:
    if arguments[:1] in (["run"], ["check"], ["master"]):
        _import_structlog_without_rich()
    if arguments[:1] == ["run"]:
        from holdfast.cli.run import run

        return run(arguments[1:])
    if arguments[:1] == ["check"]:
        from holdfast.cli.check import check

        return check(arguments[1:])
    if arguments[:1] == ["master"]:
        from holdfast.cli.master import master

        return master(arguments[1:])
    from holdfast.cli.app import run_app

    return run_app(arguments)


def _import_structlog_without_rich() -> None:
    """structlog imports rich where it finds it, for tracebacks we never print in that way: a quarter of the time
    that an agent takes to start, and a master to come back."""
    if "rich" in sys.modules:
        return
    sys.modules["rich"] = None  # type: ignore[assignment]  # as the import system notes what is not there
    try:
        import structlog  # noqa: F401
    finally:
        del sys.modules["rich"]


def _code_of(error: HoldfastError) -> int:
    table: list[tuple[type[HoldfastError], int]] = [
        (UsageError, exit_codes.USAGE),
        (RefusedError, exit_codes.REFUSED),
        (JournalError, exit_codes.NO_MASTER),
        (WireError, exit_codes.NO_MASTER),
    ]
    return next((code for kind, code in table if isinstance(error, kind)), exit_codes.WORKER_FAILED)
