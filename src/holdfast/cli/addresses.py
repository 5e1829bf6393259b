"""Network addresses: which are this machine's, and which one other nodes reach it by."""

from __future__ import annotations

import ipaddress
import socket

from holdfast.errors import UsageError, WireError


def resolve(host: str) -> str:
    """Return a host's numeric address."""
    try:
        return str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError as error:
        raise UsageError(f"the address {host} cannot be resolved ({error.strerror}): check --rdzv-endpoint") from error


def resolve_all(host: str) -> tuple[str, ...]:
    """Return all numeric addresses of a host."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return ()
    return tuple(dict.fromkeys(str(entry[4][0]) for entry in found))


def is_loopback(host: str) -> bool:
    """Return whether the host can be reached from this machine only."""
    return ipaddress.ip_address(resolve(host).partition("%")[0]).is_loopback


def is_local(host: str) -> bool:
    """Return whether this machine can listen on that host's address."""
    address = resolve(host)
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
    return True


def primary_address() -> str:
    """Return the address from which this machine connects to others."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(
                ("192.0.2.1", 9)
            )  # an address reserved for documentation: nothing is sent, only the route is looked up
        except OSError:
            return "127.0.0.1"
        return str(probe.getsockname()[0])


def is_name(host: str) -> bool:
    """Return whether the host is a name that other machines can resolve, and not `localhost` or a number."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return host != "localhost"
    return False


def check_free(host: str, port: int) -> None:
    """Raise WireError if another process listens there already."""
    address = resolve(host)
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address, port))
            probe.listen()
        except OSError as error:
            raise WireError(f"cannot listen on {host}:{port}: {error.strerror}; choose another port") from error


def own_address(master_host: str) -> str:
    """Return the address from which this machine connects to the master, and so the one other nodes reach it by."""
    address = resolve(master_host)
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((address, 9))  # a datagram socket: nothing is sent
        except OSError as error:
            raise UsageError(f"{master_host} cannot be reached from here: {error.strerror}") from error
        return str(probe.getsockname()[0])
