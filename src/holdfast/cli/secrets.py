"""Where a job's token comes from: never the command line.

1. HOLDFAST_TOKEN, 2. --token-file or HOLDFAST_TOKEN_FILE, 3. on loopback only: a file of this user's, made once
in the state directory, so that jobs on one machine are guarded without any set-up.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from pathlib import Path

import structlog

from holdfast.errors import UsageError
from holdfast.wire.secure import TOKEN_CHARS_MIN

TOKEN_VARIABLE = "HOLDFAST_TOKEN"

log = structlog.get_logger("agent")


def find_token(environ: Mapping[str, str], token_file: str | None, state_dir: str, *, loopback: bool) -> str:
    """The token, or a UsageError that says how to give one."""
    if token := environ.get(TOKEN_VARIABLE, "").strip():
        return _checked(token, f"the variable {TOKEN_VARIABLE}")
    if token_file:
        return _checked(_read(Path(token_file)), f"the token file {token_file}")
    if not loopback:
        raise UsageError(
            "the master's address is not loopback, so the job needs a token: put the same secret of at least"
            f" {TOKEN_CHARS_MIN} characters on every node, in a file (--token-file FILE) or in {TOKEN_VARIABLE};"
            ' python -c "import secrets; print(secrets.token_hex(32))" makes one'
        )
    return _own_token(Path(state_dir) / "token")


def _checked(token: str, where: str) -> str:
    if len(token) < TOKEN_CHARS_MIN:
        raise UsageError(f"{where} holds {len(token)} characters, a token needs at least {TOKEN_CHARS_MIN}")
    return token


def _read(path: Path) -> str:
    try:
        if path.stat().st_mode & 0o077:
            log.warning(f"the token file {path} can be read by others: chmod 600 it")
        return path.read_text().strip()
    except OSError as error:
        raise UsageError(f"cannot read the token file {path}: {error.strerror}") from error


def _own_token(path: Path) -> str:
    if not path.exists():
        _make_token(path)
    return _checked(_read(path), f"the token file {path}")


def _make_token(path: Path) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_name(f".token-{secrets.token_hex(8)}")
        fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(fd, "w") as file:
            file.write(secrets.token_hex(32))
        try:
            os.link(draft, path)  # whole or not at all, and the first one wins
        except FileExistsError:
            pass
        finally:
            draft.unlink()
    except OSError as error:
        raise UsageError(f"cannot write the token {path}: {error.strerror}; choose another --state-dir") from error
