"""Files that other scripts wrote with torch.save."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from holdfast.errors import CheckpointError
from holdfast.state import epoch_files


def trained(seed: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    model(torch.randn(5, 4)).square().mean().backward()
    optimizer.step()
    return model, optimizer


def write(folder: Path, epoch: int, seed: int = 0, prefix: str = "", **more: Any) -> Path:
    model, optimizer = trained(seed)
    content = {
        "epoch": epoch,
        "model_state_dict": {prefix + name: value for name, value in model.state_dict().items()},
        "optimizer_state_dict": optimizer.state_dict(),
        "loss": 0.25,
    }
    path = folder / f"checkpoint_epoch_{epoch}.pt"
    torch.save(content | more, path)
    return path


@pytest.mark.parametrize("prefix", ["", "module.", "_orig_mod.module.", "module._orig_mod."])
def test_model_and_optimizer_come_back_bit_for_bit(tmp_path: Path, prefix: str) -> None:
    write(tmp_path, 3, seed=1, prefix=prefix)
    write(tmp_path, 12, seed=2, prefix=prefix)
    old = epoch_files.latest(tmp_path, on_damage=pytest.fail)
    assert old is not None
    model, optimizer = trained(7)
    assert old.load(model=model, optimizer=optimizer) == 12
    assert old.loss == 0.25
    expected_model, expected_optimizer = trained(2)
    for name, value in expected_model.state_dict().items():
        assert torch.equal(model.state_dict()[name], value)
    for number, state in expected_optimizer.state_dict()["state"].items():
        for key, value in state.items():
            assert torch.equal(optimizer.state_dict()["state"][number][key], value)


def test_a_model_whose_own_names_begin_like_a_wrapper_s_is_loaded(tmp_path: Path) -> None:
    class Odd(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = torch.nn.Linear(2, 2)

    saved, live = Odd(), Odd()
    path = tmp_path / "checkpoint_epoch_1.pt"
    torch.save({"epoch": 1, "model_state_dict": saved.state_dict(), "loss": torch.tensor(2.0), "extra": [1]}, path)
    old = epoch_files.read(path)
    assert (old.load(live), old.loss, old.more) == (1, 2.0, {"extra": [1]})
    assert torch.equal(live.module.weight, saved.module.weight)
    with pytest.raises(CheckpointError, match="no state of an optimizer"):
        old.load(live, torch.optim.SGD(live.parameters()))


def test_a_damaged_file_is_named_and_the_one_before_is_used(tmp_path: Path) -> None:
    write(tmp_path, 1)
    path = write(tmp_path, 2)
    path.write_bytes(path.read_bytes()[:1000])
    (tmp_path / "checkpoint_epoch_3.pt").write_bytes(b"")
    told: list[str] = []
    old = epoch_files.latest(tmp_path, on_damage=told.append)
    assert old is not None
    assert old.epoch == 1
    assert ["checkpoint_epoch_3.pt" in told[0], "checkpoint_epoch_2.pt" in told[1]] == [True, True]
    assert path.exists()


def test_files_of_which_none_can_be_read_are_not_taken_for_none(tmp_path: Path) -> None:
    for epoch in (1, 2):
        (tmp_path / f"checkpoint_epoch_{epoch}.pt").write_bytes(b"")
    told: list[str] = []
    with pytest.raises(CheckpointError, match=r"2 files .* none of which can be read"):
        epoch_files.latest(tmp_path, on_damage=told.append)
    assert len(told) == 2


@pytest.mark.parametrize("kind", [np.float32, np.float64, np.int64])
def test_a_loss_may_be_a_number_of_numpy(tmp_path: Path, kind: type) -> None:
    assert epoch_files.read(write(tmp_path, 1, loss=kind(2))).loss == 2.0


class Bomb:
    def __reduce__(self) -> Any:
        return Path.touch, (Path("/tmp/holdfast-legacy-bomb"),)


@pytest.mark.parametrize("how", ["torch", "pickle"])
def test_code_in_a_file_is_not_executed(tmp_path: Path, how: str) -> None:
    path = tmp_path / "checkpoint_epoch_1.pt"
    content = {"epoch": 1, "model_state_dict": {}, "loss": Bomb()}
    if how == "torch":
        torch.save(content, path)
    else:
        path.write_bytes(pickle.dumps(content, protocol=2))
    with pytest.raises(CheckpointError, match="more than tensors"):
        epoch_files.read(path)
    assert not Path("/tmp/holdfast-legacy-bomb").exists()


def test_another_shape_or_another_model_is_a_sentence(tmp_path: Path) -> None:
    other = tmp_path / "checkpoint_epoch_1.pt"
    torch.save({"weights": torch.zeros(1)}, other)
    with pytest.raises(CheckpointError, match="another shape"):
        epoch_files.read(other)
    with pytest.raises(CheckpointError, match="does not fit"):
        epoch_files.read(write(tmp_path, 2)).load(torch.nn.Linear(9, 9))


def test_a_folder_without_any_has_none(tmp_path: Path) -> None:
    assert epoch_files.latest(tmp_path / "nothing") is None
    (tmp_path / "checkpoint_epoch_x.pt").write_bytes(b"")
    assert epoch_files.latest(tmp_path) is None
