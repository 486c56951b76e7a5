from __future__ import annotations

import errno
import json
import multiprocessing
import os
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fledge.errors import ConfigError
from fledge.orchestration.rundir import RunDir, live_lines, read_lines
from fledge.types import Episode, Message, Outcome, Segment


def begun(path: Path, resumed_from: int | None = None) -> RunDir:
    run = RunDir.open(path)
    run.begin_attempt(resumed_from)
    return run


def write_steps(run: RunDir, *steps: int) -> None:
    for step in steps:
        run.metrics(step, {"reward/mean": step / 10})
        run.end_step(step)


def alive(path: Path) -> list[tuple[int, int]]:
    return [(line["attempt"], line["step"]) for line in live_lines(path, "metrics")]


def test_lines_carry_step_attempt_and_time_and_floats_come_back_exactly(tmp_path: Path) -> None:
    run = begun(tmp_path / "new" / "run")
    run.metrics(3, {"reward/mean": 0.1 + 0.2, "optim/lr": 1e-17})
    run.end_step(3)
    run.close()
    (line,) = live_lines(run.path, "metrics")
    assert line["step"] == 3 and line["attempt"] == 1 and line["time"] > 1e9
    assert line["reward/mean"] == 0.1 + 0.2 and line["optim/lr"] == 1e-17


def test_lines_wait_for_the_end_of_the_step(tmp_path: Path) -> None:
    run = begun(tmp_path)
    run.metrics(1, {"a": 1.0})
    assert alive(tmp_path) == []
    run.end_step(1)
    assert alive(tmp_path) == [(1, 1)]
    run.end_step(2)
    assert alive(tmp_path) == [(1, 1)], "a step was written twice"
    run.close()


def test_episode_line_has_text_rewards_counts_and_versions(tmp_path: Path) -> None:
    segment = Segment(
        (5, 6, 7, 1), (0.0, 0.0, -0.7, -0.1), (False, False, True, True), (-1, -1, 4, 5)
    )
    messages = (Message("user", "2+2\n"), Message("assistant", "vier \ud800 \u2028 4"))
    episode = Episode(
        "2+2", 3, (segment, segment), (0.25, 0.5), Outcome.TRUNCATED, messages, error="e"
    )
    run = begun(tmp_path)
    run.episode(7, 2, episode)
    run.end_step(7)
    run.close()
    (line,) = live_lines(tmp_path, "episodes")
    assert line["task_key"] == "2+2" and line["epoch"] == 2 and line["index"] == 3
    assert line["step"] == 7 and line["reward"] == 0.75 and line["rewards"] == [0.25, 0.5]
    assert line["outcome"] == "truncated" and line["error"] == "e"
    assert line["segments"][0] == {
        "ids": [5, 6, 7, 1],
        "sampled": [[2, 3, 4], [3, 4, 5]],
        "logps": [-0.7, -0.1],
    }
    assert line["tokens"] == 8 and line["response_tokens"] == 4 and len(line["segments"]) == 2
    assert [m["content"] for m in line["messages"]] == [m.content for m in messages]


def test_a_number_that_json_does_not_have_is_kept_as_text(tmp_path: Path) -> None:
    run = begun(tmp_path)
    run.metrics(1, {"a": float("nan"), "b": float("-inf"), "c": 2.0})
    run.end_step(1)
    run.close()
    text = (tmp_path / "metrics.jsonl").read_text()
    line = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert (line["a"], line["b"], line["c"]) == ("NaN", "-Infinity", 2.0)


def test_attempts_count_up_and_resume_supersedes_later_steps(tmp_path: Path) -> None:
    first = begun(tmp_path)
    write_steps(first, 1, 2, 3, 4, 5)
    first.close()
    second = begun(tmp_path, resumed_from=2)
    assert second.attempt == 2
    write_steps(second, 3, 4)
    second.close()
    third = begun(tmp_path, resumed_from=4)
    write_steps(third, 5)
    third.close()
    assert alive(tmp_path) == [(1, 1), (1, 2), (2, 3), (2, 4), (3, 5)]
    fourth = begun(tmp_path, resumed_from=1)
    write_steps(fourth, 2)
    fourth.close()
    assert alive(tmp_path) == [(1, 1), (4, 2)]
    assert len(list(read_lines(tmp_path / "metrics.jsonl"))) == 9, (
        "a reader must not delete history"
    )


def test_a_start_from_scratch_supersedes_everything(tmp_path: Path) -> None:
    first = begun(tmp_path)
    write_steps(first, 0, 1)
    first.close()
    second = begun(tmp_path)
    write_steps(second, 0)
    second.close()
    assert alive(tmp_path) == [(2, 0)]


def test_a_process_killed_before_its_attempt_began_is_no_attempt(tmp_path: Path) -> None:
    run = RunDir.open(tmp_path)
    run.event("warning", "start-up is slow")
    run.close()
    again = begun(tmp_path)
    assert again.attempt == 1
    again.close()


@pytest.mark.parametrize("torn", [b'{"step": 3, "rewa', b"\0\0\0", b'{"step": 3}', b"x" * 200_000])
def test_a_torn_last_line_is_cut_off_and_later_lines_are_kept(tmp_path: Path, torn: bytes) -> None:
    run = begun(tmp_path)
    write_steps(run, 1, 2)
    run.close()
    log = tmp_path / "metrics.jsonl"
    whole = log.read_bytes()
    log.write_bytes(whole + torn)
    assert alive(tmp_path) == [(1, 1), (1, 2)], "a reader must not see a torn line"
    again = RunDir.open(tmp_path)
    assert log.read_bytes() == whole
    again.begin_attempt(2)
    write_steps(again, 3)
    again.close()
    assert alive(tmp_path) == [(1, 1), (1, 2), (2, 3)]
    kinds = [line["kind"] for line in read_lines(tmp_path / "events.jsonl")]
    assert kinds == ["attempt", "repair", "attempt"]


def test_a_file_that_is_one_torn_line_becomes_empty(tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").write_bytes(b'{"step": 0, "attempt": 1, "ki')
    run = begun(tmp_path)
    assert run.attempt == 1
    run.close()


def test_a_damaged_line_in_the_middle_is_an_error_that_names_it(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\nnonsense\n{"step": 3}\n')
    with pytest.raises(ConfigError, match=r"run_dir: .*metrics\.jsonl line 2 is not JSON"):
        list(read_lines(tmp_path / "metrics.jsonl"))


def test_events_are_written_at_once_and_heard(tmp_path: Path) -> None:
    heard: list[tuple[str, str]] = []
    run = begun(tmp_path, resumed_from=4)
    run.listeners.append(lambda kind, message: heard.append((kind, message)))
    run.event("warning", "reward is flat", key="env")
    line = list(read_lines(tmp_path / "events.jsonl"))[-1]
    run.close()
    assert line["kind"] == "warning" and line["key"] == "env"
    assert line["step"] == 4 and line["attempt"] == 1 and line["time"] > 1e9
    assert heard == [("warning", "reward is flat")]


def test_a_file_in_place_of_the_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for bad in (tmp_path / "file", tmp_path / "file" / "run"):
        with pytest.raises(ConfigError, match=r"run_dir: .* a file; name a directory"):
            RunDir.open(bad)


@pytest.mark.parametrize("bad", ["", "/proc/fledge/run", "a\0b", "x" * 300, "~nobody-at-all/run"])
def test_a_path_that_cannot_be_made_is_refused(bad: str) -> None:
    with pytest.raises(ConfigError, match="run_dir: ") as caught:
        RunDir.open(bad)
    assert "\n" not in str(caught.value)


def test_a_directory_that_cannot_be_written_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> int:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(ConfigError, match=r"run_dir: cannot write to .*: permission denied"):
        RunDir.open(tmp_path)


def test_one_process_at_a_time(tmp_path: Path) -> None:
    run = RunDir.open(tmp_path)
    message = rf"run_dir: .* is in use by another process \(pid {os.getpid()}\)"
    with pytest.raises(ConfigError, match=message):
        RunDir.open(tmp_path)
    run.close()
    RunDir.open(tmp_path).close()


def test_kill_releases_the_lock_and_keeps_what_was_flushed(
    tmp_path: Path, run_until_killed: Callable[[Callable[[Any], None]], None]
) -> None:
    def victim(stop: Callable[[], None]) -> None:
        run = begun(tmp_path)
        write_steps(run, 1)
        run.metrics(2, {"reward/mean": 2.0})
        with pytest.raises(ConfigError, match="in use"):
            RunDir.open(tmp_path)
        stop()

    run_until_killed(victim)
    assert alive(tmp_path) == [(1, 1)]
    run = begun(tmp_path, resumed_from=1)
    assert run.attempt == 2
    run.close()


def _hold(ready: Any, leave: Any) -> None:
    ready.set()
    leave.wait(20)


def test_a_forked_worker_does_not_hold_the_lock(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    ready, leave = context.Event(), context.Event()
    run = RunDir.open(tmp_path)
    worker = context.Process(target=_hold, args=(ready, leave))
    worker.start()
    try:
        assert ready.wait(20)
        with pytest.raises(ConfigError, match="in use"):
            RunDir.open(tmp_path)
        run.close()
        RunDir.open(tmp_path).close()
    finally:
        leave.set()
        worker.join(20)


def test_a_full_disk_is_a_clear_error_and_leaves_whole_lines(small_disk: Path) -> None:
    run = begun(small_disk / "run")
    write_steps(run, 1)
    with pytest.raises(
        ConfigError, match=r"run_dir: cannot write to .*run: the disk is full"
    ) as caught:
        for step in range(2, 100):
            run.event("note", "x" * 50_000, step=step)
    assert "\n" not in str(caught.value)
    with pytest.raises(ConfigError, match="the disk is full"):
        run.write_report({"text": "x" * 100_000})
    assert not (run.path / "report.json").exists()
    run.close()
    assert (run.path / "events.jsonl").read_bytes().endswith(b"\n")
    assert alive(run.path) == [(1, 1)]


def test_a_write_cut_short_is_undone(tmp_path: Path) -> None:
    run = begun(tmp_path)
    write_steps(run, 1)
    before = (tmp_path / "metrics.jsonl").read_bytes()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 20, hard))
    try:
        run.metrics(2, {"reward/mean": 1.0})
        with pytest.raises(ConfigError, match="the file-size limit is reached"):
            run.end_step(2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert (tmp_path / "metrics.jsonl").read_bytes() == before
    run.end_step(2)
    run.close()
    assert alive(tmp_path) == [(1, 1), (1, 2)], "the line is written once there is room"


def test_report_and_config_are_replaced_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = begun(tmp_path)
    run.write_config("seed: 0\n")
    run.write_report({"steps": 1, "loss": float("inf")})

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("fledge.orchestration.files.os.replace", full)
    with pytest.raises(ConfigError, match=r"run_dir: .* the disk is full"):
        run.write_report({"steps": 2})
    run.close()
    report = json.loads((tmp_path / "report.json").read_text())
    assert report == {"steps": 1, "loss": "Infinity"}
    assert (tmp_path / "config.yaml").read_text() == "seed: 0\n"
    assert not list(tmp_path.glob("*.tmp")) and not list(tmp_path.glob(".*.tmp"))
