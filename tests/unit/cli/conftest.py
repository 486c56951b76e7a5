"""The command line in-process, and a recipe small enough to train in a moment."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from fledge.cli.main import main

RunCli = Callable[..., tuple[int, str, str]]

RECIPE = """
run_dir: {folder}/run
steps: 1
console: plain
model: {{path: tiny, random_init: true}}
env: {{name: reward, function: "{module}:reward"}}
data: {{train: {folder}/train.jsonl}}
rollout: {{group_size: 2, groups_per_step: 1, max_new_tokens: 3}}
engine: {{cache_mb: 4}}
"""


@pytest.fixture
def run_cli(capsys: pytest.CaptureFixture[str]) -> RunCli:
    """`run_cli("train", "steps=1")` gives exit code, stdout and stderr."""

    def run(*arguments: str) -> tuple[int, str, str]:
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        out, err = capsys.readouterr()
        assert isinstance(ended.value.code, int)
        return ended.value.code, out, err

    return run


@pytest.fixture
def small_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], str]:
    """Writes a recipe whose reward function returns the given expression; returns its path."""

    def write(reward: str = "float(len(response) % 2)") -> str:
        module = f"reward_of_{tmp_path.name}"
        monkeypatch.syspath_prepend(str(tmp_path))
        body = f"import math\n\ndef reward(prompt, response, meta):\n    return {reward}\n"
        (tmp_path / f"{module}.py").write_text(body)
        rows = [{"prompt": f"{n}+{n}", "answer": str(2 * n)} for n in range(4)]
        (tmp_path / "train.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        recipe = tmp_path / "recipe.yaml"
        recipe.write_text(RECIPE.format(folder=tmp_path, module=module))
        return str(recipe)

    return write
