"""az:// against Azurite: what every store promises, whole saves, refusals."""

from __future__ import annotations

import base64
import secrets
from collections.abc import Iterator
from threading import Thread

import pytest

from holdfast.errors import StorageError
from holdfast.storage.checkpoint_catalogue import CheckpointCatalogue
from holdfast.storage.retention import LastN
from holdfast.storage.stores import Store, open_store
from support.azure import Azurite, find_program
from support.saves import save
from support.store_contract import check_store

pytest.importorskip("obstore")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Azurite]:
    if (program := find_program()) is None:
        pytest.skip("azurite-blob is not installed: tests/install-packages.sh does it where npm is")
    with pytest.MonkeyPatch.context() as patch:
        made = Azurite(tmp_path_factory.mktemp("azure"), program)
        for name, value in made.variables.items():
            patch.setenv(name, value)
        made.start()
        try:
            made.make_container("checkpoints")
            yield made
        finally:
            made.kill()


@pytest.fixture
def store(server: Azurite) -> Store:
    return open_store(f"az://checkpoints/{secrets.token_hex(4)}", retry_for_s=20.0)


def steps(catalogue: CheckpointCatalogue) -> list[int]:
    return [found.step for found in catalogue.list().found]


def test_azure_keeps_the_promises_of_a_store(store: Store) -> None:
    check_store(store)


def test_checkpoints_are_saved_listed_verified_pinned_and_pruned(store: Store) -> None:
    catalogue = CheckpointCatalogue(store)
    for step in (1, 2, 3):
        save(store, step)
    latest = catalogue.latest(on_damage=pytest.fail)
    assert latest is not None and latest.step == 3 and catalogue.inspect(latest) == []
    catalogue.pin(1, "first")
    assert catalogue.prune(LastN(1)).removed == [2]
    assert steps(catalogue) == [3, 1]
    assert store.names("step-2") == {}


def test_of_two_attempts_at_a_step_one_is_published(store: Store) -> None:
    found: list[str] = []
    threads = [Thread(target=lambda n=n: found.append(save(store, 7, nonce=n).manifest.nonce)) for n in ("one", "two")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 2 and len(set(found)) == 1
    assert CheckpointCatalogue(store).open(7).manifest.nonce == found[0]


def test_what_is_wrong_is_one_sentence(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere = open_store("az://nowhere/run", retry_for_s=1.0)
    with pytest.raises(StorageError, match="there is no such bucket"):
        elsewhere.put_new("a", b"x")
    with pytest.raises(StorageError, match="there is no such bucket"):
        elsewhere.names("a")
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", base64.b64encode(secrets.token_bytes(64)).decode())
    stranger = open_store("az://checkpoints/run", retry_for_s=1.0)
    with pytest.raises(StorageError, match="does not accept our credentials"):
        stranger.put_new("a", b"x")
