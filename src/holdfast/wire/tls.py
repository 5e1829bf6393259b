"""Files for TLS."""

from __future__ import annotations

from pathlib import Path

import msgspec

from holdfast.errors import UsageError


class Tls(msgspec.Struct, frozen=True):
    """Files for TLS. With `ca`, the server demands a certificate of the client too (mutual TLS)."""

    cert: str
    key: str
    ca: str = ""

    def read(self) -> tuple[bytes, bytes, bytes | None]:
        """Their contents."""
        try:
            ca = Path(self.ca).read_bytes() if self.ca else None
            return Path(self.cert).read_bytes(), Path(self.key).read_bytes(), ca
        except OSError as error:
            flags = "--tls-cert, --tls-key, --tls-ca"
            raise UsageError(f"cannot read {error.filename}: {error.strerror} ({flags})") from error
