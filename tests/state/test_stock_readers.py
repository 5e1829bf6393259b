"""A published directory, opened by those who do not know us."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from torch.distributed.checkpoint import HuggingFaceStorageReader
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from state.test_export import saved, tracked

pytestmark = pytest.mark.filterwarnings("ignore")  # torch's own, of being used without a group


def test_stock_readers_open_what_was_published(tmp_path: Path) -> None:
    state = tracked()
    saved(tmp_path, state, shares=3)
    folder = tmp_path / "step-5"
    expected = state.modules()["model"].state_dict()
    for reader in (None, HuggingFaceStorageReader(str(folder))):
        wanted = {"model.middle.weight": torch.zeros(16, 16), "model.embedding.weight": torch.zeros(40, 16)}
        dcp.load(wanted, checkpoint_id=str(folder), storage_reader=reader, no_dist=True)
        for name, tensor in wanted.items():
            assert torch.equal(tensor, expected[name.removeprefix("model.")]), (reader, name)
    names = set()
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            names |= set(file.keys())
    assert "model.middle.weight" in names


def test_stock_tools_make_one_file_of_it_with_what_is_no_tensor(tmp_path: Path) -> None:
    state = tracked()
    saved(tmp_path, state, shares=2)
    dcp_to_torch_save(str(tmp_path / "step-5"), str(tmp_path / "all.pt"))
    loaded = torch.load(tmp_path / "all.pt", weights_only=True)
    optimizer = state.optimizers()["optimizer"]
    assert loaded["optimizer"]["param_groups"][0]["lr"] == optimizer.param_groups[0]["lr"]
    model = state.modules()["model"].state_dict()
    assert all(torch.equal(loaded["model"][name], value) for name, value in model.items())
