"""The options that several commands share, each defined once.

    @job_command()                                        # holdfast status [JOB] --state-dir ... --endpoint ...
    def status(target: JobTarget, output: Output = Format.TEXT) -> None:
        source = target.open_source()

`job_command` replaces the parameter `target` by the options that say which job is meant and how its master is reached.
"""

from __future__ import annotations

import inspect
import os
from argparse import ArgumentTypeError
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
import typer

from holdfast.cli.master_address import MasterAddress
from holdfast.cli.run_flag_values import endpoint as parse_endpoint
from holdfast.cli.run_flag_values import seconds as parse_seconds
from holdfast.errors import UsageError
from holdfast.observe.jobs import find_journal
from holdfast.observe.source import JobSource, JournalSource
from holdfast.observe.token_file import Token, find_token
from holdfast.util.files import expand_home
from holdfast.util.state_directory import DEFAULT, state_directory

if TYPE_CHECKING:
    from holdfast.wire.tls import Tls

PORT_DEFAULT = 29400
STATE_DIR_DEFAULT = DEFAULT


def seconds(text: str | float) -> float:
    """Parse a duration that an option gives (run_flag_values.py)."""
    try:
        return parse_seconds(str(text))
    except ArgumentTypeError as error:
        raise typer.BadParameter(str(error)) from None


class Format(StrEnum):
    """The form of a command's output."""

    TEXT = "text"
    JSON = "json"


Output = Annotated[Format, typer.Option("-o", "--output", help="Text for people, or JSON for programs.")]
StateDir = Annotated[
    Path,
    typer.Option(
        "--state-dir", metavar="DIR", envvar="HOLDFAST_STATE_DIR", help="The directory with the jobs' journals."
    ),
]
Follow = Annotated[bool, typer.Option("-f", "--follow", help="Go on, over restarts, until the job ends.")]

_JOB_HELP = "Id of the job or the beginning of it; the newest job if not given."
_JOB_ARGUMENT = Annotated[str | None, typer.Argument(metavar="JOB", help=_JOB_HELP)]
_JOB_OPTION = Annotated[str | None, typer.Option("--job", metavar="JOB", help=_JOB_HELP)]
_ENDPOINT = Annotated[
    str | None,
    typer.Option("--endpoint", metavar="HOST:PORT", help="Ask the live master there instead of reading its journal."),
]
_TOKEN_FILE = Annotated[
    Path | None,
    typer.Option(
        "--token-file",
        metavar="FILE",
        envvar="HOLDFAST_TOKEN_FILE",
        help="File with the job's token; or HOLDFAST_TOKEN.",
    ),
]
_TLS_CERT = Annotated[
    str, typer.Option("--tls-cert", metavar="FILE", envvar="HOLDFAST_TLS_CERT", help="As given to `holdfast run`.")
]
_TLS_KEY = Annotated[
    str, typer.Option("--tls-key", metavar="FILE", envvar="HOLDFAST_TLS_KEY", help="The certificate's key.")
]
_TLS_CA = Annotated[
    str, typer.Option("--tls-ca", metavar="FILE", envvar="HOLDFAST_TLS_CA", help="The root of the certificates.")
]
_SHARED: dict[str, tuple[Any, Any]] = {
    "state_dir": (StateDir, STATE_DIR_DEFAULT),
    "endpoint": (_ENDPOINT, None),
    "token_file": (_TOKEN_FILE, None),
    "tls_cert": (_TLS_CERT, ""),
    "tls_key": (_TLS_KEY, ""),
    "tls_ca": (_TLS_CA, ""),
}


class JobTarget(msgspec.Struct, frozen=True):
    """The job that a command is about, and how its records or its master are reached."""

    job: str | None
    state_dir: Path
    endpoint: str | None
    token_file: Path | None
    tls_cert: str
    tls_key: str
    tls_ca: str

    def open_source(self) -> JobSource:
        """Return the records of the job: its journal's file or, with --endpoint, its live master."""
        address = self.address
        if address is None:
            return JournalSource(self.journal())
        from holdfast.observe.remote import MasterSource  # slow to import, and seldom needed

        return MasterSource(address.host, address.port, self.token(), self.tls(), wanted=self.job)

    @property
    def address(self) -> MasterAddress | None:
        """The address of the live master, if one was given."""
        if self.endpoint is None:
            return None
        try:
            return MasterAddress(*parse_endpoint(self.endpoint, PORT_DEFAULT))
        except ArgumentTypeError as error:
            raise UsageError(f"--endpoint {self.endpoint}: {error}") from None

    def journal(self) -> Path:
        """Return the path of the job's journal on this machine."""
        return find_journal(state_directory(self.state_dir), self.job)

    def token(self) -> Token:
        """Return the job's token."""
        token_file = expand_home(self.token_file) if self.token_file else None
        return find_token(os.environ, token_file, state_directory(self.state_dir))

    def tls(self) -> Tls | None:
        """Return the files of TLS, if any were given."""
        from holdfast.wire.tls import Tls

        if not self.tls_cert and not self.tls_key and not self.tls_ca:
            return None
        if not self.tls_cert or not self.tls_key:
            raise UsageError("TLS needs a certificate and its key: give both --tls-cert FILE and --tls-key FILE")
        return Tls(self.tls_cert, self.tls_key, self.tls_ca)


Command = Callable[..., None]


def job_command(job: Literal["argument", "option"] = "argument") -> Callable[[Command], Command]:
    """Return a decorator that gives a command the shared options. `job`: how the job itself is named."""

    def decorate(command: Command) -> Command:
        def run(**values: Any) -> None:
            target = JobTarget(values.pop("job"), **{name: values.pop(name) for name in _SHARED})
            command(target=target, **values)

        own = [p for p in inspect.signature(command, eval_str=True).parameters.values() if p.name != "target"]
        named = _parameter("job", _JOB_ARGUMENT if job == "argument" else _JOB_OPTION, None)
        shared = [_parameter(name, annotation, default) for name, (annotation, default) in _SHARED.items()]
        parameters = [named, *own, *shared] if job == "argument" else [*own, named, *shared]
        keyword_only = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in parameters]
        run.__signature__ = inspect.Signature(keyword_only)  # type: ignore[attr-defined]  # typer reads both of these
        run.__annotations__ = {p.name: p.annotation for p in parameters}
        run.__name__, run.__doc__ = command.__name__, command.__doc__
        return run

    return decorate


def _parameter(name: str, annotation: Any, default: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
