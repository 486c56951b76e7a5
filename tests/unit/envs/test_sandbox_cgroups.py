"""Where cgroups are looked for, from texts; and v2 on a tree of plain files."""

import errno
from pathlib import Path

import pytest

from fledge.envs.sandbox import cgroups
from fledge.envs.sandbox.cgroups import Base, Cgroup, candidates

V1 = """\
40 30 0:35 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory
41 30 0:36 / /sys/fs/cgroup/pids rw,relatime - cgroup cgroup rw,pids
42 30 0:37 / /sys/fs/cgroup/cpu rw,relatime - cgroup cgroup rw,cpu
23 28 0:21 / /proc rw,relatime shared:14 - proc proc rw
"""


def test_v1_is_below_ourselves():
    found = candidates(V1, "4:memory:/jobs/7\n3:pids:/\n2:cpu:/\n0::/\n")
    assert found == [
        Base(Path("/sys/fs/cgroup/memory/jobs/7"), 1, ("memory",)),
        Base(Path("/sys/fs/cgroup/pids"), 1, ("pids",)),
    ]


def test_a_mount_of_a_part_of_the_tree():
    mount = "40 30 0:35 /docker/a /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory"
    assert candidates(mount, "4:memory:/docker/a/b")[0].path == Path("/sys/fs/cgroup/memory/b")
    assert candidates(mount, "4:memory:/elsewhere") == []


def v2(tmp_path, limit):
    own = tmp_path / "user" / "session"
    own.mkdir(parents=True)
    (own / "memory.max").write_text(limit)
    mount = f"30 23 0:26 / {tmp_path} rw shared:9 - cgroup2 cgroup2 rw,nsdelegate"
    return [base.path for base in candidates(mount, "0::/user/session")]


def test_v2_may_stand_beside_us(tmp_path):
    assert v2(tmp_path, "max\n") == [tmp_path / "user/session", tmp_path / "user"]


def test_v2_never_leaves_a_limit_that_was_set_on_us(tmp_path):
    assert v2(tmp_path, "1000000\n") == [tmp_path / "user/session"]


def test_v2_limits_are_written_and_kills_are_read(tmp_path):
    group = Cgroup((Base(tmp_path, 2, ("memory", "pids")),), processes=10, memory=1 << 20)
    (path,) = group.paths
    assert (path / "pids.max").read_text() == "10"
    assert (path / "memory.max").read_text() == str(1 << 20)
    (path / "memory.events").write_text("low 0\noom 1\noom_kill 0\noom_group_kill 0\n")
    assert not group.out_of_memory()
    (path / "memory.events").write_text("low 0\noom 1\noom_kill 2\noom_group_kill 0\n")
    assert group.out_of_memory()
    assert group.join(["true"])[4:] == [str(path / "cgroup.procs"), "--", "true"]


def test_a_place_without_rights_is_not_used(monkeypatch):
    def refused(*_arguments, **_named):
        raise PermissionError(errno.EACCES, "no")

    monkeypatch.setattr(Path, "mkdir", refused)
    assert not cgroups._works(Base(Path("/sys/fs/cgroup"), 2, ("pids",)))


def test_the_dead_are_swept_and_the_living_are_not(tmp_path):
    for name in ("fledge-999999999-0", "fledge-1-0", "fledge-x-0"):
        (tmp_path / name).mkdir()
    cgroups._sweep(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["fledge-1-0", "fledge-x-0"]


@pytest.mark.skipif(not cgroups.usable(), reason="no cgroup can be made here")
def test_a_real_one_comes_and_goes():
    group = Cgroup(cgroups.usable(), processes=8, memory=32 << 20)
    paths = list(group.paths)
    assert all(path.is_dir() for path in paths) and not group.out_of_memory()
    assert group.remove() and group.remove()
    assert not any(path.exists() for path in paths)
