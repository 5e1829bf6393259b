"""A slow cable between two hosts, beside the switch: NAMESPACE NAMESPACE ADDRESS ADDRESS DELAY_S.

Each of the two gets a TUN device, and a route through it to the other's address. Whatever the kernel hands to one
device is handed to the other after the delay, in the order in which it came. The devices go when this process ends.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import select
import struct
import subprocess
import sys
import time
from collections import deque

NEW_NETWORK = 0x40000000
SET_DEVICE = 0x400454CA
TUN_WITHOUT_HEADER = 0x1001
PACKET_BYTES_MAX = 65_536
DEVICE = "slow"
Packets = deque[tuple[float, bytes]]


def plug_in(namespace: str, own: str, other: str) -> int:
    """The device's file."""
    libc = ctypes.CDLL(None, use_errno=True)
    here = os.open("/proc/self/ns/net", os.O_RDONLY)
    there = os.open(f"/run/netns/{namespace}", os.O_RDONLY)
    _enter(libc, there)
    try:
        device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        fcntl.ioctl(device, SET_DEVICE, struct.pack("16sH", DEVICE.encode(), TUN_WITHOUT_HEADER))
        for words in (["link", "set", DEVICE, "up"], ["route", "add", f"{other}/32", "dev", DEVICE, "src", own]):
            subprocess.run(["ip", *words], check=True)
    finally:
        _enter(libc, here)
        os.close(here)
        os.close(there)
    return device


def _enter(libc: ctypes.CDLL, namespace: int) -> None:
    if libc.setns(namespace, NEW_NETWORK):
        raise OSError(ctypes.get_errno(), "setns")


def carry(devices: tuple[int, int], delay_s: float) -> None:
    """Until the end of this process."""
    under_way: dict[int, Packets] = {device: deque() for device in devices}
    opposite = dict(zip(devices, reversed(devices), strict=True))
    while True:
        first = min((packets[0][0] for packets in under_way.values() if packets), default=None)
        patience_s = None if first is None else max(first - time.monotonic(), 0.0)
        for device in select.select(devices, [], [], patience_s)[0]:
            under_way[opposite[device]].append((time.monotonic() + delay_s, os.read(device, PACKET_BYTES_MAX)))
        for device, packets in under_way.items():
            while packets and packets[0][0] <= time.monotonic():
                os.write(device, packets.popleft()[1])


if __name__ == "__main__":
    one, other, one_address, other_address, delay_text = sys.argv[1:]
    ends = plug_in(one, one_address, other_address), plug_in(other, other_address, one_address)
    print("plugged in", flush=True)
    carry(ends, float(delay_text))
