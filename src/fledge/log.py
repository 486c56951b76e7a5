"""Time spans and events: who did what when. Listeners may watch; nothing here prints or writes by
itself.

A span is a named phase of the run (`generate`, `score`, `backward`, `step`, `publish`, `save`,
...). `Clock` adds up the seconds per phase between two readings and tells listeners when a phase
begins, which is how the console shows what is going on and how a stall is given a name.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Listener = Callable[[str], None]


class Clock:
    """Seconds per phase since the last `lap`.

    >>> clock = Clock()
    >>> with clock.span("generate"):
    ...     pass
    >>> sorted(clock.lap())
    ['generate', 'total']
    """

    def __init__(self) -> None:
        self._seconds: dict[str, float] = defaultdict(float)
        self._lap_began = time.perf_counter()
        self.listeners: list[Listener] = []
        self.current = ""

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        outer, self.current = self.current, name
        for listener in self.listeners:
            listener(name)
        began = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[name] += time.perf_counter() - began
            self.current = outer

    def lap(self) -> dict[str, float]:
        """Seconds per span since the last lap, and `total`; starts a new lap."""
        now = time.perf_counter()
        seconds = {**self._seconds, "total": now - self._lap_began}
        self._seconds.clear()
        self._lap_began = now
        return seconds
