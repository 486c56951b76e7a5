"""RL whose reward is a trained reward model's score."""

import json
from statistics import fmean

import pytest
import torch
from safetensors.torch import load_file, save_file

import fledge
from fledge.config.schema import ModelConfig
from fledge.errors import CheckpointError, ModelError, RewardError
from fledge.models.load import load_policy
from fledge.models.reward import load_reward_model, save_reward_model
from fledge.models.value import ValueHead
from fledge.orchestration.rundir import live_lines
from fledge.trainer.reward import RewardModel
from fledge.types import assistant, user

SMALL = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2, "head_dim": 16}


def prompts():
    return [{"prompt": f"say {i}"} for i in range(8)]


def half(prompt, response, meta):
    return 0.5


@pytest.fixture(scope="module")
def judge(tmp_path_factory):
    """A reward model that was never trained: it has its likes and dislikes, too."""
    folder = tmp_path_factory.mktemp("judge") / "model"
    policy = load_policy(ModelConfig(random_init=True, device="cpu", overrides=SMALL), seed=5)
    head = ValueHead(policy.config.hidden_size)
    torch.manual_seed(6)
    torch.nn.init.normal_(head.linear.weight)
    save_reward_model(policy, head, folder, {})
    return folder


def train(folder, judge, *overrides, steps=2, env="reward"):
    recipe = {
        "run_dir": str(folder),
        "steps": steps,
        "console": "quiet",
        "env": env,
        "reward_model": {"path": str(judge), "weight": 2.0},
        "model": {"random_init": True, "device": "cpu", "overrides": SMALL},
        "data": {"train": {"name": prompts}, "eval_size": 2},
        "rollout": {"group_size": 4, "groups_per_step": 3, "max_new_tokens": 4},
        "optim": {"lr": 3e-3},
        "checkpoint": {"every": 2},
    }
    return fledge.train(fledge.load_config(fledge.TrainConfig, recipe, overrides, environ={}))


def test_the_reward_of_an_episode_is_the_weighed_score_of_its_text(tmp_path, judge):
    train(tmp_path / "run", judge, env={"name": "reward", "function": half})
    model = RewardModel(*load_reward_model(judge, ModelConfig(device="cpu")))
    lines = list(live_lines(tmp_path / "run", "episodes"))
    assert len(lines) == 24
    for line in lines:
        talk = [
            {"user": user, "assistant": assistant}[m["role"]](m["content"])
            for m in line["messages"]
        ]
        assert line["reward"] == pytest.approx(0.5 + 2 * model.score([talk])[0], abs=1e-3)


def test_a_policy_learns_to_please_it(tmp_path, judge):
    settings = ("rollout.group_size=16", "rollout.max_new_tokens=1", "optim.lr=2e-2")
    train(tmp_path / "run", judge, *settings, steps=15)
    lines = [line for line in live_lines(tmp_path / "run", "metrics") if line["step"]]
    rewards = [line["reward/mean"] for line in lines]
    gained = fmean(rewards[-3:]) - fmean(rewards[:3])
    assert gained > lines[0]["reward/std"], rewards


def test_another_reward_model_is_refused_on_resume(tmp_path, judge):
    other = tmp_path / "other"
    other.mkdir()
    for file in judge.iterdir():
        (other / file.name).write_bytes(file.read_bytes())
    train(tmp_path / "run", other)
    head = load_file(other / "value_head.safetensors")
    save_file({name: -tensor for name, tensor in head.items()}, other / "value_head.safetensors")
    with pytest.raises(CheckpointError, match=r"reward_model\.weights"):
        train(tmp_path / "run", other, steps=3)


def test_what_is_no_reward_model_is_refused_before_any_work(tmp_path):
    with pytest.raises(ModelError, match=r"^reward_model\.path: .*no reward model"):
        train(tmp_path / "run", tmp_path / "nothing")
    assert not (tmp_path / "run").exists()


def test_a_conversation_that_does_not_fit_names_its_task(tmp_path, judge):
    small = tmp_path / "small"
    small.mkdir()
    for file in judge.iterdir():
        (small / file.name).write_bytes(file.read_bytes())
    config = json.loads((small / "config.json").read_text())
    (small / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 9}))
    with pytest.raises(RewardError, match=r"^reward_model: task '.*context is 9"):
        train(tmp_path / "run", small)
