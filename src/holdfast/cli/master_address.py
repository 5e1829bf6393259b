"""Where a job's master listens, written down beside its journal: so that commands on its machine find it by the job.

    <state dir>/jobs/<job>/master.json     {"host": "127.0.0.1", "port": 41234}

Written when the master listens, for its owner's eyes only, removed when it ends in peace. One that was killed leaves it
behind, until its next life writes its own: whoever reads it must expect nobody there, or somebody else.
"""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

FILE_NAME = "master.json"
ANY_ADDRESS = {"0.0.0.0": "127.0.0.1", "::": "::1"}
"""Where a master that listens everywhere is reached from its own machine."""


class MasterAddress(msgspec.Struct, frozen=True):
    """Of a job's master."""

    host: str
    port: int


def write_address(directory: Path, host: str, port: int) -> None:
    """Whole or not at all. Raises OSError."""
    draft = directory / f".{FILE_NAME}-{os.getpid()}"
    address = MasterAddress(ANY_ADDRESS.get(host, host), port)
    draft.unlink(missing_ok=True)
    fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(fd, "wb") as file:
        file.write(msgspec.json.encode(address))
    draft.replace(directory / FILE_NAME)


def read_address(directory: Path) -> MasterAddress | None:
    """None if no master has written one, or what is there is none."""
    try:
        return msgspec.json.decode((directory / FILE_NAME).read_bytes(), type=MasterAddress)
    except (OSError, msgspec.DecodeError):
        return None


def remove_address(directory: Path) -> None:
    """By the master that wrote it, while it still holds the journal. What cannot be removed misleads nobody."""
    try:
        (directory / FILE_NAME).unlink(missing_ok=True)
    except OSError:
        pass
