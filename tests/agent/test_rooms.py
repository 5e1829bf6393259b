"""Rooms for snapshots are workers', not seats': who closes up to a lower seat stays where its images are."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from agent.crews import agent_config
from holdfast.agent.memory import state_keeper
from holdfast.agent.memory.state_keeper import StateKeeper
from holdfast.agent.reports import Reports
from holdfast.core.kept import Pacing
from holdfast.state.parts import write_image
from holdfast.state.tracked import Tracked
from holdfast.wire.session import Room, Sealed, Snapshots, Written
from holdfast.wire.slots import Record, Seat, Status, Wanted


class Tenant:
    """A worker, as far as its state goes."""

    def __init__(self, seat: int) -> None:
        self.seat: int | None = seat
        self.ended = self.dismissed = False
        self.told: asyncio.Queue[Any] = asyncio.Queue()

    def tell(self, message: Any) -> None:
        self.told.put_nowait(message)


async def room_for(keeper: StateKeeper, tenant: Tenant) -> str:
    keeper.need_room(tenant, 64 * 1_024)  # type: ignore[arg-type]
    room = await tenant.told.get()
    assert isinstance(room, Room) and not room.why
    return Path(room.directory).name


def keeper_in(directory: Path, say: Callable[[Any], None] = lambda event: None) -> StateKeeper:
    keeper = StateKeeper(
        agent_config(directory, snapshot_dir=str(directory / "memory"), snapshots=Snapshots(every=1)),
        Reports("node-0", lambda: "life", say),
    )
    keeper.open("job", str(directory / "checkpoints"))
    return keeper


def test_who_closes_up_keeps_its_room_and_a_newcomer_gets_another(tmp_path: Path) -> None:
    async def shrink_and_grow() -> None:
        keeper = keeper_in(tmp_path)
        first, lost, last = tenants = [Tenant(seat) for seat in range(3)]
        assert [await room_for(keeper, one) for one in tenants] == ["seat-0", "seat-1", "seat-2"]
        lost.ended = True
        last.seat = 1
        assert [await room_for(keeper, one) for one in (first, last)] == ["seat-0", "seat-2"]
        newcomer = Tenant(2)
        assert await room_for(keeper, newcomer) == "seat-1"
        newcomer.dismissed, newcomer.seat = True, None
        assert await room_for(keeper, Tenant(2)) == "seat-1"
        await keeper.close()

    asyncio.run(asyncio.wait_for(shrink_and_grow(), 60.0))


def test_a_checkpoint_is_made_of_the_image_in_the_workers_own_room(tmp_path: Path) -> None:
    async def seal() -> None:
        keeper = keeper_in(tmp_path)
        lost, closing_up = Tenant(0), Tenant(1)
        for one in (lost, closing_up):
            await room_for(keeper, one)
        lost.ended, closing_up.seat = True, 0
        page = dict(keeper.vault.seats())[1]
        image = write_image(Tracked(model=torch.nn.Linear(2, 2)).state(), 1, 0)
        with page.path(0).open("r+b") as file:
            file.write(image)
        page.write(0, Record(Status.SEALED, 7, view=2, size_bytes=len(image)))
        keeper.sealed(closing_up, Sealed(7, True, {}, {}, url=str(tmp_path / "elsewhere")))  # type: ignore[arg-type]
        written = await closing_up.told.get()
        assert isinstance(written, Written) and not written.why
        assert (tmp_path / "elsewhere" / "step-7").is_dir()
        await keeper.close()

    asyncio.run(asyncio.wait_for(seal(), 60.0))


def test_what_a_dead_worker_knew_is_known_to_its_agent(tmp_path: Path) -> None:
    async def look() -> None:
        keeper = keeper_in(tmp_path)
        for seat in range(2):
            await room_for(keeper, Tenant(seat))
        pages: list[Seat] = [page for _, page in keeper.vault.seats()]
        assert keeper.vault.whole_word() == -1
        for page, step in zip(pages, (4, 3), strict=True):
            page.write(0, Record(Status.SEALED, step, view=2, size_bytes=1))
            page.put(whole=step)
        assert keeper.vault.whole_word() == pages[0].whole_word() > pages[1].whole_word()
        await keeper.close()

    asyncio.run(asyncio.wait_for(look(), 60.0))


def test_a_partner_that_does_not_get_on_is_waited_for_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And again when it has got on."""
    monkeypatch.setattr(state_keeper, "COPIES_PATIENCE_S", 100.0)

    class Copies:
        partners, safe, held, guests = 1, None, (), None

        def safe_age(self, seat: int) -> tuple[int, int] | None:
            return self.safe

        def parity_of(self) -> list[Any]:
            return []

        async def close(self, is_kept: bool = False) -> None: ...

    async def work() -> None:
        keeper, copies = keeper_in(tmp_path), Copies()
        keeper.replication = copies  # type: ignore[assignment]
        await room_for(keeper, Tenant(0))
        page = keeper.vault._seats[0]

        def waits_for(step: int, age_s: float) -> bool:
            created_ns = time.time_ns() - int(age_s * 1e9)
            page.write(step % 2, Record(Status.SEALED, step, 1, size_bytes=8, created_ns=created_ns))
            keeper.say()
            return bool(page.get("partners"))

        copies.partners = 0
        assert not waits_for(1, 200.0), "there is nobody to wait for"
        copies.partners = 1
        assert waits_for(1, 0.0), "a new one is waited for"
        assert not waits_for(1, 200.0), "but not for ever"
        assert not waits_for(2, 0.0) and not waits_for(3, 0.0), "nor the next ones at all"
        copies.safe = (1, 2)
        assert waits_for(4, 0.0), "it gets on again"
        assert not waits_for(4, 200.0) and not waits_for(5, 0.0)
        copies.safe = (1, 5)
        assert waits_for(6, 0.0)
        await keeper.close()

    asyncio.run(work())


def test_two_images_of_one_step_have_an_answer_each(tmp_path: Path) -> None:
    """Or who waits for the second waits for ever, and its slot is never free again."""

    async def seal_twice() -> None:
        keeper, saving = keeper_in(tmp_path), Tenant(0)
        await room_for(keeper, saving)
        page = dict(keeper.vault.seats())[0]
        image = write_image(Tracked(model=torch.nn.Linear(2, 2)).state(), 1, 0)
        for slot in range(2):
            with page.path(slot).open("r+b") as file:
                file.write(image)
            record = Record(Status.SEALED, 5, view=1, size_bytes=len(image), wanted=Wanted.YES, created_ns=100 + slot)
            page.write(slot, record)
            told = Sealed(5, True, url=str(tmp_path / "elsewhere"), created_ns=100 + slot)
            keeper.sealed(saving, told)  # type: ignore[arg-type]
        answers = {(written.created_ns, written.why) for written in [await saving.told.get() for _ in range(2)]}
        assert answers == {(100, ""), (101, "")}
        assert {record.wanted for record in page.sealed().values()} == {Wanted.TAKEN}
        await keeper.close()

    asyncio.run(asyncio.wait_for(seal_twice(), 60.0))


def test_the_master_hears_how_snapshots_are_made(tmp_path: Path) -> None:
    async def say() -> None:
        said: list[Any] = []
        keeper = keeper_in(tmp_path, said.append)
        for seat in range(2):
            await room_for(keeper, Tenant(seat))
        for number, page in keeper.vault.seats():
            page.write(0, Record(Status.SEALED, 9, size_bytes=1))
            cost_ns = 20_000_000 * (1 + number)
            page.put(every=3, cost_ns=cost_ns, step_ns=500_000_000, taken=5, skipped=number, spoiled=1)
        keeper.say()
        (event,) = said
        assert event.pacing == Pacing(3, True, 0.5, 0.04, 10, 1, 2)
        await keeper.close()

    asyncio.run(asyncio.wait_for(say(), 60.0))
