from __future__ import annotations

import io
import os
import select
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

import pytest
from rich.console import Console as RichConsole

from fledge.orchestration import console
from fledge.orchestration.console import Live, Pace, Plain, View, duration, make_console, sparkline

METRICS = {
    "reward/mean": 0.434,
    "response/len_mean": 4.12,
    "policy/entropy": 0.521,
    "optim/grad_norm": 0.81,
    "perf/tok_s": 6123.0,
    "time/gen": 0.6,
    "time/train": 0.3,
    "time/total": 1.0,
    "nobody/knows": 1.0,
}


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def render(view: View, width: int) -> list[str]:
    recorder = RichConsole(width=width, file=io.StringIO(), record=True, legacy_windows=False)
    recorder.print(view)
    return recorder.export_text().rstrip("\n").split("\n")


@pytest.fixture
def terminal() -> Iterator[tuple[int, TextIO]]:
    """Both ends of a real pseudo-terminal."""
    master, slave = os.openpty()
    with os.fdopen(slave, "w", encoding="utf-8") as stream:
        yield master, stream
    os.close(master)


def said(master: int, stream: TextIO) -> str:
    """All that was written so far: the kernel hands it over in pieces, so read up to a mark."""
    stream.write("<end>")
    stream.flush()
    text = b""
    while not text.endswith(b"<end>"):
        assert select.select([master], [], [], 10)[0], "the terminal lost the mark"
        text += os.read(master, 65536)
    return text.decode().removesuffix("<end>")


def test_sparkline_shows_the_shape() -> None:
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7], 20) == "▁▂▃▄▅▆▇█"
    assert sparkline([3, 3, 3], 20) == "▄▄▄"
    assert sparkline([], 20) == sparkline([1.0], 0) == sparkline([1.0], -5) == ""
    assert sparkline([0.0, float("nan"), 1.0], 3) == "▁ █"
    assert sparkline([float("nan")], 3) == " "
    assert sparkline([-1e300, 1e300], 2) == "▁█"


@pytest.mark.parametrize("width", [1, 7, 60, 199])
def test_sparkline_of_many_values_rises_with_them(width: int) -> None:
    line = sparkline([i / 1000 for i in range(1000)], width)
    assert len(line) == width and list(line) == sorted(line)


def test_durations() -> None:
    assert [duration(s) for s in (0.4, 45, 65, 7380, 273600)] == [
        "0s",
        "45s",
        "1m05s",
        "2h03m",
        "3d04h",
    ]


def test_pace_goes_by_the_clock_and_not_by_a_second_call_for_a_step() -> None:
    clock = Clock()
    pace = Pace(100, clock)
    assert pace.left() == ""
    clock.now = 500.0  # a slow start is not a slow step
    pace.step(10, 2.0)
    assert pace.left() == "3m00s"
    for step in range(11, 40):
        clock.now += 1.0
        pace.step(step, 0.5)
        clock.now += 1.0
        pace.step(step, None)
    assert pace.left() == duration(2.0 * (100 - 39))
    pace.step(100, 1.0)
    assert pace.left() == ""


def test_plain_line() -> None:
    out, clock = io.StringIO(), Clock()
    plain = Plain("sums", 150, out, clock)
    plain.step(12, METRICS)
    plain.note("saved step_12")
    plain.warn("reward is flat")
    plain.close()
    assert out.getvalue().splitlines() == [
        "sums",
        "step 12/150 reward 0.43 len 4.1 entropy 0.52 grad 0.81 tok/s 6.1k eta 2m18s",
        "saved step_12",
        "warning: reward is flat",
    ]


def test_plain_is_sparing_but_keeps_evaluations_and_the_last_step() -> None:
    out, clock = io.StringIO(), Clock()
    plain = Plain("sums", 100, out, clock)
    for step in range(1, 101):
        clock.now += 0.5
        plain.step(step, {"eval/sums/avg@1": 0.25} if step == 7 else {"sft/loss": 1.5})
    lines = out.getvalue().splitlines()[1:]
    assert lines[0].startswith("step 1/100 loss 1.500") and lines[-1] == "step 100/100 loss 1.500"
    assert any(line.startswith("step 7/100 eval/sums/avg@1 0.250") for line in lines)
    assert 20 <= len(lines) <= 30


def test_quiet_says_warnings_only() -> None:
    out = io.StringIO()
    quiet = make_console("quiet", "sums", 10, out)
    quiet.phase("generate")
    quiet.step(1, METRICS)
    quiet.note("hello")
    quiet.warn("careful")
    quiet.close()
    assert out.getvalue() == "warning: careful\n"


@pytest.mark.parametrize("width", [60, 80, 120, 200])
def test_live_fits_its_width_and_shows_everything(width: int) -> None:
    clock = Clock()
    view = View("sums on tiny", 200, clock)
    assert render(view, width)[0].startswith("sums on tiny")
    for step in range(101):
        clock.now += 1.0
        metrics = {**METRICS, "reward/mean": step / 100}
        if step % 50 == 0:
            metrics["eval/sums/avg@1"] = step / 200
        view.step(step, metrics)
    view.phase("score")
    clock.now += 3.0
    lines = render(view, width)
    text = "\n".join(lines)
    assert all(len(line) <= width for line in lines) and len(lines) == 7
    assert lines[0] == "sums on tiny  1m44s  score 3s"
    assert lines[1].startswith("step 100/200 ━") and lines[1].endswith("50%  eta 1m40s")
    reward = next(line for line in lines if line.startswith("reward 1.00 "))
    assert "▁" in reward and reward.endswith("█")
    assert "eval/sums/avg@1 0.000 → 0.500 ▁▄█" in text.replace("▅", "▄")
    assert "entropy 0.52" in text and "tok/s 6.1k" in text and "nobody" not in text
    bar = next(line for line in lines if line.startswith("time "))
    assert bar.count("█") == pytest.approx(2 * bar.count("▓"), abs=1)
    assert "█ gen 60%  ▓ train 30%" in text


def test_live_with_nothing_to_show_yet_and_with_a_supervised_run() -> None:
    view = View("sft", 10, Clock())
    assert len(render(view, 60)) == 2
    view.step(1, {"sft/loss": 2.0})
    assert any(line.startswith("loss 2.000 ▄") for line in render(view, 60))
    assert not any(line.startswith("time") for line in render(view, 60))


def test_drawing_waits_for_a_step_that_is_arriving() -> None:
    drawn: list[list[str]] = []
    waited: list[bool] = []
    thread = threading.Thread(target=lambda: drawn.append(render(view, 80)))

    def clock() -> float:
        if armed and not waited:  # we are in the middle of `step`
            waited.append(True)
            thread.start()
            thread.join(0.3)
            waited[0] = thread.is_alive()
        return 0.0

    armed: list[bool] = []
    view = View("t", 10, clock)
    armed.append(True)
    view.step(1, {"reward/mean": 0.5})
    thread.join(10)
    assert waited == [True], "drew half a step"
    assert any(line.startswith("reward 0.50") for line in drawn[0])


def test_auto_is_live_on_a_terminal_and_close_leaves_the_last_state(
    terminal: tuple[int, TextIO], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    master, stream = terminal
    live = make_console("auto", "sums", 10, stream)
    assert isinstance(live, Live)
    live.phase("generate")
    live.note("[a] note")
    live.warn("careful")
    live.step(10, METRICS)
    live.close()
    live.close()
    text = said(master, stream)
    assert "[a] note" in text and "warning: careful" in text and "step 10/10" in text
    assert text.rstrip().endswith("\x1b[?25h"), "the cursor must come back"


@pytest.mark.parametrize("mode", ["auto", "live"])
@pytest.mark.parametrize("term", ["dumb", "unknown"])
def test_a_dumb_terminal_gets_plain_lines(
    terminal: tuple[int, TextIO], monkeypatch: pytest.MonkeyPatch, mode: console.Mode, term: str
) -> None:
    monkeypatch.setenv("TERM", term)
    master, stream = terminal
    plain = make_console(mode, "sums", 10, stream)
    assert isinstance(plain, Plain)
    plain.step(1, METRICS)
    plain.close()
    text = said(master, stream)
    assert "step 1/10 reward 0.43" in text and "\x1b" not in text
    assert ("console: 'live' needs a terminal" in text) is (mode == "live")


def test_a_file_gets_plain_lines_in_its_own_encoding(tmp_path: Path) -> None:
    with open(tmp_path / "log", "w", encoding="ascii") as stream:
        plain = make_console("auto", "Größe", 10, stream)
        plain.warn("→ 3")
        plain.close()
    assert (tmp_path / "log").read_text() == "Gr??e\nwarning: ? 3\n"


@pytest.mark.parametrize("mode", ["plain", "quiet"])
def test_a_closed_pipe_does_not_end_the_run(mode: console.Mode) -> None:
    read, write = os.pipe()
    stream = os.fdopen(write, "w")
    display = make_console(mode, "sums", 10, stream)
    os.close(read)
    for step in range(3):
        display.step(step, METRICS)
        display.warn("careful")
    display.close()
    with pytest.raises(BrokenPipeError):
        stream.close()


def test_a_terminal_that_goes_away_does_not_end_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    master, slave = os.openpty()
    stream = os.fdopen(slave, "w", encoding="utf-8")
    live = make_console("live", "sums", 10, stream)
    os.close(master)
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    live.warn("careful")
    live.step(1, METRICS)
    live.note("still here")
    live.close()
    with pytest.raises(OSError):
        stream.close()
