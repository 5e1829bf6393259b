"""Where a node's memory of a job is: its own images (vault.py) and other nodes' (replicas/), in one directory."""

from __future__ import annotations

import hashlib
from pathlib import Path
from urllib.parse import quote

NAME_CHARS_MAX = 200
"""File systems take 255."""


def node_dir(root: Path, job_id: str, node_id: str) -> Path:
    """One for each node of each job."""
    return root / directory_name(job_id) / directory_name(node_id)


def directory_name(text: str) -> str:
    """An id as one name in a file system, as a user may have chosen anything; another one for every other id."""
    name = quote(text, safe="", errors="surrogatepass") or "%"
    if name.startswith("."):
        name = f"%2E{name[1:]}"
    if len(name) > NAME_CHARS_MAX:
        digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()
        name = f"{name[: NAME_CHARS_MAX - len(digest) - 1]}%{digest}"
    return name
