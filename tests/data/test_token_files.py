"""Windows of a token file, and the documents packed in them."""

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import holdfast as hf
from holdfast.data.token_files import IGNORED, TokenFile
from holdfast.errors import UsageError


@pytest.fixture
def path(tmp_path: Path) -> Any:
    np.arange(100, 131, dtype=np.uint16).tofile(tmp_path / "tokens.bin")
    return tmp_path / "tokens.bin"


def test_windows_follow_one_another_and_targets_are_shifted(path: Path) -> None:
    tokens = TokenFile(path, window_tokens=10)
    assert len(tokens) == 3
    for sample, window in enumerate(tokens[k] for k in range(3)):
        assert window["inputs"].tolist() == list(range(100 + 10 * sample, 110 + 10 * sample))
        assert window["targets"].tolist() == list(range(101 + 10 * sample, 111 + 10 * sample))
    with pytest.raises(IndexError):
        tokens[3]


def test_documents_do_not_see_one_another(tmp_path: Path) -> None:
    np.array([5, 6, 0, 7, 0, 8, 9], dtype=np.int32).tofile(tmp_path / "t")
    window = TokenFile(tmp_path / "t", window_tokens=6, dtype=np.int32, separator=0)[0]
    assert window["inputs"].tolist() == [5, 6, 0, 7, 0, 8]
    assert window["targets"].tolist() == [6, 0, IGNORED, 0, IGNORED, 9]
    assert window["documents"].tolist() == [0, 0, 0, 1, 1, 2]
    assert window["positions"].tolist() == [0, 1, 2, 0, 1, 0]


def test_workers_map_the_file_themselves(path: Path) -> None:
    tokens = TokenFile(path, window_tokens=10)
    assert tokens[0]["inputs"][0] == 100
    assert len(pickle.dumps(tokens)) < 1000
    loader = hf.Loader(tokens, global_batch_size=2, num_workers=1, seed_samples=False, rank=0, world_size=1)
    windows = []
    for batch in loader:
        windows += batch["inputs"][:, 0].tolist()
        loader.commit()
    loader.close()
    assert sorted(windows) == [100, 110, 120]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"window_tokens": 31}, "too few"),
        ({"window_tokens": 0}, "at least 1"),
        ({"window_tokens": 4, "dtype": np.int32}, "not whole tokens"),
    ],
)
def test_invalid_files_are_refused(path: Path, settings: Any, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        TokenFile(path, **settings)
    with pytest.raises(UsageError, match="not a file"):
        TokenFile(path.parent / "none", window_tokens=4)
