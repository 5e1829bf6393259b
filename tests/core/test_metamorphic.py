"""What must not change a decision: when it is, how nodes are called, and links of nodes that only stand by."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from holdfast.core import events as e
from holdfast.core import records as r
from holdfast.core.events import SessionInfo
from holdfast.core.faults.failures import Exited, Signalled
from holdfast.core.shard_map import ShardMap
from support import world as worlds
from support.world import World

MEMBERS, SPARES = 6, 3
STORIES = range(12)
SESSIONS = [SessionInfo(), SessionInfo(resizable=False), SessionInfo(shard_map=ShardMap(2), replicas=1), None]

Named = Callable[[int], str]
Outcome = tuple[str, ...]


def by_number(number: int) -> str:
    return f"n{number}"


def tell(story: int, *, named: Named = by_number, flaps: bool = False) -> World:
    """A random story of faults, the same for the same number. `flaps`: whenever something happens, the links of all
    nodes that stand by have just broken; they are back well within the time that they have."""
    chance = random.Random(story)
    session = SESSIONS[story % len(SESSIONS)]
    world = World(nodes=(4, MEMBERS), workers=2, session=session, restarts=20, spare_nodes=SPARES)
    world.gather(*map(named, range(MEMBERS)))
    calm(world)
    for number in range(MEMBERS, MEMBERS + SPARES):
        world.do(world.hello(named(number)))
        world.do(world.parked(named(number), 2))
    for _ in range(6):
        if world.finished or not world.serving:
            break
        idle = [n for n in world.job.nodes.values() if flaps and n.is_here and n.node_id not in world.job.members]
        parked = {node.node_id: node.parked for node in idle}
        for node_id in parked:
            world.do(world.broke(node_id))
        _mishap(world, chance)
        world.wait(0.1)
        for node_id in parked:  # the first to be back is the first that was to be taken
            world.do(world.hello(node_id, parked=parked[node_id]))
        world.wait(6.0)
        if world.serving and chance.random() < 0.6:
            calm(world)
    return world


def calm(world: World) -> None:
    if world.session is None:
        world.start_all()
    else:
        world.prove()


def _mishap(world: World, chance: random.Random) -> None:
    victim, local_rank = world.members[chance.randrange(len(world.members))], chance.randrange(2)
    happens: list[Callable[[], e.Event]] = [
        lambda: world.broke(victim),
        lambda: world.silent(victim),
        lambda: world.leaving(victim),
        lambda: world.failed(victim, local_rank, end=Signalled(9, "SIGKILL")),
        lambda: world.failed(victim, local_rank, end=Exited(chance.choice([1, 14, 201]))),
    ]
    world.do(chance.choice(happens)())


def decisions(world: World, named: Named = by_number) -> list[Outcome]:
    """What was decided and formed, with nodes by number, without times and texts."""
    numbers = {named(number): str(number) for number in range(MEMBERS + SPARES)}
    found: list[Outcome] = []
    for record in world.history:
        match record:
            case r.IncidentDecided(strategy=strategy, counted=counted, view=view):
                found.append(("decided", strategy.value, str(counted), str(view)))
            case r.ViewFormed(view=view):
                found.append(("view", *(f"{numbers[m.node_id]}:{m.workers}" for m in view.members)))
            case r.NodeCordoned(node_id=node_id):
                found.append(("cordoned", numbers[node_id]))
            case r.JobFinished(outcome=outcome):
                found.append(("finished", outcome.value))
            case _:
                pass
    return found


@pytest.mark.parametrize("story", STORIES)
def test_when_it_happens(story: int, monkeypatch: pytest.MonkeyPatch) -> None:
    told = decisions(tell(story))
    assert len(told) > 2
    monkeypatch.setattr(worlds, "START", worlds.START + 1_700_000_000.0)
    assert decisions(tell(story)) == told


@pytest.mark.parametrize("story", STORIES)
def test_how_nodes_are_called(story: int) -> None:
    order = random.Random(~story).sample(range(100, 200), MEMBERS + SPARES)

    def named(number: int) -> str:
        return f"m{order[number]}"

    assert decisions(tell(story, named=named), named) == decisions(tell(story))


@pytest.mark.parametrize("story", STORIES)
def test_links_of_nodes_that_stand_by(story: int) -> None:
    assert decisions(tell(story, flaps=True)) == decisions(tell(story))
