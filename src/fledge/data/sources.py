"""Where rows come from: JSONL, JSON, Parquet, HF datasets and generator functions, told apart by
name.

Each reader is a function whose keyword arguments are what a recipe may give it. Reading only: rows
are not interpreted.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from fledge.config import Plugin
from fledge.errors import DataError, FledgeError
from fledge.plugins import check_arguments, nearest, resolve

Rows = list[dict[str, Any]]

GENERATORS: dict[str, str] = {
    "arithmetic": "fledge.envs.arithmetic:tasks",
    "arithmetic_demonstrations": "fledge.envs.arithmetic:demonstrations",
    "arithmetic_pairs": "fledge.envs.arithmetic:pairs",
    "aime": "fledge.envs.maths:aime_tasks",
    "countdown": "fledge.envs.countdown:tasks",
    "gsm8k": "fledge.envs.gsm8k:tasks",
    "gsm8k_multi_turn": "fledge.envs.gsm8k:tasks",
    "guess": "fledge.envs.guess:tasks",
    "maths": "fledge.envs.maths:tasks",
    "reasoning": "fledge.envs.reasoning:tasks",
    "search": "fledge.envs.search:tasks",
    "text2sql": "fledge.envs.text2sql:tasks",
}
"""Built-in names. Spelled as a recipe would spell them, because `data` does not import `envs`."""


def read_source(source: Plugin, key: str) -> Rows:
    """The rows behind a name, by the first rule that fits: generator, file, folder, `module:name`,
    hub name.
    """
    if callable(source.name):
        return _generated(source.name, source, key)
    name = source.name
    if name in GENERATORS:
        return _generated(GENERATORS[name], source, key)
    path = Path(name).expanduser()
    if path.is_file():
        return _from_file(path, source, key)
    if path.is_dir():
        arguments = check_arguments(folder, source.arguments, key, positional=2)
        return _dicts(folder(path, key, **arguments), f"{key}: row")
    if path.suffix.lower() in FILES:
        raise DataError(f"{key}: file {name!r} does not exist")
    if ":" in name:
        return _generated(name, source, key)
    if name.startswith((".", "/", "~")) or name.count("/") != 1:
        raise DataError(
            f"{key}: {name!r} is no file, folder or built-in generator"
            f"{nearest(name, list(GENERATORS))} "
            f'(built in: {", ".join(GENERATORS)}; your own: "module:name"; HF hub: "owner/name")'
        )
    arguments = check_arguments(hub, source.arguments, key, positional=2)
    return _dicts(hub(name, key, **arguments), f"{key}: row")


def jsonl(path: Path, key: str) -> Rows:
    """One JSON object per line; blank lines are skipped."""
    rows: Rows = []
    for number, line in enumerate(_text(path, key).split("\n"), 1):
        if line.strip():
            where = f"{key}: line {number} of {str(path)!r}"
            rows.append(_row(_parse(line, where), where))
    return rows


def json_list(path: Path, key: str) -> Rows:
    """One JSON list of objects."""
    rows = _parse(_text(path, key), f"{key}: {str(path)!r}")
    if not isinstance(rows, list):
        raise DataError(
            f"{key}: {str(path)!r} must hold a list of objects, not {type(rows).__name__}; "
            f"one object per line is .jsonl"
        )
    return _dicts(rows, f"{key}: item")


def parquet(path: Path, key: str) -> Rows:
    try:
        import pyarrow
        from pyarrow import parquet as reader
    except ImportError:
        raise _needs_extra(key, "a Parquet file", "pyarrow") from None
    try:
        rows: Rows = reader.read_table(path).to_pylist()
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{key}: {str(path)!r} is not readable Parquet: {_line(error)}") from None
    return rows


FILES: dict[str, Callable[[Path, str], Rows]] = {
    ".jsonl": jsonl,
    ".ndjson": jsonl,
    ".json": json_list,
    ".parquet": parquet,
}


def folder(path: Path, key: str, *, split: str | None = None, subset: str | None = None) -> Any:
    """A folder written by `save_to_disk`, or a folder of data files."""
    datasets = _datasets(key)
    saved = any((path / name).is_file() for name in ("dataset_info.json", "dataset_dict.json"))
    if not saved:
        return _load(datasets, str(path), key, split, subset)
    if subset is not None:
        raise DataError(f"{key}.subset: {str(path)!r} was saved from one subset; remove this key")
    try:
        found = datasets.load_from_disk(str(path))
    except Exception as error:  # the library's errors have no common base
        raise DataError(f"{key}: {str(path)!r} cannot be loaded: {_line(error)}") from None
    if isinstance(found, Mapping):
        name = split or "train"
        if name not in found:
            raise DataError(
                f"{key}.split: {str(path)!r} has no split {name!r} (it has: {', '.join(found)})"
            )
        return found[name]
    if split is not None:
        raise DataError(f"{key}.split: {str(path)!r} has no splits; remove this key")
    return found


def hub(name: str, key: str, *, split: str | None = None, subset: str | None = None) -> Any:
    """A dataset of the HF hub, or of its local cache."""
    return _load(_datasets(key), name, key, split, subset)


def _load(datasets: Any, name: str, key: str, split: str | None, subset: str | None) -> Any:
    try:
        return datasets.load_dataset(name, subset, split=split or "train")
    except Exception as error:  # the library's errors have no common base
        chosen = f"split {split or 'train'!r}" + (f", subset {subset!r}" if subset else "")
        raise DataError(
            f"{key}: dataset {name!r} ({chosen}) cannot be loaded: {_line(error)}"
        ) from None


def _datasets(key: str) -> Any:
    try:
        import datasets
    except ImportError:
        raise _needs_extra(key, "an HF dataset", "datasets") from None
    return datasets


def _from_file(path: Path, source: Plugin, key: str) -> Rows:
    reader = FILES.get(path.suffix.lower())
    if reader is None:
        raise DataError(
            f"{key}: {source.label!r} has an unknown extension (known: {', '.join(sorted(FILES))})"
        )
    check_arguments(reader, source.arguments, key, positional=2)
    return reader(path, key)


def _generated(spec: str | Callable[..., Any], source: Plugin, key: str) -> Rows:
    function = resolve(spec, {}, key)
    arguments = check_arguments(function, source.arguments, key)
    try:
        rows = list(function(**arguments))
    except FledgeError:
        raise
    except Exception as error:
        raise DataError(
            f"{key}: generator {source.label!r} failed: {type(error).__name__}: {_line(error)}"
        ) from error
    return _dicts(rows, f"{key}: generator {source.label!r}: row")


def _dicts(rows: Iterable[Any], where: str) -> Rows:
    return [_row(row, f"{where} {number}") for number, row in enumerate(rows, 1)]


def _row(row: Any, where: str) -> dict[str, Any]:
    if not isinstance(row, Mapping):
        raise DataError(f"{where} must be an object with named fields, not {type(row).__name__}")
    return dict(row)


def _text(path: Path, key: str) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"{key}: {str(path)!r} is not UTF-8 text: {error.reason}") from None
    except OSError as error:
        raise DataError(f"{key}: {str(path)!r} cannot be read: {error.strerror}") from None


def _parse(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        place = f"line {error.lineno}, " if error.lineno > 1 else ""
        raise DataError(
            f"{where} is not valid JSON: {error.msg} ({place}column {error.colno})"
        ) from None


def _needs_extra(key: str, what: str, package: str) -> DataError:
    return DataError(f"{key}: {what} needs {package}; run: pip install 'fledge[data]'")


def _line(error: Exception) -> str:
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0]
