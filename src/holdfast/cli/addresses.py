"""Which addresses are this machine's, and by which one other nodes reach it."""

from __future__ import annotations

import ipaddress
import socket

from holdfast.errors import UsageError, WireError


def resolve(host: str) -> str:
    """A host's numeric address."""
    try:
        return str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError as error:
        raise UsageError(f"the address {host} cannot be resolved ({error.strerror}): check --rdzv-endpoint") from error


def is_loopback(host: str) -> bool:
    """Whether it can be reached from this machine only."""
    return ipaddress.ip_address(resolve(host).partition("%")[0]).is_loopback


def is_local(host: str) -> bool:
    """Whether this machine can listen there."""
    address = resolve(host)
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
    return True


def primary_address() -> str:
    """The address by which this machine speaks to others."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # an address of documents: nothing is sent, the route alone is asked for
        except OSError:
            return "127.0.0.1"
        return str(probe.getsockname()[0])


def is_name(host: str) -> bool:
    """A name that others resolve for themselves, and not `localhost` or a number."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return host != "localhost"
    return False


def check_free(host: str, port: int) -> None:
    """Raises WireError if somebody listens there already."""
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
    """The address from which this machine speaks to the master, and so the one other nodes reach it by."""
    address = resolve(master_host)
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((address, 9))  # a datagram socket: nothing is sent
        except OSError as error:
            raise UsageError(f"{master_host} cannot be reached from here: {error.strerror}") from error
        return str(probe.getsockname()[0])
