"""The attacks, tried for real on this machine: a wall is trusted when it was run against.

Each attack is a candidate that reports what it reached; the judgement is made outside, from
evidence (a planted secret, a listener that heard something, a process that is still there), never
from the candidate's word alone. Without bubblewrap no attack is run: they would succeed.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
import socket
import tempfile
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from fledge.envs.sandbox import bubblewrap, cgroups
from fledge.envs.sandbox.process import Ended
from fledge.envs.sandbox.results import SandboxError
from fledge.envs.sandbox.runner import MEGABYTE, Sandbox, make_job

REACHED = b"REACHED"
SMALL = Sandbox(
    wall_seconds=20.0,
    cpu_seconds=20,
    memory_mb=96,
    max_output_bytes=1 << 16,
    max_file_mb=1,
    max_processes=16,
    work_mb=4,
)


@dataclass(frozen=True, slots=True)
class Check:
    """One attack, and whether it was stopped."""

    attack: str
    holds: bool
    detail: str


@dataclass(frozen=True, slots=True)
class Report:
    """What holds on this machine, and which layers there are."""

    layers: tuple[str, ...]
    checks: tuple[Check, ...]

    @property
    def failed(self) -> tuple[Check, ...]:
        return tuple(check for check in self.checks if not check.holds)

    def summary(self) -> str:
        """What gets through, with the first reason; empty if nothing does."""
        names = ", ".join(check.attack for check in self.failed)
        return f"{names} ({self.failed[0].detail})" if names else ""

    def table(self) -> str:
        width = max(len(check.attack) for check in self.checks)
        rows = [
            f"{check.attack:<{width}}  {'stopped' if check.holds else 'OPEN':<7}  {check.detail}"
            for check in self.checks
        ]
        return "\n".join(
            row.rstrip() for row in [f"layers: {', '.join(self.layers) or 'none'}", *rows]
        )


Attack = Callable[[], Awaitable[tuple[bool, str]]]


async def probe() -> Report:
    """Try every attack, a few at a time."""
    bwrap = bubblewrap.find()
    controllers = [f"{c} cgroup v{b.version}" for b in cgroups.usable() for c in b.controllers]
    if bwrap is None:
        checks = [Check(name, False, "not tried: bwrap was not found") for name in ATTACKS]
        return Report(("rlimits", *controllers), tuple(checks))
    slots = asyncio.Semaphore(4)

    async def one(name: str, attack: Attack) -> Check:
        async with slots:
            return await _tried(name, attack)

    found = await asyncio.gather(*(one(name, attack) for name, attack in ATTACKS.items()))
    return Report(("bubblewrap", "rlimits", *sorted(controllers)), tuple(found))


async def _tried(name: str, attack: Attack, again: bool = True) -> Check:
    """A crowded machine may keep an attack from running; it gets a second chance to succeed."""
    try:
        return Check(name, *await attack())
    except SandboxError as error:
        return await _tried(name, attack, again=False) if again else Check(name, False, str(error))


async def _run(code: str) -> Ended:
    return await SMALL.unguarded(make_job(code, {}), "")


def _verdict(ended: Ended, detail: str, evidence: bytes = REACHED) -> tuple[bool, str]:
    """Stopped, if the candidate ran at all and did not come back with the evidence."""
    said = ended.stdout + ended.stderr
    if evidence in said:
        return False, f"it reached {detail}"
    if b"TRIED" not in said:
        raise SandboxError("sandbox: the attack did not run to its end")
    return True, ""


async def _host_files() -> tuple[bool, str]:
    token = secrets.token_hex(8)
    with tempfile.NamedTemporaryFile("w", prefix="fledge-probe-") as file:
        file.write(token)
        file.flush()
        paths = [file.name, "/etc/passwd", "/etc/shadow", os.path.abspath(__file__)]
        code = f"""
for path in {paths!r}:
    try:
        print(open(path).read()[:60], "REACHED")
    except OSError:
        pass
print("TRIED")
"""
        return _verdict(await _run(code), "a file of the host")


async def _environment() -> tuple[bool, str]:
    ended = await _run("""
import glob, os
print(dict(os.environ))
for path in glob.glob("/proc/[0-9]*/environ"):
    try:
        print(open(path, "rb").read())
    except OSError:
        pass
print("TRIED")
""")
    known = set(bubblewrap.ENVIRONMENT.values())
    values = [v for v in os.environ.values() if len(v) >= 6 and v not in known]
    leaked = [v for v in values if v.encode() in ended.stdout and not v.startswith("/")]
    return (False, "a variable of the host") if leaked else _verdict(ended, "a variable")


@contextlib.contextmanager
def _listener(family: int, address: str | tuple[str, int]) -> Iterator[socket.socket]:
    with socket.socket(family, socket.SOCK_STREAM) as server:
        server.bind(address)
        server.listen()
        yield server


_CONNECT = """
import socket
for family, address in {targets!r}:
    try:
        with socket.socket(family, socket.SOCK_STREAM) as client:
            client.settimeout(1)
            client.connect(address)
            print("REACHED", address)
    except OSError:
        pass
print("TRIED")
"""


async def _network() -> tuple[bool, str]:
    """A listener of the host, and an address outside: no route is as good as no answer."""
    family = int(socket.AF_INET)
    with _listener(family, ("127.0.0.1", 0)) as server:
        targets = [(family, server.getsockname()), (family, ("1.1.1.1", 53))]
        return _verdict(await _run(_CONNECT.format(targets=targets)), "the network")


async def _abstract_sockets() -> tuple[bool, str]:
    family, name = int(socket.AF_UNIX), f"\0fledge-probe-{secrets.token_hex(8)}"
    with _listener(family, name):
        ended = await _run(_CONNECT.format(targets=[(family, name)]))
        return _verdict(ended, "an abstract socket of the host")


async def _host_processes() -> tuple[bool, str]:
    ended = await _run("""
import os
print(os.readlink("/proc/self/ns/pid"), "pids", sorted(filter(str.isdigit, os.listdir("/proc"))))
for pid in filter(str.isdigit, os.listdir("/proc")):
    print(open(f"/proc/{pid}/cmdline").read()[:60])
print("TRIED")
""")
    return _verdict(ended, "the host's processes", os.readlink("/proc/self/ns/pid").encode())


async def _host_settings() -> tuple[bool, str]:
    """Opened for writing, and a mode set to what it is: evidence that changes nothing."""
    ended = await _run("""
import os
for path in ("core_pattern", "hostname", "printk"):
    try:
        os.close(os.open("/proc/sys/kernel/" + path, os.O_WRONLY))
        print("REACHED", path)
    except OSError:
        pass
for path in ("/dev/null", "/dev/zero", "/dev/urandom", "/dev/full", "/usr/bin"):
    try:
        os.chmod(path, os.stat(path).st_mode & 0o7777)
        print("REACHED", path)
    except OSError:
        pass
print("TRIED")
""")
    return _verdict(ended, "settings of the host's kernel, devices or programs")


_LIBC = """
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
"""


async def _mount() -> tuple[bool, str]:
    ended = await _run(
        _LIBC
        + """
results = [
    libc.mount(b"none", b"/box", b"tmpfs", 0, None),
    libc.mount(b"none", b"/proc", None, 32, None),
    libc.umount2(b"/usr", 2),
    libc.unshare(0x00020000),
]
print("REACHED" if 0 in results else results, "TRIED")
"""
    )
    return _verdict(ended, "mount")


async def _user_namespaces() -> tuple[bool, str]:
    code = 'print("REACHED" if libc.unshare(0x10000000) == 0 else "", "TRIED")'
    return _verdict(await _run(_LIBC + code), "a new user namespace")


async def _memory_bomb() -> tuple[bool, str]:
    ended = await _run(f"""
print("TRIED", flush=True)
held = []
while len(held) < {2 * SMALL.memory_mb}:
    held.append(bytearray(b"x") * {MEGABYTE})
print("REACHED")
""")
    return _verdict(ended, f"{2 * SMALL.memory_mb} MB with a limit of {SMALL.memory_mb}")


async def _huge_file() -> tuple[bool, str]:
    """One file beyond its limit, then many files beyond the directory's, wherever they may be."""
    ended = await _run(f"""
import os
largest = total = 0
for folder in ("/box", "/tmp", "/dev/shm", "/dev", "/"):
    for number in range(64):
        try:
            name = os.path.join(folder, f"file{{number}}of{{len(folder)}}")
            with open(name, "wb", buffering=0) as file:
                for _ in range(32):
                    total += file.write(bytes(65536))
                    largest = max(largest, file.tell())
        except OSError:
            pass
size = {SMALL.work_mb * MEGABYTE + bubblewrap.SHARED_MEMORY_BYTES}
print("REACHED" if largest > {SMALL.max_file_mb * MEGABYTE} or total > size else "", "TRIED")
""")
    return _verdict(ended, "more disk than its limit")


async def _fork_bomb() -> tuple[bool, str]:
    """Children that stay; the attack ends itself at four times the limit, should it get there."""
    ended = await _run(f"""
import os, sys, time
print("TRIED", flush=True)
for count in range({4 * SMALL.max_processes}):
    try:
        if os.fork() == 0:
            time.sleep(60)
            os._exit(0)
    except OSError:
        break
    if count >= {SMALL.max_processes}:
        print("REACHED")
        break
""")
    return _verdict(ended, f"{SMALL.max_processes} processes and more")


async def _daemon() -> tuple[bool, str]:
    token = f"fledge-probe-{secrets.token_hex(8)}"
    ended = await _run(f"""
import os, sys, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        for fd in range(64):
            try:
                os.close(fd)
            except OSError:
                pass
        os.execv(sys.executable, [sys.executable, "-ISc", "import time; time.sleep(60)", {token!r}])
    os._exit(0)
time.sleep(0.3)
print("TRIED")
""")
    survivors = _processes(token)
    for pid in survivors:
        os.kill(pid, signal.SIGKILL)
    return (False, "it outlived its run") if survivors else _verdict(ended, "a daemon")


def _processes(token: str) -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if token.encode() in path.read_bytes():
                found.append(int(path.parent.name))
    return found


async def _flood() -> tuple[bool, str]:
    ended = await _run("import os\nwhile True: os.write(1, b'x' * 65536)")
    size = len(ended.stdout)
    if ended.end == "output_limit" and size <= SMALL.max_output_bytes:
        return True, ""
    return False, f"{size} bytes came out, {ended.end}"


async def _other_run() -> tuple[bool, str]:
    """One run holds a secret in its directory while another looks for it."""
    token = secrets.token_hex(8)
    holder = asyncio.create_task(
        _run(f"import time\nopen('secret', 'w').write({token!r})\ntime.sleep(0.8)\nprint('TRIED')")
    )
    try:
        await asyncio.sleep(0.3)
        seeker = await _run("""
import glob, time
for pattern in ("/box/*", "/tmp/*", "/proc/[0-9]*/root/box/*", "/proc/[0-9]*/cwd/*"):
    for path in glob.glob(pattern):
        if not path.endswith("main.py"):
            try:
                print(path, open(path).read())
            except OSError:
                pass
print("TRIED")
""")
        await holder
    finally:
        holder.cancel()
        await asyncio.gather(holder, return_exceptions=True)
    return _verdict(seeker, "the directory of another run", token.encode())


async def _endless() -> tuple[bool, str]:
    """A loop that ignores every signal it can."""
    code = """
import signal
for number in set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP}:
    signal.signal(number, signal.SIG_IGN)
while True:
    pass
"""
    sandbox = Sandbox(wall_seconds=0.5, cpu_seconds=60, memory_mb=SMALL.memory_mb)
    ended = await sandbox.unguarded(make_job(code, {}), "")
    return (True, "") if ended.end == "timeout" else (False, f"ended by {ended.end}")


ATTACKS: dict[str, Attack] = {
    "read host files": _host_files,
    "environment secrets": _environment,
    "network": _network,
    "abstract sockets": _abstract_sockets,
    "host processes": _host_processes,
    "host settings and devices": _host_settings,
    "mount": _mount,
    "new user namespaces": _user_namespaces,
    "memory bomb": _memory_bomb,
    "huge file": _huge_file,
    "fork bomb": _fork_bomb,
    "daemon that survives the kill": _daemon,
    "endless loop": _endless,
    "output flood": _flood,
    "another run's directory": _other_run,
}
