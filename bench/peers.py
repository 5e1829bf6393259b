"""The peers' virtual environments: each has one of its own, never the project's.

torch comes first and by the project's exact pin: a peer's looser range would pull a build for accelerators.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

TORCH = "torch==2.13.0"
INSTALL_LIMIT_S = 900.0


class Peer(NamedTuple):
    """What is installed, with or without what it says it needs."""

    distribution: str
    module: str
    released_as: str
    """An environment that has this one instead is taken too."""
    without_dependencies: bool = False
    besides: tuple[str, ...] = ()


TORCHFT = Peer("torchft-nightly", "torchft", released_as="torchft")
"""In the release, 0.2.0, a collective that fails may end the survivor too. It is mended here."""
NVRX = Peer(
    "nvidia-resiliency-ext",
    "nvidia_resiliency_ext.inprocess",
    released_as="nvidia-resiliency-ext",
    without_dependencies=True,  # they pin what only a machine with accelerators has
    besides=("packaging", "psutil", "pyyaml", "defusedxml", "nvidia-ml-py"),
)
DLROVER = Peer(
    "dlrover[k8s,torch]",
    "dlrover.trainer.torch.flash_checkpoint.ddp",
    released_as="dlrover",
    besides=("protobuf",),
)


def install(peer: Peer, directory: Path) -> str:
    """The Python of the peer's environment, which is made unless it is there. Raises if that does not work."""
    home = directory / peer.distribution
    python = str(home / "bin" / "python")
    if not version(peer, python)[0]:
        _run([sys.executable, "-m", "venv", "--clear", str(home)])
        pip = [python, "-m", "pip", "install", "--quiet"]
        _run([*pip, TORCH, "numpy", *peer.besides])
        _run([*pip, *(["--no-deps"] if peer.without_dependencies else []), peer.distribution])
    return python


def version(peer: Peer, python: str) -> tuple[str, str]:
    """The peer's version and torch's under this Python; without, an empty one and why."""
    program = f"import torch, {peer.module}, importlib.metadata as there\n"
    program += f"names = {[peer.distribution, peer.released_as]}\n"
    program += "[name, *_] = [name for name in names if list(there.distributions(name=name))]\n"
    program += "print(f'{name}={there.version(name)}', torch.__version__)"
    try:
        found = subprocess.run([python, "-W", "ignore", "-c", program], capture_output=True, text=True, check=False)
    except OSError as error:
        return "", f"{python}: {error.strerror}"
    if found.returncode:
        return "", (found.stderr.strip().splitlines() or ["no reason given"])[-1]
    return ", torch ".join(found.stdout.split()[-2:]), ""


def _run(command: list[str]) -> None:
    finished = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_LIMIT_S, check=False)
    if finished.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{finished.stderr[-2_000:]}")
