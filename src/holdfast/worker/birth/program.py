"""Runs a program in place of the forked interpreter: `--no-python`, and Python itself for `--start-method spawn`."""

from __future__ import annotations

import os
import sys
from typing import NoReturn

from holdfast.worker.birth.error_file import write_error_file

# As a shell says it.
NOT_FOUND_EXIT_CODE = 127
NOT_EXECUTABLE_EXIT_CODE = 126


def become_program(argv: tuple[bytes, ...]) -> NoReturn:
    """Looked for on the worker's own PATH."""
    try:
        os.execvpe(argv[0], argv, os.environ)
    except OSError as error:
        write_error_file(error)
        sys.stderr.write(f"holdfast: cannot run {os.fsdecode(argv[0])!r}: {error.strerror}\n")
        os._exit(NOT_FOUND_EXIT_CODE if isinstance(error, FileNotFoundError) else NOT_EXECUTABLE_EXIT_CODE)
