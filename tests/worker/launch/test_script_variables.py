"""Variables that a script sets before it imports torch have the effect that they have under torchrun."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.worker.launch.script_imports import locate
from holdfast.worker.launch.script_variables import variables_set
from support.nest import ENVIRONMENT, Nest, run_python, write

FOUND = {
    "import os\nos.environ['TORCH_LOGS'] = '+dynamo'\nimport torch": ("TORCH_LOGS",),
    "from os import environ\nenviron.setdefault('PYTORCH_JIT', '0')\nimport torch": ("PYTORCH_JIT",),
    "import os\nos.putenv('MKL_NUM_THREADS', '3')": ("MKL_NUM_THREADS",),
    "import os\nos.environ.update({'OMP_NUM_THREADS': '7'}, TORCH_LOGS='x')": ("TORCH_LOGS", "OMP_NUM_THREADS"),
    "import os\nos.environ |= {'TORCHINDUCTOR_MAX_AUTOTUNE': '1'}\n": ("TORCHINDUCTOR_MAX_AUTOTUNE",),
    "import os\ndef early():\n    os.environ['TORCH_LOGS'] = 'x'\nearly()\nimport torch": ("TORCH_LOGS",),
    "import os\nif True:\n    os.environ['TORCH_LOGS'] = 'x'\nfrom torch import nn": ("TORCH_LOGS",),
    "import setup_first\nimport torch": ("PYTORCH_JIT",),
    "import torch, os\nos.environ['TORCH_LOGS'] = '+dynamo'": (),
    "import os\nos.environ['TORCH_NCCL_BLOCKING_WAIT'] = '1'\nos.environ['HF_HOME'] = '/x'\nimport torch": (),
    "import os\nprint(os.environ['TORCH_LOGS'])": (),
    "import os\nos.environ['OMP_SET'] = '1'\nos.environ.setdefault('OMP_SET', '2')": (),
}


@pytest.mark.parametrize("text", FOUND)
def test_what_a_script_sets_too_late_for_a_fork_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.setenv("OMP_SET", "1")
    write(tmp_path / "setup_first.py", "import os\nos.environ['PYTORCH_JIT'] = '0'")
    write(tmp_path / "train.py", text)
    assert variables_set(locate("script", str(tmp_path / "train.py"))) == FOUND[text]


def test_threads_and_the_debug_level_are_applied_in_a_fork(tmp_path: Path) -> None:
    script = write(
        tmp_path / "script.py",
        "import os\nos.environ['OMP_NUM_THREADS'] = '2'\nos.environ['TORCH_DISTRIBUTED_DEBUG'] = 'DETAIL'\n"
        "import torch, torch.distributed as dist\nprint(torch.get_num_threads(), dist.get_debug_level())",
    )
    with Nest("warm", script=str(script)) as nest:
        ready = nest.do(nest.launcher.ready())
        assert (ready.is_fit, ready.sets) == (True, ("OMP_NUM_THREADS", "TORCH_DISTRIBUTED_DEBUG"))
        forked = nest.run(["script.py"], tmp_path)
    assert forked == run_python(["script.py"], tmp_path)
    assert ENVIRONMENT["OMP_NUM_THREADS"] == "1", "else nothing is proved"
