"""Graders that may hang, crash or eat memory, in processes of their own.

A worker answers one JSON line per request. One that takes too long is killed, one that died is
replaced. What goes wrong is a `GraderFailed`, never a reward: the episode is played again or set
aside. The processes are plain `python -c`, so a script that starts a run needs no `__main__` guard,
and none of its threads is forked.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import importlib
import json
import os
import queue
import resource
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, TextIO

from fledge.envs.threads import in_thread

START_TIMEOUT = 120.0
"""Seconds until a worker has imported its grader."""

MEMORY = 4 << 30
"""Bytes of address space of one worker."""


class GraderFailed(RuntimeError):
    """The grader could not say whether a reply is right. Not a fault of the recipe, so not a
    `FledgeError`: the run goes on.
    """


class WorkerPool:
    """`size` processes that call `function`, a "module:name" that takes and returns plain data.

    Processes start when they are first needed and end with this one.
    """

    def __init__(self, function: str, size: int, timeout: float) -> None:
        self.function = function
        self.timeout = timeout
        self._places: queue.SimpleQueue[_Worker | None] = queue.SimpleQueue()
        self._all: list[_Worker] = []
        self._lock = threading.Lock()
        for _ in range(size):
            self._places.put(None)
        atexit.register(self.close)

    async def call(self, request: Any) -> Any:
        """What the function returns for `request`; raises `GraderFailed` where it does not."""
        return await in_thread(self._call, request)

    def _call(self, request: Any) -> Any:
        worker = self._places.get()
        try:
            if worker is None or not worker.alive:
                worker = self._start()
            return worker.ask(request, self.timeout)
        finally:
            # Whatever happened, the place is free again; a dead worker is replaced on its next use.
            self._places.put(worker)

    def _start(self) -> _Worker:
        worker = _Worker(self.function, self.timeout)
        with self._lock:
            self._all = [w for w in self._all if w.alive] + [worker]
        return worker

    def close(self) -> None:
        """End all processes. A later call starts new ones."""
        with self._lock:
            for worker in self._all:
                worker.kill()


@functools.cache
def shared_pool(function: str, size: int, timeout: float) -> WorkerPool:
    """The one pool of all environments with these settings."""
    return WorkerPool(function, size, timeout)


class _Worker:
    def __init__(self, function: str, timeout: float) -> None:
        code = f"from fledge.envs.pool import serve; serve({function!r}, {timeout!r})"
        path = os.pathsep.join(p for p in sys.path if p)
        self.process = subprocess.Popen(
            [sys.executable, "-c", code],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": path},
            bufsize=0,
        )
        if self._read(START_TIMEOUT) != {"ready": True}:
            self.kill()
            raise GraderFailed(f"{function} sent something else than its readiness")

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    @property
    def pid(self) -> int:
        return self.process.pid

    def ask(self, request: Any, timeout: float) -> Any:
        assert self.process.stdin is not None
        try:
            _write_all(self.process.stdin.fileno(), json.dumps(request).encode() + b"\n")
            answer = self._read(timeout)
        except OSError as error:
            self.kill()
            raise GraderFailed(f"a grader's process died: {error}") from None
        if "error" in answer:
            raise GraderFailed(answer["error"])
        return answer["result"]

    def _read(self, timeout: float) -> dict[str, Any]:
        """One line, or the end of this process."""
        assert self.process.stdout is not None
        waiting = select.poll()  # select() knows no descriptor above 1023
        waiting.register(self.process.stdout, select.POLLIN)
        line = b""
        end = time.monotonic() + timeout
        while not line.endswith(b"\n"):
            ready = waiting.poll(1000 * max(0, end - time.monotonic()))
            if not ready:
                self.kill()
                raise GraderFailed(f"a grader took longer than {timeout:g} s")
            chunk = os.read(self.process.stdout.fileno(), 1 << 16)
            if not chunk:
                self.kill()
                raise GraderFailed(f"a grader's process died ({self.process.returncode})")
            line += chunk
        found: dict[str, Any] = json.loads(line)
        return found

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()


def _write_all(descriptor: int, data: bytes) -> None:
    while data:
        data = data[os.write(descriptor, data) :]


def serve(function: str, timeout: float) -> None:
    """A worker's whole life: answer requests until there are no more."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # ctrl-C is the parent's to handle
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a grader prints must not look like an answer
    module, _, name = function.partition(":")
    grade: Callable[[Any], Any] = getattr(importlib.import_module(module), name)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    _send(answers, {"ready": True})
    for line in sys.stdin:
        # A second guard, for a worker whose parent was killed before it could end it.
        signal.setitimer(signal.ITIMER_REAL, timeout + 5)
        try:
            answer = {"result": grade(json.loads(line))}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        signal.setitimer(signal.ITIMER_REAL, 0)
        _send(answers, answer)


def _send(stream: TextIO, value: Any) -> None:
    stream.write(json.dumps(value) + "\n")
    stream.flush()
