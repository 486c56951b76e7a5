"""What a person sees while a run runs: a live display on a terminal, plain lines elsewhere.

`make_console` picks one of three: `Live` (rich), `Plain` (one line per step, at most one every two
seconds) and `Quiet` (warnings only). They share `phase`, `step`, `note`, `warn` and `close`. A
metric that is missing is not shown. A terminal that goes away silences the display and never ends
the run. Nothing here computes a metric or writes to the run directory.
"""

from __future__ import annotations

import math
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Literal, Protocol, TextIO

from rich.console import Console as RichConsole
from rich.console import ConsoleOptions, RenderResult
from rich.live import Live as RichLive
from rich.text import Text

Mode = Literal["auto", "live", "plain", "quiet"]
BLOCKS = "▁▂▃▄▅▆▇█"
_SHADES = "█▓▒░"
_COLOURS = ("cyan", "magenta", "green", "yellow", "blue", "red")
_PLAIN_SECONDS = 2.0
_RECENT = 20


class Console(Protocol):
    """What the controller tells a person; `step` may come twice for a step, for its evaluation."""

    def phase(self, name: str) -> None: ...

    def step(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def note(self, text: str) -> None: ...

    def warn(self, text: str) -> None: ...

    def close(self) -> None: ...


def make_console(mode: Mode, title: str, steps: int, stream: TextIO | None = None) -> Console:
    """The display for `console: auto|live|plain|quiet`; `auto` is live on a capable terminal."""
    stream = stream or sys.stdout
    if mode == "quiet":
        return Quiet(stream)
    if mode == "plain":
        return Plain(title, steps, stream)
    terminal = RichConsole(file=stream)
    if _can_be_live(terminal):
        return Live(title, steps, terminal)
    plain = Plain(title, steps, stream)
    if mode == "live":
        plain.note("console: 'live' needs a terminal with Unicode; showing plain lines")
    return plain


def _can_be_live(terminal: RichConsole) -> bool:
    if not terminal.is_terminal or terminal.is_dumb_terminal:
        return False
    try:
        (BLOCKS + _SHADES).encode(terminal.encoding)
    except (UnicodeEncodeError, LookupError):
        return False
    return True


def sparkline(values: Sequence[float], width: int) -> str:
    """A curve in one line, at most `width` wide; longer ones show the mean of each stretch.

    >>> sparkline([0, 1, 2, 3, 4, 5, 6, 7], 8)
    '▁▂▃▄▅▆▇█'
    >>> sparkline([0, 0, 7, 7], 2)
    '▁█'
    """
    if width <= 0 or not values:
        return ""
    count = min(width, len(values))
    cuts = [i * len(values) // count for i in range(count + 1)]
    means = [_mean(values[a:b]) for a, b in pairwise(cuts)]
    known = [m for m in means if m is not None]
    if not known:
        return " " * count
    low, high = min(known), max(known)
    return "".join(" " if m is None else _block(m, low, high) for m in means)


def _mean(values: Sequence[float]) -> float | None:
    finite = [v for v in values if math.isfinite(v)]
    return sum(finite) / len(finite) if finite else None


def _block(value: float, low: float, high: float) -> str:
    if high == low:
        return BLOCKS[3]
    return BLOCKS[round((value - low) / (high - low) * (len(BLOCKS) - 1))]


def _compact(value: float) -> str:
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= limit:
            return f"{value / limit:.1f}{unit}"
    return f"{value:.0f}"


def duration(seconds: float) -> str:
    """Two units at most: `45s`, `1m05s`, `2h03m`, `3d04h`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02}s"
    if whole < 86400:
        return f"{whole // 3600}h{whole % 3600 // 60:02}m"
    return f"{whole // 86400}d{whole % 86400 // 3600:02}h"


_SHOWN: dict[str, tuple[str, Callable[[float], str]]] = {
    "reward/mean": ("reward", "{:.2f}".format),
    "sft/loss": ("loss", "{:.3f}".format),
    "pair/accuracy": ("accuracy", "{:.2f}".format),
    "pair/margin": ("margin", "{:.3f}".format),
    "response/len_mean": ("len", "{:.1f}".format),
    "policy/entropy": ("entropy", "{:.2f}".format),
    "optim/grad_norm": ("grad", "{:.2g}".format),
    "perf/tok_s": ("tok/s", _compact),
}


def _numbers(metrics: Mapping[str, float]) -> list[tuple[str, str]]:
    return [
        (label, form(metrics[name])) for name, (label, form) in _SHOWN.items() if name in metrics
    ]


def _is_evaluation(name: str) -> bool:
    return name.startswith("eval/") and "@" in name


class Pace:
    """How long a step takes, by the clock between steps, and so when the run will end."""

    def __init__(self, steps: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.steps = steps
        self.at = 0
        self._clock = clock
        self._seen: tuple[int, float] | None = None
        self._recent: deque[float] = deque(maxlen=_RECENT)

    def step(self, step: int, total: float | None) -> None:
        """`total` is what the step says of itself: all there is to go by after the first one."""
        now = self._clock()
        if self._seen is None:
            if total is not None:
                self._recent.append(total)
        elif step > self._seen[0]:
            self._recent.append((now - self._seen[1]) / (step - self._seen[0]))
        if self._seen is None or step > self._seen[0]:
            self._seen = (step, now)
        self.at = max(self.at, step)

    def left(self) -> str:
        if not self._recent or self.at >= self.steps:
            return ""
        return duration(sum(self._recent) / len(self._recent) * (self.steps - self.at))


class Quiet:
    """Warnings only."""

    def __init__(self, stream: TextIO) -> None:
        self._stream: TextIO | None = stream

    def phase(self, name: str) -> None:
        pass

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        pass

    def note(self, text: str) -> None:
        pass

    def warn(self, text: str) -> None:
        self._line(f"warning: {text}")

    def close(self) -> None:
        pass

    def _line(self, text: str) -> None:
        if self._stream is None:
            return
        encoding = getattr(self._stream, "encoding", None) or "utf-8"
        try:
            self._stream.write(text.encode(encoding, "replace").decode(encoding) + "\n")
            self._stream.flush()
        except (OSError, ValueError):
            self._stream = None  # a closed pipe or terminal must not end hours of training


class Plain(Quiet):
    """One line per step, or per two seconds when steps are faster; evaluations always."""

    def __init__(
        self,
        title: str,
        steps: int,
        stream: TextIO,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(stream)
        self._pace = Pace(steps, clock)
        self._clock = clock
        self._next = -math.inf
        self._line(title)

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        self._pace.step(step, metrics.get("time/total"))
        evaluations = [(n, f"{v:.3f}") for n, v in metrics.items() if _is_evaluation(n)]
        due = self._clock() >= self._next
        if not (due or evaluations or step >= self._pace.steps):
            return
        self._next = self._clock() + _PLAIN_SECONDS
        words = [f"step {step}/{self._pace.steps}"]
        words += [f"{label} {value}" for label, value in _numbers(metrics) + evaluations]
        left = self._pace.left()
        self._line(" ".join(words + ([f"eta {left}"] if left else [])))

    def note(self, text: str) -> None:
        self._line(text)


class Live:
    """A few lines that stay in place on a terminal; notes and warnings scroll above them."""

    def __init__(self, title: str, steps: int, terminal: RichConsole) -> None:
        self._terminal = terminal
        self._view = View(title, steps)
        self._live: RichLive | None = RichLive(
            self._view, console=terminal, refresh_per_second=4, vertical_overflow="crop"
        )
        self._safely(self._live.start)

    def phase(self, name: str) -> None:
        self._view.phase(name)

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        self._view.step(step, metrics)

    def note(self, text: str) -> None:
        self._safely(lambda: self._terminal.print(Text(text)))

    def warn(self, text: str) -> None:
        self._safely(lambda: self._terminal.print(Text(f"warning: {text}", style="yellow")))

    def close(self) -> None:
        if self._live is not None:
            live, self._live = self._live, None
            self._view.phase("")
            self._safely(live.stop)

    def _safely(self, action: Callable[[], None]) -> None:
        try:
            action()
        except (OSError, ValueError):
            self._live = None  # the terminal is gone; the run is not


class View:
    """The live display as a value: what it shows follows from the calls so far and the width."""

    def __init__(self, title: str, steps: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._title = title
        self._pace = Pace(steps, clock)
        self._clock = clock
        self._began = self._phase_began = clock()
        self._phase = "starting"
        self._latest: dict[str, float] = {}
        self._curves: dict[str, list[float]] = {}
        self._times: deque[dict[str, float]] = deque(maxlen=_RECENT)
        self._lock = threading.Lock()  # rich draws from a thread of its own

    def phase(self, name: str) -> None:
        with self._lock:
            if name != self._phase:
                self._phase, self._phase_began = name, self._clock()

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        with self._lock:
            self._take(step, metrics)

    def _take(self, step: int, metrics: Mapping[str, float]) -> None:
        self._pace.step(step, metrics.get("time/total"))
        self._latest = {**self._latest, **metrics}
        for name, value in metrics.items():
            if name in ("reward/mean", "sft/loss", "pair/accuracy") or _is_evaluation(name):
                self._curves.setdefault(name, []).append(value)
        times = {n.removeprefix("time/"): v for n, v in metrics.items() if n.startswith("time/")}
        if times:
            self._times.append(times)

    def __rich_console__(self, console: RichConsole, options: ConsoleOptions) -> RenderResult:
        with self._lock:
            lines = self._lines(options.max_width)
        for line in lines:
            line.no_wrap, line.overflow = True, "ellipsis"
            yield line

    def _lines(self, width: int) -> list[Text]:
        found = [self._head(), self._progress(width)]
        found += [self._curve(name, width) for name in self._curves]
        numbers = "  ".join(f"{label} {value}" for label, value in _numbers(self._latest))
        return [line for line in [*found, Text(numbers), *self._split(width)] if line.plain]

    def _head(self) -> Text:
        now = self._clock()
        head = Text.assemble((self._title, "bold"), f"  {duration(now - self._began)}")
        if self._phase:
            head.append(f"  {self._phase} {duration(now - self._phase_began)}", style="cyan")
        return head

    def _progress(self, width: int) -> Text:
        steps, at, left = self._pace.steps, self._pace.at, self._pace.left()
        done = min(1.0, at / max(1, steps))
        before = f"step {at}/{steps} "
        after = f" {done:4.0%}" + (f"  eta {left}" if left else "")
        room = max(4, min(60, width - len(before) - len(after)))
        full = round(done * room)
        bar = ("━" * full, "green"), ("─" * (room - full), "dim")
        return Text.assemble(before, *bar, after)

    def _curve(self, name: str, width: int) -> Text:
        values = self._curves[name]
        label, form = _SHOWN.get(name, (name, "{:.3f}".format))
        if name not in _SHOWN and len(values) > 1:
            head = f"{label} {form(values[0])} → {form(values[-1])} "
        else:
            head = f"{label} {form(values[-1])} "
        return Text.assemble(head, (sparkline(values, min(80, width - len(head))), "green"))

    def _split(self, width: int) -> list[Text]:
        """Where recent time went: a bar, and the share of each part below it."""
        sums: dict[str, float] = {}
        for times in self._times:
            for name, seconds in times.items():
                sums[name] = sums.get(name, 0.0) + seconds
        total = sums.pop("total", 0.0)
        whole = max(total, sum(sums.values()))
        shares = {n: s / whole for n, s in sums.items() if whole > 0 and s / whole >= 0.005}
        bar, legend = Text("time "), Text("     ")
        room = max(4, min(60, width - len(bar.plain)))
        for index, (name, share) in enumerate(sorted(shares.items(), key=lambda x: -x[1])):
            shade, colour = _SHADES[index % len(_SHADES)], _COLOURS[index % len(_COLOURS)]
            bar.append(shade * round(share * room), style=colour)
            legend.append(f"{shade} {name} {share:.0%}  ", style=colour)
        legend.rstrip()
        return [bar, legend] if shares else []
