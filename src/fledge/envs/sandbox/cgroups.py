"""Limits that count a whole tree of processes: a pids and a memory cgroup per run, v1 or v2.

A run's cgroup is made below our own, so that limits set on us still hold for it. In v2 a cgroup
that has processes cannot hand out controllers to children; there the run's cgroup stands beside
ours, unless ours is limited. Settings of a cgroup that we did not make are never changed.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import itertools
import os
import re
import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

JOIN = 'while [ "$1" != -- ]; do echo 0 > "$1" || exit 125; shift; done; shift; exec "$@"'
"""Moves itself into each cgroup named before `--`, then becomes the command: no moment in which the
command runs outside."""

_NUMBERS = itertools.count()


@dataclass(frozen=True)
class Base:
    """A directory in which a cgroup can be made, and what it can limit."""

    path: Path
    version: int
    controllers: tuple[str, ...]


class Cgroup:
    """The cgroups of one run; `remove` leaves nothing of them."""

    def __init__(self, bases: tuple[Base, ...], processes: int, memory: int) -> None:
        name = f"fledge-{os.getpid()}-{next(_NUMBERS)}"
        self.paths: list[Path] = []
        self._memory: tuple[Path, int] | None = None
        try:
            for base in bases:
                path = base.path / name
                path.mkdir()
                self.paths.append(path)
                self._limit(path, base, processes, memory)
        except OSError:
            self.remove()
            raise

    def _limit(self, path: Path, base: Base, processes: int, memory: int) -> None:
        if "pids" in base.controllers:
            (path / "pids.max").write_text(str(processes))
        if "memory" in base.controllers:
            self._memory = (path, base.version)
            limit, swap, most_swap = (
                ("memory.max", "memory.swap.max", 0)
                if base.version == 2
                else ("memory.limit_in_bytes", "memory.memsw.limit_in_bytes", memory)
            )
            (path / limit).write_text(str(memory))
            if (path / swap).exists():
                (path / swap).write_text(str(most_swap))

    def join(self, command: list[str]) -> list[str]:
        """`command`, started inside."""
        if not self.paths:
            return command
        entries = [str(path / "cgroup.procs") for path in self.paths]
        return ["/bin/sh", "-c", JOIN, "sh", *entries, "--", *command]

    def out_of_memory(self) -> bool:
        """Whether the kernel killed something in here for its memory."""
        if self._memory is None:
            return False
        path, version = self._memory
        text = (path / ("memory.events" if version == 2 else "memory.oom_control")).read_text()
        return any(
            line.split()[0] == "oom_kill" and line.split()[1] != "0" for line in _lines(text)
        )

    def kill(self) -> None:
        for path in self.paths:
            _kill(path)

    def remove(self, seconds: float = 5.0) -> bool:
        """Kill what is inside and remove the directories; False if that took too long."""
        deadline = time.monotonic() + seconds
        while self.paths:
            self.kill()
            self.paths = [path for path in self.paths if not _removed(path)]
            if self.paths and time.monotonic() > deadline:
                return False
            if self.paths:
                time.sleep(0.001)
        return True


def _lines(text: str) -> list[str]:
    return [line for line in text.splitlines() if len(line.split()) == 2]


def _kill(path: Path) -> None:
    for pid in _pids(path):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _pids(path: Path) -> list[int]:
    try:
        return [int(pid) for pid in (path / "cgroup.procs").read_text().split()]
    except FileNotFoundError:
        return []
    except OSError as error:
        # A process that is being reaped, or a threaded cgroup: nothing that can be killed now.
        if error.errno in (errno.ENODEV, errno.EOPNOTSUPP):
            return []
        raise


def _removed(path: Path) -> bool:
    try:
        path.rmdir()
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True


@functools.cache
def usable() -> tuple[Base, ...]:
    """Where this process can make cgroups that limit processes or memory; found out by trying."""
    mounts = Path("/proc/self/mountinfo").read_text()
    own = Path("/proc/self/cgroup").read_text()
    found: list[Base] = []
    for base in candidates(mounts, own):
        free = set(base.controllers) - {name for other in found for name in other.controllers}
        wanted = Base(base.path, base.version, tuple(sorted(free)))
        if free and _works(wanted):
            _sweep(wanted.path)
            found.append(wanted)
    return tuple(found)


def candidates(mountinfo: str, own: str) -> list[Base]:
    """Every directory worth trying, from the texts of /proc/self/mountinfo and /proc/self/cgroup.

    >>> mountinfo = "30 23 0:26 / /sys/fs/cgroup/pids rw - cgroup cgroup rw,pids"
    >>> [str(base.path) for base in candidates(mountinfo, "8:pids:/job")]
    ['/sys/fs/cgroup/pids/job']
    """
    memberships = [line.split(":", 2) for line in own.splitlines()]
    found = []
    for line in mountinfo.splitlines():
        left, _, right = line.partition(" - ")
        kind, _, options = right.split(" ", 2)
        root, point = left.split(" ")[3:5]
        if kind not in ("cgroup", "cgroup2"):
            continue
        mounted = {"pids", "memory"} & set(options.split(","))
        for _, names, inside in memberships:
            ours = set(names.split(",")) & mounted if kind == "cgroup" else not names
            if not ours or not Path(inside).is_relative_to(root):
                continue
            path = Path(point) / Path(inside).relative_to(root)
            if kind == "cgroup":
                found.append(Base(path, 1, tuple(sorted(mounted))))
            else:
                found += [Base(each, 2, ("memory", "pids")) for each in _places(path, Path(point))]
    return found


def _places(path: Path, point: Path) -> list[Path]:
    """In v2: below ourselves, or beside ourselves where nobody limited us."""
    if path == point or any(_limited(path / name) for name in ("memory.max", "pids.max")):
        return [path]
    return [path, path.parent]


def _limited(file: Path) -> bool:
    try:
        return file.read_text().strip() != "max"
    except OSError:
        return False


def _works(base: Base) -> bool:
    """Make one, move a process into it, remove it."""
    try:
        trial = Cgroup((base,), processes=8, memory=64 << 20)
    except OSError:
        return False
    try:
        command = trial.join(["/bin/sh", "-c", ":"])
        moved = subprocess.run(command, capture_output=True, timeout=10, check=False)
        return moved.returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False
    finally:
        trial.remove()


def _sweep(path: Path) -> None:
    """Remove what a process that was killed outright left behind.

    That can be a live `bwrap`: one whose parent dies before it is set up waits for it forever.
    """
    for left in path.glob("fledge-*-*"):
        owner = re.fullmatch(r"fledge-(\d+)-\d+", left.name)
        if owner and not Path("/proc", owner[1]).exists():
            _kill(left)
            _removed(left)
