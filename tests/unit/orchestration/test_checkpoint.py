from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from fledge.errors import CheckpointError
from fledge.orchestration import checkpoint
from fledge.orchestration.checkpoint import (
    Checkpoints,
    check_identity,
    read_checkpoint,
    read_latest,
)


def weights(value: float, size: int = 8) -> Callable[[Path], None]:
    def write(directory: Path) -> None:
        save_file({"w": np.full(size, value, np.float32)}, directory / "model.safetensors")
        (directory / "optim").mkdir()
        (directory / "optim" / "groups.json").write_text('{"lr": 0.1}')

    return write


def opened(path: Path, keep_last: int = 2, keep_best: bool = False) -> Checkpoints:
    return Checkpoints(path, keep_last, keep_best)


def names(path: Path) -> list[str]:
    return sorted(p.name for p in (path / "checkpoints").iterdir())


def value_of(path: Path) -> float:
    return float(load_file(path / "model.safetensors")["w"][0])


def test_what_was_saved_comes_back(tmp_path: Path) -> None:
    saves = opened(tmp_path)
    assert saves.latest() is None and read_latest(tmp_path) is None
    state = {"rng": [1, 2**63], "mean": 0.1 + 0.2, "best": float("-inf"), "nested": {"a": None}}
    saves.save(9, weights(9), {"epoch": 0})
    path = saves.save(10, weights(10), state)
    found = saves.latest()
    assert found == read_latest(tmp_path) == read_checkpoint(path) == (10, path, state)
    assert value_of(path) == 10 and names(tmp_path) == ["step_10", "step_9"]


def test_newest_are_kept_and_the_best_survives(tmp_path: Path) -> None:
    saves = opened(tmp_path, keep_last=2, keep_best=True)
    scores = {1: 0.2, 2: 0.9, 3: None, 4: float("nan"), 5: 0.5}
    for step, score in scores.items():
        saves.save(step, weights(step), {}, score)
    assert names(tmp_path) == ["step_2", "step_4", "step_5"] and saves.best() == 2
    again = opened(tmp_path, keep_last=1, keep_best=True)
    again.save(6, weights(6), {}, 0.9)
    assert names(tmp_path) == ["step_6"], "a newer one that is as good replaces the best"
    plain = opened(tmp_path, keep_last=1)
    plain.save(7, weights(7), {}, 0.1)
    assert names(tmp_path) == ["step_7"]


def test_the_one_just_saved_is_never_pruned(tmp_path: Path) -> None:
    saves = opened(tmp_path, keep_last=1)
    saves.save(10, weights(10), {})
    saves.save(5, weights(5), {})
    assert "step_5" in names(tmp_path)


def test_saving_a_step_again_replaces_it(tmp_path: Path) -> None:
    saves = opened(tmp_path)
    saves.save(3, weights(1), {"n": 1})
    saves.save(3, weights(2), {"n": 2})
    found = saves.latest()
    assert found is not None and found.state == {"n": 2} and value_of(found.path) == 2
    assert names(tmp_path) == ["step_3"]


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("name", "damage", "complaint"),
    [
        ("model.safetensors", truncate, r"model\.safetensors has \d+ bytes instead of \d+"),
        ("model.safetensors", flip, r"model\.safetensors was altered"),
        ("model.safetensors", Path.unlink, r"model\.safetensors is missing"),
        ("optim/groups.json", flip, r"optim/groups\.json was altered"),
        ("state.json", Path.unlink, r"state\.json is missing"),
        ("manifest.json", truncate, r"manifest\.json is not a manifest"),
        ("manifest.json", Path.unlink, r"manifest\.json is missing"),
        ("extra.json", Path.touch, r"extra\.json is not in manifest\.json"),
        ("model.pt", Path.touch, r"model\.pt is neither safetensors nor JSON"),
        ("optim/state.pkl", Path.touch, r"optim/state\.pkl is neither"),
        ("pytorch_model.bin", Path.touch, r"pytorch_model\.bin is neither"),
    ],
)
def test_damage_is_named_and_never_skipped(
    tmp_path: Path, name: str, damage: Callable[[Path], None], complaint: str
) -> None:
    saves = opened(tmp_path, keep_last=3)
    for step in (10, 20, 30):
        saves.save(step, weights(step), {})
    damage(tmp_path / "checkpoints" / "step_30" / name)
    truncate(tmp_path / "checkpoints" / "step_20" / "state.json")
    with pytest.raises(CheckpointError, match=complaint) as caught:
        saves.latest()
    text = str(caught.value)
    assert "step_30 is damaged" in text and "\n" not in text
    assert "step_10 is complete; delete the damaged directory to continue from it" in text
    with pytest.raises(CheckpointError, match=complaint):
        read_checkpoint(tmp_path / "checkpoints" / "step_30")


def test_damage_without_an_alternative_says_so(tmp_path: Path) -> None:
    opened(tmp_path).save(1, weights(1), {})
    truncate(tmp_path / "checkpoints" / "step_1" / "state.json")
    with pytest.raises(
        CheckpointError, match="no earlier one is complete; delete it to start over"
    ):
        read_latest(tmp_path)


def test_a_checkpoint_under_another_name_is_refused(tmp_path: Path) -> None:
    path = opened(tmp_path).save(1, weights(1), {})
    path.rename(path.with_name("step_2"))
    with pytest.raises(CheckpointError, match=r"manifest\.json belongs to step 1"):
        read_latest(tmp_path)


def test_pickles_are_refused_when_saving(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"not model\.pt"):
        opened(tmp_path).save(1, lambda d: (d / "model.pt").touch(), {})
    assert names(tmp_path) == []


def test_state_that_json_would_change_is_refused(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="JSON keys are strings"):
        opened(tmp_path).save(1, weights(1), {"seen": [{3: True}]})


@pytest.mark.parametrize("when", ["write", "rename", "fsync"])
def test_a_failed_save_leaves_the_earlier_ones_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    saves = opened(tmp_path, keep_last=1)
    saves.save(1, weights(1), {"n": 1})

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    if when == "rename":
        monkeypatch.setattr(os, "rename", full)
    elif when == "fsync":
        monkeypatch.setattr("fledge.orchestration.files.os.fsync", full)
    message = (
        r"checkpoint: cannot save step_2 in run_dir .*: the disk is full;.*step_1 is untouched"
    )
    with pytest.raises(CheckpointError, match=message) as caught:
        saves.save(2, full if when == "write" else weights(2), {})
    assert "\n" not in str(caught.value)
    found = saves.latest()
    assert found is not None and found.state == {"n": 1} and names(tmp_path) == ["step_1"]


def test_a_failed_replacement_puts_the_old_one_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saves = opened(tmp_path)
    saves.save(1, weights(1), {"n": 1})
    rename = os.rename

    def fails_once_for_the_new(source: Path, target: Path) -> None:
        if ".tmp-step_1" in str(source):
            raise OSError(errno.EIO, "Input/output error")
        rename(source, target)

    monkeypatch.setattr(os, "rename", fails_once_for_the_new)
    with pytest.raises(CheckpointError, match="input/output error"):
        saves.save(1, weights(2), {"n": 2})
    found = saves.latest()
    assert found is not None and found.state == {"n": 1} and names(tmp_path) == ["step_1"]


def test_ctrl_c_while_saving_leaves_no_trace(tmp_path: Path) -> None:
    def interrupted(directory: Path) -> None:
        weights(1)(directory)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        opened(tmp_path).save(1, interrupted, {})
    assert names(tmp_path) == []


def test_a_really_full_disk(small_disk: Path) -> None:
    """safetensors reports a full disk as an error of its own, not as an OSError."""
    saves = opened(small_disk)
    saves.save(1, weights(1, size=50_000), {})
    saves.save(2, weights(2, size=50_000), {})
    message = r"checkpoint: cannot save step_3 .*the disk is full.*step_2 is untouched"
    with pytest.raises(CheckpointError, match=message):
        saves.save(3, weights(3, size=400_000), {})
    with pytest.raises(CheckpointError, match=r"cannot save step_3 .*the disk is full"):
        saves.save(3, weights(3), {"text": "x" * 1_000_000})
    found = saves.latest()
    assert found is not None and found.step == 2 and value_of(found.path) == 2
    assert names(small_disk) == ["step_1", "step_2"]
    saves.save(4, weights(4), {})
    assert names(small_disk) == ["step_2", "step_4"]


Stop = Callable[..., None]
Killer = Callable[[Callable[[Stop], None]], None]


def save_again(path: Path, step: int, stop: Stop | None = None) -> None:
    def write(directory: Path) -> None:
        weights(2)(directory)
        if stop:
            stop()

    opened(path, keep_last=1).save(step, write, {"n": 2})


@pytest.mark.parametrize("step", [2, 1], ids=["new", "replacing"])
@pytest.mark.parametrize("moment", ["write", "sync_file", "_put_in_place"])
def test_kill_in_the_middle_of_a_save_keeps_the_old(
    tmp_path: Path, run_until_killed: Killer, moment: str, step: int
) -> None:
    opened(tmp_path).save(1, weights(1), {"n": 1})

    def victim(stop: Stop) -> None:
        if moment != "write":
            setattr(checkpoint, moment, stop)
        save_again(tmp_path, step, stop if moment == "write" else None)

    run_until_killed(victim)
    assert any(n.startswith(".tmp-") for n in names(tmp_path)), (
        "the kill came too late to test this"
    )
    found = read_latest(tmp_path)
    assert found is not None and found.step == 1 and found.state == {"n": 1}
    assert opened(tmp_path).latest() == found
    assert names(tmp_path) == ["step_1"]


def test_kill_between_the_two_renames_of_a_replacement_puts_the_old_back(
    tmp_path: Path, run_until_killed: Killer
) -> None:
    opened(tmp_path).save(1, weights(1), {"n": 1})
    rename = os.rename

    def victim(stop: Stop) -> None:
        os.rename = lambda a, b: stop() if ".tmp-" in str(a) else rename(a, b)  # type: ignore
        save_again(tmp_path, 1)

    run_until_killed(victim)
    assert ".old-step_1" in names(tmp_path)
    found = opened(tmp_path).latest()
    assert found is not None and found.state == {"n": 1} and names(tmp_path) == ["step_1"]


def test_kill_while_pruning_leaves_the_new_one(tmp_path: Path, run_until_killed: Killer) -> None:
    opened(tmp_path).save(1, weights(1), {"n": 1})
    rmtree = shutil.rmtree

    def victim(stop: Stop) -> None:
        shutil.rmtree = lambda p, **k: stop() if "gone" in str(p) else rmtree(p, **k)  # type: ignore
        save_again(tmp_path, 2)

    run_until_killed(victim)
    found = opened(tmp_path).latest()
    assert found is not None and found.step == 2 and names(tmp_path) == ["step_2"]


def test_readers_do_not_disturb_a_save_in_progress(tmp_path: Path) -> None:
    saves = opened(tmp_path)
    saves.save(1, weights(1), {})

    def write(directory: Path) -> None:
        weights(2)(directory)
        found = read_latest(tmp_path)
        assert found is not None and found.step == 1 and directory.is_dir()

    saves.save(2, write, {})


def test_the_manifest_is_written_last_and_lists_every_file(tmp_path: Path) -> None:
    path = opened(tmp_path).save(1, weights(1), {}, score=0.5)
    manifest = json.loads((path / "manifest.json").read_text())
    assert sorted(manifest["files"]) == ["model.safetensors", "optim/groups.json", "state.json"]
    assert manifest["score"] == 0.5 and manifest["step"] == 1


def test_identity_lists_what_changed() -> None:
    saved = {"optim.lr": 0.001, "seed": 0, "rollout.stop": ["a"], "data.fingerprint": "ab"}
    warned: list[str] = []
    check_identity(saved, {**saved, "rollout.stop": ("a",)}, warned.append)
    now = {"optim.lr": 0.0003, "seed": 0, "rollout.stop": ["a"], "data.fingerprint": "cd"}
    with pytest.raises(CheckpointError) as caught:
        check_identity(saved, {**now, "algorithm.loss.high": 0.28}, warned.append)
    text = str(caught.value)
    assert "optim.lr: 0.001 -> 0.0003" in text and 'data.fingerprint: "ab" -> "cd"' in text
    assert "algorithm.loss.high: (not set) -> 0.28" in text and "seed" not in text
    assert "start another run_dir or set it back" in text and "\n" not in text and not warned


def test_identity_tells_a_missing_key_from_none() -> None:
    with pytest.raises(CheckpointError, match=r"model\.lora: null -> \(not set\)"):
        check_identity({"model.lora": None}, {}, print)


def test_identity_is_brief_about_many_changes() -> None:
    saved = {f"key{i:02}": "x" * 500 for i in range(20)}
    with pytest.raises(CheckpointError, match="and 12 more") as caught:
        check_identity(saved, dict.fromkeys(saved, 1), print)
    assert len(str(caught.value)) < 1200


def test_identity_warns_where_it_cannot_tell() -> None:
    warned: list[str] = []
    saved = {"software.torch": "2.11", "data.fingerprint": None, "seed": 0}
    check_identity(
        saved, {**saved, "software.torch": "2.12", "data.fingerprint": "a"}, warned.append
    )
    assert len(warned) == 2 and "cannot tell" in warned[0] and "last bits" in warned[1]


def test_edited_code_warns_and_does_not_refuse() -> None:
    said: list[str] = []
    check_identity({"code.env.function": "a"}, {"code.env.function": "b"}, said.append)
    assert said == [
        "env.function: the file of this plug-in has changed since the checkpoint was made"
    ]


def test_whether_anything_was_saved_is_known_without_reading_it(tmp_path: Path) -> None:
    assert not checkpoint.has_checkpoint(tmp_path)
    opened(tmp_path).save(3, weights(3), {})
    assert checkpoint.has_checkpoint(tmp_path)
