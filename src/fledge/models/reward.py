"""A reward model on disk: a Hugging Face model with its tokenizer, a value head, and a note on what
its scores are like.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from fledge.config.schema import ModelConfig
from fledge.errors import ModelError
from fledge.models.load import Policy, export, load_policy
from fledge.models.value import ValueHead

HEAD = "value_head.safetensors"
FACTS = "reward_model.json"
KEY = "reward_model.path"


def save_reward_model(
    policy: Policy, head: ValueHead, directory: Path, facts: Mapping[str, Any]
) -> None:
    """Adapters are merged in; `facts` are for people, and written as they are."""
    directory.mkdir(parents=True, exist_ok=True)
    save_file(head.state_dict(), directory / HEAD)
    export(policy, directory)  # which also settles who may read the weights
    (directory / FACTS).write_text(f"{json.dumps(dict(facts), indent=2)}\n")


def load_reward_model(path: str | Path, like: ModelConfig) -> tuple[Policy, ValueHead]:
    """What `save_reward_model` wrote, frozen, with the device and the dtype of `like`."""
    if not has_value_head(path):
        raise ModelError(
            f"{KEY}: {str(path)!r} is no reward model (there is no {HEAD} in it); give the export "
            "of a `fledge prefer` run with loss=bradley_terry, which is its run_dir/model"
        )
    config = ModelConfig(path=str(path), device=like.device, dtype=like.dtype)
    policy = load_policy(config, 0, KEY)
    head = ValueHead(policy.config.hidden_size).to(policy.device)
    load_value_head(head, path, KEY)
    policy.module.requires_grad_(False)
    return policy, head.requires_grad_(False)


def has_value_head(path: str | Path) -> bool:
    return (Path(path) / HEAD).is_file()


def load_value_head(head: ValueHead, path: str | Path, key: str) -> None:
    """Copy a saved head into this one; `key` is the setting that named the folder."""
    try:
        head.load_state_dict(load_file(Path(path) / HEAD))
    except (SafetensorError, OSError, RuntimeError) as error:
        raise ModelError(f"{key}: the value head in {str(path)!r} is damaged: {error}") from None
