"""Starts one process tree, reads what it says up to a limit, and ends it whole.

No thread, no child watcher: descriptors and timers of the event loop. `Tree.destroy` is
synchronous, so that it runs to its end also when the task was cancelled twice or the loop is
closing; on the ordinary path everything is dead before it is called, and it takes no time.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import functools
import json
import os
import select
import shutil
import signal
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from fledge.envs.sandbox.cgroups import Cgroup
from fledge.envs.sandbox.results import SandboxError

START_SECONDS = 30.0
"""From the start of the process to the candidate's first instruction; more is our own failure."""
DEATH_SECONDS = 10.0
REPORT_ROOM = 1 << 10

End = Literal["exit", "timeout", "output_limit", "stuck"]


@dataclass(frozen=True)
class Job:
    """What to start. `build` gets the descriptors (job, report, info) and returns the command."""

    build: Callable[[int, int, int], list[str]]
    payload: bytes
    stdin: bytes
    wall_seconds: float
    max_output: int
    cgroup: Cgroup
    temporary: str | None = None


@dataclass(frozen=True)
class Ended:
    """How it ended, before anybody judges it."""

    end: End
    exit_code: int
    stdout: bytes
    stderr: bytes
    report: bytes
    started: bool
    out_of_memory: bool


class Tap:
    """Reads one pipe, and no further than its limit."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.fd = self.inlet = -1
        self.data = bytearray()
        self.full = False

    def open(self) -> tuple[int, int]:
        self.fd, self.inlet = os.pipe()
        os.set_blocking(self.fd, False)
        return self.fd, self.inlet

    def read(self) -> bool:
        """Take what is there now; False when no more will be taken."""
        room = self.limit - len(self.data)
        try:
            chunk = os.read(self.fd, min(65536, room + 1))
        except BlockingIOError:
            return True
        self.data += chunk[:room]
        self.full = len(chunk) > room
        return bool(chunk) and not self.full

    def drain(self) -> None:
        """The rest, once every writer is dead: at most what one pipe holds."""
        before = -1
        while not self.full and before != len(self.data):
            before = len(self.data)
            self.read()


class Tree:
    """One running tree. Consumes a `Job`, produces an `Ended`, and waits only under a timer."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.loop = asyncio.get_running_loop()
        self.ended: asyncio.Future[End] = self.loop.create_future()
        self.fds: list[int] = []
        self.readers: set[int] = set()
        self.timer: asyncio.TimerHandle | None = None
        self.process: subprocess.Popen[bytes] | None = None
        self.pidfd = self.inner = self.inner_pid = -1
        self.stdout, self.stderr = Tap(job.max_output), Tap(job.max_output)
        self.report, self.info = Tap(job.max_output + REPORT_ROOM), Tap(REPORT_ROOM)

    def start(self) -> None:
        for tap in self._taps():
            self.fds += tap.open()
        payload = self._memory_file(self.job.payload)
        stdin = self._memory_file(self.job.stdin)
        inherited = (payload, self.report.inlet, self.info.inlet)
        self.process = subprocess.Popen(
            self.job.cgroup.join(self.job.build(*inherited)),
            stdin=stdin,
            stdout=self.stdout.inlet,
            stderr=self.stderr.inlet,
            pass_fds=inherited,
            env={},
            cwd=self.job.temporary or "/",
            start_new_session=True,
        )
        self.pidfd = os.pidfd_open(self.process.pid)
        self.fds.append(self.pidfd)
        for fd in (payload, stdin, *(tap.inlet for tap in self._taps())):
            self._close(fd)
        self._on_readable(self.pidfd, functools.partial(self._end, "exit"))
        for tap in (self.stdout, self.stderr):
            self._on_readable(tap.fd, functools.partial(self._output, tap))
        self._on_readable(self.report.fd, self._reported)
        self._on_readable(self.info.fd, self._informed)
        self.timer = self.loop.call_later(START_SECONDS, self._end, "stuck")

    async def wait(self) -> Ended:
        """Until it ends or must; then until everything in it is dead."""
        end = await self.ended
        self._kill()
        await self._dead()
        assert self.process is not None
        self.process.wait(DEATH_SECONDS)
        for tap in (self.stdout, self.stderr, self.report):
            tap.drain()
        if end == "exit" and (self.stdout.full or self.stderr.full or self.report.full):
            end = "output_limit"
        code = self.process.returncode
        return Ended(
            end=end,
            exit_code=code if code >= 0 else 128 - code,
            stdout=bytes(self.stdout.data),
            stderr=bytes(self.stderr.data),
            report=bytes(self.report.data),
            started=self.report.data.startswith(b"\n"),
            out_of_memory=self.job.cgroup.out_of_memory(),
        )

    def destroy(self) -> None:
        """End and give back everything, whatever state this is in. May be called twice."""
        if self.timer is not None:
            self.timer.cancel()
        self._kill()
        gone = self._reaped() and (self.inner < 0 or _exited(self.inner, DEATH_SECONDS))
        self._reap_inner()
        for fd in list(self.fds):
            self._close(fd)
        gone = self.job.cgroup.remove(DEATH_SECONDS) and gone
        if self.job.temporary is not None:
            shutil.rmtree(self.job.temporary, ignore_errors=True)
        if not gone:
            raise SandboxError("sandbox: a process survived SIGKILL; the machine is in trouble")

    def _taps(self) -> tuple[Tap, ...]:
        return self.stdout, self.stderr, self.report, self.info

    def _memory_file(self, data: bytes) -> int:
        """Input as a sealed file in memory: nobody has to feed it, and nobody can change it."""
        fd = os.memfd_create("fledge", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        self.fds.append(fd)
        with open(fd, "wb", closefd=False) as file:
            file.write(data)
        os.lseek(fd, 0, os.SEEK_SET)
        seals = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
        return fd

    def _on_readable(self, fd: int, callback: Callable[[], None]) -> None:
        self.readers.add(fd)
        self.loop.add_reader(fd, callback)

    def _ignore(self, fd: int) -> None:
        if fd in self.readers:
            self.readers.remove(fd)
            if not self.loop.is_closed():
                self.loop.remove_reader(fd)

    def _close(self, fd: int) -> None:
        self._ignore(fd)
        if fd in self.fds:
            self.fds.remove(fd)
            os.close(fd)

    def _end(self, end: End) -> None:
        self._ignore(self.pidfd)
        if not self.ended.done():
            self.ended.set_result(end)

    def _output(self, tap: Tap) -> None:
        if not tap.read():
            self._ignore(tap.fd)
            if tap.full:
                self._end("output_limit")

    def _reported(self) -> None:
        """The first byte says that the candidate's time begins."""
        first = not self.report.data
        self._output(self.report)
        if first and self.report.data and self.timer is not None:
            self.timer.cancel()
            self.timer = self.loop.call_later(self.job.wall_seconds, self._end, "timeout")

    def _informed(self) -> None:
        """bwrap tells the process 1 of the sandbox; its death is the death of all in there."""
        if self.info.read():
            with contextlib.suppress(ValueError):
                self._hold_inner(json.loads(bytes(self.info.data))["child-pid"])
        else:
            self._ignore(self.info.fd)

    def _hold_inner(self, pid: int) -> None:
        if self.inner_pid < 0:
            self.inner_pid = pid
            # It may be dead already, or we may be out of descriptors: bwrap still takes it along.
            with contextlib.suppress(OSError):
                self.inner = os.pidfd_open(pid)
                self.fds.append(self.inner)

    def _kill(self) -> None:
        if self.inner_pid < 0 and self.info.fd in self.fds:
            self._informed()
        if self.inner >= 0:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self.inner, signal.SIGKILL)
        if self.process is not None and self.process.returncode is None:
            # The group counts where there are no walls; behind them it is bwrap alone.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
        self.job.cgroup.kill()

    async def _dead(self) -> None:
        """Wait without blocking the loop; `destroy` would wait too, but alone."""
        for fd in (self.pidfd, self.inner):
            if fd >= 0 and not _exited(fd, 0):
                dead = asyncio.Event()
                self._on_readable(fd, dead.set)
                try:
                    async with asyncio.timeout(DEATH_SECONDS):
                        await dead.wait()
                except TimeoutError:
                    raise SandboxError("sandbox: a process survived SIGKILL") from None
                finally:
                    self._ignore(fd)

    def _reaped(self) -> bool:
        try:
            return self.process is None or self.process.wait(DEATH_SECONDS) is not None
        except subprocess.TimeoutExpired:
            return False

    def _reap_inner(self) -> None:
        """bwrap leaves its child to the init process, and in a container that may be us."""
        if self.inner_pid > 0:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(self.inner_pid, os.WNOHANG)


def _exited(pidfd: int, seconds: float) -> bool:
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(seconds * 1000))


async def execute(job: Job) -> Ended:
    """Run one job; nothing of it is left when this returns or raises.

    Our own failures (no fork, no descriptor) are a `SandboxError`.
    """
    tree = Tree(job)
    try:
        tree.start()
        return await tree.wait()
    except (OSError, subprocess.SubprocessError) as error:
        raise SandboxError(f"sandbox: could not run a process: {error}") from error
    finally:
        tree.destroy()
