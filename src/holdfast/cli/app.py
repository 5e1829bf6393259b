"""The commands other than `run` and `master`, by typer."""

from __future__ import annotations

import typer

from holdfast import __version__
from holdfast.cli import events, logs, status

EPILOG = "`holdfast run --help` and `holdfast master --help` show the flags of those two."


def run_app(arguments: list[str]) -> int:
    """Parse and run; returns the exit code."""
    try:
        result = build_app()(args=arguments, prog_name="holdfast", standalone_mode=False)
    except typer.Exit as exit_request:
        return int(exit_request.exit_code)
    except Exception as error:  # click's own errors are sentences already; anything else is a bug and raises
        return _explain(error)
    return int(result or 0)


def build_app() -> typer.Typer:
    """All commands."""
    app = typer.Typer(
        help="Keeps distributed PyTorch training running.",
        epilog=EPILOG,
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
    )
    app.command("run", help="Run a script on this node: torchrun's flags and more.")(_elsewhere)
    app.command("master", help="Run a job's master alone.")(_elsewhere)
    for module in (status, events, logs):
        module.register(app)

    @app.command()
    def version() -> None:
        """Print the version."""
        print(__version__)

    return app


def _elsewhere() -> None:
    """Handled before this point; listed for --help."""


def _explain(error: Exception) -> int:
    import click

    if isinstance(error, click.exceptions.ClickException):
        error.show()
        return error.exit_code
    if isinstance(error, click.exceptions.Abort):
        return 130
    raise error
