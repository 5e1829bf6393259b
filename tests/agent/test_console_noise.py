"""What of a worker's stderr is left off the console, and what is not."""

from __future__ import annotations

import pytest

from holdfast.agent.console_noise import HELD_BYTES_MAX, NoiseFilter

CLOSED_STORE = b"""\
[rank1]:[W1118 12:00:00.123456789 TCPStore.cpp:125] [c10d] recvValue failed on SocketImpl(fd=3, \
addr=[localhost]:33312, remote=[localhost]:29500): Connection reset by peer
Exception raised from recvBytes at /pytorch/torch/csrc/distributed/c10d/Utils.hpp:679 (most recent call first):
frame #0: c10::Error::Error(c10::SourceLocation, std::string) + 0x98 (0x7f0a in /lib/libc10.so)
frame #1: <unknown function> + 0x5ba8afe (0x7f1a in /lib/libtorch_cpu.so)
<omitting python frames>

"""
HEARTBEAT = b"""\
[rank1]:[W1118 12:00:00.9 ProcessGroupNCCL.cpp:1783] [PG ID 0 PG GUID 0 Rank 1] Failed to check the "should dump" \
flag on TCPStore, (maybe TCPStore server has shut down too early), with error: Connection reset by peer
"""
INTERRUPTED = b"""\
[rank0]: Traceback (most recent call last):
[rank0]:   File "train.py", line 3, in <module>
[rank0]:     loss.backward()
[rank0]: RuntimeError: Connection closed by peer [127.0.0.1]:6864

[rank0]: During handling of the above exception, another exception occurred:

[rank0]: Traceback (most recent call last):
[rank0]:   File "train.py", line 3, in <module>
[rank0]: KeyboardInterrupt
"""
COLLATERAL = b"""\
Traceback (most recent call last):
  File "train.py", line 3, in <module>
RuntimeError: Connection closed by peer [127.0.0.1]:6864
"""
OWN = b"""\
Traceback (most recent call last):
  File "train.py", line 9, in save
OSError: No space left on device
"""
WARNING = b"[rank0]:[W801 12:00:00.1 ProcessGroup.cpp:9] Warning: destroy_process_group() was not called\n"


@pytest.mark.parametrize("noise", [CLOSED_STORE, HEARTBEAT])
def test_the_noise_of_closing_stores_is_left_off(noise: bytes) -> None:
    found = NoiseFilter(lambda: False)
    assert found.feed(b"before\n" + noise + b"after\n") == b"before\nafter\n"


@pytest.mark.parametrize("text", [WARNING, COLLATERAL, INTERRUPTED, OWN, b"frame #1: of a film\n", b"half a line"])
def test_all_else_is_shown_at_once_while_the_job_runs(text: bytes) -> None:
    assert NoiseFilter(lambda: False).feed(text) == text


@pytest.mark.parametrize("interrupted", [INTERRUPTED, INTERRUPTED.replace(b"[rank0]: ", b"")])
def test_the_traceback_of_an_interrupt_is_left_off(interrupted: bytes) -> None:
    found = NoiseFilter(lambda: True)
    for line in interrupted.splitlines(keepends=True):
        assert found.feed(line) == b""
    assert found.feed(b"saved\n") == b"saved\n" and not found.is_holding


def test_what_another_rank_caused_is_left_off_after_an_interrupt() -> None:
    found = NoiseFilter(lambda: True)
    assert found.feed(COLLATERAL) == b"" and found.is_holding
    assert found.flush() == b"" and not found.is_holding


def test_an_error_of_the_scripts_way_out_is_shown() -> None:
    found = NoiseFilter(lambda: True)
    assert found.feed(OWN) + found.flush() == OWN


def test_what_is_held_back_is_bounded() -> None:
    found = NoiseFilter(lambda: True)
    line = b"x" * 1023 + b"\n"
    shown = found.feed(b"Traceback (most recent call last):\n" + line * (HELD_BYTES_MAX // 1024 + 8))
    assert len(shown) > HELD_BYTES_MAX and not found.is_holding
