"""torch's private API: used in one module, and said in a sentence when it is not there."""

from __future__ import annotations

import ast
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from holdfast import torch_compat
from holdfast.errors import TorchVersionError
from holdfast.util.versions import TORCH_TESTED, is_tested

SOURCE = Path(holdfast.__file__).parent
TENSOR_ATTRIBUTES = {"_version", "_local_tensor", "_parameters", "_buffers"}


def private_uses(path: Path) -> list[str]:
    """Return imports from private modules of torch, and private attributes of torch's modules and tensors."""
    found: list[str] = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            names = [*(node.module or "").split("."), *(name.name for name in node.names)]
            found += [f"{path}:{node.lineno} {name}" for name in names if name.startswith("_")]
        if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__"):
            text = ast.unparse(node.value)
            is_tensors = node.attr in TENSOR_ATTRIBUTES and text not in ("self", "cls", "super()")
            if text.split(".")[0] in ("torch", "dist", "distributed_c10d") or is_tensors:
                found.append(f"{path}:{node.lineno} {text}.{node.attr}")
    return found


def test_private_api_of_torch_is_used_in_one_module() -> None:
    """The iterators of DataLoader are wrapped where their batches are watched: torch calls us there."""
    wrapped = {"worker/hand_drawn_batches.py"}
    found = [
        use
        for path in sorted(SOURCE.rglob("*.py"))
        if path.name != "torch_compat.py" and path.relative_to(SOURCE).as_posix() not in wrapped
        for use in private_uses(path)
    ]
    assert not found
    assert len(private_uses(SOURCE / "torch_compat.py")) > 10, "the finder finds nothing any more"


def test_this_version_of_torch_is_a_tested_one() -> None:
    assert is_tested(torch.__version__, TORCH_TESTED)
    assert is_tested("2.13.1+cu130", TORCH_TESTED)
    assert not is_tested("2.14.0", TORCH_TESTED)
    assert not is_tested("2.1", TORCH_TESTED)


def test_an_untested_version_is_warned_of_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch, "__version__", "3.0.0")
    monkeypatch.setattr(torch_compat, "_warned_in", 0)
    with caplog.at_level(logging.WARNING, "holdfast"):
        torch_compat.warn_if_untested()
        torch_compat.warn_if_untested()
    (record,) = caplog.records
    assert record.holdfast_event == "torch-untested"  # type: ignore[attr-defined]
    assert "torch 3.0.0" in record.getMessage() and "2.13" in record.getMessage()


def test_a_missing_name_is_said_in_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.distributed import distributed_c10d

    monkeypatch.delattr(distributed_c10d, "_group_or_default_group")
    with pytest.raises(TorchVersionError, match=rf"torch {torch.__version__.replace('+', '.')}.*group_or_default") as e:
        torch_compat.group_or_default(None)
    assert isinstance(e.value.__cause__, AttributeError)


def test_errors_of_torch_itself_pass_unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_: object) -> None:
        raise RuntimeError("connection reset by peer")

    from torch.distributed import distributed_c10d

    monkeypatch.setattr(distributed_c10d, "_group_or_default_group", broken)
    with pytest.raises(RuntimeError, match="connection reset"):
        torch_compat.group_or_default(None)


class DeviceModule:
    """As torch.cuda, as far as DTensor asks it for its generator."""

    is_available = staticmethod(lambda: True)
    device_count = staticmethod(lambda: 8)
    set_rng_state = get_rng_state = staticmethod(lambda: None)


class MeshOf:
    """A mesh of devices of a kind."""

    def __init__(self, device_type: str) -> None:
        self.device_type = device_type

    def get_rank(self) -> int:
        return 3


def refuse_broadcast(*_: object) -> None:
    raise AssertionError("a replacement would be alone in it")


def test_random_operations_of_dtensors_begin_without_an_exchange(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.distributed.tensor import _random

    monkeypatch.setattr(_random, "_get_device_handle", lambda kind: DeviceModule)
    monkeypatch.setattr(torch.distributed, "broadcast", refuse_broadcast)
    monkeypatch.setattr(_random, "_rng_tracker", None)

    def made() -> Any:
        return _random._rng_tracker

    torch_compat.begin_dtensor_random(MeshOf("cpu"))
    assert made() is None, "torch has none for the CPU"
    torch_compat.begin_dtensor_random(MeshOf("cuda"))
    tracker = made()
    assert isinstance(tracker, _random.OffsetBasedRNGTracker) and tracker._device == torch.device("cuda:3")
    torch_compat.begin_dtensor_random(MeshOf("cuda"))
    assert made() is tracker, "one for the process"
    assert not any("generator" in name or "state" in name for name in vars(tracker)), "it has no state of its own"
