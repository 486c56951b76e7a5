"""Adapters on a trained model, on the CPU: twice is the same, and a stopped run goes on."""

import os
import shutil

import pytest
from safetensors.torch import load_file, save_file

from fledge.config import TrainConfig, load_config
from fledge.config.schema import ModelConfig
from fledge.errors import ModelError
from fledge.models.load import export, load_policy
from fledge.orchestration import train


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A model on disk, as a downloaded one would be."""
    folder = tmp_path_factory.mktemp("base")
    small = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2}
    export(load_policy(ModelConfig(random_init=True, overrides=small), seed=3), folder)
    return folder


def prompts():
    return [{"prompt": f"say {i}"} for i in range(8)]


def length(prompt, response, meta):
    return len(response) / 8


def run(base, folder, steps, *overrides):
    recipe = {
        "run_dir": str(folder),
        "steps": steps,
        "console": "quiet",
        "model": {
            "path": str(base),
            "device": "cpu",
            "lora": {"rank": 4, "dora": True, "plus_ratio": 4.0},
        },
        "env": {"name": "reward", "function": length},
        "data": {"train": {"name": prompts}},
        "rollout": {"group_size": 3, "groups_per_step": 2, "max_new_tokens": 5},
        "algorithm": {"kl": {"coef": 0.01}},
        "optim": {"lr": 1e-2},
        "checkpoint": {"every": 2},
    }
    train(load_config(TrainConfig, recipe, overrides, environ={}))
    return (folder / f"checkpoints/step_{steps}/weights/adapter_model.safetensors").read_bytes()


def test_a_run_is_reproducible_and_resumes_exactly(base, tmp_path):
    straight = run(base, tmp_path / "a", 4)
    assert run(base, tmp_path / "b", 4) == straight
    run(base, tmp_path / "c", 2)
    assert run(base, tmp_path / "c", 4) == straight
    assert run(base, tmp_path / "d", 4, "seed=1") != straight


def test_a_damaged_model_is_refused_and_not_filled_with_random_weights(base, tmp_path):
    def load(change):
        folder = tmp_path / f"m{len(os.listdir(tmp_path))}"
        shutil.copytree(base, folder)
        change(folder / "model.safetensors")
        return load_policy(ModelConfig(path=str(folder)), seed=0)

    def without_a_layer(file):
        tensors = load_file(file)
        del tensors["model.layers.0.self_attn.q_proj.weight"]
        save_file(tensors, file, metadata={"format": "pt"})

    def truncated(file):
        file.write_bytes(file.read_bytes()[:1000])

    def of_another_shape(file):
        tensors = load_file(file)
        tensors["model.norm.weight"] = tensors["model.norm.weight"][:-1].clone()
        save_file(tensors, file, metadata={"format": "pt"})

    def not_a_number(file):
        tensors = load_file(file)
        tensors["model.norm.weight"][0] = float("nan")
        save_file(tensors, file, metadata={"format": "pt"})

    with pytest.raises(ModelError, match=r"1 missing, such as model\.layers\.0\.self_attn\.q_proj"):
        load(without_a_layer)
    with pytest.raises(ModelError, match=r"model\.path: cannot load weights"):
        load(truncated)
    with pytest.raises(ModelError, match=r"model\.path"):
        load(of_another_shape)
    with pytest.raises(ModelError, match="NaN or infinite"):
        load(not_a_number)
