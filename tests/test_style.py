"""What can be held of how this project is written: unique names, whole sentences, paths and snippets that are true."""

from __future__ import annotations

import ast
import builtins
import collections
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SRC = ROOT / "src/holdfast"
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("bench/*.md")])
TRACKED = [path for d in ("src", "tests", "bench", "examples", "docs") for path in sorted((ROOT / d).rglob("*.*"))]

MODULE_NAMES_TWICE = {
    "base": "one per plug-in package",
    "failures": "a worker's failure as a value, and the view of a job's failures",
    "logs": "the logging system, and the command that shows what workers printed",
    "events": "core's events, and the command that shows a job's",
    "master": "the process, and the command that starts it",
}
"""Base names of modules that may stand in two packages, and why."""

FRAGMENT = re.compile(
    r"(Of|As|By|Those|Until|Who|What|Which|Whose|Where|When|From|For|To|With|In|On|At|If|Once|After|Before|So|No|Not|None|One"
    r"|All|Both|Each|Every|It|That|This|How|Since|Than|Though|But|And|Or)\b"
)
"""First words of a docstring that is no sentence with a verb."""

FRAGMENTS_SHARE_MAX = 0.1

DIALECT = re.compile(r"\b(nobody|whoever|anew|for ever|somebody|new life|whomever|thereof)\b", re.IGNORECASE)
"""Words that an operator would not search for."""

WORKPLACE = re.compile(r"(?<![\w.])/(?:work|farm)/|\bassistants?\b")
"""Paths of one machine, which mean nothing on another."""

LOGGING_ITSELF = {
    SRC / "util/logs.py",
    SRC / "util/tasks.py",  # flushes all handlers before it ends the process
    SRC / "worker/launch/child_setup.py",  # silences a logger of torch's
}

LEVELS = {"debug", "info", "notice", "warning", "error"}


def sources() -> Iterator[tuple[Path, ast.Module]]:
    """Return every source file with its syntax tree."""
    for path in sorted(SRC.rglob("*.py")):
        yield path, ast.parse(path.read_text())


def test_a_class_name_is_defined_once() -> None:
    places = collections.defaultdict(list)
    for path, tree in sources():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(str(path.relative_to(SRC)))
    assert {name: found for name, found in places.items() if len(found) > 1} == {}


def test_a_module_name_is_used_once() -> None:
    places = collections.defaultdict(list)
    for path, _ in sources():
        if path.stem not in ("__init__", "__main__"):
            places[path.stem].append(str(path.relative_to(SRC)))
    twice = {name: found for name, found in places.items() if len(found) > 1}
    assert set(twice) <= set(MODULE_NAMES_TWICE), twice


def test_docstrings_of_functions_start_with_a_verb() -> None:
    fragments, total = [], 0
    for path, tree in sources():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and (text := ast.get_docstring(node)):
                total += 1
                if FRAGMENT.match(text):
                    fragments.append(f"{path.relative_to(SRC)}:{node.lineno} {text.splitlines()[0][:60]}")
    assert len(fragments) <= FRAGMENTS_SHARE_MAX * total, "\n".join(fragments)


def messages(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Return the texts of log calls and exceptions, with their lines."""
    for node in ast.walk(tree):
        is_log = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in LEVELS
        raised = node.exc if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) else None
        call = node if is_log else raised
        if call is None:
            continue
        for part in ast.walk(call):
            if isinstance(part, ast.Constant) and isinstance(part.value, str):
                yield part.lineno, part.value


def test_messages_use_the_words_of_operators() -> None:
    found = [
        f"{path.relative_to(SRC)}:{line} {text}"
        for path, tree in sources()
        for line, text in messages(tree)
        if DIALECT.search(text)
    ]
    assert found == []


def test_source_and_documents_are_written_in_plain_words() -> None:
    texts = [*SRC.rglob("*.py"), *DOCUMENTS, ROOT / "pyproject.toml"]
    assert [str(path.relative_to(ROOT)) for path in texts if DIALECT.search(path.read_text())] == []


def test_log_calls_have_a_stable_key() -> None:
    """`log.warning("fork-server-died", "the fork server died", …)`."""
    wrong = []
    for path, tree in sources():
        for node in ast.walk(tree):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in LEVELS):
                continue
            if not (isinstance(node.func.value, ast.Name) and node.func.value.id == "log"):
                continue
            key = node.args[0] if node.args else None
            is_key = isinstance(key, ast.JoinedStr) or (
                isinstance(key, ast.Constant) and re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)+", str(key.value))
            )
            if len(node.args) != 2 or not is_key:
                wrong.append(f"{path.relative_to(SRC)}:{node.lineno}")
    assert wrong == []


def test_there_is_one_logging_system() -> None:
    for path, tree in sources():
        imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names} | {
            node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)
        }
        assert "structlog" not in imported, path
        if path not in LOGGING_ITSELF:
            assert "logging" not in imported, f"{path.relative_to(SRC)}: use holdfast.util.logs"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_paths_named_in_documents_exist(document: Path) -> None:
    packages = "|".join(sorted(path.name for path in SRC.iterdir() if (path / "__init__.py").exists()))
    for named in re.findall(rf"`((?:{packages})/[\w/]+\.py)`", document.read_text()):
        assert (SRC / named).exists(), f"{document.name} names {named}, which does not exist"


def test_the_map_names_every_package() -> None:
    text = (ROOT / "docs/architecture.md").read_text()
    for path in SRC.rglob("__init__.py"):
        package = path.parent.relative_to(SRC)
        if package != Path() and any(path.parent.glob("[!_]*.py")):
            assert f"{package.name}/" in text, f"docs/architecture.md does not name the package {package}"


def test_the_glossary_has_at_most_forty_nouns() -> None:
    text = (ROOT / "docs/architecture.md").read_text()
    section = text.split("## Glossary", 1)[1].split("\n## ", 1)[0]
    rows = [line for line in section.splitlines() if line.startswith("| ") and not line.startswith(("| ---", "| noun"))]
    assert 20 <= len(rows) <= 40


# --- snippets


def snippets() -> list[tuple[str, int, str]]:
    """Return every Python block of the documents: where it stands, and its text."""
    found = []
    for document in DOCUMENTS:
        text = document.read_text()
        for match in re.finditer(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
            found.append((document.name, text[: match.start()].count("\n") + 1, match.group(1)))
    return found


GIVEN = {
    "hf", "torch", "nn", "DDP", "DistributedDataParallel", "fully_shard", "lr_scheduler", "np", "os", "sys", "dist",
    "job", "model", "opt", "optimizer", "data", "dataset", "loader", "step", "Net", "Bench", "Training", "variation",
    "build_model", "build_dataset", "cross_entropy", "load_dataset", "evaluate", "upload", "state", "steps", "device",
    "scheduler", "meter", "checkpointer", "loss", "args", "Path", "tokens", "epoch", "seed", "Record", "Addressed",
    "total", "train", "steps_per_epoch", "safetensors", "HuggingFaceStorageReader", "DataLoader", "rank", "save",
    "augment", "epochs", "loss_of", "clip_grad_norm_", "holdfast", "path", "start", "checkpoint",
}  # fmt: skip
"""Names that snippets take as given: the packages that a page speaks of, and what a reader's script has."""


@pytest.mark.parametrize(("document", "line", "text"), snippets(), ids=lambda value: str(value)[:40])
def test_python_blocks_compile_and_bind_their_names(document: str, line: int, text: str) -> None:
    tree = ast.parse(text.replace("…", "..."))
    bound = set(dir(builtins)) | GIVEN - {"loss"}
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name, ctx=ast.Store()):
                bound.add(name)
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name) | ast.AsyncFunctionDef(name=name):
                bound.add(name)
            case ast.arg(arg=name):
                bound.add(name)
            case ast.Import(names=names) | ast.ImportFrom(names=names):
                bound |= {(alias.asname or alias.name).split(".")[0] for alias in names}
            case ast.ExceptHandler(name=str(name)):
                bound.add(name)
    unbound = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)} - bound
    assert unbound == set(), f"{document}:{line}"


def test_nothing_names_the_machine_it_was_written_on() -> None:
    found = []
    for path in [*TRACKED, *DOCUMENTS]:
        if path.suffix in (".py", ".md", ".toml", ".sh", ".txt") and path != Path(__file__):
            found += [f"{path.relative_to(ROOT)}: {m.group()}" for m in WORKPLACE.finditer(path.read_text())]
    assert found == []


def test_nothing_says_to_install_holdfast_from_an_index() -> None:
    """While the name is not ours there, `pip install holdfast[extra]` would bring whatever others put there."""
    said = re.compile(r"pip install [^\n`]*\bholdfast(?![/.\w-])")
    texts = [*DOCUMENTS, *SRC.rglob("*.py"), *(ROOT / "examples").rglob("*.py")]
    assert [str(path.relative_to(ROOT)) for path in texts if said.search(path.read_text())] == []
    assert said.search("needs a package: pip install 'holdfast[s3]'") and said.search("pip install holdfast")


# --- tests of modules

TESTED_THROUGH = {
    "tests/agent/test_agent.py": ["agent/uplink", "util/network"],
    "tests/e2e/test_restarts.py": ["agent/view_stores"],
    "tests/agent/test_hangs.py": ["agent/worker_stacks"],
    "tests/agent/test_worker_group.py": ["agent/failure_reports"],
    "tests/agent/launch/test_launcher.py": [
        "worker/launch/child_setup",
        "worker/launch/start_fork_server",
        "worker/launch/store_host",
    ],
    "tests/checks/test_accelerators.py": ["checks/accelerators/mps"],
    "tests/cli/test_checkpoints.py": ["cli/checkpoint_tables", "storage/verify"],
    "tests/cli/test_child_failures.py": ["cli/launched"],
    "tests/cli/test_drain_resize_jobs.py": ["cli/ask_master", "master/operator_requests"],
    "tests/cli/test_main.py": ["__main__", "cli/terminal"],
    "tests/cli/test_run_flags.py": ["cli/run_flag_parser", "cli/addresses"],
    "tests/cli/test_simulate.py": ["cli/simulation_values"],
    "tests/cli/test_status_events_logs.py": ["cli/job_stacks", "cli/master_address"],
    "tests/cli/test_job_list.py": ["observe/stored_jobs"],
    "tests/core/test_bursts.py": ["core/rung_tries"],
    "tests/core/test_choose_strategy.py": ["core/planned_changes", "core/rung_plans"],
    "tests/core/test_notices.py": ["core/wording"],
    "tests/core/test_policy.py": ["core/form_view"],
    "tests/core/health/test_checkup.py": ["core/health/check_rounds"],
    "tests/data/test_loader.py": ["data/batch_source", "data/worker_dataset"],
    "tests/data/test_stream.py": ["data/shard_reader", "data/stream_step"],
    "tests/master/test_master.py": ["master/stack_requests"],
    "tests/observe/test_summary.py": ["observe/node_summary"],
    "tests/snapshots/parity/test_rounds.py": ["snapshots/parity/rebuild"],
    "tests/snapshots/test_hostile_memory.py": ["util/private_directories"],
    "tests/state/test_partition.py": ["state/block_loader"],
    "tests/state/test_stock_readers.py": ["state/safetensors_files"],
    "tests/state/test_tracked.py": ["state/modules", "state/step_backup"],
    "tests/state/test_tree.py": ["state/decode", "state/encode"],
    "tests/storage/test_directory.py": ["storage/direct_io", "storage/directory_publisher", "storage/publish"],
    "tests/storage/test_image.py": ["storage/archive_frames"],
    "tests/storage/test_stores.py": ["storage/fsspec_store"],
    "tests/storage/test_s3.py": ["storage/object_publisher"],
    "tests/test_failover.py": ["util/user_code"],
    "tests/wire/test_control.py": ["wire/store_passage"],
    "tests/worker/collectives/test_groups.py": ["worker/collectives/local_only", "worker/collectives/sockets"],
    "tests/worker/launch/test_script.py": [
        *("worker/launch/error_file", "worker/launch/no_reverse_dns", "worker/launch/reset_interpreter"),
        "worker/launch/stack_handler",
    ],
    "tests/worker/parallel/test_canonical.py": ["worker/parallel/flat_gradients"],
    "tests/worker/test_untracked.py": ["worker/own_generators", "worker/untracked_copies"],
    "tests/worker/test_undo_copy.py": ["state/state_size"],
    # What only whole jobs run: it starts with a worker's connection to an agent, and ends with other ranks.
    "tests/conformance/test_programs.py": [
        *("as_torchrun", "torchrun", "worker/launch/call_in_main", "worker/launch/caller_fork"),
        "worker/launch/function_call",
    ],
    "tests/conformance/test_ends.py": ["cli/launcher_error_file"],
    "tests/e2e/test_templates.py": ["cli/templates/train_fsdp2", "cli/templates/train_huggingface"],
    "tests/e2e/test_node_check.py": ["worker/check_pairs", "worker/examiner"],
    "tests/e2e/test_outside_of_steps.py": ["worker/outside_steps"],
    "tests/e2e/test_per_rank_state.py": ["worker/restore/local_state"],
    "tests/e2e/test_sample_audit.py": ["worker/sample_recorder"],
    "tests/e2e/test_scripts_of_others.py": ["worker/hand_drawn_batches"],
    "tests/e2e/test_session_faults.py": ["worker/bootstrap", "worker/worker_state"],
    "tests/e2e/test_spares.py": [
        "worker/parking",
        "worker/launch/spare_environment",
        "worker/collectives/recorded_answers",
    ],
    "tests/cli/test_doctor_and_plan.py": ["cli/doctor", "cli/cost_plans", "worker/device_doctor"],
}
"""Modules that no test names, each with the test that runs it: all of the others have a test that imports them, or one
of their own name."""


def test_every_module_has_a_test() -> None:
    tests = [path for path in (ROOT / "tests").rglob("*.py") if path != Path(__file__)]
    imported: set[str] = set()
    for path in tests:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                imported |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                imported |= {str(node.module), *(f"{node.module}.{alias.name}" for alias in node.names)}
    own = {path.stem.removeprefix("test_") for path in tests}
    modules = {path.relative_to(SRC).with_suffix("") for path in SRC.rglob("*.py") if path.name != "__init__.py"}
    without = {
        str(module)
        for module in modules
        if ".".join(("holdfast", *module.parts)) not in imported and module.name not in own
    }
    listed = [module for of_test in TESTED_THROUGH.values() for module in of_test]
    assert not [test for test in TESTED_THROUGH if not (ROOT / test).exists()]
    assert without - set(listed) == set(), "write a test of it, or name the test that runs it in TESTED_THROUGH"
    assert len(listed) == len(set(listed))
