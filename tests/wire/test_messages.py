"""What is said comes over as it was meant: every message of either side, through the decoder of the other."""

import msgspec
import pytest

from holdfast.core.events import DrainAsked, NodeGone, ResizeAsked
from holdfast.wire.messages import (
    Acknowledge,
    Answer,
    Ask,
    Farewell,
    FromMaster,
    Heartbeat,
    Page,
    Report,
    ToMaster,
    Watch,
)

TO_MASTER = [
    Report(1, 2, NodeGone(node_id="a", incarnation="a.1")),
    Heartbeat(2),
    Farewell(),
    Watch(7),
    Ask(DrainAsked(node_id="a", why="its disk")),
    Ask(ResizeAsked(nodes=3, why=""), "demo"),
]
FROM_MASTER = [
    Acknowledge(1),
    Page(2, ("{}", "{}")),
    Answer(True, "node a leaves the job", 9),
    Answer(False, "why not"),
]


@pytest.mark.parametrize(("messages", "union"), [(TO_MASTER, ToMaster), (FROM_MASTER, FromMaster)])
def test_each_message_is_read_as_what_it_was(messages, union):
    for message in messages:
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=union) == message


@pytest.mark.parametrize("request_", [NodeGone(node_id="a", incarnation="a.1"), None, 3])
def test_an_operator_may_ask_for_nothing_else(request_):
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(msgspec.msgpack.encode(Ask(request_)), type=ToMaster)
