"""The token with which a watcher proves itself to a live master. It is looked for, never made."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec

from holdfast.errors import UsageError

TOKEN_VARIABLE = "HOLDFAST_TOKEN"


class Token(msgspec.Struct, frozen=True):
    """A job's secret, and where it was found: a sentence names the place, never the secret."""

    secret: str
    place: str


def find_token(environ: Mapping[str, str], token_file: Path | None, state_dir: Path) -> Token:
    """From the environment, else from the named file, else from the one `holdfast run` makes for loopback jobs."""
    if secret := environ.get(TOKEN_VARIABLE, "").strip():
        return Token(secret, f"the variable {TOKEN_VARIABLE}")
    if token_file:
        return _read(token_file)
    own = state_dir / "token"
    if own.is_file():
        return _read(own)
    raise UsageError(
        f"a live master wants the job's token: put it into {TOKEN_VARIABLE}, or name its file with --token-file"
        f" (there is none in {own} either)"
    )


def _read(path: Path) -> Token:
    try:
        secret = path.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise UsageError(f"cannot read the token file {path}: {reason}") from error
    if not secret:
        raise UsageError(f"the token file {path} is empty")
    return Token(secret, f"the file {path}")
