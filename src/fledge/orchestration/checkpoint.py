"""Checkpoints: complete or absent, verified before use, never silently replaced by an older one.

    checkpoints/step_20/    the trainer's files, state.json, manifest.json (size and sha256 of each)
    checkpoints/.tmp-*      being written or deleted; removed by the next process that trains here
    checkpoints/.old-*      set aside while its successor takes its name; put back after a kill

`Checkpoints` belongs to the process that holds the run directory's lock; `read_latest` and
`read_checkpoint` are for everyone else and change nothing. `check_identity` refuses to continue a
run as a different one. Only safetensors and JSON are read or written: nothing here unpickles.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError

from fledge.errors import CheckpointError
from fledge.orchestration.files import sync_directory, sync_file, why

SUFFIXES = (".safetensors", ".json")
MANIFEST = "manifest.json"
STATE = "state.json"
_NAME = re.compile(r"step_(0|[1-9]\d*)")
_SHOWN_CHANGES = 8


class Saved(NamedTuple):
    """A verified checkpoint: `Saved(20, Path("runs/a/checkpoints/step_20"), {"epoch": 1})`."""

    step: int
    path: Path
    state: dict[str, Any]


class Checkpoints:
    """Checkpoints of the run that this process trains; opening clears what a kill left behind."""

    def __init__(self, run_dir: str | Path, keep_last: int, keep_best: bool) -> None:
        assert keep_last >= 1
        self.directory = Path(run_dir) / "checkpoints"
        self._keep_last = keep_last
        self._keep_best = keep_best
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            _clear_leftovers(self.directory)
        except OSError as error:
            raise CheckpointError(
                f"run_dir: cannot prepare {self.directory}: {why(error)}; make it writable"
            ) from error

    def save(
        self,
        step: int,
        write: Callable[[Path], None],
        state: Mapping[str, Any],
        score: float | None = None,
    ) -> Path:
        """Save `step_{step}`: `write` puts its files into a directory, the rest is done here.

        On any failure the earlier checkpoints are as they were. Older ones are deleted only when
        the new one is complete and on disk. `state` comes back as JSON has it: tuples become lists.
        """
        final = self.directory / f"step_{step}"
        temporary = self.directory / f".tmp-step_{step}-{os.getpid()}"
        try:
            temporary.mkdir()
            write(temporary)
            _finish(temporary, step, state, score)
            _put_in_place(temporary, final)
        except (OSError, SafetensorError) as error:
            raise self._not_saved(step, error) from error
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
        self._prune(step)
        return final

    def latest(self) -> Saved | None:
        """The newest checkpoint, verified, or None when there is none."""
        return _latest(self.directory)

    def best(self) -> int | None:
        """The step with the highest score on disk; among equals the newest."""
        scores = {step: self._score(step) for step in _steps(self.directory)}
        scored = [(score, step) for step, score in scores.items() if score is not None]
        return max(scored)[1] if scored else None

    def _score(self, step: int) -> float | None:
        try:
            score = json.loads((self.directory / f"step_{step}" / MANIFEST).read_bytes())["score"]
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return score if isinstance(score, float) else None

    def _prune(self, just_saved: int) -> None:
        steps = _steps(self.directory)
        best = self.best() if self._keep_best else None
        keep = {just_saved, best, *steps[-self._keep_last :]}
        try:
            for step in steps:
                if step not in keep:
                    _remove(self.directory / f"step_{step}")
        except OSError as error:
            raise CheckpointError(
                f"checkpoint.keep_last: step_{just_saved} is saved, but an older checkpoint in "
                f"{self.directory} cannot be deleted: {why(error)}"
            ) from error

    def _not_saved(self, step: int, error: Exception) -> CheckpointError:
        steps = [s for s in _steps(self.directory) if s != step]
        left = f"step_{steps[-1]} is untouched" if steps else "no earlier checkpoint exists"
        return CheckpointError(
            f"checkpoint: cannot save step_{step} in run_dir {self.directory.parent}: {why(error)};"
            f" free space, lower checkpoint.keep_last or name another run_dir ({left})"
        )


def has_checkpoint(run_dir: str | Path) -> bool:
    """Whether a run has saved anything yet; nothing is read or verified."""
    return bool(_steps(Path(run_dir) / "checkpoints"))


def read_latest(run_dir: str | Path) -> Saved | None:
    """The newest checkpoint of a run, verified; for processes that do not train in `run_dir`."""
    return _latest(Path(run_dir) / "checkpoints")


def read_checkpoint(path: str | Path) -> Saved:
    """One checkpoint directory, verified against its manifest."""
    path = Path(path)
    problem = _problem(path)
    if problem:
        raise CheckpointError(f"checkpoint: {path} is damaged: {problem}")
    return _read_verified(path)


def _read_verified(path: Path) -> Saved:
    manifest = json.loads((path / MANIFEST).read_bytes())
    return Saved(manifest["step"], path, json.loads((path / STATE).read_bytes()))


def check_identity(
    saved: Mapping[str, Any], now: Mapping[str, Any], warn: Callable[[str], None]
) -> None:
    """Refuse to resume as a different run.

    Both are flat: fixed configuration values, and identities such as `data.fingerprint`. A
    difference is an error, and so is a key on one side only. Keys under `software.` only warn:
    another version of a library continues the run, if not bit for bit. So do keys under `code.`,
    the files of plug-ins. A fingerprint of None could not be taken, and warns, too.
    """
    current: dict[str, Any] = json.loads(json.dumps(dict(now)))  # tuples compare as saved
    changes: list[str] = []
    for key in sorted(saved.keys() | current.keys()):
        old, new = saved.get(key), current.get(key)
        if old == new and (key in saved) == (key in current):
            continue
        change = f"{key}: {_shown(saved, key)} -> {_shown(current, key)}"
        if key.startswith("code."):
            plug_in = key.removeprefix("code.")
            warn(f"{plug_in}: the file of this plug-in has changed since the checkpoint was made")
        elif key.startswith("software."):
            warn(f"{change}: the resumed run may differ from an uninterrupted one in the last bits")
        elif key.endswith(".fingerprint") and (old is None or new is None):
            warn(f"{change}: cannot tell whether it is what the checkpoint was made with")
        else:
            changes.append(change)
    if changes:
        more = len(changes) - _SHOWN_CHANGES
        listed = "; ".join(changes[:_SHOWN_CHANGES]) + (f"; and {more} more" if more > 0 else "")
        raise CheckpointError(
            f"run_dir holds a run that was made with other values: {listed}; "
            "start another run_dir or set it back"
        )


def _shown(values: Mapping[str, Any], key: str) -> str:
    text = json.dumps(values[key]) if key in values else "(not set)"
    return text if len(text) <= 60 else f"{text[:57]}..."


def _steps(directory: Path) -> list[int]:
    if not directory.is_dir():
        return []
    found = [(_NAME.fullmatch(p.name), p) for p in directory.iterdir()]
    return sorted(int(match[1]) for match, path in found if match and path.is_dir())


def _latest(directory: Path) -> Saved | None:
    steps = _steps(directory)
    if not steps:
        return None
    newest = directory / f"step_{steps[-1]}"
    problem = _problem(newest)
    if problem is None:
        return _read_verified(newest)
    earlier = (s for s in reversed(steps[:-1]) if _problem(directory / f"step_{s}") is None)
    complete = next(earlier, None)
    if complete is None:
        advice = "no earlier one is complete; delete it to start over or name another run_dir"
    else:
        advice = f"step_{complete} is complete; delete the damaged directory to continue from it"
    raise CheckpointError(f"checkpoint: {newest} is damaged: {problem}; {advice}")


def _finish(directory: Path, step: int, state: Mapping[str, Any], score: float | None) -> None:
    """Add state and manifest, and force all of it to disk."""
    _check_keys(state)
    assert not (directory / STATE).exists(), f"{STATE} is not the trainer's to write"
    (directory / STATE).write_text(json.dumps(dict(state)))
    files = _files(directory)
    for name in files:
        assert Path(name).suffix in SUFFIXES, f"a checkpoint holds safetensors and JSON, not {name}"
    manifest = {
        "step": step,
        "score": float(score) if score is not None and math.isfinite(score) else None,
        "files": {name: _describe(directory / name) for name in files},
    }
    (directory / MANIFEST).write_text(json.dumps(manifest, indent=1))
    for name in (*files, MANIFEST):
        sync_file(directory / name)
    for inner in [p for p in directory.rglob("*") if p.is_dir()]:
        sync_directory(inner)
    sync_directory(directory)


def _check_keys(value: Any) -> None:
    """JSON turns the key 1 into "1", and the resumed run would not find it."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            assert isinstance(key, str), f"state has the key {key!r}, but JSON keys are strings"
            _check_keys(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            _check_keys(item)


def _put_in_place(temporary: Path, final: Path) -> None:
    """Rename to the final name; an existing checkpoint steps aside and is put back on failure."""
    aside = final.with_name(f".old-{final.name}")
    replaces = final.exists()
    if replaces:
        os.rename(final, aside)
    try:
        os.rename(temporary, final)
    except OSError:
        if replaces:
            os.rename(aside, final)
        raise
    sync_directory(final.parent)
    if replaces:
        _remove(aside)


def _remove(path: Path) -> None:
    """Delete so that a kill in the middle leaves no half checkpoint under a valid name."""
    doomed = path.with_name(f".tmp-gone-{path.name}-{os.getpid()}")
    os.rename(path, doomed)
    shutil.rmtree(doomed)


def _clear_leftovers(directory: Path) -> None:
    for aside in directory.glob(".old-step_*"):
        final = aside.with_name(aside.name.removeprefix(".old-"))
        if final.exists():
            _remove(aside)
        else:
            os.rename(aside, final)
    for leftover in directory.glob(".tmp-*"):
        shutil.rmtree(leftover)


def _files(directory: Path) -> list[str]:
    found = (p.relative_to(directory).as_posix() for p in directory.rglob("*") if p.is_file())
    return sorted(name for name in found if name != MANIFEST)


def _describe(path: Path) -> dict[str, Any]:
    with open(path, "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return {"size": path.stat().st_size, "sha256": digest}


def _problem(path: Path) -> str | None:
    """What is wrong with a checkpoint, naming the file; None when it is complete and unaltered."""
    try:
        for name in _files(path):
            if Path(name).suffix not in SUFFIXES:
                return f"{name} is neither safetensors nor JSON, and nothing else is read"
        manifest = json.loads((path / MANIFEST).read_bytes())
        expected: dict[str, dict[str, Any]] = manifest["files"]
        if f"step_{manifest['step']}" != path.name:
            return f"{MANIFEST} belongs to step {manifest['step']}"
        for name in sorted({STATE, *expected, *_files(path)}):
            problem = _file_problem(path / name, name, expected.get(name))
            if problem:
                return problem
    except FileNotFoundError:
        return f"{MANIFEST} is missing"
    except (ValueError, KeyError, TypeError, AttributeError):
        return f"{MANIFEST} is not a manifest"
    except OSError as error:
        return f"it cannot be read: {why(error)}"
    return None


def _file_problem(path: Path, name: str, expected: Mapping[str, Any] | None) -> str | None:
    if not path.is_file():
        return f"{name} is missing"
    if expected is None:
        return f"{name} is not in {MANIFEST}"
    size = path.stat().st_size
    if size != expected["size"]:
        return f"{name} has {size} bytes instead of {expected['size']}"
    if _describe(path)["sha256"] != expected["sha256"]:
        return f"{name} was altered (its sha256 differs)"
    return None
