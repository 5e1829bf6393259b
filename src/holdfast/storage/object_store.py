"""Object stores, by obstore: s3://bucket/prefix, gs://bucket/prefix, az://container/prefix.

Large files go up in parts, several at a time; a file appears when it is whole. Each request is tried again for a while,
and what still fails is begun anew, with growing pauses, until the store's patience ends: an outage costs time, not the
checkpoint. A conditional put is one atomic request of the store's own.

An upload that is cut off (kill -9) leaves its parts invisibly in the bucket: a lifecycle rule for incomplete multipart
uploads is the way to be rid of them.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

from holdfast.errors import MissingError, StorageError, UsageError
from holdfast.storage.credentials import aws_config
from holdfast.storage.patience import PAUSE_FIRST_S, OutageError, persist
from holdfast.storage.stores import BLOCK_BYTES, PATIENCE_S, Progress

CONCURRENT_MAX = 8
"""Parts of one upload under way at once: 64 MiB of memory."""
PARTS_MAX = 10_000
"""S3's own limit."""
REQUEST_TIMEOUT_S = 60.0
"""For 8 MiB, on the slowest network one would train on."""
REQUEST_RETRY_S = 60.0
"""How long one request is tried again before the whole file is begun anew."""
REQUEST_PAUSE_MAX_S = 3.0
RETRIES_MAX = 100
"""The time is what ends them."""
SENTENCE_CHARS_MAX = 300
RANGE_NOT_SATISFIABLE = 416

Result = TypeVar("Result")


class ObjectStore:
    """Objects under a prefix of a bucket."""

    local = None

    def __init__(self, url: str, patience_s: float = PATIENCE_S) -> None:
        self._obstore = _module(url)
        self._url = url.rstrip("/")
        self._patience_s = patience_s
        self._store = self._connect(url)

    @property
    def url(self) -> str:
        return self._url

    def put(
        self, name: str, pieces: Iterable[memoryview], size_bytes: int, on_progress: Progress | None = None
    ) -> None:
        def upload() -> None:
            sent = _counted(pieces, size_bytes, on_progress)
            content = b"".join(sent) if size_bytes <= BLOCK_BYTES else sent  # one request, where one does
            options = {"chunk_size": chunk_bytes(size_bytes), "max_concurrency": CONCURRENT_MAX}
            try:
                self._obstore.put(self._store, name, content, **options)
            except FileNotFoundError as error:
                if _is_bucket_missing(error):
                    raise
                text = f"{self._url}/{name} cannot be written: the upload is not known ({_sentence(error)})"
                raise OutageError(text) from None

        self._do(f"{self._url}/{name} cannot be written", upload)

    def put_new(self, name: str, content: bytes) -> bool:
        def create() -> bool:
            try:
                self._obstore.put(self._store, name, content, mode="create")
            except self._obstore.exceptions.AlreadyExistsError:
                return False
            return True

        return self._do(f"{self._url}/{name} cannot be written", create)

    def replace(self, name: str, content: bytes, instead_of: bytes) -> bool:
        def swap() -> bool:
            there = self._obstore.get(self._store, name)
            version = {key: there.meta[key] for key in ("e_tag", "version") if there.meta.get(key)}
            if bytes(there.bytes()) != instead_of:
                return False
            try:
                self._obstore.put(self._store, name, content, mode=version)
            except self._obstore.exceptions.PreconditionError:
                return False
            return True

        return self._do(f"{self._url}/{name} cannot be written", swap)

    def read(self, name: str, start: int = 0, size: int | None = None) -> bytes:
        def fetch() -> bytes:
            if size is None and not start:
                return bytes(self._obstore.get(self._store, name).bytes())
            length = size if size is not None else self._obstore.head(self._store, name)["size"] - start
            return self._range(name, start, length)

        return self._do(f"{self._url}/{name} cannot be read", fetch)

    def size(self, name: str) -> int:
        found = self._do(f"{self._url}/{name} cannot be read", lambda: self._obstore.head(self._store, name))
        return int(found["size"])

    def names(self, folder: str) -> dict[str, int]:
        return {item["path"]: item["size"] for item in self._list(folder)}

    def folders(self, folder: str = "") -> list[str]:
        prefix = f"{folder}/" if folder else None
        found = self._do(
            f"{self._url}/{folder} cannot be listed",
            lambda: self._obstore.list_with_delimiter(self._store, prefix)["common_prefixes"],
        )
        return sorted(path.rstrip("/").rpartition("/")[2] for path in found)

    def modified_unix_s(self, folder: str) -> float:
        return max((item["last_modified"].timestamp() for item in self._list(folder)), default=0.0)

    def delete(self, name: str) -> None:
        try:
            self._do(f"{self._url}/{name} cannot be removed", lambda: self._obstore.delete(self._store, name))
        except MissingError:
            pass

    def _list(self, folder: str) -> list[Any]:
        def walk() -> list[Any]:
            prefix = f"{folder}/" if folder else None
            return [item for page in self._obstore.list(self._store, prefix) for item in page]

        return self._do(f"{self._url}/{folder} cannot be listed", walk)

    def _range(self, name: str, start: int, size: int) -> bytes:
        try:
            return bytes(self._obstore.get_range(self._store, name, start=start, length=size)) if size > 0 else b""
        except self._obstore.exceptions.BaseError as error:
            if _status(error) == RANGE_NOT_SATISFIABLE:
                return b""
            raise

    def _do(self, what: str, work: Callable[[], Result]) -> Result:
        def attempt() -> Result:
            with self._sentences(what):
                return work()

        return persist(attempt, self._patience_s)

    @contextmanager
    def _sentences(self, what: str) -> Iterator[None]:
        errors = self._obstore.exceptions
        try:
            yield
        except FileNotFoundError as error:
            if _is_bucket_missing(error):
                raise StorageError(f"{what}: there is no such bucket") from None
            raise MissingError(f"{what}: it is not there") from None
        except (errors.PermissionDeniedError, errors.UnauthenticatedError) as error:
            raise StorageError(f"{what}: {_refusal(error)}") from None
        except errors.BaseError as error:
            if _is_bucket_missing(error):  # of a listing, as the next
                raise StorageError(f"{what}: there is no such bucket") from None
            if _status(error) in (401, 403):
                raise StorageError(f"{what}: {_refusal(error)}") from None
            if 400 <= _status(error) < 500 and _status(error) not in (408, 429):
                raise StorageError(f"{what}: {_sentence(error)}") from None
            raise OutageError(f"{what}: {_sentence(error)}") from None

    def _connect(self, url: str) -> Any:
        retry_s = min(REQUEST_RETRY_S, self._patience_s)
        options: dict[str, Any] = {
            "client_options": {"timeout": timedelta(seconds=min(REQUEST_TIMEOUT_S, max(self._patience_s, 1.0)))},
            "retry_config": {
                "retry_timeout": timedelta(seconds=retry_s),
                "max_retries": RETRIES_MAX,
                "backoff": {
                    "init_backoff": timedelta(seconds=PAUSE_FIRST_S),
                    "max_backoff": timedelta(seconds=REQUEST_PAUSE_MAX_S),
                    "base": 2,
                },
            },
        }
        if url.lower().startswith("s3"):
            options["config"] = aws_config(os.environ)
            endpoint = options["config"].get("endpoint", "") or _endpoint(os.environ)
            options["client_options"]["allow_http"] = endpoint.startswith("http://")
        try:
            return self._obstore.store.from_url(url, **options)
        except (self._obstore.exceptions.BaseError, ValueError) as error:
            raise UsageError(f"{url} cannot be opened: {_sentence(error)}") from None


def chunk_bytes(size_bytes: int) -> int:
    """Of a multipart upload: a multiple of our blocks, such that there are not too many."""
    blocks = max(1, -(-size_bytes // BLOCK_BYTES))
    return BLOCK_BYTES * -(-blocks // PARTS_MAX)


def _module(url: str) -> Any:
    try:
        import obstore
        import obstore.exceptions
        import obstore.store
    except ImportError:
        raise UsageError(f"{url} needs the package obstore: pip install 'holdfast[s3]'") from None
    return obstore


def _endpoint(environment: os._Environ[str]) -> str:
    return next((environment[name] for name in ("AWS_ENDPOINT_URL", "AWS_ENDPOINT") if environment.get(name)), "")


def _counted(pieces: Iterable[memoryview], size_bytes: int, on_progress: Progress | None) -> Iterator[memoryview]:
    """Progress as the pieces are taken: ahead of the network by what is under way."""
    done = 0
    for piece in pieces:
        yield piece
        done += len(piece)
        if on_progress is not None:
            on_progress(done, size_bytes)


def _is_bucket_missing(error: Exception) -> bool:
    return any(code in str(error) for code in ("NoSuchBucket", "ContainerNotFound"))


def _status(error: Exception) -> int:
    match = re.search(r"status code: (\d{3})", str(error))
    return int(match[1]) if match else 0


def _refusal(error: Exception) -> str:
    return f"the store does not accept our credentials ({_sentence(error)}); check the environment or the profile"


def _sentence(error: Exception) -> str:
    """The part of obstore's text that is for people: not the source of the error, nor the markup of the answer."""
    text = str(error).split("\n\nDebug source", 1)[0]
    if match := re.search(r"<Message>(.*?)</Message>", text, re.DOTALL):
        text = match[1]
    return " ".join(text.split())[:SENTENCE_CHARS_MAX].rstrip(" .")
