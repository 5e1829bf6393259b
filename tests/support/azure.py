"""Azurite, Microsoft's own emulator of Azure's blobs: on loopback, with an account and a key of its own."""

from __future__ import annotations

import base64
import email.utils
import hashlib
import hmac
import os
import secrets
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

ACCOUNT = "tests"
API_VERSION = "2021-08-06"
READY_TIMEOUT_S = 60.0
POLL_S = 0.05


def find_program() -> str | None:
    """Where tests/install-packages.sh puts it, or elsewhere on the path."""
    return shutil.which("azurite-blob", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")


class Azurite:
    """One, that keeps everything in memory."""

    def __init__(self, root: Path, program: str) -> None:
        self._root, self._program = root, program
        self._key = secrets.token_bytes(64)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._port = free.getsockname()[1]
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def variables(self) -> dict[str, str]:
        """What a client needs in its environment."""
        return {
            "AZURE_STORAGE_USE_EMULATOR": "true",
            "AZURITE_BLOB_STORAGE_URL": f"http://127.0.0.1:{self._port}",
            "AZURE_STORAGE_ACCOUNT_NAME": ACCOUNT,
            "AZURE_STORAGE_ACCOUNT_KEY": base64.b64encode(self._key).decode(),
        }

    def start(self) -> None:
        place = ["--blobHost", "127.0.0.1", "--blobPort", str(self._port)]
        with (self._root / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [self._program, *place, "--inMemoryPersistence", "--skipApiVersionCheck", "--disableTelemetry"],
                cwd=self._root,
                stdout=log,
                stderr=log,
                env=os.environ | {"AZURITE_ACCOUNTS": f"{ACCOUNT}:{base64.b64encode(self._key).decode()}"},
            )

    def make_container(self, name: str) -> None:
        """As soon as it answers. Our client has no call for it."""
        deadline = time.monotonic() + READY_TIMEOUT_S
        while True:
            try:
                urllib.request.urlopen(self._signed(name), timeout=10.0).close()
                return
            except urllib.error.HTTPError:
                raise
            except OSError:
                assert time.monotonic() < deadline, (self._root / "log").read_text()[-3000:]
                time.sleep(POLL_S)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def _signed(self, container: str) -> urllib.request.Request:
        date = email.utils.formatdate(usegmt=True)
        headers = f"x-ms-date:{date}\nx-ms-version:{API_VERSION}"
        wanted = "\n".join(["PUT", *[""] * 11, headers, f"/{ACCOUNT}/{ACCOUNT}/{container}", "restype:container"])
        signature = base64.b64encode(hmac.new(self._key, wanted.encode(), hashlib.sha256).digest()).decode()
        return urllib.request.Request(
            f"http://127.0.0.1:{self._port}/{ACCOUNT}/{container}?restype=container",
            method="PUT",
            headers={
                "x-ms-date": date,
                "x-ms-version": API_VERSION,
                "Authorization": f"SharedKey {ACCOUNT}:{signature}",
                "Content-Length": "0",
            },
        )
