"""The address of a job's master, in a file beside its journal, so that commands on its machine find it by the job.

    <state dir>/jobs/<job>/master.json     {"host": "127.0.0.1", "port": 41234}

The master writes the file when it listens, readable by its owner only, and removes it when it ends. A master that was
killed leaves the file behind until the next one replaces it, so there may be no process at that address, or another
one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from holdfast.util.files import read_small, write_atomically

FILE_NAME = "master.json"
FILE_BYTES_MAX = 4_096
ANY_ADDRESS = {"0.0.0.0": "127.0.0.1", "::": "::1"}
"""The address of a master that listens everywhere, as seen from its own machine."""


class MasterAddress(msgspec.Struct, frozen=True):
    """The host and the port of a job's master."""

    host: str
    port: Annotated[int, Meta(ge=0, le=65_535)]


def write_address(directory: Path, host: str, port: int) -> None:
    """Write the file, complete or not at all. Raise OSError if that fails."""
    address = MasterAddress(ANY_ADDRESS.get(host, host), port)
    write_atomically(directory / FILE_NAME, msgspec.json.encode(address))


def read_address(directory: Path) -> MasterAddress | None:
    """Return the address, or None if there is no file or it cannot be read."""
    try:
        return msgspec.json.decode(read_small(directory / FILE_NAME, FILE_BYTES_MAX), type=MasterAddress)
    except (OSError, msgspec.DecodeError):
        return None


def remove_address(directory: Path) -> None:
    """Remove the file, by the master that wrote it and still has the journal locked. A failure does no harm."""
    try:
        (directory / FILE_NAME).unlink(missing_ok=True)
    except OSError:
        pass
