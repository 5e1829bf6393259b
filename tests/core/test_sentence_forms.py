"""Every sentence that is made of a record is a whole one, whatever is in the record: counts of 0, 1 and 2, empty lists,
reasons that are not known. No plural after 1, no comma before nothing, no brackets around nothing."""

from __future__ import annotations

import enum
import re
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest

from holdfast.core import records as r
from holdfast.core.events import SessionInfo
from holdfast.core.faults.failures import Failure, describe
from holdfast.core.faults.fault_types import Fault
from holdfast.core.sentences import failure_report, sentence
from support.world import World

TRANSCRIPTS = Path(__file__).parent / "transcripts"
KINDS = sorted({*get_args(r.Record)}, key=lambda kind: kind.__name__)
NAMES = frozenset(
    {
        "node_id",
        "job_id",
        "peer",
        "stream",
        "shard",
        "machine",
        "holder",
        "host",
        "url",
        "first",
        "second",
        "stage",
        "source",
    }
)
"""Fields that are never empty: what they name exists."""
NOUNS = "node|rank|worker|restart|spare|step|part|sample(?! report)|record|failure"
UNITS_AND_VERBS = "ms|s|is|as|has|was|loss|process"
BROKEN = {
    "a plural after 1": rf"(?<!slot )(?<!rank )(?<!worker )\b1 (?!(?:{UNITS_AND_VERBS})\b)[a-z]+s\b(?! (?:is|has) )",
    "a singular after another number": rf"\b(?:0|2) (?:{NOUNS})\b",
    "a space before a mark": r" [,;:.)]",
    "a mark after a mark": r"[,;:(]\s*[,;:)]",
    "a mark at the end": r"[,;:(–-]\s*$",
    "two spaces": r"  ",
    "a word at the end that wants another": r"\b(?:because|of|from|by|with|and|to|in|is|are)\s*$",
    "nothing between words": r"\b(?:of|to|by|from) (?:and|is|are|has|have|in|that)\b",
}


def variants(kind: Any, size: int, field: str = "") -> Any:
    """Return a value of a type: numbers are `size`, lists have as many entries, texts are empty for 0."""
    info = kind if isinstance(kind, msgspec.inspect.Type) else msgspec.inspect.type_info(kind)
    match info:
        case msgspec.inspect.BoolType():
            return bool(size % 2)
        case msgspec.inspect.IntType():
            return size
        case msgspec.inspect.FloatType():
            return float(size)
        case msgspec.inspect.StrType():
            return "" if size == 0 and field not in NAMES else "x"
        case msgspec.inspect.BytesType():
            return b"x" * size
        case msgspec.inspect.NoneType():
            return None
        case msgspec.inspect.LiteralType(values=values):
            return values[size % len(values)]
        case msgspec.inspect.EnumType(cls=cls):
            members: list[enum.Enum] = list(cls)
            return members[size % len(members)]
        case msgspec.inspect.VarTupleType(item_type=item):
            return (variants(item, max(size, 1), field),) * size
        case msgspec.inspect.TupleType(item_types=items):
            return tuple(variants(item, size, field) for item in items)
        case msgspec.inspect.DictType(key_type=key, value_type=value):
            return {variants(key, 1, field): variants(value, size, field)} if size else {}
        case msgspec.inspect.UnionType(types=types):
            return variants(types[size % len(types)], size, field)
        case msgspec.inspect.StructType(cls=cls, fields=fields):
            # A fault comes from a table, and is complete.
            return cls(
                **{one.name: variants(one.type, max(size, 1) if cls is Fault else size, one.name) for one in fields}
            )
    raise AssertionError(f"no value of {info}")


def broken(text: str) -> list[str]:
    """Return what is wrong with a sentence."""
    return [f"{what}: {text!r}" for what, pattern in BROKEN.items() if re.search(pattern, text)]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("size", [0, 1, 2])
def test_the_sentence_of_a_record_is_whole(kind: type, size: int) -> None:
    assert broken(sentence(variants(kind, size))) == []


@pytest.mark.parametrize("size", [0, 1, 2])
def test_the_words_for_a_failure_are_whole(size: int) -> None:
    failure = variants(Failure, size)
    assert broken(describe(failure)) == []
    assert [wrong for line in failure_report(failure).splitlines() for wrong in broken(line.strip())] == []


@pytest.mark.parametrize(
    "text",
    [
        "view 3 formed: 1 ranks on 1 node",
        "2 node left",
        "restart, as , so all start from step 3",
        "step-5 was there already, of job : that one stays",
        "node b is lost: ",
        "waits for others ()",
    ],
)
def test_what_was_broken_once_is_seen(text: str) -> None:
    assert broken(text)


@pytest.mark.parametrize("collectives", [0, 1, 2])
@pytest.mark.parametrize("how", ["asleep", "busy", "waiting"])
def test_a_rank_that_hangs_is_described_as_it_is(how: str, collectives: int) -> None:
    world = World(nodes=(1, 1), workers=2, session=SessionInfo())
    world.do(world.hello("a"))
    world.start_all()
    world.prove()
    asleep, idle = (1,) * (how == "asleep"), (1,) * (how == "busy")
    world.do(world.stalled("a", 8, 7, collectives=(collectives + 1, collectives), asleep=asleep, idle=idle))
    world.wait(60.0)
    (opened,) = [record for record in world.history if isinstance(record, r.IncidentOpened)]
    assert opened.cause.startswith("rank 1 on a hangs: no progress for ") and broken(opened.cause) == []
    place = f"(step 7, {collectives} collective{'s' * (collectives != 1)})"
    ends = {
        "asleep": f"it sleeps {place}, and all others wait",
        "busy": f"it does not wait for other ranks {place}",
        "waiting": f"it has made the least progress {place} of all, which wait for one another",
    }
    assert opened.cause.endswith(ends[how])


def test_no_sentence_of_the_golden_transcripts_counts_wrongly() -> None:
    """They hold the reasons of decisions, which are made of many numbers. Lines with > are what a test asks for."""
    plural = re.compile(r"\b1 (?:nodes|ranks|workers|restarts|spares|steps|processes)\b")
    lines = [line for path in TRANSCRIPTS.glob("*.txt") for line in path.read_text().splitlines()]
    assert len(lines) > 500
    assert [line for line in lines if plural.search(line) and not line.startswith(">")] == []
