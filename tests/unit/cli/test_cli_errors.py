"""Whatever goes wrong: the right exit code, one line that names the setting, no stack trace."""

from __future__ import annotations

import errno
import json
import shutil
from collections.abc import Callable
from importlib import resources
from pathlib import Path

import pytest

import fledge.orchestration

RunCli = Callable[..., tuple[int, str, str]]
Recipe = Callable[..., str]


def expect_error(result: tuple[int, str, str], *parts: str) -> None:
    code, out, err = result
    assert code == 2, (out, err)
    assert err.startswith("error: ") and err.count("\n") == 1, err
    assert "Traceback" not in out + err
    for part in parts:
        assert part in err, err


@pytest.mark.parametrize(
    ("setting", "parts"),
    [
        ("rollout.group_sise=4", ["rollout.group_sise", "did you mean 'rollout.group_size'"]),
        ("data.train=nowhere.jsonl", ["data.train", "does not exist"]),
        ("rollout.group_size=1", ["rollout.group_size"]),
        ("model.path=./nowhere", ["model.path", "no folder here"]),
        ("env=nothing_like_it", ["env", "not built in"]),
        ("env.function=no_such_module:f", ["env.function", "no_such_module"]),
        ("rollout.max_new_tokens=512", ["rollout.max_new_tokens", "context"]),
        ("steps=many", ["steps", "many"]),
    ],
)
def test_a_bad_setting(
    run_cli: RunCli, small_recipe: Recipe, setting: str, parts: list[str]
) -> None:
    expect_error(run_cli("train", small_recipe(), setting), *parts)


def test_empty_data(run_cli: RunCli, small_recipe: Recipe, tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text("\n")
    result = run_cli("train", small_recipe(), f"data.train={tmp_path}/empty.jsonl")
    expect_error(result, "data.train", "has no rows")


def test_a_file_where_the_run_should_be(
    run_cli: RunCli, small_recipe: Recipe, tmp_path: Path
) -> None:
    (tmp_path / "taken").write_text("")
    result = run_cli("train", small_recipe(), f"run_dir={tmp_path}/taken")
    expect_error(result, "run_dir", "file")


@pytest.mark.parametrize(
    ("text", "part"),
    [("a: [1", "not valid YAML"), ("- 1", "must be a mapping"), ("steps: 1", "env")],
)
def test_a_bad_recipe(run_cli: RunCli, tmp_path: Path, text: str, part: str) -> None:
    recipe = tmp_path / "bad.yaml"
    recipe.write_text(text)
    expect_error(run_cli("train", str(recipe)), part)


def test_a_prompt_longer_than_the_context(
    run_cli: RunCli, small_recipe: Recipe, tmp_path: Path
) -> None:
    recipe = small_recipe()
    (tmp_path / "train.jsonl").write_text(json.dumps({"prompt": "1+1 " * 400}))
    expect_error(run_cli("train", recipe), "data.max_prompt_tokens", "context of 512")


@pytest.mark.parametrize("reward", ["math.nan", "None", "'1.0'"])
def test_a_reward_that_is_no_number(run_cli: RunCli, small_recipe: Recipe, reward: str) -> None:
    expect_error(run_cli("train", small_recipe(reward)), "env.function", "finite number")


def test_a_tokenizer_that_is_too_large_for_the_model(
    run_cli: RunCli, small_recipe: Recipe, tmp_path: Path
) -> None:
    model = tmp_path / "model"
    shutil.copytree(str(resources.files("fledge.models") / "tiny"), model)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "vocab_size": 100}))
    result = run_cli("train", small_recipe(), f"model.path={model}")
    expect_error(result, "model.path", "do not belong together")


def test_a_truncated_checkpoint_on_resume(
    run_cli: RunCli, small_recipe: Recipe, tmp_path: Path
) -> None:
    recipe = small_recipe()
    assert run_cli("train", recipe)[0] == 0
    weights = tmp_path / "run/checkpoints/step_1/weights/model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    expect_error(run_cli("train", recipe, "steps=2"), "checkpoint", "model.safetensors")
    expect_error(run_cli("chat", str(tmp_path / "run"), "--prompt", "hi"), "model.safetensors")


@pytest.mark.parametrize(
    ("raised", "code", "part"),
    [
        (KeyboardInterrupt(), 130, "give the same command again"),
        (RuntimeError("boom"), 1, "run again with --debug"),
        (OSError(errno.ENOSPC, "No space", "x"), 2, "No space left on device: x; free space"),
        (RuntimeError("I/O error (os error 28)"), 2, "No space left on device"),
        (MemoryError(), 2, "optim.micro_tokens"),
    ],
)
def test_what_ends_a_command_from_outside(
    run_cli: RunCli, monkeypatch: pytest.MonkeyPatch, raised: BaseException, code: int, part: str
) -> None:
    def fail(*_: object) -> None:
        raise raised

    monkeypatch.setattr(fledge.orchestration, "train", fail)
    found, out, err = run_cli("train")
    assert (found, out) == (code, "")
    assert part in err and err.count("\n") == 1


@pytest.mark.parametrize("by_environment", [False, True])
def test_debug_shows_the_stack_trace(
    run_cli: RunCli, monkeypatch: pytest.MonkeyPatch, by_environment: bool
) -> None:
    monkeypatch.setenv("FLEDGE_DEBUG", "1" if by_environment else "0")
    arguments = ["train", "stps=3", *([] if by_environment else ["--debug"])]
    code, _, err = run_cli(*arguments)
    assert code == 2
    assert "Traceback" in err and err.splitlines()[-1].startswith("error: stps")
