"""A real S3 server: what every store promises, whole saves, races, refusals, an outage in the middle of an upload."""

from __future__ import annotations

import secrets
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Thread

import pytest

from holdfast.errors import CheckpointError, MissingError, StorageError
from holdfast.storage import object_store
from holdfast.storage.checkpoint_catalogue import CheckpointCatalogue
from holdfast.storage.checkpoint_writer import CheckpointWriter
from holdfast.storage.failpoints import DEBUG_VARIABLE, SAVE_POINTS, VARIABLE
from holdfast.storage.retention import LastN
from holdfast.storage.stores import Store, open_store
from support.processes import finish, run, started, wait_for_line
from support.s3_server import KEY, Server
from support.saves import about, image, save
from support.store_contract import check_store

pytest.importorskip("obstore")


QUICK_TO_RETURN = ("-master.electionTimeout=1s", "-master.heartbeatInterval=200ms")
"""Alone it needs nobody's vote. Else it takes 17 s after a kill; but so it does not bear being stopped for long."""


@contextmanager
def serving(root: Path, *more: str) -> Iterator[Server]:
    with pytest.MonkeyPatch.context() as patch:
        made = Server(root, *more)
        for name, value in made.variables.items():
            patch.setenv(name, value)
        made.start()
        try:
            made.wait_until_ready()
            yield made
        finally:
            made.kill()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(tmp_path_factory.mktemp("s3")) as made:
        yield made


@pytest.fixture
def store(server: Server) -> Store:
    return open_store(f"s3://checkpoints/{secrets.token_hex(4)}", retry_for_s=20.0)


def steps(catalogue: CheckpointCatalogue) -> list[int]:
    return [found.step for found in catalogue.list().found]


def put_raw(store: Store, name: str, content: bytes) -> None:
    store.put(name, [memoryview(content)], len(content))


def test_s3_keeps_the_promises_of_a_store(store: Store) -> None:
    check_store(store)


def test_checkpoints_are_saved_listed_verified_pinned_and_pruned(store: Store) -> None:
    catalogue = CheckpointCatalogue(store)
    for step in (1, 2, 3):
        save(store, step)
    assert steps(catalogue) == [3, 2, 1]
    latest = catalogue.latest(on_damage=pytest.fail)
    assert latest is not None
    assert latest.step == 3
    assert catalogue.inspect(latest) == []
    catalogue.pin(1, "first")
    assert catalogue.open(1).tags == ("first",)
    assert catalogue.prune(LastN(1)).removed == [2]
    assert steps(catalogue) == [3, 1]
    assert store.names("step-2") == {}
    assert set(store.names("step-3")) == {
        "step-3/manifest.json",
        *(f"step-3/job-1/{file}" for file in ("part-0.safetensors", "part-1.safetensors", ".metadata", ".objects")),
    }
    with catalogue.sources(latest) as sources:
        assert sources[1].skeleton == b"\x92\x01\xc0"


def test_damage_in_a_bucket_is_named_and_the_one_before_is_used(store: Store) -> None:
    catalogue = CheckpointCatalogue(store)
    for step in (1, 2, 3, 4):
        save(store, step)
    name = "step-4/job-1/part-1.safetensors"
    flipped = bytearray(store.read(name))
    flipped[-50] ^= 1
    put_raw(store, name, bytes(flipped))
    store.delete("step-3/job-1/part-0.safetensors")
    assert catalogue.prune(LastN(9), grace_s=0.0).swept == []
    put_raw(store, "step-2/manifest.json", b"{}")
    told: list[str] = []
    found = catalogue.latest(on_damage=told.append)
    assert found is not None
    assert found.step == 1
    assert ["checksum" in told[0], "missing" in told[1], "manifest" in told[2]] == [True] * 3
    assert save(store, 2, nonce="anew").manifest.nonce == "anew"  # takes the place of the damaged one, which is kept
    assert store.read("step-2/manifest.json.damaged-anew") == b"{}"
    catalogue.verify(catalogue.open(2))
    assert catalogue.prune(LastN(9), grace_s=0.0).swept == []
    assert "step-2/job-1/part-0.safetensors" in store.names("step-2")  # the files of what is kept


def test_two_processes_race_to_publish_and_one_does(store: Store, server: Server) -> None:
    words = (store.url, 5, "raced", 4)
    with (
        started("save.py", *words, 0, 1, HOLD="1") as one,
        started("save.py", *words, 2, 3, HOLD="1") as other,
        started("save.py", store.url, 5, "rival", 1, 0, HOLD="1") as rival,
    ):
        for process in (one, other, rival):
            wait_for_line(process, "written")
        for process in (one, rival):
            assert process.stdin is not None
            process.stdin.write("\n")
            process.stdin.flush()
        assert [finish(process) for process in (other, one, rival)] == ["5", "5", "5"]
    catalogue = CheckpointCatalogue(store)
    found = catalogue.latest(on_damage=pytest.fail)
    assert found is not None
    nonces = {name.split("/")[1] for name in store.names("step-5")} - {"manifest.json"}
    assert nonces == {found.manifest.nonce}  # the loser has removed what it wrote


@pytest.mark.parametrize("point", ["part-half", "part-named", "note-written", "metadata-written", "manifest-written"])
def test_a_writer_killed_anywhere_leaves_all_or_nothing(store: Store, point: str) -> None:
    save(store, 1)
    died = run("save.py", store.url, 2, "job-1", 2, 0, 1, **{VARIABLE: point, DEBUG_VARIABLE: "1"})
    assert died.returncode == -signal.SIGKILL, died.stderr
    catalogue = CheckpointCatalogue(store)
    is_published = SAVE_POINTS.index(point) >= SAVE_POINTS.index("manifest-written")
    assert steps(catalogue) == ([2, 1] if is_published else [1])
    assert [item.step for item in catalogue.list().unfinished] == ([] if is_published else [2])
    assert run("save.py", store.url, 2, "job-1", 2, 0, 1).stdout.strip() == "2"
    found = catalogue.latest(on_damage=pytest.fail)
    assert found is not None
    assert found.step == 2


def test_what_another_process_reads_is_not_removed(store: Store) -> None:
    for step in (1, 2):
        save(store, step)
    catalogue = CheckpointCatalogue(store)
    with started("read.py", store.url, 1) as reader:
        wait_for_line(reader, "reading")
        assert "is being read by process" in catalogue.prune(LastN(1)).kept[1]
        assert finish(reader) == "complete"
    assert catalogue.prune(LastN(1)).removed == [1]


def test_wrong_credentials_are_a_sentence(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    save(store, 1)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    stranger = open_store(store.url, retry_for_s=20.0)
    for work in (
        lambda: save(stranger, 2),
        lambda: CheckpointCatalogue(stranger).latest(),
        lambda: CheckpointCatalogue(stranger).list(),
    ):
        with pytest.raises(StorageError, match="does not accept our credentials") as caught:
            work()
        assert "\n" not in str(caught.value)
        assert "Debug" not in str(caught.value)


def test_who_may_only_read_can_load(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    save(store, 1)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", f"{KEY}-reader")
    reader = open_store(store.url, retry_for_s=20.0)
    assert CheckpointCatalogue(reader).latest(on_damage=pytest.fail) is not None
    with pytest.raises(StorageError, match="credentials"):
        save(reader, 2)


def test_credentials_of_a_profile_are_found(
    store: Store, server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(store, 1)
    (tmp_path / "credentials").write_text(
        f"[default]\naws_access_key_id = x\n[lab]\naws_access_key_id = {KEY}\n"
        f"aws_secret_access_key = {server.variables['AWS_SECRET_ACCESS_KEY']}\n"
    )
    (tmp_path / "config").write_text(f"[profile lab]\nregion = us-east-1\nendpoint_url = {server.endpoint}\n")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_REGION", "AWS_ENDPOINT_URL"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_PROFILE", "lab")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    assert CheckpointCatalogue(open_store(store.url, retry_for_s=20.0)).latest() is not None


def test_a_store_that_is_away_is_no_store_without_checkpoints(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    save(store, 1)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    away = open_store(store.url, retry_for_s=0.5)
    with pytest.raises(StorageError, match="given up after"):
        CheckpointCatalogue(away).latest()
    with pytest.raises(StorageError) as caught:
        away.read("step-1/manifest.json")
    assert not isinstance(caught.value, MissingError)


def upload_through(trouble: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """A third of the way, trouble begins. What was saved is whole afterwards."""
    monkeypatch.setattr(object_store, "REQUEST_TIMEOUT_S", 3.0)  # so that a server that hangs is asked again soon
    store = open_store(f"s3://checkpoints/{secrets.token_hex(4)}", retry_for_s=100.0)
    content = image(1, 40_000_000)
    begun: list[int] = []

    def progress(done: int, total: int) -> None:
        if not begun and done * 3 >= total:
            begun.append(done)
            trouble()

    with CheckpointWriter(store, about(1, 1), "a") as writing:
        writing.write_part(0, content, progress)
        found = writing.publish()
    assert begun
    assert found is not None
    CheckpointCatalogue(store).verify(found)
    assert store.read("step-1/a/part-0.safetensors") == bytes(content)


def test_a_server_that_hangs_in_the_middle_of_an_upload_is_waited_for(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[subprocess.Popen[bytes]] = []
    back = Thread(target=lambda: (waits[0].wait(), server.signal(signal.SIGCONT)))

    def stop() -> None:
        server.signal(signal.SIGSTOP)
        waits.append(subprocess.Popen(["sleep", "4"]))  # longer than a request may take
        back.start()

    upload_through(stop, monkeypatch)
    back.join()


def test_a_server_that_is_killed_in_the_middle_of_an_upload_and_comes_back_gets_all_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(tmp_path, *QUICK_TO_RETURN) as server:

        def restart() -> None:
            server.kill()
            server.start()

        upload_through(restart, monkeypatch)


def test_a_bucket_that_cannot_be_is_a_sentence(server: Server) -> None:
    with pytest.raises(CheckpointError) as caught:
        save(open_store("s3://x/y", retry_for_s=5.0), 1)
    assert "\n" not in str(caught.value)
