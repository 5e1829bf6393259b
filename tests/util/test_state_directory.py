"""Where the state is if no directory was named."""

import os
import stat
from pathlib import Path

import pytest

from holdfast.errors import UsageError
from holdfast.util.state_directory import (
    check_state_directory,
    fallback,
    make_fallback,
    make_state_directory,
    state_directory,
)
from support.strangers import as_stranger, world_writable

as_root = pytest.mark.skipif(os.getuid() != 0, reason="needs root, to be another user")


@pytest.fixture
def open_to_all(tmp_path: Path) -> Path:
    """A directory in which every user may create files, as in /tmp."""
    return world_writable(tmp_path / "open")


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))


def test_it_is_in_the_home_where_that_can_be_written_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert make_state_directory(make_fallback()) == state_directory("~/.holdfast") == tmp_path / ".holdfast"
    assert stat.S_IMODE((tmp_path / ".holdfast").stat().st_mode) == 0o700
    assert state_directory("/data/state") == Path("/data/state")


@pytest.mark.parametrize("home", ["/proc", "/proc/nothing", "/dev/null"])  # where not even root can create anything
def test_without_a_usable_home_it_is_private_and_temporary(home: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", home)
    assert state_directory("~/.holdfast") == Path(home) / ".holdfast", "nothing is in the other yet"
    found = make_state_directory(make_fallback())
    assert found == fallback()
    assert stat.S_IMODE(found.stat().st_mode) == 0o700
    assert make_state_directory(make_fallback()) == state_directory("~/.holdfast") == found, "later commands find it"


def test_a_fallback_that_is_a_link_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/proc")
    fallback().symlink_to(tmp_path)
    found = make_fallback()
    assert found.name.startswith(f"{fallback().name}-") and stat.S_IMODE(found.stat().st_mode) == 0o700


def test_no_place_for_a_fallback_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", "/proc")
    with pytest.raises(UsageError, match=r"can be used: .* name a directory with --state-dir"):
        make_fallback()


@as_root
def test_what_another_user_has_made_in_its_place_is_neither_used_nor_read(
    open_to_all: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(open_to_all))
    guessed = fallback()
    assert as_stranger(lambda: guessed.mkdir(0o777))
    assert as_stranger(lambda: (guessed / "token").write_text("a token that the stranger knows"))
    found = make_fallback()
    assert found != fallback() and found.stat().st_uid == os.getuid() and stat.S_IMODE(found.stat().st_mode) == 0o700
    monkeypatch.setenv("HOME", "/proc")
    assert make_state_directory(found) == found
    assert state_directory("~/.holdfast") == Path("/proc/.holdfast"), "the stranger's is not read"


@as_root
@pytest.mark.parametrize("name", ["token", "shared-memory", "jobs", "logs"])
def test_what_another_user_has_put_into_a_directory_that_is_open_to_all_is_not_used(
    open_to_all: Path, name: str
) -> None:
    check_state_directory(open_to_all)
    assert as_stranger(lambda: (open_to_all / name).mkdir(0o777))
    with pytest.raises(UsageError, match="belongs to user 65534: name another directory"):
        check_state_directory(open_to_all)


@as_root
def test_another_users_directory_is_used_with_a_warning(open_to_all: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A container's root often works in a directory that belongs to a user of the host."""
    state = open_to_all / "state"
    assert as_stranger(lambda: state.mkdir(0o777))
    assert as_stranger(lambda: (state / "jobs").mkdir(0o777))
    for directory in (state, state / "not-there-yet"):
        caplog.clear()
        check_state_directory(directory)
        assert "another user can read and change the job's token" in caplog.text and "65534" in caplog.text
    caplog.clear()
    check_state_directory(open_to_all / "another" / "state")
    assert not caplog.text


def test_a_state_directory_that_cannot_be_one_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "loop").symlink_to("loop")
    check_state_directory(tmp_path / "not" / "there")
    with pytest.raises(UsageError, match="cannot be used: Too many levels"):
        check_state_directory(tmp_path / "loop" / "inner")
