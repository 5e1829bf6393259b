"""hf.Checkpointer in one process: when room is made, what stays in memory, and files of other scripts."""

from __future__ import annotations

import os
import random
import socket
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint

import holdfast as hf
from holdfast.errors import CheckpointError, StorageError, UsageError
from holdfast.wire.launch_messages import send
from holdfast.wire.worker_messages import CheckpointNotice, SnapshotSealed
from holdfast.worker.agent_connection import AgentConnection
from holdfast.worker.checkpointer import AgentSnapshotHost


def trained() -> tuple[torch.nn.Linear, torch.optim.Optimizer]:
    model = torch.nn.Linear(64, 64)
    return model, torch.optim.Adam(model.parameters())


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.randn(4, 64)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def memories() -> list[str]:
    """Of this process, for images that it writes."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return [line for line in lines if "memfd:holdfast-image" in line and " rw-s " in line]


def wait_for_room(images: int) -> None:
    give_up_at = time.monotonic() + 60.0
    while len(memories()) < images:
        assert time.monotonic() < give_up_at, "room was not made"
        time.sleep(0.005)


def test_room_is_made_after_the_first_update_and_not_for_who_only_loads(tmp_path: Path) -> None:
    model, optimizer = trained()
    checkpoints = hf.Checkpointer(tmp_path)
    assert checkpoints.load(model=model, optimizer=optimizer) is None
    assert not memories()
    train(model, optimizer)
    wait_for_room(2)
    train(model, optimizer)
    expected = model.weight.detach().clone()
    checkpoints.save(2, model=model, optimizer=optimizer)
    assert len(memories()) == 2, "the room that was foreseen is the one that is used"
    train(model, optimizer)
    checkpoints.close()
    assert not memories()
    other, its_optimizer = trained()
    assert hf.Checkpointer(tmp_path).load(model=other, optimizer=its_optimizer) == 2
    assert torch.equal(other.weight, expected)


def test_what_is_saved_may_be_something_else_than_what_was_loaded(tmp_path: Path) -> None:
    model, optimizer = trained()
    with hf.Checkpointer(tmp_path) as checkpoints:
        assert checkpoints.load(optimizer=optimizer, model=model) is None
        train(model, optimizer)
        wait_for_room(2)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        checkpoints.save(1, model=model, optimizer=optimizer, scheduler=scheduler)
        checkpoints.wait()
        with pytest.raises(UsageError, match="other objects"):
            checkpoints.save(2, model=model, optimizer=optimizer)
    assert not memories()
    assert hf.Checkpointer(tmp_path).load(model=model, optimizer=optimizer, scheduler=scheduler) == 1


def test_a_save_that_nothing_foresaw_is_complete_and_so_is_the_next(tmp_path: Path) -> None:
    model, optimizer = trained()
    with hf.Checkpointer(tmp_path, keep="all") as checkpoints:
        for step in (1, 2, 3):
            train(model, optimizer)
            checkpoints.save(step, model=model, optimizer=optimizer)
    assert [found.step for found in checkpoints.catalogue.list().found] == [3, 2, 1]


def test_files_of_other_scripts_are_loaded_and_left_alone(tmp_path: Path) -> None:
    model, optimizer = trained()
    train(model, optimizer)
    for epoch in (3, 12):
        saved = {
            "epoch": epoch,
            "model_state_dict": model.state_dict(),
            "optimizer_state_dict": optimizer.state_dict(),
            "loss": 0.5,
        }
        torch.save(saved, tmp_path / f"checkpoint_epoch_{epoch}.pt")
    other, its_optimizer = trained()
    checkpoints = hf.Checkpointer(tmp_path)
    assert checkpoints.load(model=other, optimizer=its_optimizer) is None
    assert checkpoints.load_legacy(other, its_optimizer) == 12
    assert torch.equal(other.weight, model.weight)
    checkpoints.save(13, model=other, optimizer=its_optimizer)
    checkpoints.close()
    assert hf.Checkpointer(tmp_path).load(model=model, optimizer=optimizer) == 13
    assert {"checkpoint_epoch_3.pt", "checkpoint_epoch_12.pt", "step-13"} <= set(os.listdir(tmp_path))
    assert hf.Checkpointer(tmp_path / "none").load_legacy(model) is None
    with pytest.raises(CheckpointError, match="does not fit"):
        hf.Checkpointer(tmp_path / "none").load_legacy(torch.nn.Linear(2, 2), directory=tmp_path)


def test_steps_and_metrics_that_cannot_be_are_refused_at_once(tmp_path: Path) -> None:
    model, optimizer = trained()
    with hf.Checkpointer(tmp_path) as checkpoints:
        for step in (-1, 1.5, "3", 10**18):
            with pytest.raises(UsageError, match="cannot be saved"):
                checkpoints.save(step, model=model, optimizer=optimizer)  # type: ignore[arg-type]
        for value in (None, "low", torch.ones(2)):
            with pytest.raises(UsageError, match=r"the metric loss is .*, which is no number"):
                checkpoints.save(1, metrics={"loss": value}, model=model, optimizer=optimizer)  # type: ignore[dict-item]
        checkpoints.save(10**18 - 1, metrics={"loss": torch.tensor(0.5)}, model=model, optimizer=optimizer)
    (found,) = checkpoints.catalogue.list().found
    assert (found.step, found.about.metrics) == (10**18 - 1, {"loss": 0.5})


def test_threads_save_one_after_the_other(tmp_path: Path) -> None:
    model, optimizer = trained()
    with hf.Checkpointer(tmp_path, keep="all") as checkpoints, ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda step: checkpoints.save(step, model=model, optimizer=optimizer), range(8)))
    assert [found.step for found in checkpoints.catalogue.list().found] == [7, 6, 5, 4, 3, 2, 1, 0]


def test_a_home_directory_is_meant_by_a_tilde(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    model, optimizer = trained()
    with hf.Checkpointer("~/run") as checkpoints:
        checkpoints.save(1, model=model, optimizer=optimizer)
    assert (tmp_path / "home/run/step-1").is_dir()
    assert os.listdir(tmp_path) == ["home"]


def test_parameters_that_change_too_early_are_said_and_copied_at_once_from_then_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = torch.nn.Linear(1_000, 8_000)  # so large that a thread copies it, in its own time
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    checkpoints = hf.Checkpointer(tmp_path, keep="all")
    for step in range(4):
        with torch.no_grad():
            model.weight.fill_(step)
        checkpoints.save(step, model=model, optimizer=optimizer)
        with torch.no_grad():
            model.weight[0, 0] = -1.0
    with pytest.raises(CheckpointError, match="step 0 is not saved: the parameters changed while they were copied"):
        checkpoints.close()
    assert "something else than an optimizer changed the parameters" in caplog.text
    assert [found.step for found in checkpoints.catalogue.list().found] == [3, 2, 1]
    assert checkpoints.load(model=model, optimizer=optimizer) == 3
    assert bool((model.weight == 3.0).all())


def test_storage_that_fails_is_a_warning_at_once_and_an_error_at_the_end(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model, optimizer = trained()
    checkpoints = hf.Checkpointer(tmp_path / "in-the-way")
    (tmp_path / "in-the-way").write_text("")
    checkpoints.save(1, model=model, optimizer=optimizer)
    give_up_at = time.monotonic() + 60.0
    while "the checkpoint of step 1 is not written" not in caplog.text:
        assert time.monotonic() < give_up_at, "nothing was said"
        time.sleep(0.005)
    with pytest.raises(CheckpointError, match="Not a directory"):
        checkpoints.close()
    checkpoints.close()
    (tmp_path / "in-the-way").unlink()
    checkpoints.save(2, model=model, optimizer=optimizer)
    checkpoints.close()
    assert [found.step for found in checkpoints.catalogue.list().found] == [2]


@pytest.mark.parametrize("damaged", ["manifest.json", "part-0.safetensors"])
def test_checkpoints_that_are_all_damaged_are_not_taken_for_none(tmp_path: Path, damaged: str) -> None:
    model, optimizer = trained()
    with hf.Checkpointer(tmp_path) as checkpoints:
        for step in (1, 2):
            checkpoints.save(step, model=model, optimizer=optimizer)
    for path in tmp_path.glob(f"step-*/{damaged}"):
        os.truncate(path, 100)
    with pytest.raises(CheckpointError, match="no checkpoint that every rank can load"):
        checkpoints.load(model=model, optimizer=optimizer)


def test_storage_that_cannot_be_asked_is_no_reason_to_go_back(tmp_path: Path) -> None:
    model, optimizer = trained()
    with hf.Checkpointer(f"local://{tmp_path}") as checkpoints:
        for step in (1, 2):
            checkpoints.save(step, model=model, optimizer=optimizer)
    manifest = tmp_path / "step-2" / "manifest.json"
    manifest.unlink()
    manifest.symlink_to(manifest)  # to be read, it is an error of the file system
    with pytest.raises(StorageError, match="cannot be read"):
        checkpoints.load(model=model, optimizer=optimizer)


def test_a_step_that_another_run_has_saved_stays_and_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model, optimizer = trained()
    for _ in range(2):
        with hf.Checkpointer(tmp_path) as checkpoints:
            train(model, optimizer)
            checkpoints.save(1, model=model, optimizer=optimizer)
    assert caplog.text.count("was there already, of another run") == 1


def test_a_step_that_is_saved_once_more_stays_as_it_was_and_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model, optimizer = trained()
    with hf.Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(1, model=model, optimizer=optimizer)
        expected = model.weight.detach().clone()
        train(model, optimizer)
        checkpoints.save(1, model=model, optimizer=optimizer)
        checkpoints.save(2, model=model, optimizer=optimizer)
        checkpoints.save(1, model=model, optimizer=optimizer)  # gone back, and come there again
    assert "step 1 was saved already, and stays as it was" in caplog.text
    assert [found.step for found in checkpoints.catalogue.list().found] == [2, 1]
    (tmp_path / "step-2" / "manifest.json").unlink()
    assert hf.Checkpointer(tmp_path).load(model=model, optimizer=optimizer) == 1
    assert torch.equal(model.weight, expected)


def test_two_images_of_one_step_are_waited_for_each(tmp_path: Path) -> None:
    """Under an agent, at the other end of a line: it answers for each, in whatever order."""
    with socket.socket(socket.AF_UNIX) as agent:
        agent.bind(str(tmp_path / "agent"))
        agent.listen()
        line = AgentConnection(str(tmp_path / "agent"), "worker", lambda why, view: None, repairs=False)
        connection, _ = agent.accept()
        with connection:
            host = AgentSnapshotHost(line, "runs/7", "last:3")
            for created_ns in (100, 101):
                host.tell(SnapshotSealed(5, True, created_ns=created_ns))
            send(connection, CheckpointNotice(5, "the disk is full", 101))
            send(connection, CheckpointNotice(5, "", 100))
            with pytest.raises(CheckpointError, match="the disk is full"):
                host.wait()
            host.close()  # nothing is left to wait for


class Counting(torch.nn.Linear):
    """Says beside its tensors how many times it was run, by hooks."""

    def __init__(self, takes_back: bool) -> None:
        super().__init__(64, 64)
        self.runs = 0
        self.register_state_dict_post_hook(Counting._say)
        if takes_back:
            self.register_load_state_dict_pre_hook(Counting._take_back)

    @staticmethod
    def _say(module: Counting, state: dict[str, Any], prefix: str, _: Any) -> None:
        state[f"{prefix}runs"] = module.runs

    @staticmethod
    def _take_back(module: Counting, state: dict[str, Any], prefix: str, *_: Any) -> None:
        module.runs = state.pop(f"{prefix}runs")


@pytest.mark.parametrize("takes_back", [True, False])
def test_a_plain_value_that_a_hook_adds_to_a_models_state_is_kept(tmp_path: Path, takes_back: bool) -> None:
    model = Counting(takes_back)
    optimizer = torch.optim.Adam(model.parameters())
    with hf.Checkpointer(tmp_path, keep="all") as checkpoints:
        for model.runs in (1, 2, 3):
            train(model, optimizer)
            checkpoints.save(model.runs, model=model, optimizer=optimizer)
    other = Counting(takes_back)
    same = torch.optim.Adam(other.parameters())
    assert hf.Checkpointer(tmp_path).load(model=other, optimizer=same) == 3
    assert torch.equal(other.weight, model.weight) and other.runs == (3 if takes_back else 0)


def draw() -> tuple[float, float, float, list[float]]:
    return random.gauss(), np.random.rand(), np.random.standard_normal(), torch.rand(3).tolist()


@pytest.mark.parametrize("is_kept", [True, False])
def test_generators_go_on_as_they_would_have_unless_they_are_left_out(tmp_path: Path, is_kept: bool) -> None:
    model, optimizer = trained()
    with hf.Checkpointer(tmp_path, generators=is_kept) as checkpoints:
        for step in (1, 2):
            train(model, optimizer)
            draw()
            checkpoints.save(step, model=model, optimizer=optimizer)
    expected = draw()
    assert hf.Checkpointer(tmp_path).load(model=model, optimizer=optimizer) == 2
    assert (draw() == expected) is is_kept
    before = torch.default_generator.get_state()
    assert hf.Checkpointer(tmp_path, generators=False).load(model=model, optimizer=optimizer) == 2
    assert torch.equal(torch.default_generator.get_state(), before)
    (found, *_) = checkpoints.catalogue.list().found
    assert found.about.notes == {"generators": "each rank's in its part" if is_kept else "not kept"}
    assert found.about.versions.keys() == {"python", "holdfast", "torch"}
    state = {"model": {"weight": torch.zeros(64, 64)}}
    with warnings.catch_warnings(action="ignore"):  # of torch's: that there is one process only
        torch.distributed.checkpoint.load(state, checkpoint_id=tmp_path / "step-2")
    assert torch.equal(state["model"]["weight"], model.weight)
