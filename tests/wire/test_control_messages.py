"""What is said comes over as it was meant: every message of either side, through the decoder of the other."""

from typing import Any

import msgspec
import pytest

from holdfast.core.events import DrainRequested, NodeLeft, ResizeRequested
from holdfast.wire.control_messages import (
    Acknowledge,
    EventReport,
    Farewell,
    FromMaster,
    Heartbeat,
    OperatorAnswer,
    OperatorRequest,
    Page,
    ToMaster,
    Watch,
)

TO_MASTER = [
    EventReport(1, 2, NodeLeft(node_id="a", incarnation="a.1")),
    Heartbeat(2),
    Farewell(),
    Watch(7),
    OperatorRequest(DrainRequested(node_id="a", why="its disk")),
    OperatorRequest(ResizeRequested(nodes=3, why=""), "demo"),
]
FROM_MASTER = [
    Acknowledge(1),
    Page(2, ("{}", "{}")),
    OperatorAnswer(True, "node a leaves the job", 9),
    OperatorAnswer(False, "why not"),
]


@pytest.mark.parametrize(("messages", "union"), [(TO_MASTER, ToMaster), (FROM_MASTER, FromMaster)])
def test_each_message_is_read_as_what_it_was(messages: Any, union: Any) -> None:
    for message in messages:
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=union) == message


@pytest.mark.parametrize("request_", [NodeLeft(node_id="a", incarnation="a.1"), None, 3])
def test_an_operator_may_ask_for_nothing_else(request_: Any) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(msgspec.msgpack.encode(OperatorRequest(request_)), type=ToMaster)
