"""The generator of any accelerator, not only CUDA's, is set, kept and put back."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

LAB = Path(__file__).parents[1] / "e2e" / "lab"
SCRIPT = """
import holdfast_sim, torch
holdfast_sim.load()
from holdfast.data.randomness import generator_states, preserved_generators, set_generators, slot_randomness
from holdfast.state import generators

torch.manual_seed(1)
before = generator_states()
assert before[3] is None and not torch.sim.is_initialized(), "a device that nobody uses is not touched"
torch.sim.manual_seed(3)
first = torch.sim.rand()
with slot_randomness(1, 2, 3):
    drawn = torch.sim.rand()
second = torch.sim.rand()
torch.sim.manual_seed(3)
assert [torch.sim.rand(), torch.sim.rand()] == [first, second], "what is drawn in between changes nothing"
with slot_randomness(1, 2, 3):
    assert torch.sim.rand() == drawn
saved = generators.generators()
after = torch.sim.rand()
assert generator_states() != before
generators.set_generators(saved)
assert torch.sim.rand() == after and "sim" in saved and "cuda" not in saved
"""


def test_the_generator_of_another_vendors_device() -> None:
    env = {**os.environ, "PYTHONPATH": str(LAB)}
    done = subprocess.run([sys.executable, "-c", SCRIPT], env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
