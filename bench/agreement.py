"""What it takes ranks to connect for agreements, and to agree: in one group of all, and by a tree of small groups.

    connect    from the moment that all ranks are there to the last one whose view has begun
    agree      one agreement of twelve numbers, as at a commit; the mean of many in a row, of the slowest rank
    sockets    the most connections with other ranks that a rank has

All ranks are on this machine and share its cores, so with many of them the times are those of its processors, not of a
network.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import machine
import torch
from torch.distributed import TCPStore

from holdfast.worker.collectives import agreement_tree, groups

FORK = multiprocessing.get_context("fork")
TIMEOUT = timedelta(seconds=300)
VALUES = 12
KINDS = ("flat", "tree")


class Times(NamedTuple):
    """What one rank has measured."""

    connect_s: float
    agree_s: float
    sockets: int


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[16, 32, 64])
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--agreements", type=int, default=50)
    parser.add_argument("--fan", type=int, default=0, help="the most ranks of a group; 0: as few as two levels need")
    parser.add_argument("-o", "--output", type=Path)
    arguments = parser.parse_args()
    os.environ |= machine.benchmark_environment()
    result: dict[str, Any] = {"machine": machine.describe(), "load average": machine.load(), "rows": []}
    print(f"{machine.heading(result['machine'])}\nload average at the start: {result['load average']}\n")
    print("| ranks | kind | fan | connect, s | agree, ms | sockets |\n| --- | --- | --- | --- | --- | --- |")
    for ranks in arguments.ranks:
        fan_max = arguments.fan or math.isqrt(ranks - 1) + 1
        fan = agreement_tree.fan_of(ranks, fan_max)
        runs: dict[str, list[Times]] = {kind: [] for kind in arguments.kinds}
        for _ in range(arguments.repetitions):
            for kind in arguments.kinds:  # in turn, as the load of the machine changes
                runs[kind].append(measure(ranks, kind, fan_max, arguments.agreements))
        for kind, times in runs.items():
            connect_s, agree_s, sockets = (median(values) for values in zip(*times, strict=True))
            shown = fan if kind == "tree" else "–"
            agree_ms = 1000 * agree_s
            print(f"| {ranks} | {kind} | {shown} | {connect_s:.2f} | {agree_ms:.2f} | {sockets:.0f} |", flush=True)
            result["rows"].append({"ranks": ranks, "kind": kind, "fan": fan, "runs": [one._asdict() for one in times]})
    print(f"\nload average at the end: {machine.load()}")
    if arguments.output:
        arguments.output.write_text(json.dumps(result, indent=1))


def measure(ranks: int, kind: str, fan_max: int, agreements: int) -> Times:
    """Run so many ranks once; the longest times and the most sockets of any of them."""
    host, host_pipe = begin(keep_store)
    members = []
    try:
        port = host_pipe.recv()
        members = [begin(live, port, rank, ranks, kind, fan_max, agreements) for rank in range(ranks)]
        for _, pipe in members:
            pipe.recv()  # it is there
        for _, pipe in members:
            pipe.send("go")
        times = [receive(pipe) for _, pipe in members]
    finally:
        for process, _ in [*members, (host, host_pipe)]:
            process.kill()
            process.join()
    return Times(*(max(values) for values in zip(*times, strict=True)))


def begin(function: Callable[..., None], *arguments: Any) -> tuple[Any, Connection]:
    ours, theirs = FORK.Pipe()
    process = FORK.Process(target=function, args=(theirs, *arguments))
    process.start()
    theirs.close()
    return process, ours


def receive(pipe: Connection) -> Times:
    if not pipe.poll(TIMEOUT.total_seconds()):
        raise TimeoutError("a rank has not come back")
    return Times(*pipe.recv())


def keep_store(pipe: Connection) -> None:
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pipe.send(server.port)
    signal.pause()  # until it is killed


def live(pipe: Connection, port: int, rank: int, size: int, kind: str, fan_max: int, agreements: int) -> None:
    gc.freeze()
    torch.set_num_threads(1)
    agreement_tree.FLAT_RANKS_MAX, agreement_tree.FAN_MAX = (0 if kind == "tree" else size), fan_max
    store = TCPStore("127.0.0.1", port, is_master=False, timeout=TIMEOUT)
    pipe.send("there")
    pipe.recv()
    began_at = time.monotonic()
    groups.start(rank, size, store, view=1, timeout=TIMEOUT)
    connect_s = time.monotonic() - began_at
    values = list(range(rank, rank + VALUES))
    groups.agree(values)
    began_at = time.monotonic()
    for _ in range(agreements):
        groups.agree(values)
    agree_s = (time.monotonic() - began_at) / agreements
    sockets = len(groups.current_connections().mesh._found())
    pipe.send(Times(connect_s, agree_s, sockets))
    signal.pause()  # all others may still be at it


if __name__ == "__main__":
    main()
