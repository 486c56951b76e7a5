"""Files that survive a kill or a full disk with the old content or the new, never a mixture.

`write_atomic`, `sync_file` and `sync_directory` are what the run directory and the checkpoints are
built on; `why` turns an `OSError` into a few words; `to_json` is strict JSON on one line.
Nothing here knows what it writes.
"""

from __future__ import annotations

import errno
import json
import math
import os
import re
from pathlib import Path
from typing import Any

_WHY = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the disk quota is used up",
    errno.EFBIG: "the file-size limit is reached",
    errno.EROFS: "the file system is read-only",
}


def why(error: BaseException) -> str:
    """The cause in a few words, for the middle of a sentence.

    >>> why(OSError(errno.ENOSPC, "No space left on device"))
    'the disk is full'
    """
    number = getattr(error, "errno", None)
    if number is None and (found := re.search(r"\(os error (\d+)\)", str(error))):
        number = int(found[1])  # safetensors has an error of its own around the system's
    if number is not None:
        return _WHY.get(number) or os.strerror(number).lower()
    return " ".join(str(error).split()) or type(error).__name__


def to_json(value: Any) -> str:
    """One line of strict JSON.

    JSON has no NaN and no infinity, and a browser refuses a file that contains them, so they are
    written as the strings that `float()` and JavaScript's `Number()` read back.

    >>> to_json({"a": 1.5, "b": float("nan")})
    '{"a": 1.5, "b": "NaN"}'
    """
    try:
        return json.dumps(value, allow_nan=False)
    except ValueError:
        return json.dumps(_finite(value), allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return value


def sync_file(path: Path) -> None:
    """Make the content of a file outlive a power cut."""
    _sync(path, os.O_RDONLY)


def sync_directory(path: Path) -> None:
    """Make the names in a directory outlive a power cut."""
    _sync(path, os.O_RDONLY | os.O_DIRECTORY)


def _sync(path: Path, flags: int) -> None:
    descriptor = os.open(path, flags)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_atomic(path: Path, text: str) -> None:
    """Replace a file whole: a reader, or a kill at any moment, finds the old text or the new."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with open(temporary, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_directory(path.parent)
