"""`holdfast init`: write a training script to begin with, one that runs as it is."""

from __future__ import annotations

import os
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from holdfast.errors import UsageError
from holdfast.observe.formatting import printable

TEMPLATES = Path(__file__).parent / "templates"


class Template(StrEnum):
    """A kind of training script."""

    DDP = "ddp"
    FSDP2 = "fsdp2"
    HUGGINGFACE = "huggingface"


def register(app: typer.Typer) -> None:
    """Add the command to the program."""
    app.command()(init)


def init(
    path: Annotated[Path, typer.Argument(metavar="[FILE]", help="The file to write.")] = Path("train.py"),
    template: Annotated[
        Template, typer.Option("-t", "--template", help="A replicated model, a sharded one, or one of Hugging Face's.")
    ] = Template.DDP,
) -> None:
    """Write a training script to begin with: it runs as it is. A file that is there stays."""
    text = (TEMPLATES / f"train_{template}.py").read_text().replace("train.py", path.name)
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        with os.fdopen(descriptor, "w") as file:
            file.write(text)
    except FileExistsError:
        raise UsageError(f"{path} is there already: name another file, as in holdfast init train2.py") from None
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror or error}") from None
    print(printable(f"wrote {path}; run it:\n  holdfast run --standalone --nproc-per-node 2 --spares 1 {path}"))
