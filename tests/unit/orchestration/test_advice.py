"""Settings that will not do what somebody hopes are named at the start."""

import pytest

from fledge.config import TrainConfig, load_config
from fledge.orchestration.advice import REAL_MODEL, advice

RECIPE = {"env": "arithmetic", "data": {"train": "tasks.jsonl"}}


def said(*overrides: str, parameters: int = 1000) -> list[str]:
    return advice(load_config(TrainConfig, RECIPE, overrides, {}), parameters)


@pytest.mark.parametrize(
    ("overrides", "text"),
    [
        (["algorithm.loss.high=0.3"], "algorithm.loss.high has no effect"),
        (["algorithm.loss={name: dual_clip, c: 4.0}"], "algorithm.loss.c has no effect"),
        (["algorithm.critic.clip=0.3"], "algorithm.critic.clip has no effect"),
        (
            ["algorithm.name=ppo", "algorithm.critic.model=head", "algorithm.critic.lr=1e-3"],
            "algorithm.critic.lr has no effect: algorithm.critic.model=head",
        ),
        (
            ["algorithm.name=ppo", "algorithm.critic.coef=1.0"],
            "algorithm.critic.coef has no effect: a separate critic",
        ),
        (
            ["algorithm.loss.high=0.3", "algorithm.correction=[token_tis]"],
            "algorithm.loss.high has no effect",
        ),
        (["algorithm.name=rloo", "algorithm.epochs=4"], "policy_gradient with 4 updates per batch"),
        (
            ["algorithm.name=ppo", "algorithm.critic.warmup_steps=100"],
            "the policy will never be trained",
        ),
        (
            ["algorithm.name=dapo", "algorithm.advantage=gae"],
            "dynamic_sampling=filter throws away groups",
        ),
        (["algorithm.kl.horizon=9", "algorithm.kl.coef=0.1"], "algorithm.kl.horizon has no effect"),
        (["algorithm.shaping.overlong_penalty=2.0"], "overlong_penalty has no effect"),
        (["algorithm.loss={name: sapo, tau_pos: 2.0}"], "algorithm.loss.tau_pos has no effect"),
        (["algorithm.kl.estimator=k2"], "algorithm.kl.estimator has no effect"),
        (["algorithm.shaping.max_rounds=2"], "algorithm.shaping.max_rounds has no effect"),
        (["eval.temperature=0.5"], "eval.temperature has no effect"),
        (["tracking.project=x"], "tracking.project has no effect"),
        (["optim.warmup_steps=100"], "optim.lr=1e-06 is never reached"),
        (["optim.lr=0"], "nothing will be learned"),
        (["rollout.top_p=0.9", "algorithm.name=rloo"], "rollout.top_p: replies come from a cut"),
        (
            ["algorithm.name=gspo", "algorithm.loss.high=0.2"],
            "algorithm.loss.high=0.2 bounds a ratio of whole sequences",
        ),
        (["rollout.group_size=2"], "rollout.group_size=2 with grpo makes every advantage"),
        (["model.lora.targets=[q_proj, v_proj]"], "model.lora.targets leaves out the MLP"),
    ],
)
def test_a_setting_that_does_not_do_what_it_says_is_named(overrides, text):
    assert any(text in found for found in said(*overrides)), said(*overrides)


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["algorithm.loss.high=0.3", "algorithm.epochs=2"],
        ["algorithm.name=ppo", "algorithm.critic.clip=0.3"],
        ["algorithm.name=ppo", "algorithm.critic.model=head", "algorithm.critic.coef=1.0"],
        ["algorithm.name=dapo", "algorithm.shaping.max_rounds=2"],
        ["algorithm.kl.coef=0.1", "algorithm.kl.estimator=k2"],
        ["eval.temperature=0.5", "data.eval_size=2"],
        ["tracking.project=x", "tracking.to=[wandb]"],
        ["rollout.group_size=2", "algorithm.advantage.scale_by_std=false"],
        ["model.lora.targets=[q_proj, gate_proj]"],
        ["algorithm.name=gspo"],
    ],
)
def test_settings_with_an_effect_are_left_alone(overrides):
    assert said(*overrides) == []


def test_rates_that_are_known_to_fail_are_named_for_models_of_a_real_size():
    high = ["optim.lr=1e-3"]
    low = ["model.lora.rank=8", "optim.lr=1e-6"]
    assert any("optim.lr=0.001 is known to break" in t for t in said(*high, parameters=REAL_MODEL))
    assert any("optim.lr=1e-06 hardly moves adapters" in t for t in said(*low, parameters=10**9))
    assert said(*high) == [] and said(*low) == []
    assert said("model.lora.rank=8", "optim.lr=1e-3", parameters=10**9) == []
