"""Start-up checks: prompts must fit, held-out tasks stay out."""

import pytest

from fledge.config import TrainConfig, load_config
from fledge.config.schema import ModelConfig
from fledge.envs import Environment, make_factory
from fledge.errors import ConfigError, DataError
from fledge.models.load import load_policy
from fledge.orchestration.setup import code_digests, make_tasks
from fledge.types import Step


@pytest.fixture(scope="module")
def policy():
    return load_policy(ModelConfig(random_init=True, overrides={"hidden_size": 16}), seed=0)


def resolve(*overrides, rows=12):
    recipe = {
        "env": {"name": "reward", "function": score},
        "data": {"train": {"name": prompts, "count": rows}},
    }
    return load_config(TrainConfig, recipe, overrides, {})


def score(prompt, response, meta):
    return 1.0


def prompts(count: int = 3, repeat: int = 1):
    return [{"prompt": "7" * (i + 1)} for i in range(count)] * repeat


def tasks_of(policy, *overrides):
    config = resolve(*overrides).config
    return make_tasks(config, make_factory(config.env), policy)


def test_held_out_tasks_are_split_off(policy):
    found = tasks_of(policy, "data.eval_size=4")
    assert len(found.eval) == 4 and len(found.train) == 8
    assert not {t.key for t in found.eval} & {t.key for t in found.train}


def test_long_prompts_are_filtered_with_a_count(policy):
    everything = tasks_of(policy)
    assert everything.too_long == 0
    limit = everything.longest_prompt - 2
    filtered = tasks_of(policy, f"data.max_prompt_tokens={limit}")
    assert filtered.too_long == 2 and len(filtered.train) == 10
    with pytest.raises(DataError, match=r"data\.max_prompt_tokens"):
        tasks_of(policy, "data.max_prompt_tokens=1")


def test_a_prompt_that_cannot_fit_is_refused_before_work(policy):
    with pytest.raises(DataError, match=r"context of 512 leaves 8 .*max_new_tokens=504"):
        tasks_of(policy, "rollout.max_new_tokens=504")


def test_duplicates_are_merged_and_counted(policy):
    assert tasks_of(policy, "data.train.repeat=2").duplicates == 12


def test_an_evaluation_on_trained_tasks_is_refused(policy):
    config = resolve().config
    shared = config.data.model_copy(update={"eval": config.data.train})
    config = config.model_copy(update={"data": shared})
    with pytest.raises(DataError, match=r"data\.eval: 12 held-out tasks are also in data\.train"):
        make_tasks(config, make_factory(config.env), policy)


def test_a_leak_is_found_whatever_the_ids(policy):
    def twins():
        return [{"id": str(i), "prompt": "same"} for i in range(10)]

    config = load_config(
        TrainConfig,
        {
            "env": {"name": "reward", "function": score},
            "data": {"train": {"name": twins}, "eval_size": 4},
        },
        environ={},
    ).config
    with pytest.raises(DataError, match=r"held-out tasks are also in data\.train"):
        make_tasks(config, make_factory(config.env), policy)


def test_replies_that_fill_the_context_are_refused(policy):
    with pytest.raises(ConfigError, match=r"rollout\.max_new_tokens: 600 leaves no room"):
        tasks_of(policy, "rollout.max_new_tokens=600")


def test_a_reset_that_fails_is_refused_by_name(policy):
    class Broken(Environment):
        async def reset(self):
            raise KeyError("prompt")

        async def step(self, reply):
            return Step(terminated=True)

    config = resolve().config
    with pytest.raises(DataError, match=r"env: Broken\.reset failed"):
        make_tasks(config, Broken, policy)


def test_an_edited_plug_in_changes_its_digest(tmp_path, monkeypatch):
    source = tmp_path / "edited_xyz.py"
    source.write_text("def score(prompt, response, meta):\n    return 1.0\n")
    monkeypatch.chdir(tmp_path)
    recipe = {
        "env": {"name": "reward", "function": "edited_xyz:score"},
        "data": {"train": {"name": prompts}},
    }
    config = load_config(TrainConfig, recipe, environ={}).config
    make_factory(config.env)
    first = code_digests(config)
    assert list(first) == ["code.env.function"]
    source.write_text("def score(prompt, response, meta):\n    return 0.5\n")
    assert code_digests(config) != first
