"""A real S3 server: SeaweedFS, on loopback, with its own keys. It can be stopped, killed and started again."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

READY_TIMEOUT_S = 60.0
POLL_S = 0.05
GRPC_OFFSET = 10_000
"""Between a port of the server and its gRPC twin."""

KEY, SECRET = "holdfast-tests", "not-a-secret-of-anybody"
IDENTITIES = {
    "identities": [
        {
            "name": "tests",
            "credentials": [{"accessKey": KEY, "secretKey": SECRET}],
            "actions": ["Admin", "Read", "Write", "List", "Tagging"],
        },
        {
            "name": "reader",
            "credentials": [{"accessKey": f"{KEY}-reader", "secretKey": SECRET}],
            "actions": ["Read", "List"],
        },
    ]
}


class Server:
    """One, in a directory of its own."""

    def __init__(self, root: Path, *more: str) -> None:
        self._more = more
        self._root = root
        self._config = root / "identities.json"
        self._config.write_text(json.dumps(IDENTITIES))
        (root / "data").mkdir()
        self._ports = _free_ports(4)
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._ports[3]}"

    @property
    def variables(self) -> dict[str, str]:
        """What a client needs in its environment."""
        return {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ACCESS_KEY_ID": KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_REGION": "us-east-1",
            "HOME": str(self._root),
        }

    def start(self) -> None:
        master, volume, filer, s3 = self._ports
        program = Path(sys.executable).parent / "weed"
        flags = [
            *(f"-dir={self._root / 'data'}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1"),
            *(f"-master.port={master}", f"-volume.port={volume}", "-volume.max=8", "-master.volumeSizeLimitMB=256"),
            *("-s3.port.iceberg=0", "-s3.port.lance=0", *self._more),
            *("-filer", f"-filer.port={filer}", f"-filer.localSocket={self._root}/filer.sock"),
            *("-s3", f"-s3.port={s3}", f"-s3.config={self._config}", f"-s3.localSocket={self._root}/s3.sock"),
        ]
        with (self._root / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [str(program), f"-logdir={self._root}", "server", *flags],
                cwd=self._root,
                stdout=log,
                stderr=log,
                env=os.environ | self.variables,
            )

    def wait_until_ready(self) -> None:
        """It takes an object, and has the bucket that the tests use."""
        from holdfast.errors import CheckpointError
        from holdfast.storage.object_store import ObjectStore

        deadline = time.monotonic() + READY_TIMEOUT_S
        while True:
            try:
                urllib.request.urlopen(self.endpoint, timeout=1.0)
            except urllib.error.HTTPError:
                pass  # it answers: without a signature it refuses
            except OSError:
                assert time.monotonic() < deadline, (self._root / "log").read_text()[-3000:]
                time.sleep(POLL_S)
                continue
            try:
                ObjectStore("s3://checkpoints/ready", retry_for_s=2.0).put("ready", [memoryview(b"1")], 1)
                return
            except CheckpointError:
                assert time.monotonic() < deadline, (self._root / "log").read_text()[-3000:]

    def signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


def _free_ports(count: int) -> list[int]:
    """Whose gRPC twins are free as well."""
    found: list[int] = []
    for port in range(20_000 + os.getpid() % 10_000, 50_000):
        if _is_free(port) and _is_free(port + GRPC_OFFSET):
            found.append(port)
        if len(found) == count:
            return found
    raise AssertionError("no free ports")


def _is_free(port: int) -> bool:
    with socket.socket() as attempt:
        try:
            attempt.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
