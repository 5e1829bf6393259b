"""The options that commands share: the same on each of them, with the same meaning."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import typer

from holdfast.cli.main import build_app
from holdfast.cli.options import Format, JobTarget, Output, job_command
from holdfast.errors import UsageError

JOB_COMMANDS = ("status", "events", "logs", "explain", "drain", "resize", "data verify")
SHARED = {"--state-dir", "--endpoint", "--token-file", "--tls-cert", "--tls-key", "--tls-ca"}
READING = ("status", "events", "logs", "explain", "data verify", "nodes ls", "nodes history", "checkpoints ls")


def find(name: str) -> Any:
    command: Any = typer.main.get_command(build_app())
    for word in name.split():
        command = command.commands[word]
    return command


def options(name: str) -> dict[str, Any]:
    return {option: parameter for parameter in find(name).params for option in parameter.opts}


def commands() -> list[tuple[str, Any]]:
    def walk(command: Any, path: str) -> list[tuple[str, Any]]:
        below = getattr(command, "commands", {}).items()
        return [(path, command), *(found for name, one in below for found in walk(one, f"{path} {name}".strip()))]

    return walk(typer.main.get_command(build_app()), "")


@pytest.mark.parametrize("name", JOB_COMMANDS)
def test_every_command_about_a_job_has_the_shared_options(name: str) -> None:
    found, status = options(name), options("status")
    assert found.keys() >= SHARED
    for option in SHARED:
        assert found[option].help == status[option].help
        assert found[option].envvar == status[option].envvar
    assert "job" in found or "--job" in found


@pytest.mark.parametrize("name", READING)
def test_every_command_that_shows_something_prints_json_on_request(name: str) -> None:
    found = options(name)["--output"]
    assert found.opts == ["-o", "--output"] and found.help == "Text for people, or JSON for programs."


def test_every_command_and_option_has_a_help_text() -> None:
    for name, command in commands():
        assert command.help, f"holdfast {name} has no help"
        for parameter in command.params:
            assert getattr(parameter, "help", ""), f"holdfast {name} {parameter.name} has no help"


def test_help_texts_avoid_the_words_of_a_private_dialect() -> None:
    banned = re.compile(r"\b(whoever|nobody|somebody|anew|for ever|known for|is to have|made of)\b")
    for name, command in commands():
        texts = [command.help or "", *(getattr(parameter, "help", "") or "" for parameter in command.params)]
        assert not [text for text in texts if banned.search(text)], name


def test_the_decorator_hands_the_options_over_as_a_target(tmp_path: Path) -> None:
    seen: list[object] = []

    @job_command()
    def show(target: JobTarget, output: Output = Format.TEXT) -> None:
        """Show."""
        seen.extend([target, output])

    app = typer.Typer()
    app.command()(show)
    app(["demo", "-o", "json", "--state-dir", str(tmp_path), "--endpoint", "host:7"], standalone_mode=False)
    target, output = seen
    assert isinstance(target, JobTarget) and output is Format.JSON
    assert (target.job, target.state_dir) == ("demo", tmp_path)
    assert target.address is not None and (target.address.host, target.address.port) == ("host", 7)


def test_an_endpoint_that_is_none_and_half_of_tls_are_refused() -> None:
    target = JobTarget(None, Path("x"), "host:port", None, "cert.pem", "", "")
    with pytest.raises(UsageError, match="--endpoint host:port: the port must be a number"):
        assert target.address
    with pytest.raises(UsageError, match="give both --tls-cert FILE and --tls-key FILE"):
        target.tls()
