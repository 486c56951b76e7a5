"""Commands on a small run: what they print and leave behind."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fledge.cli import show
from fledge.cli.main import cost

RunCli = Callable[..., tuple[int, str, str]]
Recipe = Callable[..., str]


def record(average: float, reply: str) -> dict[str, Any]:
    return {"average": average, "passed": average, "answers": [["1+1", reply, average]]}


REPORT: dict[str, Any] = {
    "finished": True,
    "evaluations": {"0": record(0.4, "1"), "20": record(0.9, "?"), "100": record(1.0, "2")},
    "health": {
        "warnings": {"something odd": 2},
        "worst_mismatch": 2.4e-6,
        "publishes_proven": 101,
        "dropped_episodes": {"grader_error": 3},
    },
    "model": "runs/a/model",
    "seconds": 61.2,
}


def test_the_summary_of_a_warm_started_run_has_three_stages() -> None:
    report = {**REPORT, "before": {"evaluation": record(0.0, "\x1b[2J")}}
    lines = show.train_summary(report, "runs/a", cost="61 s, 70 s of CPU").splitlines()
    at = [i for i, line in enumerate(lines) if line.startswith("  ") and line[2] != " "]
    assert [lines[i].split("  ")[1].strip() for i in at] == [
        "before",
        "after supervised warm start",
        "after RL",
    ]
    assert [lines[i].split()[-1] for i in at] == ["0.000", "0.400", "1.000"]
    assert [lines[i + 1].strip() for i in at] == [
        "1+1 -> \\x1b[2J  wrong",
        "1+1 -> 1  wrong",
        "1+1 -> 2  right",
    ]
    assert (
        "health: 101 publishes proven, worst mismatch 2.4e-06, warnings: something odd (x2), "
        "dropped episodes: 3 grader_error" in lines
    )
    assert "time: 61 s, 70 s of CPU" in lines
    assert "model: runs/a/model" in lines
    assert "next: fledge chat runs/a" in lines


def test_the_summary_without_warm_start_has_before_and_after() -> None:
    text = show.train_summary(REPORT, "runs/a", cost="1 s")
    assert "before" in text and "after RL" in text and "supervised" not in text


def test_the_summary_without_evaluations_has_no_scores() -> None:
    text = show.train_summary({**REPORT, "evaluations": {}}, "runs/a", cost="1 s")
    assert "score" not in text and "health:" in text


def test_the_cost_is_wall_and_cpu_time() -> None:
    assert re.fullmatch(r"\d+ s, \d+ s of CPU", cost())


def test_train_eval_chat_and_export(
    run_cli: RunCli, small_recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = str(tmp_path / "run")
    code, out, err = run_cli("train", small_recipe(), "data.eval_size=2")
    assert (code, err) == (0, "")
    assert "before" in out and "after RL" in out and f"next: fledge chat {run}" in out

    code, out, err = run_cli("eval", run, "eval.samples=2", "eval.temperature=1")
    assert (code, err) == (0, "")
    assert out.startswith("reward: avg@2 ") and "pass@2 " in out and out.count(" -> ") == 2

    code, out, err = run_cli("chat", run, "--prompt", "1+1")
    assert (code, err, out.count("\n")) == (0, "", 1)

    lines = iter(["1+1", "", "2+2"])
    monkeypatch.setattr("builtins.input", lambda prompt: _next(lines))
    code, out, err = run_cli("chat", run)
    assert (code, err) == (0, "")
    assert "only knows what its run taught it" in out

    _check_export(run_cli, run, tmp_path)


def _next(lines: Iterator[str]) -> str:
    for line in lines:
        return line
    raise EOFError


def _check_export(run_cli: RunCli, run: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    code, _, err = run_cli("export", run, str(tmp_path / "out"))
    assert (code, err) == (0, "")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert model.config.vocab_size >= len(AutoTokenizer.from_pretrained(tmp_path / "out"))
    code, _, err = run_cli("export", run, str(tmp_path / "out"))
    assert code == 2 and "OUT" in err
    code, _, err = run_cli("export", run, str(tmp_path / "other"), "--adapter")
    assert code == 2 and "--adapter" in err and not (tmp_path / "other").exists()


def test_an_adapter_can_be_exported_alone_or_merged(
    run_cli: RunCli, small_recipe: Recipe, tmp_path: Path
) -> None:
    assert run_cli("train", small_recipe(), "model.lora.rank=2")[0] == 0
    run = str(tmp_path / "run")
    assert run_cli("export", run, str(tmp_path / "adapter"), "--adapter")[0] == 0
    assert (tmp_path / "adapter/adapter_model.safetensors").is_file()
    assert run_cli("export", run, str(tmp_path / "merged"))[0] == 0
    assert (tmp_path / "merged/model.safetensors").is_file()


def test_chat_extends_the_conversation_token_by_token(
    run_cli: RunCli, small_recipe: Recipe, tmp_path: Path
) -> None:
    import asyncio

    from fledge.cli.chat import Conversation

    assert run_cli("train", small_recipe())[0] == 0
    conversation = Conversation(tmp_path / "run", temperature=1.0)

    async def say(text: str) -> str:
        return "".join([piece async for piece in conversation.say(text)])

    with asyncio.Runner() as runner:
        first = runner.run(say("1+1"))
        kept = list(conversation.token_ids)
        runner.run(say("2+2"))
    assert conversation.token_ids[: len(kept)] == kept
    assert len(conversation.token_ids) > len(kept)
    assert isinstance(first, str)


def test_sft_trains_and_says_what_is_next(run_cli: RunCli, tmp_path: Path) -> None:
    rows = [{"prompt": "1+1", "response": "2"}, {"prompt": "2+2", "response": "4"}]
    (tmp_path / "demos.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    recipe = tmp_path / "sft.yaml"
    recipe.write_text(
        f"run_dir: {tmp_path}/run\nsteps: 1\nmodel: {{random_init: true}}\n"
        f"data: {{train: {tmp_path}/demos.jsonl, batch_size: 2}}\n"
    )
    code, out, _ = run_cli("sft", str(recipe), "--dry-run")
    assert code == 0 and "data.batch_size" in out and not (tmp_path / "run").exists()
    code, out, err = run_cli("sft", str(recipe))
    assert (code, err) == (0, "")
    assert f"next: fledge chat {tmp_path}/run" in out


def test_a_run_that_was_stopped_early_ends_with_130(
    run_cli: RunCli, monkeypatch: pytest.MonkeyPatch
) -> None:
    import fledge.orchestration

    monkeypatch.setattr(fledge.orchestration, "train", lambda _: {"finished": False, "step": 3})
    assert run_cli("train") == (130, "", "")


def test_env_check(run_cli: RunCli, small_recipe: Recipe, tmp_path: Path) -> None:
    assert run_cli("env", "check", "arithmetic")[0] == 0
    small_recipe("'no number'")
    data, function = f"{tmp_path}/train.jsonl", f"function=reward_of_{tmp_path.name}:reward"
    code, out, _ = run_cli("env", "check", "reward", function, "--data", data)
    assert code == 1 and "finite number" in out
    code, _, err = run_cli("env", "check", "reward", function)
    assert code == 2 and "--data" in err
    code, _, err = run_cli("env", "check", "arithmetic", "no_such_argument=1")
    assert code == 2 and "no_such_argument" in err
