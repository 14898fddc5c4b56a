"""SHA-256 of texts, JSON values and files, in hexadecimal digits.

Cache keys, checkpoints and manifests store them, so a function that changed here would orphan every
cached entry.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any


def hash_bytes(data: bytes) -> str:
    """SHA-256 of bytes."""
    return hashlib.sha256(data).hexdigest()


def hash_text(text: str) -> str:
    """SHA-256 of a text in UTF-8."""
    # File names may contain bytes that are not UTF-8, which Python represents as surrogates.
    return hash_bytes(text.encode("utf-8", "surrogatepass"))


def hash_json(value: Any) -> str:
    """SHA-256 of the canonical JSON of a value."""
    return hash_text(canonical_json(value))


def canonical_json(value: Any) -> str:
    """The canonical JSON text of a value: sorted keys, no spaces, ASCII only; NaN is refused."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def hash_file(path: Path) -> str:
    """SHA-256 of a file, which is read in chunks."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
