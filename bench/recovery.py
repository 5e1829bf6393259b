"""A fault in a training job: Holdfast and its peers, one after the other in every round, on the same model.

    kill        `kill -9` of one worker, until all ranks have committed a new step
    hang        SIGSTOP of one worker, the same
    overhead    the price of a step without faults, against a plain script under torchrun

Each contender is used as its own documentation says: as it comes, and, where it can, with a spare and short intervals
too. Times are the workers' own (their diaries). What is not back within the limit is said, not waited for; so is a peer
that is not installed: give its Python, or a directory to install it into (--install-peers).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import machine
import overhead
import peers
from aftermath import Aftermath, Fault, aftermath, first, pids_by_rank, steps_done
from contenders import SCRIPTS, Contender, Holdfast, Job, Nvrx, Torchft, Torchrun, Workload
from diary import Entry
from receipts import fault_table, overhead_table

MEASURES = ("kill", "hang", "overhead")
SIGNALS = {"kill": signal.SIGKILL, "hang": signal.SIGSTOP}
START_LIMIT_S = 120.0
SPARE_LIMIT_S = 20.0
TUNED = ("--hang-timeout", "1")
"""As short as the heartbeats of the peers that are tuned."""
WATCHED = ("holdfast-watch", "holdfast-checksums")
"""Only where they are asked for: they are about the price of a step."""
WARM_STEPS = 20
"""Before anything is broken: first steps are slow, and DDP rearranges its buckets after them."""


@dataclass(frozen=True)
class Sample:
    """One fault. Without a time, `why` says what happened instead."""

    measure: str
    contender: str
    load: float
    why: str = ""
    after: Aftermath = Aftermath(None, None, None, 0, 0)


# --- the contenders


def contenders(options: argparse.Namespace, pythons: dict[str, tuple[str, str]]) -> list[Contender]:
    """All there are, or those that were asked for; what cannot run says why."""
    flags = tuple(options.holdfast_flags.split())
    torchft, no_torchft = pythons["torchft"]
    nvrx, no_nvrx = pythons["nvrx"]
    found: list[Contender] = [
        Holdfast("holdfast-spare", "holdfast, 1 spare", "retry,recover,exit", 1, flags),
        Holdfast("holdfast", "holdfast, no spare", "retry,recover-in-place,exit", 0, flags),
        Holdfast("holdfast-tuned", "holdfast, 1 spare, tuned", "retry,recover,exit", 1, (*flags, *TUNED)),
        Holdfast("holdfast-watch", "holdfast, job.watch", "retry,recover-in-place,exit", 0, flags, 100),
        Holdfast("holdfast-checksums", "holdfast, checksums each step", "retry,recover-in-place,exit", 0, flags, 1),
        Torchrun("torchrun", "torchrun"),
        Torchft("torchft", "torchft", torchft, 0, 5_000, no_torchft),
        Torchft("torchft-tuned", "torchft, 1 spare, tuned", torchft, 1, 1_000, no_torchft),
        Nvrx("nvrx", "NVRx", nvrx, 0, 0.0, no_nvrx),
        Nvrx("nvrx-tuned", "NVRx, 1 reserve, tuned", nvrx, 1, 0.1, no_nvrx),
    ]
    usual = [one.key for one in found if one.key not in WATCHED]
    wanted = options.contenders.split(",") if options.contenders else usual
    if unknown := set(wanted) - {one.key for one in found}:
        raise SystemExit(f"no contender {', '.join(sorted(unknown))}; there are {', '.join(one.key for one in found)}")
    for one in found:
        if not one.missing and options.model not in one.models:
            one.missing = f"compared on ddp only, not on {options.model}"
    return [one for one in found if one.key in wanted]


def find_peers(options: argparse.Namespace) -> tuple[dict[str, tuple[str, str]], dict[str, str]]:
    """Each peer's Python or why there is none, and the versions found."""
    pythons, versions = {}, {}
    for key, peer in (("torchft", peers.TORCHFT), ("nvrx", peers.NVRX)):
        python, why = getattr(options, f"{key}_python"), ""
        if python is None and options.install_peers:
            try:
                python = peers.install(peer, options.install_peers)
            except (RuntimeError, OSError, subprocess.TimeoutExpired) as error:
                why = f"could not be installed: {str(error).splitlines()[-1]}"
        if python is not None:
            versions[key], why = peers.version(peer, python)
        pythons[key] = python or "", why or ("" if python else f"not installed (--{key}-python or --install-peers)")
    return pythons, {key: version for key, version in versions.items() if version}


# --- kill and hang


def break_one(contender: Contender, measure: str, workload: Workload, options: argparse.Namespace) -> Sample:
    limit_s = options.hang_limit if measure == "hang" else options.limit
    load = os.getloadavg()[0]
    with Job(contender, workload) as job:
        warm_up(job)
        who = pids_by_rank(job.diary.entries, workload.ranks)
        victim = who[options.victim if options.victim is not None else workload.ranks - 1]
        fault = Fault(time.time(), victim, who)
        os.kill(victim, SIGNALS[measure])
        goes_on = job.wait_for(lambda: first(recent(job, fault), fault), limit_s)
        if goes_on and goes_on.world < workload.ranks and measure in contender.refills:
            job.wait_for(lambda: first(recent(job, fault), fault, workload.ranks), limit_s)
        after = aftermath(job.diary.entries, fault)
        why = "" if goes_on else "the job ended" if job.run.over else f"not within {limit_s:.0f} s"
    return Sample(measure, contender.name, load, "started over" if after.started_over else why, after)


def recent(job: Job, fault: Fault) -> list[Entry]:
    """Only what came after: the search is done often, and the diary grows."""
    return [entry for entry in job.diary.entries if entry.at > fault.at]


def warm_up(job: Job) -> None:
    """Until it is at work, its spares parked, at a moment that is not in step with anything."""
    ranks = job.workload.ranks
    job.contender.launch(job)
    if job.wait_for(lambda: steps_done(job.diary.entries, ranks) >= WARM_STEPS or None, START_LIMIT_S) is None:
        raise RuntimeError(f"{job.contender.name} did not train on {ranks} ranks:\n{job.run.output()}")
    if job.workload.model == "ddp":  # sharded spares are not heard of before they have a rank
        everyone = ranks + job.contender.spares
        job.wait_for(lambda: len(job.diary.pids) >= everyone or None, SPARE_LIMIT_S)
    settled_at = time.monotonic() + random.uniform(1.0, 1.1)
    job.wait_for(lambda: time.monotonic() > settled_at or None, START_LIMIT_S)


def break_all(measure: str, running: list[Contender], options: argparse.Namespace) -> Iterator[Sample]:
    """In rounds, so that a busy minute of the machine hits all of them. Who misses the limit is not asked again."""
    workload = Workload(options.ranks, options.model, checkpoint_every=options.checkpoint_every)
    missed: set[str] = set()
    for _ in range(options.reps):
        for contender in running:
            if contender.key in missed:
                continue
            try:
                sample = break_one(contender, measure, workload, options)
            except RuntimeError as error:
                print(error, file=sys.stderr)
                sample = Sample(measure, contender.name, os.getloadavg()[0], "did not start")
            if sample.why.startswith("not within"):
                missed.add(contender.key)
            yield sample


# --- overhead


def measure_overhead(running: list[Contender], options: argparse.Namespace) -> list[overhead.Block]:
    """Against the plain script. All of them are started, and wait at gates for their turns."""
    environment = machine.benchmark_environment()
    command = [sys.executable, str(SCRIPTS / "workload.py"), str(options.step_ms)]
    rows = int(subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout)
    workload = Workload(options.ranks, options.model, rows, 0.0, options.checkpoint_every, options.block_steps)
    plain = Torchrun(overhead.PLAIN, "plain script, torchrun", plain=True)
    print(f"overhead: {rows} rows a batch, {options.rounds} rounds of {options.block_steps} steps for each", flush=True)
    return list(overhead.measure([plain, *running], workload, options.rounds, START_LIMIT_S))


# --- the program


def shown(samples: Iterator[Sample]) -> Iterator[Sample]:
    """Says each as it comes: some of them take a minute."""
    for sample in samples:
        after = sample.after
        times = ", ".join(
            f"{word} {seconds:.3f} s"
            for word, seconds in (("goes on", after.goes_on_s), ("whole", after.whole_s))
            if seconds is not None
        )
        detail = f"{times}; {after.steps_lost} steps lost, {after.replaced} replaced" if not sample.why else sample.why
        print(f"{sample.measure:5} {sample.contender:32} {detail}   (load {sample.load:.2f})", flush=True)
        yield sample


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--reps", type=int, default=5, help="of each fault")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--model", choices=["ddp", "fsdp2"], default="ddp", help="fsdp2: kill, unless --only says more")
    parser.add_argument("--only", help=f"some of {','.join(MEASURES)}")
    parser.add_argument("--contenders", help="some of them, with commas between; see bench/README.md")
    parser.add_argument("--victim", type=int, help="its rank; the last if not given, as NVRx never survives rank 0")
    parser.add_argument("--limit", type=float, default=90.0, help="seconds to be back in after a kill")
    parser.add_argument("--hang-limit", type=float, default=120.0, help="seconds to be back in after a hang")
    parser.add_argument("--checkpoint-every", type=int, default=10, help="steps, of those who need checkpoints")
    parser.add_argument("--step-ms", type=float, default=50.0, help="of the overhead's steps")
    parser.add_argument("--rounds", type=int, default=40, help="of the overhead")
    parser.add_argument("--block-steps", type=int, default=10, help="steps in a row of each contender in a round")
    parser.add_argument("--torchft-python", help="Python of an environment that has torchft")
    parser.add_argument("--nvrx-python", help="Python of an environment that has nvidia-resiliency-ext")
    parser.add_argument("--install-peers", type=Path, metavar="DIR", help="make such environments there, or use them")
    parser.add_argument("--holdfast-flags", default="", help="further flags of `holdfast run`, in one argument")
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    parser.add_argument("-o", "--json", dest="output", type=Path, help="write everything as JSON")
    options = parser.parse_args()
    default = MEASURES if options.model == "ddp" else ("kill",)
    options.only = options.only.split(",") if options.only else list(default)
    if unknown := set(options.only) - set(MEASURES):
        parser.error(f"--only knows no {', '.join(sorted(unknown))}")
    return options


def main() -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # an exception, so that everything started is ended
    options = parse_options()
    random.seed(options.seed)
    pythons, versions = find_peers(options)
    here, load_before = machine.describe() | versions, machine.load()
    print(f"{machine.heading(here)}\nload average at the start: {load_before}\n")
    everyone = contenders(options, pythons)
    running = [one for one in everyone if not one.missing]
    samples = [
        sample
        for measure in SIGNALS
        if measure in options.only
        for sample in shown(break_all(measure, running, options))
    ]
    blocks = measure_overhead(running, options) if "overhead" in options.only else []
    load_after = machine.load()
    missing = {one.name: one.missing for one in everyone if one.missing}
    print("\n" + "\n".join(fault_table(samples, options.ranks, missing)) if samples else "")
    print("\n" + "\n".join(overhead_table(blocks)) if blocks else "")
    for name, why in missing.items():
        print(f"not measured: {name}: {why}")
    print(f"\nload average at the end: {load_after}")
    if options.output:
        about = {"machine": here, "load_before": load_before, "load_after": load_after, "missing": missing}
        found = {"samples": list(map(dataclasses.asdict, samples)), "blocks": list(map(dataclasses.asdict, blocks))}
        write(options, about | found)


def write(options: argparse.Namespace, found: dict[str, Any]) -> None:
    chosen = {name: str(value) if isinstance(value, Path) else value for name, value in vars(options).items()}
    options.output.write_text(json.dumps({"options": chosen, **found}, indent=2) + "\n")


if __name__ == "__main__":
    main()
