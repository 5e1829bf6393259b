"""A dump of the fault handler as people read it."""

from holdfast.wire.stack_dumps import readable_stacks

DUMP = """Thread 0x00007f22 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 324 in wait
  File "/usr/lib/python3.11/threading.py", line 1002 in _bootstrap

Current thread 0x00007f33 (most recent call first):
  File "/home/me/model.py", line 7 in build
  File "/home/me/train.py", line 3 in <module>
  File "/venv/holdfast/worker/launch/script.py", line 103 in run_script
  File "/venv/holdfast/worker/launch/fork_server.py", line 190 in <module>
  File "<frozen runpy>", line 88 in _run_code
"""
READABLE = """thread MainThread:
  File "/home/me/train.py", line 3, in <module>
  File "/home/me/model.py", line 7, in build

thread:
  File "/usr/lib/python3.11/threading.py", line 1002, in _bootstrap
  File "/usr/lib/python3.11/threading.py", line 324, in wait
"""


def test_the_main_thread_comes_first_in_the_order_of_a_traceback_without_our_frames() -> None:
    assert readable_stacks(DUMP) == READABLE


def test_ranks_that_do_the_same_have_the_same_text() -> None:
    other = DUMP.replace("0x00007f22", "0x00007e11").replace("0x00007f33", "0x00007e44")
    assert readable_stacks(other) == readable_stacks(DUMP)


def test_a_worker_that_has_not_reached_its_script_shows_where_it_is() -> None:
    early = '  File "/venv/holdfast/worker/launch/fork_server.py", line 190 in <module>\n'
    assert "fork_server.py" in readable_stacks(f"Current thread 0x01 (most recent call first):\n{early}")


def test_no_dump_is_no_stack() -> None:
    assert readable_stacks("") == ""
