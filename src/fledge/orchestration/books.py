"""Keeping the books of a run, RL or supervised: metrics, checkpoints, trackers, the display, and
the wish to stop.

`Books` never trains. A signal (Ctrl-C, SIGTERM) only sets `stopping`; the loop ends the step it is
in, saves and says how to continue. A second Ctrl-C stops at once, and the run continues from its
last checkpoint.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Mapping
from importlib.metadata import version
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Self

from fledge.config import Resolved
from fledge.errors import ConfigError
from fledge.log import Clock
from fledge.orchestration.checkpoint import Checkpoints, check_identity
from fledge.orchestration.console import make_console
from fledge.orchestration.rundir import RunDir
from fledge.orchestration.tracking import make_trackers

_PHASES = {
    "generate": "gen",
    "score": "score",
    "backward": "train",
    "step": "train",
    "publish": "publish",
    "save": "save",
    "evaluate": "eval",
}


class Books:
    """One run directory and everyone who wants to hear about the run.

    `identity` is what a resumed run must share with the one it continues, besides the
    configuration.
    """

    def __init__(self, resolved: Resolved[Any], identity: Mapping[str, Any], title: str) -> None:
        config = resolved.config
        self.resolved = resolved
        self.stopping = False
        self.began = time.monotonic()
        self.saved_step = 0
        self._seconds_before = 0.0
        self.clock = Clock()
        self.run_dir = RunDir.open(config.run_dir)
        try:
            self._identity = {**resolved.fixed(), **identity, **_software()}
            self.checkpoints = Checkpoints(
                self.run_dir.path, config.checkpoint.keep_last, config.checkpoint.keep_best
            )
            self._saved = self.checkpoints.latest()
            self.console = make_console(config.console, title, config.steps)
        except BaseException:
            self.run_dir.close()
            raise
        self.run_dir.listeners.append(self._hear)
        self.clock.listeners.append(self.console.phase)
        self._trackers: list[Any] = []
        self._handlers: dict[int, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._handlers[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        for tracker in self._trackers:
            tracker.close()
        self.console.close()
        self.run_dir.close()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.stopping:
            raise KeyboardInterrupt
        self.stopping = True
        # Straight to the terminal: the handler may have interrupted a write of the display.
        os.write(2, b"\nfinishing this step, then saving; press Ctrl-C again to stop at once\n")

    def _hear(self, kind: str, message: str) -> None:
        if kind == "warning":
            self.console.warn(message)

    def warn(self, message: str) -> None:
        """Say it loudly now, and keep it in `events.jsonl`."""
        self.run_dir.event("warning", message)

    def note(self, message: str) -> None:
        """Say it, and keep it in `events.jsonl`."""
        self.run_dir.event("note", message)
        self.console.note(message)

    def begin(self, restore: Callable[[Any], None]) -> int:
        """Resume from the newest checkpoint, or start: the step to go on from. `restore` gets the
        checkpoint.
        """
        saved = self._saved
        if saved is not None:
            check_identity(saved.state["identity"], self._identity, self.warn)
            if saved.step > self.resolved.config.steps:
                raise ConfigError(
                    f"steps: {self.resolved.config.steps} asked for, but the run in run_dir is "
                    f"already at step {saved.step}; raise steps or name another run_dir"
                )
            self._warn_about_steps(saved.state["steps"])
            restore(saved)
            self.saved_step = saved.step
            self._seconds_before = saved.state["seconds"]
        self.run_dir.begin_attempt(None if saved is None else saved.step)
        self.run_dir.write_config(self.resolved.to_yaml())
        config = self.resolved.config
        self._trackers = make_trackers(
            config.tracking, self.run_dir, self.resolved.values(), resumed=saved is not None
        )
        if saved is not None:
            done = "nothing left to do" if saved.step == config.steps else "going on"
            self.console.note(f"{saved.path}: step {saved.step} of {config.steps}, {done}")
        self.clock.lap()
        return 0 if saved is None else saved.step

    def _warn_about_steps(self, before: int) -> None:
        config = self.resolved.config
        if config.steps != before and config.optim.schedule != "constant":
            self.warn(
                f"steps changed from {before} to {config.steps}, and "
                f"optim.schedule={config.optim.schedule} depends on it: "
                "learning rates from here on differ from the first run's"
            )

    def record(self, step: int, metrics: Mapping[str, float]) -> None:
        """One step's metrics, to everyone; timing is added here."""
        found = {**metrics, **self._times(metrics)}
        self.run_dir.metrics(step, found)
        self.run_dir.end_step(step)
        for tracker in self._trackers:
            tracker.log(step, found)
        self.console.step(step, found)

    def _times(self, metrics: Mapping[str, float]) -> dict[str, float]:
        seconds = self.clock.lap()
        found: dict[str, float] = {"time/total": seconds.pop("total")}
        for phase, spent in seconds.items():
            name = f"time/{_PHASES[phase]}"
            found[name] = found.get(name, 0.0) + spent
        found["time/idle"] = max(0.0, found["time/total"] - sum(seconds.values()))
        tokens = metrics.get("perf/tokens")
        if tokens is not None and found["time/total"] > 0:
            found["perf/tok_s"] = tokens / found["time/total"]
        return found

    def save(
        self,
        step: int,
        write: Callable[[Path], None],
        state: Mapping[str, Any],
        score: float | None = None,
    ) -> None:
        """A checkpoint of `step`, whose files `write` puts into a directory; what was recorded up
        to it is made durable first.
        """
        with self.clock.span("save"):
            self.run_dir.sync()
            whole = {
                **state,
                "identity": self._identity,
                "steps": self.resolved.config.steps,
                "seconds": self.seconds(),
            }
            self.checkpoints.save(step, write, whole, score)
            self.saved_step = step

    def seconds(self) -> float:
        """Wall time of the run so far, earlier attempts up to their checkpoint included."""
        return self._seconds_before + time.monotonic() - self.began

    def due(self, step: int, every: int) -> bool:
        """Whether something that happens every `every` steps, and at the end, happens now."""
        return step == self.resolved.config.steps or bool(every and step % every == 0)

    def said_goodbye(self, step: int, command: str) -> None:
        self.run_dir.event("stopped", f"stopped at step {step}", step=step)
        self.console.note(f"stopped at step {step}, saved. To continue: {command}")


def _software() -> dict[str, str]:
    return {f"software.{name}": version(name) for name in ("torch", "transformers", "peft")}
