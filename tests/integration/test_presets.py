"""Every preset trains the quickstart's model, and what it remembers survives `kill -9`."""

from __future__ import annotations

import json
import math
import os
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from fledge.config import TrainConfig, load_config
from fledge.config.presets import PRESETS
from fledge.config.schema import ModelConfig
from fledge.errors import CheckpointError, ConfigError, ModelError
from fledge.log import Clock
from fledge.models.load import export, load_policy
from fledge.models.reward import save_reward_model
from fledge.models.value import ValueHead
from fledge.orchestration import train
from fledge.orchestration.rundir import live_lines

STEPS = 4
SMALL = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2}


def vowels(prompt: str, response: str, meta: object) -> dict[str, float]:
    """Something that replies of an untrained model differ in, never negative."""
    return {
        "vowels": sum(c in "aeiou0123" for c in response) / 4,
        "variety": len(set(response)) / 8,
    }


def long_words(segment: Any) -> list[float]:
    return [0.1 * (token % 3) for token in segment.token_ids]


def prompts(count: int = 12) -> list[dict[str, str]]:
    return [{"id": str(i), "prompt": f"{i}+{i + 7}"} for i in range(count)]


def recipe(folder: Path, *overrides: str, **sections: Any) -> Any:
    values = {
        "run_dir": str(folder),
        "steps": 2,
        "console": "quiet",
        "env": {"name": "reward", "function": vowels},
        "model": {"device": "cpu", "random_init": True},
        "data": {"train": {"name": prompts}},
        "rollout": {"group_size": 4, "groups_per_step": 4, "max_new_tokens": 6},
        "optim": {"lr": 1e-2},
        "checkpoint": {"every": 2},
        **sections,
    }
    return load_config(TrainConfig, values, overrides, environ={})


def metrics_of(folder: Path) -> list[dict[str, Any]]:
    timed = ("time", "perf/", "attempt")
    return [
        {k: v for k, v in line.items() if not k.startswith(timed)}
        for line in live_lines(folder, "metrics")
    ]


def teach(folder: Path) -> str:
    """A teacher for `distill`: some other weights of the same model."""
    train(recipe(folder, "steps=1", "seed=5"))
    return str(folder / "model")


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_a_preset_moves_the_model_at_its_first_step(name: str, tmp_path: Path):
    overrides = [f"algorithm.name={name}"]
    if name == "distill":
        overrides.append(f"algorithm.teacher={teach(tmp_path / 'teacher')}")
    report = train(recipe(tmp_path / "run", *overrides))
    assert report["finished"]
    first, second = metrics_of(tmp_path / "run")
    assert math.isfinite(first["optim/grad_norm"]) and first["optim/grad_norm"] > 0
    assert first["term/policy"] > 0
    assert all(math.isfinite(v) for line in (first, second) for v in line.values())
    assert first["policy/clamped_frac"] == 0
    said = [text for text in report["health"]["warnings"] if "max_new_tokens" not in text]
    assert not said, "an untrained model does not know when to stop; nothing else may be odd"


STATEFUL = {
    "a critic of its own": {"name": "ppo", "critic": {"warmup_steps": 1}},
    "a value head": {"name": "ppo", "critic": {"model": "head"}},
    "filtered batches": {"name": "dapo"},
    "a running baseline": {"name": "reinforce"},
    "chosen tokens": {"name": "clip_cov", "loss": {"name": "clip_cov", "cov_low": 0.0}},
    "a greedy episode": {"name": "remax"},
    "an adaptive KL": {
        "advantage": "reinforce++",
        "kl": {"coef": 0.1, "placement": "reward", "estimator": "k1", "target": 1e-4, "horizon": 9},
    },
    "a reference that follows": {"kl": {"coef": 0.1, "ref_every": 2}},
    "rewards per token and masks": {
        "advantage": "turn",
        "token_reward": long_words,
        "shaping": {"mask_truncated": True, "zero_unless_stopped": True, "overlong_buffer": 0.5},
    },
    "parts of a reward": {"advantage": "gdpo"},
}


def run_forked(resolved: Any, kill_at: int | None = None) -> int:
    """Train in a child process that kills itself when its given update begins."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            if kill_at is not None:
                _listen(kill_at)
            train(resolved)
            status = 0
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def _listen(kill_at: int) -> None:
    make, seen = Clock.__init__, Counter()

    def kill(name: str) -> None:
        seen[name] += 1
        if name == "generate" and seen[name] == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)

    def patched(self: Clock) -> None:
        make(self)
        self.listeners.append(kill)

    Clock.__init__ = patched


def final_files(folder: Path) -> dict[str, bytes]:
    last = folder / "checkpoints" / f"step_{STEPS}"
    return {p.relative_to(last).as_posix(): p.read_bytes() for p in last.rglob("*.safetensors")}


@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("what", STATEFUL)
def test_what_an_algorithm_remembers_survives_a_kill(what: str, lora: bool, tmp_path: Path):
    if lora and what not in ("a critic of its own", "a reference that follows"):
        pytest.skip("nothing here depends on adapters")
    overrides = [f"steps={STEPS}", *(["model.lora.rank=4"] if lora else [])]
    model = {"device": "cpu", "random_init": True, "overrides": SMALL}
    straight, broken = (
        recipe(tmp_path / name, *overrides, algorithm=STATEFUL[what], model=model)
        for name in ("a", "b")
    )
    assert run_forked(straight) == 0
    assert run_forked(broken, kill_at=STEPS) == -signal.SIGKILL
    assert run_forked(broken) == 0
    assert metrics_of(tmp_path / "b") == metrics_of(tmp_path / "a")
    ours, theirs = final_files(tmp_path / "a"), final_files(tmp_path / "b")
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if ours[name] != theirs[name]] == []
    state = json.loads(
        (tmp_path / "a" / "checkpoints" / f"step_{STEPS}" / "state.json").read_text()
    )
    assert "algorithm" in state


def test_parts_of_a_reward_are_reported_and_weighed(tmp_path: Path):
    rollout = {
        "group_size": 4,
        "groups_per_step": 4,
        "max_new_tokens": 6,
        "reward_weights": {"variety": 0.5},
    }
    train(recipe(tmp_path, rollout=rollout))
    for line in metrics_of(tmp_path):
        parts = line["reward/part/vowels"] + 0.5 * line["reward/part/variety"]
        assert line["reward/mean"] == pytest.approx(parts)


def test_a_reference_that_follows_is_the_policy_of_its_step(tmp_path: Path):
    train(recipe(tmp_path, "steps=4", algorithm={"kl": {"coef": 0.1, "ref_every": 2}}))
    kl = [line["policy/kl_ref"] for line in metrics_of(tmp_path)]
    assert kl[0] == pytest.approx(0, abs=1e-9) and kl[1] > 1e-6
    assert kl[2] == pytest.approx(0, abs=1e-9) and kl[3] > 1e-6


def test_a_critic_may_learn_alone_at_first(tmp_path: Path):
    settings = {"name": "ppo", "critic": {"warmup_steps": 1}}
    train(recipe(tmp_path, "steps=2", algorithm=settings))
    first, second = metrics_of(tmp_path)
    assert "optim/grad_norm" not in first and first["critic/grad_norm"] > 0
    assert second["optim/grad_norm"] > 0


def test_replies_from_a_cut_distribution_are_not_compared_with_the_whole_one(tmp_path: Path):
    rollout = {"group_size": 4, "groups_per_step": 4, "max_new_tokens": 6, "top_p": 0.7}
    report = train(recipe(tmp_path, rollout=rollout, algorithm={"old": "recomputed"}))
    for line in metrics_of(tmp_path):
        assert line["optim/grad_norm"] > 0
        assert not any(name.startswith("mismatch/") for name in line)
    assert report["health"]["worst_mismatch"] == 0


def test_a_critic_may_start_from_a_reward_model(tmp_path: Path):
    policy = load_policy(ModelConfig(random_init=True, device="cpu"), seed=5)
    head = ValueHead(policy.config.hidden_size)
    torch.nn.init.constant_(head.linear.bias, 0.75)
    save_reward_model(policy, head, tmp_path / "judge", {})
    settings = {"name": "ppo", "critic": {"path": str(tmp_path / "judge")}}
    train(recipe(tmp_path / "run", "steps=1", algorithm=settings))
    (line,) = metrics_of(tmp_path / "run")
    assert line["critic/value_mean"] == pytest.approx(0.75)


def test_a_teacher_of_another_family_is_refused(tmp_path: Path):
    other = tmp_path / "other"
    export(load_policy(ModelConfig(random_init=True, device="cpu"), seed=5), other)
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    first, second = list(vocabulary)[300:302]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    settings = {"name": "distill", "teacher": str(other)}
    with pytest.raises(ConfigError, match=r"algorithm\.teacher: .*another vocabulary"):
        train(recipe(tmp_path / "run", algorithm=settings))
    settings = {"name": "distill", "teacher": str(tmp_path / "missing")}
    with pytest.raises(ModelError, match=r"algorithm\.teacher: .*no folder here"):
        train(recipe(tmp_path / "run", algorithm=settings))


def test_a_teacher_that_has_changed_is_noticed_on_resume(tmp_path: Path):
    settings = {"name": "distill", "teacher": teach(tmp_path / "teacher")}
    train(recipe(tmp_path / "run", algorithm=settings))
    model = tmp_path / "teacher" / "model"
    export(load_policy(ModelConfig(random_init=True, device="cpu"), seed=9), model)
    with pytest.raises(CheckpointError, match=r"algorithm\.teacher\.weights"):
        train(recipe(tmp_path / "run", "steps=3", algorithm=settings))


def test_steps_in_which_everything_is_masked_are_survived_and_said(tmp_path: Path):
    rollout = {"group_size": 4, "groups_per_step": 4, "max_new_tokens": 1}
    settings = {"name": "ppo", "shaping": {"mask_truncated": True}}
    report = train(recipe(tmp_path, rollout=rollout, algorithm=settings))
    assert report["finished"]
    assert any("nothing was trained" in text for text in report["health"]["warnings"])
