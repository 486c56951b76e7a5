"""Layers, origins, refusals: what a configuration is made of and what it will not take."""

import json

import pytest
import yaml

from fledge.config import SftConfig, TrainConfig, load_config
from fledge.config.load import fixed_values
from fledge.errors import ConfigError

RECIPE = {"env": "arithmetic", "data": {"train": "tasks.jsonl"}}


def resolve(*overrides, recipe=RECIPE, environ=None, **options):
    return load_config(TrainConfig, recipe, overrides, environ or {}, **options)


def refusal(*overrides, recipe=RECIPE, environ=None):
    with pytest.raises(ConfigError) as caught:
        resolve(*overrides, recipe=recipe, environ=environ)
    return str(caught.value)


def test_later_layers_win_and_every_value_knows_its_origin(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump({**RECIPE, "seed": 1, "steps": 10, "optim": {"lr": 0.1}}))
    environ = {"FLEDGE__STEPS": "20", "FLEDGE__OPTIM__LR": "0.2", "OTHER": "x"}
    found = resolve("optim.lr=3e-4", recipe=path, environ=environ)
    config = found.config
    assert (config.seed, config.steps, config.optim.lr) == (1, 20, 3e-4)
    assert config.rollout.group_size == 8
    assert found.origin("seed") == "recipe recipe.yaml"
    assert found.origin("steps") == "environment FLEDGE__STEPS"
    assert found.origin("optim.lr") == "override"
    assert found.origin("rollout.group_size") == "default"
    assert found.origin("algorithm.reduction") == "preset grpo"


def test_a_preset_lies_below_the_recipe():
    found = resolve("algorithm.name=reinforce")
    assert found.config.algorithm.advantage.name == "reinforce"
    assert found.config.algorithm.loss.name == "policy_gradient"
    mixed = resolve("algorithm.name=reinforce", "algorithm.loss=clipped")
    assert mixed.config.algorithm.loss.name == "clipped"
    assert mixed.config.algorithm.advantage.name == "reinforce"


def test_plug_in_arguments_can_be_added_and_are_dropped_with_their_plug_in():
    found = resolve("algorithm.loss.high=0.28")
    assert found.config.algorithm.loss.name == "clipped"
    assert found.config.algorithm.loss.arguments == {"high": 0.28}
    replaced = resolve("algorithm.loss.high=0.28", "algorithm.loss={name: policy_gradient}")
    assert replaced.config.algorithm.loss.arguments == {}


def test_exponents_are_numbers_in_files_and_on_the_command_line(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text(
        "env: arithmetic\ndata: {train: tasks.jsonl}\noptim: {lr: 2e-5}\n"
        "algorithm: {correction: [{name: token_tis, cap: 1e1}]}\n"
    )
    found = resolve(recipe=path).config
    assert found.optim.lr == 2e-5
    assert found.algorithm.correction[0].arguments == {"cap": 10.0}
    assert resolve(
        "algorithm.loss={name: clipped, high: 3e-1}"
    ).config.algorithm.loss.arguments == {"high": 0.3}


def test_recipes_may_be_json(tmp_path):
    path = tmp_path / "recipe.json"
    path.write_text(json.dumps({**RECIPE, "steps": 3}))
    assert resolve(recipe=path).config.steps == 3


@pytest.mark.parametrize(
    ("override", "said"),
    [
        (
            "rollout.grop_size=4",
            "no such key; did you mean 'rollout.group_size'",
        ),
        ("stepz=4", "did you mean 'steps'"),
        ("steps=many", "steps: .*got 'many'"),
        ("steps=0", "steps: .*greater than or equal to 1"),
        ("optim.lr=nan", "optim.lr"),
        ("rollout.group_size=1", "rollout.group_size=1 gives grpo nothing to compare"),
        ("rollout.temperature=0", "rollout.temperature"),
        ("eval.samples=4", "set eval.temperature > 0"),
        ("eval.top_p=0.5", "no effect at eval.temperature=0"),
        ("checkpoint.keep_best=true", "keep_best needs evaluations"),
        ("eval.every=5", "nothing to evaluate on"),
        ("algorithm.minibatches=99", "algorithm.minibatches must not exceed"),
        ("steps", "not of the form key=value"),
        ("tracking.to=[carrier_pigeon]", "tracking.to"),
    ],
)
def test_bad_values_are_refused_by_name(override, said):
    import re

    assert re.search(said, refusal(override))


def test_a_wrong_environment_variable_is_refused():
    said = refusal(environ={"FLEDGE__ROLLOUT__GROUPSIZE": "4"})
    assert "rollout.groupsize" in said and "FLEDGE__ROLLOUT__GROUPSIZE" in said


def test_a_missing_key_and_a_missing_recipe_are_refused(tmp_path):
    assert "env: this key is needed" in refusal(recipe={"data": {"train": "x"}})
    assert "did you mean 'quickstart'" in refusal(recipe="quickstrat")
    assert "cannot be read" in refusal(recipe=str(tmp_path / "none.yaml"))
    broken = tmp_path / "broken.yaml"
    broken.write_text("a: [1,\nb: 2")
    assert "not valid YAML or JSON at line" in refusal(recipe=broken)
    broken.write_text("- 1")
    assert "must be a mapping" in refusal(recipe=broken)


def test_the_written_configuration_is_a_recipe_that_resolves_to_itself():
    first = resolve("model.lora.rank=4", "algorithm.loss={name: clipped, high: 0.3}", "steps=7")
    text = first.to_yaml()
    assert "steps: 7  # override" in text
    again = resolve(recipe=yaml.safe_load(text))
    assert again.config == first.config
    assert again.hash() == first.hash()


def test_the_hash_ignores_what_may_change_on_resume():
    base = resolve()
    assert resolve("steps=99", "run_dir=x", "tracking.to=[wandb]").hash() == base.hash()
    assert resolve("console=quiet", "checkpoint.every=1").hash() == base.hash()
    assert resolve("optim.lr=9e-9").hash() != base.hash()
    assert resolve("seed=1").hash() != base.hash()
    assert "data.train.name" not in fixed_values(base.values())


def test_smoke_changes_sizes_and_the_folder_and_nothing_else():
    full = load_config(TrainConfig, "quickstart", (), {})
    small = load_config(TrainConfig, "quickstart", (), {}, smoke=True)
    before, after = full.values(), small.values()
    changed = {key for key in before.keys() | after.keys() if before.get(key) != after.get(key)}
    assert changed == {
        "run_dir", "steps", "optim.warmup_steps", "data.eval_size", "rollout.group_size",
        "rollout.groups_per_step", "warm_start.steps", "warm_start.batch_size",
        "warm_start.optim.warmup_steps",
    }  # fmt: skip
    assert after["run_dir"] == "runs/quickstart-smoke"
    tiny = resolve("rollout.group_size=2", smoke=True)
    assert tiny.origin("rollout.group_size") == "override"


def test_functions_are_accepted_and_written_as_names():
    def mine(prompt, response, meta):
        return 0.0

    found = resolve(recipe={**RECIPE, "env": {"name": "reward", "function": mine}})
    assert found.config.env.arguments["function"] is mine
    assert found.values()["env.function"].endswith("mine")


def test_supervised_runs_have_their_own_schema():
    found = load_config(SftConfig, {"data": {"train": "x.jsonl"}}, ["data.batch_size=3"], {})
    assert found.config.data.batch_size == 3
    with pytest.raises(ConfigError, match=r"rollout"):
        load_config(SftConfig, {"data": {"train": "x.jsonl"}}, ["rollout.group_size=3"], {})
