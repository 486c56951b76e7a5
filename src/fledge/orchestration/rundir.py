"""The run directory: the one place where a run writes, and all that anything else reads about it.

    config.yaml      resolved configuration        metrics.jsonl    one line per step
    episodes.jsonl   one line per episode          events.jsonl     attempts, warnings, notes
    report.json      how the run ended             checkpoints/     see `checkpoint.py`

`RunDir` is the writer; an operating-system lock makes it the only one. `read_lines` and
`live_lines` are for readers, take no lock, and may run while a run is writing. Every line carries
`step`, `attempt` and `time`.

A resumed run repeats the steps after its checkpoint. Their first telling stays in the files but is
superseded: a line of attempt `a` and step `s` is dead once a later attempt resumed from a step
below `s`. `live_lines` leaves dead lines out. Nothing here ever rewrites a complete line, trains,
or decides where to resume.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, Literal

from fledge.errors import ConfigError
from fledge.orchestration.files import sync_directory, to_json, why, write_atomic
from fledge.types import Episode, Message, Segment

LOGS = ("metrics", "episodes", "events")
EventListener = Callable[[str, str], None]


class RunDir:
    """The writer of one run directory; make it with `RunDir.open`, and `close` it.

    `begin_attempt` comes before the first metric or episode. Metrics and episodes wait in memory
    until `end_step`, so a killed step leaves nothing behind. Call `end_step` and `sync` before
    saving the checkpoint of that step: a resumed run never repeats a step that its checkpoint
    contains, so the lines up to it must be on disk. Events are written at once.
    """

    def __init__(self, path: Path, lock: int) -> None:
        self.path = path
        self.attempt = 1
        self.step = 0
        self.listeners: list[EventListener] = []
        self._lock = lock
        self._begun = False
        self._waiting: dict[str, list[str]] = {"metrics": [], "episodes": []}
        self._files: dict[str, int] = {}

    @classmethod
    def open(cls, path: str | Path) -> RunDir:
        """Create or reopen a run directory, lock it, and cut off what a kill left half written."""
        root = _directory(path)
        run = cls(root, _take_lock(root))
        try:
            _do_not_share_lock_with_forks(run)
            torn = {name: _cut_torn_line(run._open_log(name)) for name in LOGS}
            run.attempt = 1 + max((a for a, _ in _attempts(root)), default=0)
            for name, size in torn.items():
                if size:
                    run.event("repair", f"{name}.jsonl: cut off a torn last line of {size} bytes")
        except OSError as error:
            run.close()
            raise _cannot_write(root, error) from error
        except BaseException:
            run.close()
            raise
        return run

    def begin_attempt(self, resumed_from: int | None) -> int:
        """Start a new attempt; `resumed_from` is the checkpoint's step, or None from scratch."""
        assert not self._begun, "an attempt has already begun"
        self._begun = True
        self.step = resumed_from or 0
        text = "started" if resumed_from is None else f"resumed from step {resumed_from}"
        self.event("attempt", text, resumed_from=resumed_from)
        # A lost attempt line would bring superseded lines back to life.
        self._guard(partial(os.fsync, self._files["events"]))
        return self.attempt

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """One line of metrics, written by the next `end_step`."""
        numbers = {name: float(value) for name, value in values.items()}
        self._wait("metrics", step, numbers)

    def episode(self, step: int, epoch: int, episode: Episode) -> None:
        """One finished episode, whatever becomes of it, written by the next `end_step`."""
        self._wait("episodes", step, episode_record(epoch, episode))

    def event(self, kind: str, message: str, **fields: Any) -> None:
        """Something worth knowing, written now. Listeners hear of it, too."""
        line = {**self._stamp(fields.pop("step", self.step)), "kind": kind, "message": message}
        self._append("events", [to_json({**line, **fields})])
        for listener in self.listeners:
            listener(kind, message)

    def end_step(self, step: int) -> None:
        """Hand all waiting lines to the operating system: a kill can no longer lose them."""
        self.step = step
        for name, lines in self._waiting.items():
            self._append(name, lines)
            lines.clear()

    def sync(self) -> None:
        """Make everything written so far outlive a power cut; used just before a checkpoint."""
        for descriptor in self._files.values():
            self._guard(partial(os.fsync, descriptor))

    def write_config(self, text: str) -> None:
        self._guard(lambda: write_atomic(self.path / "config.yaml", text))

    def write_report(self, report: Mapping[str, Any]) -> None:
        """How the run went: replaced whole, so that a reader never sees half of it."""
        text = json.dumps(json.loads(to_json(dict(report))), indent=2) + "\n"
        self._guard(lambda: write_atomic(self.path / "report.json", text))

    def close(self) -> None:
        """Give the directory back. Lines of an unfinished step are dropped: it will be repeated."""
        for descriptor in self._files.values():
            os.close(descriptor)
        self._files.clear()
        self._drop_lock()

    def _drop_lock(self) -> None:
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def _stamp(self, step: int) -> dict[str, Any]:
        return {"step": step, "attempt": self.attempt, "time": round(time.time(), 3)}

    def _wait(self, name: str, step: int, record: Mapping[str, Any]) -> None:
        assert self._begun, "begin_attempt comes before the first line"
        self._waiting[name].append(to_json({**self._stamp(step), **record}))

    def _open_log(self, name: str) -> int:
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND
        self._files[name] = os.open(self.path / f"{name}.jsonl", flags, 0o644)
        return self._files[name]

    def _append(self, name: str, lines: list[str]) -> None:
        if lines:
            data = "".join(f"{line}\n" for line in lines).encode()
            self._guard(lambda: _write_all_or_nothing(self._files[name], data))

    def _guard(self, action: Callable[[], object]) -> None:
        try:
            action()
        except OSError as error:
            raise _cannot_write(self.path, error) from error


def episode_record(epoch: int, episode: Episode) -> dict[str, Any]:
    """An episode as `episodes.jsonl` has it, exact to the token: `fledge replay` shows it again."""
    segments = episode.segments
    return {
        "task_key": episode.task_key,
        "epoch": epoch,
        "index": episode.index,
        "reward": episode.reward,
        "rewards": list(episode.rewards),
        "outcome": episode.outcome.value,
        "components": dict(episode.components),
        "messages": [message_record(m) for m in episode.messages],
        "tokens": sum(len(s.token_ids) for s in segments),
        "response_tokens": episode.response_length,
        "segments": [segment_record(s) for s in segments],
        "info": dict(episode.info),
        "error": episode.error,
    }


def message_record(message: Message) -> dict[str, Any]:
    record: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.tool_calls:
        record["tool_calls"] = [asdict(call) for call in message.tool_calls]
    return record | {k: v for k in ("reasoning", "tool") if (v := getattr(message, k))}


def segment_record(segment: Segment) -> dict[str, Any]:
    """Ids of all tokens; of those that were sampled the log-probs in order, and where they begin
    and end under which version; and which of them a rule has cleared.
    """
    sampled = [i for i, version in enumerate(segment.versions) if version >= 0]
    runs: list[list[int]] = []
    for place in sampled:
        if runs and runs[-1][1] == place and runs[-1][2] == segment.versions[place]:
            runs[-1][1] += 1
        else:
            runs.append([place, place + 1, segment.versions[place]])
    cleared = [[i, segment.cleared_by[i]] for i in sampled if not segment.trained[i]]
    return {
        "ids": list(segment.token_ids),
        "sampled": runs,
        "logps": [round(segment.logps[i], 6) for i in sampled],
        **({"cleared": cleared} if cleared else {}),
    }


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The complete lines of a log, oldest first. A last line still being written is left out."""
    try:
        file = open(path, "rb")  # noqa: SIM115
    except FileNotFoundError:
        return
    with file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                return
            try:
                yield json.loads(line)
            except ValueError:
                raise ConfigError(
                    f"run_dir: {path} line {number} is not JSON: the file was damaged or edited; "
                    "delete that line or name another run_dir"
                ) from None


def live_lines(
    run_dir: str | Path, log: Literal["metrics", "episodes"]
) -> Iterator[dict[str, Any]]:
    """The lines that count: those that no later attempt has superseded."""
    root = Path(run_dir)
    last_step = _last_live_steps(_attempts(root))
    for line in read_lines(root / f"{log}.jsonl"):
        if line["step"] <= last_step.get(line["attempt"], line["step"]):
            yield line


def _attempts(root: Path) -> list[tuple[int, int]]:
    """`(attempt, step it resumed from)`; a start from scratch leaves nothing alive, hence -1."""
    return [
        (line["attempt"], -1 if line["resumed_from"] is None else line["resumed_from"])
        for line in read_lines(root / "events.jsonl")
        if line["kind"] == "attempt"
    ]


def _last_live_steps(attempts: list[tuple[int, int]]) -> dict[int, int]:
    """Per attempt, the lowest step that a later attempt resumed from."""
    return {
        attempt: min(resumed for later, resumed in attempts if later > attempt)
        for attempt, _ in attempts
        if attempt < attempts[-1][0]
    }


def _directory(path: str | Path) -> Path:
    if not str(path):
        raise ConfigError("run_dir: is empty; name the directory that this run writes to")
    try:
        root = Path(path).expanduser()
        root.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise ConfigError(f"run_dir: {path} is or goes through a file; name a directory") from None
    except (OSError, ValueError, RuntimeError) as error:
        raise ConfigError(f"run_dir: cannot create {path!s}: {why(error)}; name another") from None
    return root


def _cannot_write(root: Path, error: OSError) -> ConfigError:
    return ConfigError(
        f"run_dir: cannot write to {root}: {why(error)}; make it writable or name another run_dir"
    )


def _take_lock(root: Path) -> int:
    """An exclusive lock that the operating system releases however the process ends."""
    try:
        descriptor = os.open(root / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise _cannot_write(root, error) from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, str(os.getpid()).encode(), 0)
        sync_directory(root)
    except BlockingIOError:
        owner = os.pread(descriptor, 32, 0).decode() or "unknown"
        os.close(descriptor)
        raise ConfigError(
            f"run_dir: {root} is in use by another process (pid {owner}); "
            "wait for it to end or name another run_dir"
        ) from None
    except OSError as error:
        os.close(descriptor)
        raise _cannot_write(root, error) from error
    return descriptor


def _do_not_share_lock_with_forks(run: RunDir) -> None:
    """A forked worker that outlives a killed run would hold on to its lock and block a resume."""
    reference = weakref.ref(run)

    def in_child() -> None:
        parent = reference()
        if parent is not None:
            parent._drop_lock()

    os.register_at_fork(after_in_child=in_child)


def _write_all_or_nothing(descriptor: int, data: bytes) -> None:
    """Append, or leave the file as it was: a full disk must not leave half a line in the middle."""
    size = os.fstat(descriptor).st_size
    try:
        left = memoryview(data)
        while left:
            left = left[os.write(descriptor, left) :]
    except OSError:
        os.ftruncate(descriptor, size)
        raise


def _cut_torn_line(descriptor: int) -> int:
    """Cut the file after its last newline; returns how many bytes went."""
    size = end = os.fstat(descriptor).st_size
    while end:
        start = max(0, end - 65536)
        newline = os.pread(descriptor, end - start, start).rfind(b"\n")
        if newline >= 0:
            end = start + newline + 1
            break
        end = start
    if end < size:
        os.ftruncate(descriptor, end)
    return size - end
