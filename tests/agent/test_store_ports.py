"""The ports of stores: a view's port is its own, and there is always another one to offer."""

import socket

from holdfast.agent.store_ports import StorePorts


def reachable(port):
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


def test_an_offered_port_can_be_reached_before_anybody_serves_it():
    ports = StorePorts("127.0.0.1")
    port = ports.offer()
    assert ports.offer() == port and reachable(port)
    ports.close()
    assert not reachable(port)


def test_a_port_that_a_view_took_up_is_not_offered_again_though_the_view_was_skipped():
    ports = StorePorts("127.0.0.1")
    first = ports.offer()
    assert ports.promise(5, first)
    second = ports.offer()
    assert second != first
    assert ports.promise(6, second)
    listener = ports.take(6)
    assert listener is not None and listener.getsockname()[1] == second
    assert not reachable(first), "the store of the skipped view will never be asked for"
    assert ports.take(5) is None
    listener.close()
    ports.close()


def test_an_order_that_comes_again_promises_nothing_new():
    ports = StorePorts("127.0.0.1")
    port = ports.offer()
    assert ports.promise(5, port)
    assert not ports.promise(5, port)
    ports.close()
