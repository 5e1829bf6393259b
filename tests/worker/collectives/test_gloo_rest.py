"""Whether native threads and connections have come to rest."""

from __future__ import annotations

import os
import socket
import threading
import time

from torch.distributed import ProcessGroupGloo

from holdfast.worker.collectives.gloo_rest import is_at_rest, threads

DEADLINE_S = 20.0


def test_a_thread_that_sleeps_is_at_rest_and_one_that_runs_is_not() -> None:
    before = threads()
    wake, is_over = threading.Event(), threading.Event()

    def work() -> None:
        wake.wait()
        while not is_over.is_set():
            time.sleep(0.001)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    own = threads() - before
    assert len(own) == 1
    give_up_at = time.monotonic() + DEADLINE_S
    while not is_at_rest({}, own):
        assert time.monotonic() < give_up_at
    wake.set()
    assert not is_at_rest({}, own, pause_s=0.2)
    is_over.set()
    thread.join()
    assert is_at_rest({}, own), "it has ended"


def test_the_thread_of_a_device_is_none_that_could_come_to_rest() -> None:
    before = threads()
    device = ProcessGroupGloo.create_default_device()
    give_up_at = time.monotonic() + DEADLINE_S
    while threads() - before:  # it gives itself its name
        assert time.monotonic() < give_up_at
    del device


def test_an_open_connection_may_still_be_read_from() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        client = socket.create_connection(server.getsockname())
        connection = {client.fileno(): os.fstat(client.fileno()).st_ino}
        assert not is_at_rest(connection, ())
        client.close()
        assert is_at_rest(connection, ())
