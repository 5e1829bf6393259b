"""The commands other than `run`, `check` and `master`, by typer."""

from __future__ import annotations

import typer

from holdfast import __version__
from holdfast.cli import checkpoints, data, events, explain, logs, nodes, operate, status

EPILOG = "`holdfast run --help`, `holdfast check --help` and `holdfast master --help` show the flags of those."


def run_app(arguments: list[str]) -> int:
    """Parse and run; returns the exit code. What is wrong with a command line, typer says itself."""
    try:
        build_app()(args=arguments, prog_name="holdfast")
    except SystemExit as exit_request:
        return int(exit_request.code or 0)
    return 0


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
    app.command("check", help="Check nodes: their devices, speed, disks and links.")(_elsewhere)
    app.command("master", help="Run a job's master alone.")(_elsewhere)
    for module in (status, events, explain, logs, checkpoints, data, nodes, operate):
        module.register(app)

    @app.command()
    def version() -> None:
        """Print the version."""
        print(__version__)

    return app


def _elsewhere() -> None:
    """Handled before this point; listed for --help."""
