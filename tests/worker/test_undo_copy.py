"""The state from before an update: on the CPU one arena, on a device a copy beside the state where there is room."""

from __future__ import annotations

import pytest
import torch

from holdfast.state.tracked import Tracked
from holdfast.worker import undo_copy
from holdfast.worker.undo_copy import DEVICE_RESERVE_BYTES, DeviceCopy, UndoCopy


def trained() -> tuple[Tracked, torch.nn.Linear, torch.optim.Adam]:
    model = torch.nn.Linear(5, 3)
    optimizer = torch.optim.Adam(model.parameters())
    update(model, optimizer)
    return Tracked(model=model, optimizer=optimizer), model, optimizer


def update(model: torch.nn.Linear, optimizer: torch.optim.Adam) -> None:
    model(torch.randn(2, 5)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def bits(tracked: Tracked) -> list[bytes]:
    return [tensor.detach().clone().numpy().tobytes() for tensor in tracked.state().tensors]


@pytest.mark.parametrize("is_on_device", [False, True])
def test_what_an_update_changed_is_put_back(is_on_device: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The device's copy, of tensors of the CPU: what the two do with streams and memory is not shown."""
    monkeypatch.setattr(UndoCopy, "_fits_on_device", lambda self, tensors: is_on_device)
    tracked, model, optimizer = trained()
    undo = UndoCopy(tracked)
    for _ in range(2):  # the second time into the same memory
        before = bits(tracked)
        undo.before_update()
        update(model, optimizer)
        assert bits(tracked) != before
        undo.restore()
        assert bits(tracked) == before
    assert undo.cost_s >= 0.0


def test_a_device_that_is_full_after_all_has_it_copied_to_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: DeviceCopy, flat: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(UndoCopy, "_fits_on_device", lambda self, tensors: True)
    monkeypatch.setattr(DeviceCopy, "take", fail)
    tracked, model, optimizer = trained()
    undo = UndoCopy(tracked)
    before = bits(tracked)
    for _ in range(2):
        undo.before_update()
        update(model, optimizer)
        undo.restore()
        assert bits(tracked) == before


def test_its_memory_is_used_again_and_given_back() -> None:
    tracked, model, optimizer = trained()
    copy = DeviceCopy()
    copy.take(tracked.state())
    first = [tensor.data_ptr() for tensor in copy.flat().tensors]
    update(model, optimizer)
    copy.take(tracked.state())
    assert [tensor.data_ptr() for tensor in copy.flat().tensors] == first
    assert not set(first) & {tensor.data_ptr() for tensor in tracked.state().tensors}


class OnDevice:
    """As much of a tensor of a device as the arithmetic asks for."""

    is_cpu, requires_grad = False, False
    size_bytes = 100 * 2**20

    def numel(self) -> int:
        return self.size_bytes // 4

    def element_size(self) -> int:
        return 4


@pytest.mark.parametrize(("spare_bytes", "fits"), [(0, True), (-1, False)])
def test_it_is_on_the_device_only_where_there_is_room(
    spare_bytes: int, fits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = OnDevice.size_bytes + DEVICE_RESERVE_BYTES + spare_bytes
    monkeypatch.setattr(undo_copy, "free_on_device", lambda: free)
    undo = UndoCopy(Tracked())
    assert undo._fits_on_device([OnDevice()]) is fits  # type: ignore[list-item]
    assert not undo._fits_on_device([torch.zeros(3)]), "a state on the CPU stays where it is"
