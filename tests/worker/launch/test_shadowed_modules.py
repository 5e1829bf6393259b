"""Modules beside a script come before those that the fork server has imported."""

from __future__ import annotations

from pathlib import Path

from holdfast.worker.launch.shadowed_modules import is_shadowed
from support.nest import Nest, run_python, write


def test_the_same_file_and_what_python_has_first_are_not_shadowed(tmp_path: Path) -> None:
    write(tmp_path / "statistics.py", "")
    write(tmp_path / "os.py", "")
    write(tmp_path / "sys.py", "")
    import statistics

    assert is_shadowed("statistics", str(tmp_path))
    assert not is_shadowed("statistics", str(Path(statistics.__file__).parent))
    assert not is_shadowed("os", str(tmp_path)) and not is_shadowed("sys", str(tmp_path))


def test_a_module_beside_the_script_is_the_users_whatever_its_name(warm: Nest, tmp_path: Path) -> None:
    """A module, a package, one that Python itself had first (os), and a directory that is no package (numpy)."""
    write(tmp_path / "statistics.py", "mine = 'own'")
    write(tmp_path / "queue" / "__init__.py", "from queue import deep")
    write(tmp_path / "queue" / "deep.py", "mine = 'deep'")
    write(tmp_path / "os.py", "mine = 'not asked for'")
    write(tmp_path / "numpy" / "data.txt", "")
    write(tmp_path / "preloads.py", "import statistics, queue, sys\nprint(statistics.mine, queue.deep.mine)")
    assert warm.run(["preloads.py"], tmp_path) == run_python(["preloads.py"], tmp_path)
    assert warm.run(["preloads"], tmp_path, kind="module") == run_python(["-m", "preloads"], tmp_path)
    uses = "import statistics, torch, numpy, os\nprint(statistics.mine, torch.ones(2).sum(), numpy.e, os.sep)"
    write(tmp_path / "script.py", uses)
    result = warm.run(["script.py"], tmp_path)
    assert (result.code, result.stdout) == (0, "own tensor(2.) 2.718281828459045 /\n"), result.stderr
