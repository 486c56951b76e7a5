"""Rows from files, HF datasets or generator functions, and the tasks made of them.

`load_rows` reads, `to_tasks` names each row, `split_off` and `filter_by_length` choose,
`fingerprint` identifies a set of tasks. Nothing here knows tokens, and no choice depends on the
order of a file. `pyarrow` and `datasets` are imported only when a source needs them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from fledge.config import Plugin
from fledge.data.sources import read_source
from fledge.errors import DataError
from fledge.types import Task


def load_rows(source: Plugin, key: str) -> list[dict[str, Any]]:
    """The rows of `source`; `key` is the configuration key that an error names, such as
    `data.train`.
    """
    rows = read_source(source, key)
    if not rows:
        raise DataError(f"{key}: {source.label!r} has no rows")
    return rows


def to_tasks(rows: Iterable[Mapping[str, Any]], key: str = "data.train") -> list[Task]:
    """One task per distinct row, named by its `id` or `key` field, or by a hash of its content.

    Rows that are equal become one task: twice the same task in a batch is two groups with one name,
    and a duplicate that straddles a train/eval split would leak. `len(rows) - len(tasks)` is the
    count to report. Two rows that differ but claim one name are refused.

    >>> to_tasks([{"id": 7, "prompt": "2+2"}])[0].key
    '7'
    """
    found: dict[str, tuple[int, Task]] = {}
    for number, row in enumerate(rows, 1):
        task = Task(_name(row, f"{key}: row {number}"), row)
        first, known = found.setdefault(task.key, (number, task))
        if known is not task and _canonical(known.data, key) != _canonical(row, key):
            raise DataError(
                f"{key}: rows {first} and {number} differ but have the same id {task.key!r}; "
                f"make the field unique or rename it"
            )
    return [task for _, task in found.values()]


def split_off(tasks: Sequence[Task], n: int, seed: int) -> tuple[list[Task], list[Task]]:
    """`(train, eval)` with n tasks in eval, chosen by a hash of seed and key: the order of tasks
    plays no part.
    """
    if n >= len(tasks) > 0:
        raise DataError(
            f"data.eval_size: {n} of {len(tasks)} tasks would leave none to train on; "
            f"make it smaller"
        )
    ranked = sorted(tasks, key=lambda task: _sha(f"{seed}:{task.key}"))
    chosen = {task.key for task in ranked[:n]}
    return (
        [task for task in tasks if task.key not in chosen],
        [task for task in tasks if task.key in chosen],
    )


def filter_by_length(
    tasks: Sequence[Task],
    length_of: Callable[[Task], int],
    limit: int,
    key: str = "data.max_prompt_tokens",
) -> tuple[list[Task], int]:
    """The tasks of at most `limit` tokens, and how many were dropped."""
    lengths = [length_of(task) for task in tasks]
    kept = [task for task, length in zip(tasks, lengths, strict=True) if length <= limit]
    if tasks and not kept:
        raise DataError(
            f"{key}: {limit} drops all {len(tasks)} tasks; "
            f"the shortest prompt has {min(lengths)} tokens"
        )
    return kept, len(tasks) - len(kept)


def fingerprint(tasks: Iterable[Task]) -> str:
    """Identity of a set of tasks: their names and content, in any order."""
    return _sha("\n".join(sorted(task_digest(task) for task in tasks)))[:16]


def content(task: Task) -> str:
    """What a task says, whatever its name: equal for rows that differ in `id` or `key` alone."""
    said = {field: value for field, value in task.data.items() if field not in ("id", "key")}
    return _canonical(said, f"task {task.key!r}")


def task_digest(task: Task) -> str:
    """Identity of one task: name and content."""
    return _sha(json.dumps([task.key, _canonical(task.data, f"task {task.key!r}")]))


def _name(row: Mapping[str, Any], where: str) -> str:
    for field in ("id", "key"):
        if field in row:
            value = row[field]
            if isinstance(value, bool) or not isinstance(value, str | int) or value == "":
                raise DataError(f"{where}: {field!r} must be text or a whole number, got {value!r}")
            return str(value)
    return _sha(_canonical(row, where))[:12]


def _canonical(row: Mapping[str, Any], where: str) -> str:
    try:
        return json.dumps(row, sort_keys=True, ensure_ascii=False, default=_plain)
    except (TypeError, ValueError) as error:
        raise DataError(f"{where}: a row must be plain data: {error}") from None


def _plain(value: Any) -> str:
    """Dates, decimals and bytes, as Parquet holds them. Anything else may print its address, which
    is no identity.
    """
    if isinstance(value, bytes):
        return value.hex()
    if hasattr(value, "isoformat"):
        return str(value.isoformat())
    if type(value).__name__ in ("Decimal", "UUID"):
        return str(value)
    raise TypeError(f"a {type(value).__name__} has no stable text")


def _sha(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
