"""Copies of the metrics for TensorBoard, W&B and MLflow, any number of them at once.

`make_trackers` opens what `tracking.to` names. The packages are imported here, inside the functions
that need them, and nowhere else. What cannot work is an error at the start; a tracker that fails
during the run is warned about once and tried again later, and never stops or loses training:
`metrics.jsonl` is the record, these are views of it. A resumed run continues the same W&B and
MLflow run, whose ids are kept in `tracking.json`. Everything is written inside the run directory,
unless the tools' own environment variables point elsewhere.
"""

from __future__ import annotations

import importlib
import json
import netrc
import os
import secrets
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from fledge.config.schema import TrackingConfig
from fledge.errors import ConfigError
from fledge.interfaces import Tracker
from fledge.orchestration.files import why, write_atomic
from fledge.orchestration.rundir import RunDir

RETRY_SECONDS = 60.0
WANDB_CONNECT_SECONDS = 20.0


def make_trackers(
    config: TrackingConfig, run: RunDir, config_values: Mapping[str, Any], resumed: bool
) -> list[Tracker]:
    """Open every tracker that `tracking.to` names; call it after `run.begin_attempt`."""
    ids = _Ids(run.path / "tracking.json", resumed)
    values = dict(config_values)
    trackers: list[Tracker] = []
    for name in dict.fromkeys(config.to):
        try:
            trackers.append(Guarded(name, TRACKERS[name](config.project, run, values, ids), run))
        except ConfigError:
            _close_all(trackers)
            raise
        except Exception as error:
            _close_all(trackers)
            raise ConfigError(
                f"tracking.to: {name!r} cannot start: {why(error)}; cure that or take it out"
            ) from error
    return trackers


class Guarded:
    """A tracker whose failures are told once and cost nothing: what it missed is sent later."""

    def __init__(self, name: str, inner: Tracker, run: RunDir) -> None:
        self._name = name
        self._inner = inner
        self._run = run
        self._waiting: list[tuple[int, dict[str, float]]] = []
        self._not_before = 0.0
        self._warned = False

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._waiting.append((step, dict(metrics)))
        if time.monotonic() >= self._not_before:
            self._attempt(self._send)

    def close(self) -> None:
        self._attempt(self._send)
        self._attempt(self._inner.close)

    def _send(self) -> None:
        while self._waiting:
            self._inner.log(*self._waiting[0])
            del self._waiting[0]

    def _attempt(self, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as error:
            # Waiting for a server that is away, at every step, would slow training down.
            self._not_before = time.monotonic() + RETRY_SECONDS
            if not self._warned:
                self._warned = True
                self._run.event(
                    "warning",
                    f"tracking.to: {self._name!r} failed: {why(error)}; training goes on, "
                    "metrics.jsonl has everything, and sending is tried again later",
                )


class TensorBoard:
    """Event files in `tensorboard/`, by the writer of TensorBoard: that of torch imports more."""

    def __init__(self, project: str, run: RunDir, values: dict[str, Any], ids: _Ids) -> None:
        writer = _load("tensorboard.summary.writer.event_file_writer", "tensorboard")
        self._events = _load("tensorboard.compat.proto.event_pb2", "tensorboard")
        self._summaries = _load("tensorboard.compat.proto.summary_pb2", "tensorboard")
        self._writer = writer.EventFileWriter(str(run.path / "tensorboard"))
        # TensorBoard hides points of earlier attempts from this step on.
        log = self._events.SessionLog(status=self._events.SessionLog.START)
        first = run.step + 1 if ids.resumed else 0
        self._add(first, session_log=log)
        self._writer.flush()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        value = self._summaries.Summary.Value
        values = [value(tag=name, simple_value=number) for name, number in metrics.items()]
        self._add(step, summary=self._summaries.Summary(value=values))
        self._writer.flush()  # the writer's own two minutes would be lost by a kill

    def close(self) -> None:
        self._writer.close()

    def _add(self, step: int, **content: Any) -> None:
        self._writer.add_event(self._events.Event(step=step, wall_time=time.time(), **content))


class WandB:
    """A W&B run; offline when no API key is set or the server cannot be reached."""

    def __init__(self, project: str, run: RunDir, values: dict[str, Any], ids: _Ids) -> None:
        # Its own default is to wait at the end for as long as the server is away.
        os.environ.setdefault("WANDB_FINISH_TIMEOUT", "120")
        os.environ.setdefault("WANDB_SILENT", "true")
        wandb = _load("wandb", "wandb")
        known = ids.get("wandb")
        run_id = known or ids.keep("wandb", secrets.token_hex(4))
        settings = wandb.Settings(
            # Its capture of the console would garble the live display.
            console="off",
            init_timeout=WANDB_CONNECT_SECONDS,
        )
        options: dict[str, Any] = {
            "project": project,
            "name": run.path.resolve().name,
            "dir": str(run.path),
            "id": run_id,
            "config": values,
            "reinit": "create_new",
            "settings": settings,
        }
        mode = None if "WANDB_MODE" in os.environ else _wandb_mode()
        if mode != "offline":
            options["resume"] = "allow"  # offline, the id alone says what to continue
        try:
            self._run = wandb.init(mode=mode, **options)
        except wandb.errors.CommError as error:
            run.event("warning", f"tracking.to: 'wandb' goes on offline: {why(error)}")
            options.pop("resume", None)
            wandb.teardown()  # the failed start still holds the id
            self._run = wandb.init(mode="offline", **options)
        # W&B drops a step of its own that goes back, as ours does on resume; so ours is a metric.
        self._run.define_metric("step", hidden=True)
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log({**metrics, "step": step})

    def close(self) -> None:
        self._run.finish()


class Mlflow:
    """An MLflow run, in `mlruns/` of the run directory or where MLFLOW_TRACKING_URI points."""

    def __init__(self, project: str, run: RunDir, values: dict[str, Any], ids: _Ids) -> None:
        # A server that is away is given up on after seconds, not after MLflow's many minutes.
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        uri = os.environ.get("MLFLOW_TRACKING_URI")
        if not uri:
            uri = (run.path.resolve() / "mlruns").as_uri()
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        self._entities = _load("mlflow.entities", "mlflow")
        self._client = _load("mlflow", "mlflow").MlflowClient(tracking_uri=uri)
        known = ids.get("mlflow")
        self._id = known or ids.keep("mlflow", self._create(project, run, values))
        if known:
            self._client.update_run(known, status="RUNNING")

    def _create(self, project: str, run: RunDir, values: Mapping[str, Any]) -> str:
        found = self._client.get_experiment_by_name(project)
        experiment = found.experiment_id if found else self._client.create_experiment(project)
        created = self._client.create_run(experiment, run_name=run.path.resolve().name)
        run_id: str = created.info.run_id
        param = self._entities.Param
        params = [param(key, json.dumps(value)[:500]) for key, value in values.items()]
        for start in range(0, len(params), 100):
            self._client.log_batch(run_id, params=params[start : start + 100])
        return run_id

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        now = int(time.time() * 1000)
        metric = self._entities.Metric
        values = [metric(_mlflow_name(n), float(v), now, step) for n, v in metrics.items()]
        self._client.log_batch(self._id, metrics=values)

    def close(self) -> None:
        self._client.set_terminated(self._id)


class _Ids:
    """Which run of a tracker this run directory belongs to; a start from scratch makes new ones."""

    def __init__(self, path: Path, resumed: bool) -> None:
        self.resumed = resumed
        self._path = path
        self._ids: dict[str, str] = {}
        if resumed and path.exists():
            try:
                self._ids = dict(json.loads(path.read_text()))
            except (OSError, ValueError, TypeError) as error:
                raise ConfigError(
                    f"run_dir: {path} is damaged: {why(error)}; delete it to track as a new run"
                ) from None

    def get(self, name: str) -> str | None:
        return self._ids.get(name)

    def keep(self, name: str, value: str) -> str:
        self._ids[name] = value
        write_atomic(self._path, json.dumps(self._ids))
        return value


TRACKERS: dict[str, Callable[[str, RunDir, dict[str, Any], _Ids], Tracker]] = {
    "tensorboard": TensorBoard,
    "wandb": WandB,
    "mlflow": Mlflow,
}


def _load(module: str, extra: str) -> Any:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name and module.split(".")[0] == error.name.split(".")[0]:
            raise ConfigError(
                f"tracking.to: {extra!r} is not installed; pip install 'fledge[{extra}]'"
            ) from None
        raise


def _wandb_mode() -> str:
    """Online for those who have logged in: W&B would ask at the terminal, and wait."""
    host = urlsplit(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or ""
    if os.environ.get("WANDB_API_KEY"):
        return "online"
    try:
        return "online" if netrc.netrc().authenticators(host) else "offline"
    except (OSError, netrc.NetrcParseError):
        return "offline"


def _mlflow_name(name: str) -> str:
    """MLflow refuses the `@` of `eval/sums/avg@4`."""
    return name.replace("@", "_at_")


def _close_all(trackers: list[Tracker]) -> None:
    for tracker in trackers:
        tracker.close()
