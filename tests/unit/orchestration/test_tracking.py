"""Each tracker for real: write through ours, read back through theirs."""

from __future__ import annotations

import importlib
import json
import math
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import pytest

from fledge.config.schema import TrackingConfig
from fledge.errors import ConfigError
from fledge.interfaces import Tracker
from fledge.orchestration import tracking
from fledge.orchestration.rundir import RunDir, read_lines
from fledge.orchestration.tracking import make_trackers

Name = Literal["tensorboard", "wandb", "mlflow"]
VALUES = {"optim.lr": 0.001, "env.name": "sums", "rollout.stop": ["\n"], "model.lora": None}


@pytest.fixture(autouse=True)
def nobody_logged_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No key and no server of the developer's own may take part."""
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_DIR", "MLFLOW_TRACKING_URI"):
        monkeypatch.delenv(name, raising=False)
    for name in ("MLFLOW_ALLOW_FILE_STORE", "MLFLOW_DISABLE_TELEMETRY"):
        monkeypatch.setenv(name, "true")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "2")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))


@pytest.fixture
def run(tmp_path: Path) -> Iterator[RunDir]:
    run = RunDir.open(tmp_path / "run")
    run.begin_attempt(None)
    yield run
    run.close()


def needs(*packages: str) -> None:
    for package in packages:
        pytest.importorskip(package)


def track(
    run: RunDir, to: list[Name], points: Mapping[int, Mapping[str, float]], resumed: bool = False
) -> None:
    trackers = make_trackers(TrackingConfig(to=to, project="tests"), run, VALUES, resumed)
    assert len(trackers) == len(set(to))
    for step, metrics in points.items():
        for tracker in trackers:
            tracker.log(step, metrics)
    for tracker in trackers:
        tracker.close()


def resume(run: RunDir, step: int) -> RunDir:
    run.close()
    again = RunDir.open(run.path)
    again.begin_attempt(step)
    return again


def warnings(path: Path) -> list[str]:
    lines = read_lines(path / "events.jsonl")
    return [line["message"] for line in lines if line["kind"] == "warning"]


def tensorboard_points(path: Path, tag: str) -> list[tuple[int, float]]:
    name = "tensorboard.backend.event_processing.event_accumulator"
    accumulator = importlib.import_module(name).EventAccumulator(str(path / "tensorboard"))
    accumulator.Reload()
    return [(e.step, round(e.value, 4)) for e in accumulator.Scalars(tag)]


def mlflow_client(path: Path) -> Any:
    return importlib.import_module("mlflow").MlflowClient((path / "mlruns").as_uri())


def mlflow_points(path: Path, name: str) -> list[tuple[int, float]]:
    run_id = json.loads((path / "tracking.json").read_text())["mlflow"]
    return [(m.step, m.value) for m in mlflow_client(path).get_metric_history(run_id, name)]


def wandb_records(path: Path) -> list[tuple[str, dict[int, float]]]:
    """Per offline file, its run id and the history of `reward/mean` by our step."""
    # Offline, finish() may return before W&B's service has written the file; the end of a process
    # waits for the service, and so does this.
    importlib.import_module("wandb").teardown()
    protobuf = importlib.import_module("wandb.proto.wandb_internal_pb2")
    found = []
    for file in sorted((path / "wandb").glob("offline-run-*/run-*.wandb")):
        history = {}
        for data in leveldb_log(file.read_bytes()):
            record = protobuf.Record.FromString(data)
            items = {
                item.key or "/".join(item.nested_key): json.loads(item.value_json)
                for item in record.history.item
            }
            if "reward/mean" in items:
                history[items["step"]] = items["reward/mean"]
        found.append((file.stem.removeprefix("run-"), history))
    return found


def leveldb_log(data: bytes) -> Iterator[bytes]:
    """The records of a LevelDB log, W&B's format: crc, length, type and data in 32 KiB blocks."""
    at, whole = 7, b""  # W&B's own header comes first
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        size, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        whole += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # a whole record, or its last part
            yield whole
            whole = b""


def test_tensorboard_points_come_back_and_a_resume_hides_superseded_ones(run: RunDir) -> None:
    needs("tensorboard")
    track(run, ["tensorboard"], {s: {"reward/mean": s / 10} for s in (1, 2, 3, 4)})
    again = resume(run, 2)
    track(again, ["tensorboard"], {3: {"reward/mean": 0.9}}, resumed=True)
    again.close()
    assert tensorboard_points(run.path, "reward/mean") == [(1, 0.1), (2, 0.2), (3, 0.9)]
    assert not warnings(run.path)


def test_tensorboard_forgets_all_when_the_run_starts_over(run: RunDir) -> None:
    needs("tensorboard")
    track(run, ["tensorboard"], {0: {"a": 1.0}, 1: {"a": 2.0}})
    track(run, ["tensorboard"], {0: {"a": 3.0}})
    assert tensorboard_points(run.path, "a") == [(0, 3.0)]


def test_mlflow_history_comes_back_and_a_resume_continues_the_run(run: RunDir) -> None:
    needs("mlflow")
    points = {"reward/mean": 0.5, "eval/sums/avg@4": 0.25, "odd": math.inf}
    track(run, ["mlflow"], {1: points})
    first = json.loads((run.path / "tracking.json").read_text())["mlflow"]
    again = resume(run, 1)
    track(again, ["mlflow"], {2: {"reward/mean": 0.75}}, resumed=True)
    assert mlflow_points(run.path, "reward/mean") == [(1, 0.5), (2, 0.75)]
    assert mlflow_points(run.path, "eval/sums/avg_at_4") == [(1, 0.25)]
    found = mlflow_client(run.path).get_run(first)
    assert found.data.params["optim.lr"] == "0.001" and found.info.status == "FINISHED"
    track(again, ["mlflow"], {1: {"reward/mean": 0.1}}, resumed=False)
    assert json.loads((run.path / "tracking.json").read_text())["mlflow"] != first
    again.close()
    assert not warnings(run.path)


def test_wandb_works_offline_and_a_resume_keeps_the_id(run: RunDir) -> None:
    needs("wandb")
    track(run, ["wandb"], {1: {"reward/mean": 0.5}, 2: {"reward/mean": 0.6}})
    again = resume(run, 1)
    track(again, ["wandb"], {2: {"reward/mean": 0.7}}, resumed=True)
    again.close()
    (id_1, history_1), (id_2, history_2) = wandb_records(run.path)
    assert id_1 == id_2 == json.loads((run.path / "tracking.json").read_text())["wandb"]
    assert history_1 == {1: 0.5, 2: 0.6} and history_2 == {2: 0.7}
    assert not warnings(run.path)


def test_all_at_once(run: RunDir) -> None:
    needs("tensorboard", "wandb", "mlflow")
    points = {s: {"reward/mean": float(s), "eval/sums/avg@1": 0.5} for s in (1, 2)}
    track(run, ["tensorboard", "wandb", "mlflow", "tensorboard"], points)
    assert tensorboard_points(run.path, "reward/mean") == [(1, 1.0), (2, 2.0)]
    assert mlflow_points(run.path, "reward/mean") == [(1, 1.0), (2, 2.0)]
    assert [history for _, history in wandb_records(run.path)] == [{1: 1.0, 2: 2.0}]
    assert not warnings(run.path)


@pytest.mark.parametrize("name", ["tensorboard", "wandb", "mlflow"])
def test_a_missing_package_is_an_error_that_says_how_to_install_it(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, name: Name
) -> None:
    real = importlib.import_module

    def absent(module: str) -> Any:
        if module.split(".")[0] == name:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return real(module)

    monkeypatch.setattr(importlib, "import_module", absent)
    expected = rf"^tracking\.to: '{name}' is not installed; pip install 'fledge\[{name}\]'$"
    with pytest.raises(ConfigError, match=expected):
        make_trackers(TrackingConfig(to=[name]), run, VALUES, False)


def test_a_tracker_that_cannot_start_is_an_error(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    needs("mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    with pytest.raises(ConfigError, match=r"tracking\.to: 'mlflow' cannot start: ") as caught:
        make_trackers(TrackingConfig(to=["mlflow"]), run, VALUES, False)
    assert "\n" not in str(caught.value)


class Flaky:
    """Fails while `down`, and notes what it was given."""

    def __init__(self) -> None:
        self.down = True
        self.got: list[int] = []

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        if self.down:
            raise OSError("server away")
        self.got.append(step)

    def close(self) -> None:
        self.log(-1, {})


def flaky(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> tuple[Flaky, Tracker]:
    inner = Flaky()
    monkeypatch.setitem(tracking.TRACKERS, "wandb", lambda *_: inner)
    (tracker,) = make_trackers(TrackingConfig(to=["wandb"]), run, VALUES, False)
    return inner, tracker


def test_a_tracker_that_fails_is_warned_about_once_and_catches_up(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    inner, tracker = flaky(run, monkeypatch)
    tracker.log(1, {"a": 1.0})
    inner.down = False
    tracker.log(2, {"a": 2.0})
    assert inner.got == [], "tried again at once"
    now += tracking.RETRY_SECONDS + 1
    tracker.log(3, {"a": 3.0})
    tracker.close()
    assert inner.got == [1, 2, 3, -1]
    (text,) = warnings(run.path)
    assert text.startswith("tracking.to: 'wandb' failed: server away; training goes on")


def test_a_tracker_that_never_comes_back_does_not_stop_the_run(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    inner, tracker = flaky(run, monkeypatch)
    for step in range(5):
        tracker.log(step, {"a": 1.0})
    tracker.close()
    assert inner.got == [] and len(warnings(run.path)) == 1


def test_importing_this_module_imports_no_tracker() -> None:
    script = (
        "import sys, fledge.orchestration.tracking\n"
        "print([m for m in ('tensorboard', 'wandb', 'mlflow') if m in sys.modules])"
    )
    path = ":".join(p for p in sys.path if p)
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env={"PYTHONPATH": path}
    )
    assert done.stdout == "[]\n", done.stdout + done.stderr


def test_wandb_goes_on_offline_when_its_server_is_away(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    needs("wandb")
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    monkeypatch.setattr(tracking, "WANDB_CONNECT_SECONDS", 1.0)
    track(run, ["wandb"], {1: {"reward/mean": 0.5}})
    assert [history for _, history in wandb_records(run.path)] == [{1: 0.5}]
    (text,) = warnings(run.path)
    assert text.startswith("tracking.to: 'wandb' goes on offline: ")
