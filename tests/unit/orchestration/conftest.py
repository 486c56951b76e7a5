"""Hard conditions to test under: a disk that is really full, processes that are really killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest


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
def run_until_killed() -> Callable[[str], None]:
    """Run a script that prints `kill me` at the right moment and waits; end it with SIGKILL."""

    def run(script: str) -> None:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
        process = subprocess.Popen(
            [sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, env=environment
        )
        assert process.stdout is not None
        try:
            said = process.stdout.readline()
            assert said == "kill me\n", f"the script ended early: {said!r}"
        finally:
            process.send_signal(signal.SIGKILL)
            process.wait(timeout=20)
            process.stdout.close()

    return run
