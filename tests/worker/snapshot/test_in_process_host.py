"""A Checkpointer without an agent: its memory goes with its process, however that ends."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import holdfast as hf

SCRIPTS = Path(__file__).parent / "scripts"
SCRIPT = SCRIPTS / "save_and_wait.py"


def test_a_killed_process_leaves_a_checkpoint_and_no_memory(tmp_path: Path) -> None:
    environment = {**os.environ, "TMPDIR": str(tmp_path), "PYTHONPATH": str(Path(hf.__file__).parents[1])}
    command = [sys.executable, str(SCRIPT), str(tmp_path / "saved")]
    with subprocess.Popen(
        command, env=environment, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert int(process.stdout.readline()) > 64 * 64 * 4 * 3
        assert "/dev/shm/" not in Path(f"/proc/{process.pid}/maps").read_text(), "memory with a name would stay"
        process.kill()
    left = [path for path in tmp_path.glob("holdfast-*/rank-0/*") if path.exists()]
    assert not left
    model = torch.nn.Linear(64, 64)
    assert hf.Checkpointer(tmp_path / "saved").load(model=model, optimizer=torch.optim.Adam(model.parameters())) == 7


@pytest.mark.parametrize("end", ["return", *(pytest.param(end, marks=pytest.mark.long) for end in ("raise", "exit"))])
def test_a_script_that_ends_without_close_has_saved_all_the_same(tmp_path: Path, end: str) -> None:
    environment = {**os.environ, "PYTHONPATH": str(Path(hf.__file__).parents[1])}
    command = [sys.executable, str(SCRIPTS / "save_and_leave.py"), str(tmp_path), end]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == {"return": 0, "raise": 1, "exit": 3}[end], done.stderr
    assert "holdfast" not in done.stderr.lower().replace(str(SCRIPTS).lower(), "")
    model = torch.nn.Linear(1_000, 1_000)
    assert hf.Checkpointer(tmp_path).load(model=model, optimizer=torch.optim.Adam(model.parameters())) == 2
    assert float(model.bias.detach().max()) == 2.0


def test_what_the_ranks_hold_otherwise_is_loaded_as_rank_0_had_it(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(Path(hf.__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(SCRIPTS / "two_ranks.py"), str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=100.0)
    assert done.returncode == 0, done.stderr


def test_more_than_there_is_is_refused_with_a_sentence(tmp_path: Path) -> None:
    from holdfast.wire.worker_messages import AllocateBuffers
    from holdfast.worker.snapshot.in_process_host import InProcessSnapshotHost

    host = InProcessSnapshotHost(str(tmp_path), "last:1")
    host.tell(AllocateBuffers(2**50))
    assert host.buffers_ready is not None
    assert "no room for two copies of the state" in host.buffers_ready.why
    host.close()
