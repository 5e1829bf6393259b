"""TLS of control and bulk connections: the files that the user gave, as contexts of the standard library."""

from __future__ import annotations

import ssl

import msgspec

from holdfast.errors import UsageError
from holdfast.util.files import read_small

TLS_HANDSHAKE = b"\x16\x03"
"""The first bytes of a TLS connection."""
PEM_BYTES_MAX = 4 * 2**20
"""Bundles of all roots there are have less than one."""
_FLAGS = "--tls-cert, --tls-key, --tls-ca"


class Tls(msgspec.Struct, frozen=True):
    """Files for TLS. With `ca`, the server demands a certificate of the client too (mutual TLS)."""

    cert: str
    key: str
    ca: str = ""

    def read(self) -> tuple[bytes, bytes, bytes | None]:
        """Return the contents of the files. UsageError with the name of one that cannot be read."""
        try:
            ca = read_small(self.ca, PEM_BYTES_MAX) if self.ca else None
            return read_small(self.cert, PEM_BYTES_MAX), read_small(self.key, PEM_BYTES_MAX), ca
        except OSError as error:
            raise UsageError(f"cannot read {error.filename}: {error.strerror} ({_FLAGS})") from error

    def client_context(self, *, check_hostname: bool) -> ssl.SSLContext:
        """Return the context of a connecting side: it trusts `ca`, or without one the certificate itself."""
        self.read()  # its error names the file that is missing
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = check_hostname
        context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
        try:
            context.load_verify_locations(self.ca or self.cert)
            if self.ca:
                context.load_cert_chain(self.cert, self.key, password=_no_password)
        except (OSError, ValueError) as error:
            raise self._explain(error) from error
        return context

    def server_context(self) -> ssl.SSLContext:
        """Return the context of the accepting side."""
        self.read()
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            context.load_cert_chain(self.cert, self.key, password=_no_password)
            if self.ca:
                context.load_verify_locations(self.ca)
                context.verify_mode = ssl.CERT_REQUIRED
        except (OSError, ValueError) as error:
            raise self._explain(error) from error
        return context

    def certificate(self) -> bytes:
        """Return the server's own certificate as DER, as its clients see it: the first one of the file."""
        end = "-----END CERTIFICATE-----"
        text = self.read()[0].decode(errors="replace")
        try:
            first = text[text.index("-----BEGIN CERTIFICATE-----") : text.index(end) + len(end)]
            return ssl.PEM_cert_to_DER_cert(first)
        except ValueError as error:
            raise UsageError(f"{self.cert} holds no PEM certificate ({_FLAGS})") from error

    def _explain(self, error: Exception) -> UsageError:
        reason = getattr(error, "reason", None) or error
        return UsageError(f"cannot use {self.cert}, {self.key}, {self.ca or 'no CA'} for TLS: {reason} ({_FLAGS})")


def _no_password() -> str:
    """Refuse a key that is encrypted: OpenSSL would ask the terminal, and wait."""
    raise ValueError("the key is encrypted, and no password is asked for")
