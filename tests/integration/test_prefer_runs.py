"""Runs on preference pairs: they learn, they resume exactly, and what they export can be used."""

import json
import math
import os
import random
import signal
from pathlib import Path

import pytest
import torch

import fledge
from fledge.cli.main import run as command
from fledge.config.schema import ModelConfig
from fledge.data.pairs import encode_pair
from fledge.data.render import make_renderer
from fledge.errors import CheckpointError, ConfigError, DataError
from fledge.log import Clock
from fledge.models.reward import load_reward_model
from fledge.orchestration.rundir import live_lines
from fledge.orchestration.stages import open_run, run_config
from fledge.trainer.reward import RewardModel
from fledge.types import assistant, user

SMALL = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2, "head_dim": 16}


def shorter(count=160):
    """Of two random words the shorter one is preferred."""
    dice = random.Random(0)

    def word(least, most):
        return "".join(dice.choice("abcdefgh") for _ in range(dice.randint(least, most)))

    return [
        {"prompt": f"word {i}", "chosen": word(2, 4), "rejected": word(6, 9)} for i in range(count)
    ]


def config(folder, loss, *overrides, steps=16):
    recipe = {
        "run_dir": str(folder),
        "steps": steps,
        "console": "quiet",
        "loss": loss,
        "model": {"random_init": True, "device": "cpu", "overrides": SMALL},
        "data": {"train": {"name": shorter}, "eval_size": 40, "batch_size": 16},
        "optim": {"lr": 2e-3},
        "checkpoint": {"every": 3},
    }
    return fledge.load_config(fledge.PreferConfig, recipe, overrides, environ={})


def evaluations(report, steps=16):
    return report["evaluations"]["0"], report["evaluations"][str(steps)]


@pytest.mark.parametrize(
    ("loss", "at_the_start"),
    [({"name": "dpo", "beta": 0.2}, math.log(2)), ({"name": "ipo", "beta": 1.0}, 0.25)],
)
def test_a_policy_learns_what_is_preferred(tmp_path, loss, at_the_start):
    report = fledge.prefer(config(tmp_path / "run", loss))
    before, after = evaluations(report)
    assert report["finished"] and report["trained"] == "a policy"
    assert before["accuracy"] == 0.5 and before["margin"] == 0
    assert before["loss"] == pytest.approx(at_the_start, rel=1e-6)
    assert after["accuracy"] > 0.9
    assert after["loss"] < 0.9 * before["loss"]
    lines = {line["step"]: line for line in live_lines(tmp_path / "run", "metrics")}
    assert sorted(lines) == list(range(17))
    assert lines[16]["eval/accuracy"] == after["accuracy"]
    assert {"pair/accuracy", "pair/margin", "policy/loss"} <= lines[1].keys()
    found, policy = open_run(tmp_path / "run")
    assert isinstance(found, fledge.PreferConfig) and policy.context
    assert (tmp_path / "run/model/model.safetensors").is_file()


def test_adapters_learn_against_the_model_without_them(tmp_path):
    settings = ("model.lora.rank=4", "optim.lr=1e-2")
    before, after = evaluations(fledge.prefer(config(tmp_path / "run", "dpo", *settings)))
    assert before["accuracy"] == 0.5
    assert before["loss"] == pytest.approx(math.log(2), rel=1e-6)
    assert after["accuracy"] > 0.9
    weights = tmp_path / "run/checkpoints/step_16/weights"
    assert (weights / "adapter_model.safetensors").is_file()
    assert (tmp_path / "run/model/model.safetensors").is_file(), "merged"


@pytest.fixture(scope="module")
def reward_run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("reward") / "run"
    return folder, fledge.prefer(config(folder, "bradley_terry"))


def test_a_reward_model_learns_what_is_preferred(reward_run):
    folder, report = reward_run
    before, after = evaluations(report)
    assert report["trained"] == "a reward model"
    assert before["accuracy"] == 0.5
    assert before["loss"] == pytest.approx(math.log(2), rel=1e-6)
    assert after["accuracy"] > 0.9
    line = list(live_lines(folder, "metrics"))[-1]
    assert {"critic/loss", "critic/grad_norm", "critic/lr", "pair/accuracy"} <= line.keys()


def test_a_reward_model_is_exported_with_its_head_and_scores_as_it_did(reward_run):
    folder, report = reward_run
    policy, head = load_reward_model(report["model"], ModelConfig(device="cpu"))
    pairs = shorter()
    talks = [[user(p["prompt"]), assistant(p[h])] for p in pairs for h in ("chosen", "rejected")]
    scores = RewardModel(policy, head, renderer=make_renderer(policy.tokenizer)).score(talks)
    right = sum(a > b for a, b in zip(scores[::2], scores[1::2], strict=True)) / len(pairs)
    assert right > 0.9
    facts = json.loads((folder / "model/reward_model.json").read_text())
    assert facts["loss"] == "bradley_terry"
    assert facts["mean"] == pytest.approx(sum(scores) / len(scores), abs=facts["std"] / 2)
    assert 0 < facts["std"] < 10


def test_a_reward_model_neither_talks_nor_is_exported_without_its_head(reward_run, capsys):
    folder, _ = reward_run
    with pytest.raises(ConfigError, match=rf"^run {folder}: .*reward model.*{folder}/model"):
        open_run(folder)
    assert command(["chat", str(folder), "--prompt", "hi"]) == 2
    assert command(["export", str(folder), str(folder / "out")]) == 2
    assert not (folder / "out").exists()
    assert "reward model, which scores" in capsys.readouterr().err


def test_adapters_of_a_reward_model_are_merged_into_its_export(tmp_path):
    report = fledge.prefer(
        config(tmp_path / "run", "bradley_terry", "model.lora.rank=2", "optim.lr=1e-2", steps=3)
    )
    policy, _ = load_reward_model(report["model"], ModelConfig(device="cpu"))
    assert not policy.has_adapter


# ---- resuming


def in_a_child(work, kill_in=None):
    """Run in a forked process that ends itself with SIGKILL the n-th time it is in a phase."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            if kill_in is not None:
                phase, number = kill_in
                make = Clock.__init__

                def patched(self):
                    make(self)
                    seen = []

                    def listen(name):
                        seen.append(name)
                        if seen.count(phase) == number:
                            os.kill(os.getpid(), signal.SIGKILL)

                    self.listeners.append(listen)

                Clock.__init__ = patched
            work()
            status = 0
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def outcome(folder):
    """All that must be equal: weights, optimiser and head by content, metrics but for times."""
    last = folder / "checkpoints" / "step_8"
    tensors = {str(f.relative_to(last)): f.read_bytes() for f in last.rglob("*.safetensors")}
    timed = ("time", "perf/", "attempt")
    lines = [
        {k: v for k, v in line.items() if not k.startswith(timed)}
        for line in live_lines(folder, "metrics")
    ]
    report = json.loads((folder / "report.json").read_text())
    exported = {f.name: f.read_bytes() for f in (folder / "model").iterdir()}
    return tensors, lines, report["evaluations"], exported


@pytest.mark.parametrize(
    ("loss", "phases"),
    [("dpo", [("score", 5), ("save", 2)]), ("bradley_terry", [("backward", 5)])],
)
def test_a_run_that_is_killed_ends_where_an_undisturbed_one_does(tmp_path, loss, phases):
    def work(name):
        return lambda: fledge.prefer(config(tmp_path / name, loss, steps=8))

    assert in_a_child(work("straight")) == 0
    for phase in phases:
        assert in_a_child(work(phase[0]), phase) == -signal.SIGKILL
        assert in_a_child(work(phase[0])) == 0
        assert outcome(tmp_path / phase[0]) == outcome(tmp_path / "straight")


def test_a_changed_loss_is_refused_on_resume(tmp_path):
    fledge.prefer(config(tmp_path / "run", {"name": "dpo", "beta": 0.2}, steps=1))
    with pytest.raises(CheckpointError, match=r"loss\.beta: 0\.2 -> 0\.3"):
        fledge.prefer(config(tmp_path / "run", {"name": "dpo", "beta": 0.3}, steps=2))


# ---- a loss of your own, bad rows, the command line


def test_a_loss_of_your_own(tmp_path, monkeypatch):
    (tmp_path / "own_losses.py").write_text(
        "from fledge.algorithms.preferences import of_scores\n"
        "def hinge(x, margin: float = 1.0):\n"
        "    gap = x.sequence_sum(x.side * (x.logp - x.ref_logp))\n"
        "    return (margin - gap).clamp(min=0), {}\n"
        "@of_scores\n"
        "def of_values(x):\n"
        "    return (1 - x.sequence_sum(x.side * x.value)).clamp(min=0), {}\n"
    )
    monkeypatch.chdir(tmp_path)
    loss = {"name": "own_losses:hinge", "margin": 2.0}
    report = fledge.prefer(config(tmp_path / "policy", loss, steps=4))
    assert report["evaluations"]["0"] == pytest.approx({"loss": 2.0})
    assert report["evaluations"]["4"]["loss"] < 1.9
    report = fledge.prefer(config(tmp_path / "reward", "own_losses:of_values", steps=2))
    assert report["trained"] == "a reward model"
    facts = json.loads(Path(report["model"], "reward_model.json").read_text())
    assert facts["loss"] == "own_losses:of_values"


def pair_length(x):
    """A loss that says how many tokens its pair has."""
    return x.sequence_sum(torch.ones_like(x.logp)) + 0 * x.logp, {}


def test_the_loss_is_a_mean_over_pairs_and_not_over_tokens(tmp_path, policy):
    settings = ("data.eval_size=0", "data.batch_size=160", "optim.micro_tokens=300")
    fledge.prefer(config(tmp_path / "run", pair_length, *settings, steps=1))
    (line,) = live_lines(tmp_path / "run", "metrics")
    renderer = make_renderer(policy.tokenizer)
    pairs = [encode_pair(renderer, row, "") for row in shorter()]
    lengths = [len(p.chosen.trained) + len(p.rejected.trained) for p in pairs]
    assert line["policy/loss"] == pytest.approx(sum(lengths) / len(lengths))


def test_bad_rows_are_refused_before_any_work(tmp_path):
    rows = [*shorter(3), {"prompt": "x", "chosen": "same", "rejected": "same"}]
    data = tmp_path / "pairs.jsonl"
    data.write_text("\n".join(map(json.dumps, rows)))
    with pytest.raises(DataError, match=r"^data\.train: row 4 .*chosen and rejected are the same"):
        fledge.prefer(config(tmp_path / "run", "dpo", f"data.train={data}", "data.eval_size=0"))
    assert not (tmp_path / "run").exists()
    with pytest.raises(DataError, match=r"^data\.max_tokens: row .* context"):
        long = {"prompt": "x", "chosen": "long " * 600, "rejected": "short"}
        data.write_text("\n".join(map(json.dumps, [*shorter(3), long])))
        fledge.prefer(config(tmp_path / "run", "dpo", f"data.train={data}", "data.eval_size=0"))


def test_the_command_says_how_many_pairs_are_in_the_right_order(tmp_path, capsys):
    data, recipe = tmp_path / "pairs.jsonl", tmp_path / "recipe.yaml"
    data.write_text("\n".join(map(json.dumps, shorter(20))))
    folder = tmp_path / "run"
    recipe.write_text(
        f"run_dir: {folder}\nsteps: 9\nmodel: {{random_init: true, device: cpu}}\n"
        f"data: {{train: {data}, eval_size: 8, batch_size: 4}}\n"
    )
    assert command(["prefer", str(recipe), "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert "loss.name" in shown and not folder.exists()
    assert command(["prefer", str(recipe), "--smoke"]) == 0
    shown = capsys.readouterr().out
    assert "held-out accuracy" in shown and "before  0.500" in shown and "after" in shown
    assert f"next: fledge chat {folder}-smoke" in shown
    assert run_config(f"{folder}-smoke").config.steps == 2
    assert command(["prefer", str(recipe), "steps=1", "loss=bradley_terry"]) == 0
    assert f"reward_model.path={folder}/model" in capsys.readouterr().out
    assert command(["prefer", str(recipe), "--loss", "dpo"]) == 2
    assert "settings have no dashes, write loss=dpo" in capsys.readouterr().err


def test_a_supervised_run_is_judged_before_and_after_too(tmp_path):
    rows = [{"prompt": f"say {i}", "response": "ab"} for i in range(12)]
    data = tmp_path / "demos.jsonl"
    data.write_text("\n".join(map(json.dumps, rows)))
    recipe = {
        "run_dir": str(tmp_path / "run"),
        "steps": 6,
        "console": "quiet",
        "model": {"random_init": True, "device": "cpu", "overrides": SMALL},
        "data": {"train": str(data), "eval_size": 4, "batch_size": 4},
        "optim": {"lr": 5e-3},
    }
    report = fledge.sft(fledge.load_config(fledge.SftConfig, recipe, environ={}))
    before, after = evaluations(report, 6)
    assert after["loss"] < before["loss"]
