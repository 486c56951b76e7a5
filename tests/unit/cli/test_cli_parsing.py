"""What the command line accepts, how fast, and what it loads for that."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from collections.abc import Callable

import pytest

RunCli = Callable[..., tuple[int, str, str]]
HEAVY = "torch transformers peft numpy safetensors tokenizers datasets pyarrow wandb mlflow rich"
HELP = "from fledge.cli.main import run\nrun(['--help'])\n"


def python(script: str) -> tuple[str, float]:
    """Output and CPU seconds of a fresh interpreter; CPU time, because the machine may be busy."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env=environment, check=True
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return done.stdout, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def test_nothing_heavy_is_imported_before_it_is_needed() -> None:
    check = f"print('loaded:', [m for m in '{HEAVY}'.split() if m in sys.modules])\n"
    said, _ = python(
        f"import sys, fledge\n{check}{HELP}{check}run(['train', '--dry-run'])\n{check}"
        "run(['train', 'stps=3'])\n" + check
    )
    loaded = [line for line in said.splitlines() if line.startswith("loaded:")]
    assert loaded == ["loaded: []"] * 4
    assert "Usage: fledge" in said and "quickstart" in said


def test_help_and_import_are_fast() -> None:
    assert min(python(HELP)[1] for _ in range(2)) < 0.5
    assert min(python("import fledge")[1] for _ in range(2)) < 0.3


def test_dry_run_shows_where_each_value_comes_from(
    run_cli: RunCli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLEDGE__ROLLOUT__GROUP_SIZE", "4")
    code, out, err = run_cli("train", "steps=7", "--dry-run")
    rows = {line.split()[0]: line.split(maxsplit=2)[1:] for line in out.splitlines()}
    assert (code, err) == (0, "")
    assert rows["key"] == ["value", "origin"]
    assert rows["steps"] == ["7", "override"]
    assert rows["rollout.group_size"] == ["4", "environment FLEDGE__ROLLOUT__GROUP_SIZE"]
    assert rows["env.name"] == ['"arithmetic"', "recipe quickstart"]
    assert rows["algorithm.loss.name"] == ['"clipped"', "preset grpo"]
    assert rows["optim.beta1"] == ["0.9", "default"]


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (["train", "--rollout.group_size", "4"], "write rollout.group_size=4"),
        (["train", "--rollout.group_size=4"], "write rollout.group_size=4"),
        (["eval", "some_run", "--steps"], "write steps=VALUE"),
        (["train", "--dry-rum"], "--dry-run"),
        (["train", "quickstart", "steps"], "key=value"),
        (["trian"], "train"),
        (["sft"], "recipe"),
        (["env"], "fledge env --help"),
        (["chat", "nowhere", "--temperature", "-1"], "temperature"),
    ],
)
def test_a_wrong_command_line_gets_one_line_with_a_hint(
    run_cli: RunCli, arguments: list[str], hint: str
) -> None:
    code, out, err = run_cli(*arguments)
    assert (code, out) == (2, "")
    assert err.startswith("error: ") and err.count("\n") == 1
    assert hint in err


def test_no_arguments_show_the_help_and_version_the_version(run_cli: RunCli) -> None:
    code, out, _ = run_cli()
    assert code == 0 and out.startswith("Usage: fledge")
    code, out, _ = run_cli("--version")
    assert code == 0 and out.startswith("fledge ")
