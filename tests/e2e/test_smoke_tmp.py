from e2e.jobs import SPAWN, STEPS, Place
def test_a(tmp_path):
    job = Place(tmp_path)
    agent = job.start("--standalone", "--nproc-per-node", "2", *SPAWN, STEPS)
    pids = job.journal.wait_for_workers(2)
    job.wait_for_steps(*pids.values())
    assert agent.master_pid()
    job.finish()
    assert agent.wait() == 0
    assert job.journal.finished().exit_code == 0
def test_leak(tmp_path):
    job = Place(tmp_path)
    job.start("--standalone", "--nproc-per-node", "2", *SPAWN, STEPS)
    job.journal.wait_for_workers(2)
def test_fail(tmp_path):
    job = Place(tmp_path)
    job.start("--standalone", "--nproc-per-node", "2", *SPAWN, STEPS)
    job.journal.wait_for_workers(2)
    assert 0
