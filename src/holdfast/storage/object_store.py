"""Object stores, by obstore: s3://bucket/prefix, gs://bucket/prefix, az://container/prefix.

Large files go up in parts, several at a time; a file appears when it is complete. Each request is retried for a
while, and if it still fails the file is started over, with growing pauses, until the time limit: an outage costs time,
not the checkpoint. A conditional put is one atomic request of the store's own.

An upload that is interrupted (kill -9) leaves its parts invisibly in the bucket: a lifecycle rule for incomplete
multipart uploads is the way to be rid of them.
"""

from __future__ import annotations

import os
import random
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from configparser import ConfigParser, Error
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

from holdfast.errors import MissingError, OutageError, StorageError, UsageError
from holdfast.storage.stores import RETRY_FOR_S, Progress
from holdfast.util.blocks import BLOCK_BYTES, block_count
from holdfast.util.logs import get_logger

CONCURRENT_MAX = 8
"""Parts of one upload under way at once: 64 MiB of memory."""
PARTS_MAX = 10_000
"""S3's own limit."""
REQUEST_TIMEOUT_S = 60.0
"""Enough for 8 MiB on the slowest network one would train on."""
REQUEST_RETRY_S = 60.0
"""How long one request is tried again before the file is started over."""
REQUEST_PAUSE_MAX_S = 3.0
RETRIES_MAX = 100
"""The time is what ends them."""
ERROR_CHARS_MAX = 300
RANGE_NOT_SATISFIABLE = 416

PAUSE_FIRST_S = 0.2
PAUSE_MAX_S = 15.0

Result = TypeVar("Result")
log = get_logger(__name__)


class ObjectStore:
    """Objects under a prefix of a bucket."""

    local = None

    def __init__(self, url: str, retry_for_s: float = RETRY_FOR_S) -> None:
        self._obstore = require_obstore(url)
        self._url = url.rstrip("/")
        self._retry_for_s = retry_for_s
        self._store = self._connect(url)

    @property
    def url(self) -> str:
        return self._url

    def put(
        self, name: str, blocks: Iterable[memoryview], size_bytes: int, on_progress: Progress | None = None
    ) -> None:
        def upload() -> None:
            sent = _counted(blocks, size_bytes, on_progress)
            content = b"".join(sent) if size_bytes <= BLOCK_BYTES else sent  # one request, where one does
            options = {"chunk_size": chunk_bytes(size_bytes), "max_concurrency": CONCURRENT_MAX}
            try:
                self._obstore.put(self._store, name, content, **options)
            except FileNotFoundError as error:
                if _is_bucket_missing(error):
                    raise
                text = f"{self._url}/{name} cannot be written: the upload is not known ({_message(error)})"
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
            with self._translated_errors(what):
                return work()

        return retry(attempt, self._retry_for_s)

    @contextmanager
    def _translated_errors(self, what: str) -> Iterator[None]:
        errors = self._obstore.exceptions
        try:
            yield
        except FileNotFoundError as error:
            if _is_bucket_missing(error):
                raise StorageError(f"{what}: there is no such bucket") from None
            raise MissingError(f"{what}: not found") from None
        except (errors.PermissionDeniedError, errors.UnauthenticatedError) as error:
            raise StorageError(f"{what}: {_refusal(error)}") from None
        except errors.BaseError as error:
            if _is_bucket_missing(error):  # of a listing, as the next
                raise StorageError(f"{what}: there is no such bucket") from None
            if _status(error) in (401, 403):
                raise StorageError(f"{what}: {_refusal(error)}") from None
            if 400 <= _status(error) < 500 and _status(error) not in (408, 429):
                raise StorageError(f"{what}: {_message(error)}") from None
            raise OutageError(f"{what}: {_message(error)}") from None

    def _connect(self, url: str) -> Any:
        retry_s = min(REQUEST_RETRY_S, self._retry_for_s)
        options: dict[str, Any] = {
            "client_options": {"timeout": timedelta(seconds=min(REQUEST_TIMEOUT_S, max(self._retry_for_s, 1.0)))},
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
            raise UsageError(f"{url} cannot be opened: {_message(error)}") from None


def chunk_bytes(size_bytes: int) -> int:
    """Return the chunk size of a multipart upload: a multiple of our blocks, such that there are not too many
    chunks."""
    blocks = max(1, block_count(size_bytes))
    return BLOCK_BYTES * -(-blocks // PARTS_MAX)


def require_obstore(url: str) -> Any:
    """Return the package that reaches object stores; raise UsageError if it is not installed."""
    try:
        import obstore
        import obstore.exceptions
        import obstore.store
    except ImportError:
        raise UsageError(f"{url} needs the package obstore: pip install obstore") from None
    return obstore


def _endpoint(environment: os._Environ[str]) -> str:
    return next((environment[name] for name in ("AWS_ENDPOINT_URL", "AWS_ENDPOINT") if environment.get(name)), "")


def _counted(blocks: Iterable[memoryview], size_bytes: int, on_progress: Progress | None) -> Iterator[memoryview]:
    """Report progress as blocks are taken, which is ahead of the network by what is in flight."""
    done = 0
    for block in blocks:
        yield block
        done += len(block)
        if on_progress is not None:
            on_progress(done, size_bytes)


def _is_bucket_missing(error: Exception) -> bool:
    return any(code in str(error) for code in ("NoSuchBucket", "ContainerNotFound"))


def _status(error: Exception) -> int:
    match = re.search(r"status code: (\d{3})", str(error))
    return int(match[1]) if match else 0


def _refusal(error: Exception) -> str:
    return f"the store does not accept our credentials ({_message(error)}); check the environment or the profile"


def _message(error: Exception) -> str:
    """Return the part of obstore's text that is for people, without the debug source and the markup of the response."""
    text = str(error).split("\n\nDebug source", 1)[0]
    if match := re.search(r"<Message>(.*?)</Message>", text, re.DOTALL):
        text = match[1]
    return " ".join(text.split())[:ERROR_CHARS_MAX].rstrip(" .")


# --- AWS profile files, which obstore does not read itself

KEYS = {
    "aws_access_key_id": "access_key_id",
    "aws_secret_access_key": "secret_access_key",
    "aws_session_token": "session_token",
    "region": "region",
    "endpoint_url": "endpoint",
}
VARIABLES = {
    "access_key_id": ("AWS_ACCESS_KEY_ID",),
    "secret_access_key": ("AWS_ACCESS_KEY_ID",),  # a key of the environment goes with a secret of the environment
    "session_token": ("AWS_ACCESS_KEY_ID",),
    "region": ("AWS_REGION", "AWS_DEFAULT_REGION"),
    "endpoint": ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"),
}
REGION_DEFAULT = "us-east-1"


def aws_config(environment: Mapping[str, str]) -> dict[str, str]:
    """Return what the profile files and AWS_ENDPOINT_URL_S3 set, except where a variable that obstore reads overrides
    it."""
    profile = environment.get("AWS_PROFILE") or environment.get("AWS_DEFAULT_PROFILE") or "default"
    found: dict[str, str] = {}
    for path, section in (
        (_file(environment, "AWS_CONFIG_FILE", "config"), profile if profile == "default" else f"profile {profile}"),
        (_file(environment, "AWS_SHARED_CREDENTIALS_FILE", "credentials"), profile),
    ):
        found |= _section(path, section)
    chosen = {key: value for key, value in found.items() if not any(environment.get(name) for name in VARIABLES[key])}
    if endpoint := environment.get("AWS_ENDPOINT_URL_S3"):
        chosen["endpoint"] = endpoint
    if "region" not in chosen and not any(environment.get(name) for name in VARIABLES["region"]):
        chosen["region"] = REGION_DEFAULT
    return chosen


def _file(environment: Mapping[str, str], variable: str, name: str) -> Path:
    home = environment.get("HOME", "/nonexistent")
    return Path(environment.get(variable) or f"{home}/.aws/{name}").expanduser()


def _section(path: Path, section: str) -> dict[str, str]:
    parser = ConfigParser(interpolation=None)
    try:
        parser.read(path, encoding="utf-8")
    except (OSError, Error, UnicodeDecodeError) as error:
        raise UsageError(f"{path} cannot be read: {str(error).splitlines()[0]}") from None
    if not parser.has_section(section):
        return {}
    return {KEYS[key]: value for key, value in parser.items(section) if key in KEYS and value}


def retry(
    work: Callable[[], Result],
    retry_for_s: float,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Result:
    """Do some work; repeat it after an outage, with growing pauses. When the time is over, raise the last error."""
    give_up_at = clock() + retry_for_s
    pause_s = PAUSE_FIRST_S
    tries = 0
    while True:
        tries += 1
        try:
            return work()
        except OutageError as error:
            wait_s = pause_s * random.uniform(0.5, 1.0)  # writers of one job shall not come back all at once
            if clock() + wait_s >= give_up_at:
                raise StorageError(f"{error} (given up after {tries} tries in {retry_for_s:g} s)") from error
            log.warning("storage-retry", f"{error}; retrying in {wait_s:.1f} s")
            sleep(wait_s)
            pause_s = min(pause_s * 2, PAUSE_MAX_S)
