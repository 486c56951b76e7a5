"""Hard conditions to test under: a disk that is really full, processes that are really killed."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

Stop = Callable[..., None]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of one megabyte; skipped where mounting is not allowed."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(disk)]
    try:
        done = subprocess.run(mount, capture_output=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        pytest.skip("mount is not available")
    if done.returncode:
        pytest.skip("mounting a tmpfs is not allowed here")
    try:
        yield disk
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True, timeout=20)


@pytest.fixture
def run_until_killed() -> Callable[[Callable[[Stop], None]], None]:
    """Run a function in another process until it calls `stop`, and end it there with SIGKILL."""

    def run(victim: Callable[[Stop], None]) -> None:
        heard, tell = os.pipe()

        def stop(*_: object) -> None:
            os.write(tell, b"!")
            time.sleep(60)

        child = os.fork()
        if child == 0:
            try:
                victim(stop)
            finally:
                os._exit(1)
        os.close(tell)
        try:
            assert select.select([heard], [], [], 20)[0] and os.read(heard, 1) == b"!", "no stop"
        finally:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            os.close(heard)

    return run
