"""The job's token: the secret by which agents, masters and watchers prove themselves. It never is on a command line.

1. the variable HOLDFAST_TOKEN
2. the file of --token-file or HOLDFAST_TOKEN_FILE
3. the file `token` of the state directory: for a job on loopback it is created once for each user, so that jobs on
   one machine are guarded without any set-up; watchers read it if it is there
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from pathlib import Path

import msgspec

from holdfast.errors import UsageError
from holdfast.util.files import create_once, read_small
from holdfast.util.logs import get_logger
from holdfast.wire.auth import TOKEN_CHARS_MIN

TOKEN_VARIABLE = "HOLDFAST_TOKEN"
TOKEN_FILE_VARIABLE = "HOLDFAST_TOKEN_FILE"
FILE_NAME = "token"
TOKEN_BYTES_MAX = 4_096
TOKEN_DIFFERENT_MIN = 6
"""How many different characters a token has at least: one that a program made at random has more."""
MAKE_ONE = 'python -c "import secrets; print(secrets.token_hex(32))" makes a good one'

NO_TOKEN = (
    "the master's address is not loopback, so the job needs a token: the same secret on every node. Two commands, the"
    " first once, in a directory that all nodes share (or copy the file), the second in place of this one on every node"
    f" (--token-file FILE says the same as {TOKEN_FILE_VARIABLE}; a scheduler with secrets may set {TOKEN_VARIABLE}"
    " itself):"
)
MAKE_AND_USE_ONE = (
    '(umask 077; python -c "import secrets; print(secrets.token_hex(32))" > ~/holdfast-token)',
    f"{TOKEN_FILE_VARIABLE}=~/holdfast-token holdfast run …",
)

log = get_logger(__name__)


class Token(msgspec.Struct, frozen=True):
    """A job's secret, and where it was found: a sentence names the place, never the secret."""

    secret: str
    place: str


def find_or_create_token(environ: Mapping[str, str], token_file: str | None, state_dir: str, *, loopback: bool) -> str:
    """Return the token of a job that is started here. A job beyond loopback must have been given one."""
    if token := _given(environ, Path(token_file) if token_file else None):
        return _checked(token)
    if not loopback:
        raise UsageError(NO_TOKEN, MAKE_AND_USE_ONE)
    path = Path(state_dir) / FILE_NAME
    if not path.exists():
        _create(path)
    return _checked(_read(path))


def find_token(environ: Mapping[str, str], token_file: Path | None, state_dir: Path) -> Token:
    """Return the token of a job that runs already, for a command that asks its master."""
    if token := _given(environ, token_file):
        return _printable(token)
    path = state_dir / FILE_NAME
    if path.is_file():
        return _printable(_read(path))
    raise UsageError(
        f"a live master wants the job's token: put it into {TOKEN_VARIABLE}, or name its file with --token-file"
        f" (there is none in {path} either)"
    )


def _given(environ: Mapping[str, str], token_file: Path | None) -> Token | None:
    if secret := environ.get(TOKEN_VARIABLE, "").strip():
        return Token(secret, f"the variable {TOKEN_VARIABLE}")
    return _read(token_file) if token_file else None


def _read(path: Path) -> Token:
    try:
        if path.stat().st_mode & 0o077:
            log.warning("token-file-readable", f"the token file {path} can be read by other users: chmod 600 it")
        secret = read_small(path, TOKEN_BYTES_MAX).decode().strip()
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise UsageError(f"cannot read the token file {path}: {reason}") from error
    if not secret:
        raise UsageError(f"the token file {path} is empty")
    return Token(secret, f"the file {path}")


def _checked(token: Token) -> str:
    if len(token.secret) < TOKEN_CHARS_MIN:
        found = len(token.secret)
        raise UsageError(f"{token.place} holds {found} characters, a token needs at least {TOKEN_CHARS_MIN}")
    _printable(token)
    if len(set(token.secret)) < TOKEN_DIFFERENT_MIN:
        raise UsageError(f"{token.place} holds a token that is easily guessed: {MAKE_ONE}")
    return token.secret


def _printable(token: Token) -> Token:
    if not token.secret.isprintable():
        raise UsageError(f"{token.place} holds characters that cannot be printed: {MAKE_ONE}")
    return token


def _create(path: Path) -> None:
    """Write a new token, complete or not at all. If several processes try, the first one's counts."""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        create_once(path, secrets.token_hex(32).encode())
    except OSError as error:
        raise UsageError(f"cannot write the token {path}: {error.strerror}; choose another --state-dir") from error
