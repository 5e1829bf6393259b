"""Where the state directory is if none is named: `~/.holdfast`; where there is no home that can be written to, as in
many containers, a private directory below the one for temporary files, so that a job runs there as under torchrun.

Its name there can be guessed, so that later commands find it, and so another user may take it: then a job uses one with
a random name, and no command reads what is in the other.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from holdfast.errors import UsageError
from holdfast.util.files import expand_home
from holdfast.util.logs import get_logger
from holdfast.util.private_directories import PRIVATE_MODE, NotPrivateError, check_owners, is_private, make_private

DEFAULT = Path("~/.holdfast")
CONTENT = ("token", "shared-memory", "jobs", "logs")
"""What a job trusts of what is in its state directory."""

log = get_logger(__name__)


def state_directory(path: Path | str) -> Path:
    """Return the state directory that a path names, to read what is in it; the default one may be the fallback."""
    if Path(path) != DEFAULT:
        return expand_home(path)
    wanted = _in_home()
    if wanted is not None and (_is_writable(wanted) or not is_private(fallback())):
        return wanted
    if os.path.lexists(fallback()) and not is_private(fallback()):
        raise UsageError(f"{fallback()} is not this user's own: name the state directory with --state-dir")
    return fallback()


def make_state_directory(temporary: Path) -> Path:
    """Return the default state directory of a job that is started here, or `temporary` if that one cannot be used."""
    wanted = _in_home()
    if wanted is not None:
        try:
            wanted.mkdir(mode=PRIVATE_MODE, exist_ok=True)
        except OSError:
            return temporary
    return wanted if wanted is not None and _is_writable(wanted) else temporary


def fallback() -> Path:
    """Return the directory that is used where the default one cannot be."""
    return Path(tempfile.gettempdir()) / f"holdfast-{os.geteuid()}"


def make_fallback() -> Path:
    """Return the fallback, created and private to this user; one with a random name where another user has taken its
    own. Raise UsageError if that is not possible."""
    try:
        try:
            make_private(fallback())
        except NotPrivateError:
            return Path(tempfile.mkdtemp(prefix=f"{fallback().name}-"))
    except OSError as error:
        raise UsageError(
            f"neither {DEFAULT} nor {fallback()} can be used: {error.strerror}; name a directory with --state-dir"
        ) from error
    return fallback()


def check_state_directory(directory: Path) -> None:
    """Raise UsageError if another user has put something into a state directory, as is possible in one like /tmp. Log a
    warning if the directory itself is another user's: in a container it may have to be."""
    try:
        allowed = {0, os.geteuid(), *([directory.stat().st_uid] if directory.exists() else [])}
        for path in (directory / name for name in CONTENT):
            if os.path.lexists(path) and (owner := path.lstat().st_uid) not in allowed:
                raise UsageError(f"{path} belongs to user {owner}: name another directory with --state-dir")
        check_owners(directory / "token")
    except NotPrivateError as error:
        log.warning(
            "state-directory-shared",
            f"another user can read and change the job's token, journal and logs: {error.strerror}. Name a directory of"
            " your own with --state-dir",
        )
    except OSError as error:
        raise UsageError(f"--state-dir {directory} cannot be used: {error.strerror}") from error


def _in_home() -> Path | None:
    try:
        return expand_home(DEFAULT)
    except UsageError:  # no home directory is known
        return None


def _is_writable(directory: Path) -> bool:
    return directory.is_dir() and os.access(directory, os.W_OK | os.X_OK)


def journal_path(state_dir: Path, job_id: str) -> Path:
    """Return where a job's journal is."""
    return state_dir / "jobs" / job_id.replace("/", "_") / "journal.sqlite"
