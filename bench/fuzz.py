"""Bytes of people who mean harm: against the decoders, and against the ports of a live job by another user.

    python bench/fuzz.py --frames 1000000 --connections 100000

Frames are random, or real ones with some bytes changed, cut or repeated. A decoder may return a message or raise one of
Holdfast's errors; anything else is a finding. Connections go to every port on which the master and the agent listen,
and to the agent's socket for workers, from processes of the user 65534 (this command must be root for that). After
them the job must be in its first view without an incident and go on; its processes' memory and its log are measured.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import msgspec

from holdfast.core.events import Hello, JobSpec, NodeInfo
from holdfast.core.image_info import ImageInfo
from holdfast.core.orders import Hold
from holdfast.errors import HoldfastError
from holdfast.storage import header, manifest
from holdfast.storage.image import TensorRegion, parse, plan
from holdfast.storage.manifest import CheckpointInfo, Manifest, ManifestNote, PartInfo
from holdfast.wire import bulk_connection, control
from holdfast.wire.auth import ClientHandshake, Proof, ServerHandshake
from holdfast.wire.bulk_messages import Inventory, OfferImage, StoredReplica
from holdfast.wire.control_messages import Command, EventReport
from holdfast.wire.frames import HANDSHAKE_FRAME_BYTES_MAX, PREAMBLE, FrameBuffer, decode, encode, frame_of
from holdfast.wire.launch_messages import FrameReader
from holdfast.wire.launch_messages import encode as encode_launch
from holdfast.wire.worker_messages import Enrol, FromWorker

STRANGER = 65_534
TOKEN = "a token that no stranger knows"
EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
RECEIVE_S = 0.02
SLOW_HELD = 40
"""Connections that each attacker leaves open without a word."""


def mutated(raw: bytes, chance: random.Random) -> bytes:
    """Return real bytes with some of them changed, cut or repeated; or bytes that were never real."""
    content = bytearray(raw)
    match chance.randrange(8):
        case 0:
            return chance.randbytes(chance.randrange(200))
        case 1:
            return bytes(content[: chance.randrange(len(content) + 1)])
        case 2:
            at = chance.randrange(len(content) + 1)
            return bytes(content[:at] + chance.randbytes(chance.randrange(1, 40)) + content[at:])
        case 3:
            return b"\x91" * chance.randrange(1, 3_000) + raw
        case _:
            for _ in range(chance.randrange(1, 6)):
                content[chance.randrange(len(content))] = chance.choice((0, 0x7F, 0x80, 0xC1, 0xDF, 0xFF, *content[:8]))
            return bytes(content)


def decoders() -> dict[str, tuple[bytes, Callable[[bytes], object]]]:
    """Return each decoder with a real input of it."""
    opening = ClientHandshake(TOKEN, "agent", "the master").first
    image = ImageInfo(3, 0, 1, 1, size_bytes=100, checksums=b"1234")
    region = TensorRegion(
        name="a.w", path=("a", "w"), index=0, dtype="float32", shape=(4, 2), offsets=(0, 0), full_shape=(4, 2)
    )
    layout = plan([region], 4_096)
    about = CheckpointInfo(step=3, world_size=1, notes={"position": [1, 2.5, "x"]})
    hello = Hello(
        node_id="node-0",
        incarnation="a",
        info=NodeInfo(host="node-0", address="10.0.0.1", machine_id="m", boot_id="b", pid=1, workers=2),
        spec=JobSpec(run_id="", nodes_min=1, nodes_max=2, restarts_max=0),
        store_port=29_500,
    )
    hold = Hold(job_id="job", why="the view is forming", spares=1)
    stored = Inventory((StoredReplica(kind="replica", image=image, group=("node-0", "node-1"), members=(image,)),))
    part = PartInfo(number=0, file="part-0.safetensors", size_bytes=9, checksums="0123abcd")
    described = manifest.encode(Manifest(about=about, nonce="a", parts=(part,)))
    note = manifest.encode(ManifestNote(about=about, nonce="a", part=part))

    def frames(raw: bytes) -> None:
        buffer = FrameBuffer(HANDSHAKE_FRAME_BYTES_MAX, expects_preamble=True)
        buffer.feed(raw)
        while buffer.next() is not None:
            pass

    def handshake(raw: bytes) -> None:
        server = ServerHandshake(TOKEN, ("agent", "watcher"))
        server.receive(opening)
        server.receive(raw)
        raise AssertionError("a proof was accepted")

    def worker(raw: bytes) -> None:
        reader = FrameReader(msgspec.msgpack.Decoder(FromWorker))
        reader.feed(raw)
        list(reader.frames())

    return {
        "frames": (PREAMBLE + frame_of(opening), frames),
        "opening": (opening, lambda raw: ServerHandshake(TOKEN, ("agent", "watcher")).receive(raw)),
        "proof": (encode(Proof(bytes(32))), handshake),
        "to the master": (encode(EventReport(1, 1, hello)), lambda raw: decode(control._to_master, raw)),
        "from the master": (encode(Command(1, hold)), lambda raw: decode(control._from_master, raw)),
        "to an agent": (encode(OfferImage(image)), lambda raw: decode(bulk_connection._requests, raw)),
        "from an agent": (encode(stored), lambda raw: decode(bulk_connection._replies, raw)),
        "from a worker": (encode_launch(Enrol("0" * 32, 1, True)), worker),
        "manifest": (described, lambda raw: manifest.decode(raw, Manifest, "a manifest")),
        "note": (note, lambda raw: manifest.decode(raw, ManifestNote, "a note")),
        "header": (layout.head[8:], lambda raw: header.decode(raw, layout.size_bytes - len(layout.head))),
        "image": (layout.head, lambda raw: parse(lambda start, size: raw[start : start + size], layout.size_bytes)),
    }


def fuzz_decoders(count: int, seed: int) -> dict[str, object]:
    """Give each decoder its part of so many inputs; return what became of them."""
    chance, known = random.Random(seed), decoders()
    outcomes: Counter[str] = Counter()
    findings: list[str] = []
    for name, (real, use) in known.items():
        if name != "proof":  # nobody has one without the token
            use(real)
    before = peak_mib("self")
    began = time.monotonic()
    for number in range(count):
        name = list(known)[number % len(known)]
        real, use = known[name]
        raw = mutated(real, chance)
        try:
            use(raw)
            outcomes["accepted"] += 1
        except HoldfastError:
            outcomes["refused"] += 1
        except Exception as error:  # what must not be
            findings.append(f"{name}: {error!r:.200} for {raw[:200]!r}")
    return {
        "frames": count,
        **outcomes,
        "findings": findings[:20],
        "peak_growth_mib": peak_mib("self") - before,
        "seconds": round(time.monotonic() - began),
    }


def peak_mib(pid: int | str) -> int:
    """Return the most memory a process has had."""
    found = re.search(r"VmHWM:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())
    return int(found[1]) // 1024 if found else 0


# --- a live job


def harmful(chance: random.Random) -> bytes:
    """Return what one connection sends."""
    opening = ClientHandshake("another token altogether", "agent", "the master").first
    match chance.randrange(8):
        case 0:
            return chance.randbytes(chance.randrange(1, 400))
        case 1:
            return b"GET / HTTP/1.1\r\n\r\n"
        case 2:
            return PREAMBLE + b"\xff\xff\xff\xff" + chance.randbytes(100)
        case 3:
            return PREAMBLE + frame_of(msgspec.msgpack.encode({"version": 2, "role": "A" * 3_000, "nonce": bytes(16)}))
        case 4:
            return PREAMBLE + frame_of(b"\x83\xa4role\xa4\xff\xfe\xfd\xfc")
        case 5:
            return PREAMBLE + frame_of(b"\x91" * 4_000)
        case 6:
            return PREAMBLE + frame_of(opening) + frame_of(encode(Proof(chance.randbytes(32))))
        case _:
            return PREAMBLE + frame_of(mutated(opening, chance))


def attack(targets: list[tuple[str, int] | str], count: int, seed: int) -> None:
    """Connect so many times, as another user."""
    os.setgroups([])
    os.setresgid(STRANGER, STRANGER, STRANGER)
    os.setresuid(STRANGER, STRANGER, STRANGER)
    chance = random.Random(seed)
    held: list[socket.socket] = []
    for number in range(count):
        target = targets[number % len(targets)]
        connection = socket.socket(socket.AF_UNIX if isinstance(target, str) else socket.AF_INET)
        connection.settimeout(RECEIVE_S)
        try:
            connection.connect(target)
            if number % 50 == 0:
                held = [*held[-SLOW_HELD:], connection]
                continue
            connection.sendall(harmful(chance))
            if number % 4 == 0:
                connection.recv(4_096)
        except OSError:
            pass
        if connection not in held:
            connection.close()


def listeners(pids: list[int]) -> list[tuple[str, int] | str]:
    """Return the ports and abstract sockets on which processes listen, without torch's own."""
    inodes = set()
    for pid in pids:
        for link in Path(f"/proc/{pid}/fd").iterdir():
            try:
                inodes.add(os.readlink(link))
            except OSError:
                continue
    found: list[tuple[str, int] | str] = []
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        words = line.split()
        if words[3] == "0A" and f"socket:[{words[9]}]" in inodes:
            found.append(("127.0.0.1", int(words[1].rpartition(":")[2], 16)))
    for line in Path("/proc/net/unix").read_text().splitlines()[1:]:
        words = line.split()
        if len(words) > 7 and words[7].startswith("@holdfast-") and f"socket:[{words[6]}]" in inodes:
            found.append("\0" + words[7][1:])
    return sorted(set(found), key=str)


def fuzz_job(count: int, attackers: int, directory: Path) -> dict[str, object]:
    """Start a job, connect to it so many times as another user, and return what that did to it."""
    state, log = directory / "state", directory / "log"
    environment = {**os.environ, "HOLDFAST_STATE_DIR": str(state), "OMP_NUM_THREADS": "1"}
    holdfast = (
        [sys.executable, "-m", "holdfast"]
        if not (tool := Path(sys.executable).with_name("holdfast")).exists()
        else [str(tool)]
    )
    script = [str(EXAMPLES / "train_session.py"), "--steps", "10000000", str(EXAMPLES.parent / "README.md")]
    with log.open("wb") as output:
        job = subprocess.Popen(
            [*holdfast, "run", "--standalone", "--nproc-per-node", "2", "--log-format", "json", *script],
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=output,
            cwd=EXAMPLES,
        )
    try:
        began = time.monotonic()
        while b"step-committed" not in log.read_bytes():
            if job.poll() is not None or time.monotonic() - began > 120:
                raise SystemExit(f"the job did not start:\n{log.read_text()[-3_000:]}")
            time.sleep(0.2)
        masters = [int(pid) for pid in Path(f"/proc/{job.pid}/task/{job.pid}/children").read_text().split()]
        pids = [job.pid, *(pid for pid in masters if b"master" in Path(f"/proc/{pid}/cmdline").read_bytes())]
        targets = listeners(pids)
        step, lines, size = steps(holdfast, environment), log.read_bytes().count(b"\n"), log.stat().st_size
        before = {pid: peak_mib(pid) for pid in pids}
        began = time.monotonic()
        children = []
        for number in range(attackers):
            if (pid := os.fork()) == 0:
                try:
                    attack(targets, count // attackers, number)
                finally:
                    os._exit(0)
            children.append(pid)
        for pid in children:
            os.waitpid(pid, 0)
        seconds = time.monotonic() - began
        time.sleep(2)
        after = status(holdfast, environment)
        return {
            "connections": count // attackers * attackers,
            "seconds": round(seconds),
            "targets": len(targets),
            "view": after.get("view"),
            "incidents": len(after.get("incidents", [])),
            "is_running": job.poll() is None,
            "steps_meanwhile": steps(holdfast, environment) - step,
            "peak_growth_mib": {("agent" if pid == job.pid else "master"): peak_mib(pid) - before[pid] for pid in pids},
            "log_lines": log.read_bytes().count(b"\n") - lines,
            "log_bytes": log.stat().st_size - size,
            "tracebacks": log.read_bytes().count(b"Traceback"),
            "first_traceback": (re.findall(r"Traceback.{0,3000}", log.read_text(errors="replace"), re.S) or [""])[0],
        }
    finally:
        job.terminate()
        try:
            job.wait(60)
        except subprocess.TimeoutExpired:
            job.kill()


def status(holdfast: list[str], environment: dict[str, str]) -> dict[str, object]:
    """Return what `holdfast status` says of the job."""
    run = subprocess.run([*holdfast, "status", "-o", "json"], env=environment, capture_output=True, check=True)
    found: dict[str, object] = json.loads(run.stdout)
    return found


def steps(holdfast: list[str], environment: dict[str, str]) -> int:
    """Return the highest number in the job's own report of its steps."""
    run = subprocess.run(
        [*holdfast, "logs", "--tail", "3"], env=environment, capture_output=True, text=True, check=False
    )
    return max((int(number) for number in re.findall(r"step +(\d+)", run.stdout)), default=0)


def main() -> None:
    """Run both parts and print what was found; exit with 1 if something was."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--frames", type=int, default=1_000_000)
    parser.add_argument("--connections", type=int, default=100_000)
    parser.add_argument("--attackers", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    found: dict[str, object] = {}
    if options.frames:
        found["decoders"] = result = fuzz_decoders(options.frames, options.seed)
        print(json.dumps(result), flush=True)
    if options.connections:
        if os.getuid() != 0:
            raise SystemExit("to connect as another user, this command must be root")
        with tempfile.TemporaryDirectory(prefix="holdfast-fuzz-") as directory:
            found["job"] = live = fuzz_job(options.connections, options.attackers, Path(directory))
        print(json.dumps(live), flush=True)
        if not live["is_running"] or live["incidents"] or live["tracebacks"]:
            raise SystemExit(1)
    if options.frames and found["decoders"]["findings"]:  # type: ignore[index]
        raise SystemExit(1)


if __name__ == "__main__":
    main()
