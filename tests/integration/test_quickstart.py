"""The quickstart: in full as a slow test for three seeds with its control, and small in every test
run.
"""

import json
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from fledge.config import TrainConfig, load_config
from fledge.envs import arithmetic
from fledge.orchestration import train

FLEDGE = [sys.executable, "-m", "fledge.cli.main"]
ROOT = Path(__file__).resolve().parents[2]


def command(run_dir, *overrides):
    """The command of `make train`, its report, and the CPU seconds of its process tree."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(
        [*FLEDGE, "train", "quickstart", f"run_dir={run_dir}", *overrides],
        cwd=ROOT,
        check=True,
        capture_output=True,
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return json.loads((run_dir / "report.json").read_text()), cpu


def accuracies(report):
    evaluations = report["evaluations"]
    last = max(evaluations, key=int)
    return (
        report["before"]["evaluation"]["average"],
        evaluations["0"]["average"],
        evaluations[last]["average"],
    )


def score_with_plain_transformers(folder, tasks):
    """Greedy accuracy of an export, without a line of fledge."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    right = 0
    for task in tasks:
        ids = tokenizer.apply_chat_template(
            [{"role": "user", "content": task["prompt"]}],
            add_generation_prompt=True,
            return_tensors="pt",
            return_dict=False,
        )
        out = model.generate(ids, max_new_tokens=6, do_sample=False)
        text = tokenizer.decode(out[0, ids.shape[1] :])
        right += text == f"{task['answer']}<|im_end|>"
    return right / len(tasks)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_rl_lifts_held_out_accuracy_and_shuffled_rewards_do_not(seed, tmp_path):
    run = tmp_path / "run"
    report, cpu = command(run, f"seed={seed}")
    before, warm, final = accuracies(report)
    plain = score_with_plain_transformers(run / "model", arithmetic.tasks("eval"))
    control = tmp_path / "control"
    control.mkdir()
    shutil.copytree(run / "warm_start", control / "warm_start")
    shuffled = "algorithm.advantage=examples.shuffled_rewards:shuffled"
    _, control_warm, control_final = accuracies(command(control, f"seed={seed}", shuffled)[0])
    print(
        f"\n| seed {seed}: before {before:.3f}, warm start {warm:.3f}, RL {final:.3f}, "
        f"plain transformers {plain:.3f}, shuffled rewards {control_final:.3f}, CPU {cpu:.0f} s"
    )
    assert final >= 0.9
    assert final - warm >= 0.4
    assert cpu <= 400
    assert plain == pytest.approx(final, abs=1e-9)
    assert control_warm == warm
    assert control_final - warm < 0.05


def test_the_export_loads_in_plain_transformers_and_scores_the_same(tmp_path):
    """With so few steps hardly any sum is right, so the replies are compared, too."""
    torch.set_num_threads(1)
    small = {
        "steps": 2,
        "rollout.groups_per_step": 4,
        "rollout.group_size": 2,
        "data.eval_size": 40,
        "eval.every": 0,
        "warm_start.steps": 60,
        "console": "quiet",
    }
    overrides = [f"{key}={value}" for key, value in small.items()]
    resolved = load_config(
        TrainConfig, "quickstart", [f"run_dir={tmp_path}", *overrides], environ={}
    )
    report = train(resolved)
    assert report["finished"]
    tasks = arithmetic.tasks("eval")[:40]
    final = accuracies(report)[2]
    assert score_with_plain_transformers(tmp_path / "model", tasks) == pytest.approx(final)
    answers = report["evaluations"]["2"]["answers"]
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    for prompt, reply, _ in answers:
        ids = tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}],
            add_generation_prompt=True,
            return_tensors="pt",
            return_dict=False,
        )
        out = model.generate(ids, max_new_tokens=6, do_sample=False)[0, ids.shape[1] :]
        assert tokenizer.decode(out).removesuffix("<|im_end|>") == reply


def test_the_pools_are_disjoint_and_large_enough():
    held_out = {row["prompt"] for row in arithmetic.tasks("eval")}
    practised = {row["prompt"] for row in arithmetic.tasks("train")}
    tuning = {row["prompt"] for row in arithmetic.tasks("tuning")}
    demonstrated = {row["prompt"] for row in arithmetic.demonstrations()}
    assert len(held_out) == 500
    assert len(practised) >= 10_000
    assert not held_out & (practised | demonstrated | tuning)
    assert not tuning & (practised | demonstrated)
    assert not practised & demonstrated
