"""A reward model on disk and its scores, measured against plain transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from fledge.config.schema import ModelConfig, OptimConfig
from fledge.data.batch import pack_pairs
from fledge.data.pairs import encode_scored_pair
from fledge.data.render import make_renderer
from fledge.errors import ModelError, RewardError
from fledge.models.reward import load_reward_model, save_reward_model
from fledge.models.value import ValueHead
from fledge.trainer import Critic
from fledge.trainer import reward as module
from fledge.trainer.reward import RewardModel
from fledge.types import assistant, user
from helpers import run, stock, tiny_policy

CPU = ModelConfig(device="cpu")
TALKS = [
    [user("2+2"), assistant("4")],
    [user("2+2"), assistant("five, or so")],
    [user("2+2"), assistant("")],
    [user("hello"), assistant("yes?"), user("2+2"), assistant("4")],
    [user("hello"), assistant("yes?"), user("2+2"), assistant("44")],
    [assistant("unasked")],
]


def head_of(policy: Any) -> ValueHead:
    head = ValueHead(policy.config.hidden_size)
    torch.manual_seed(4)
    torch.nn.init.normal_(head.linear.weight)
    torch.nn.init.constant_(head.linear.bias, 0.25)
    return head


@pytest.fixture(scope="module")
def folder(policy, tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("reward") / "model"
    save_reward_model(policy, head_of(policy), directory, {"loss": "bradley_terry", "mean": 0.5})
    return directory


def test_scores_are_those_of_the_last_token_in_plain_transformers(policy, stock_model):
    head, renderer = head_of(policy), make_renderer(policy.tokenizer)
    found = RewardModel(policy, head).score(TALKS)
    for talk, score in zip(TALKS, found, strict=True):
        ids = torch.tensor([renderer.encode(talk)[0]])
        with torch.no_grad():
            hidden = stock_model.get_decoder()(input_ids=ids).last_hidden_state[0, -1]
            assert score == pytest.approx(head(hidden[None]).item(), abs=1e-4)
    assert len({round(score, 3) for score in found}) == len(TALKS)


def test_scores_do_not_depend_on_the_cut_or_the_order(policy):
    head = head_of(policy)
    whole = RewardModel(policy, head).score(TALKS)
    assert RewardModel(policy, head, micro_tokens=1).score(TALKS) == pytest.approx(whole, abs=1e-4)
    backwards = RewardModel(policy, head, micro_tokens=40).score(TALKS[::-1])
    assert backwards[::-1] == pytest.approx(whole, abs=1e-4)
    assert RewardModel(policy, head).score([]) == []


def test_what_is_before_the_last_reply_is_computed_once(policy, monkeypatch):
    sizes = []
    make = module.Plan.of
    monkeypatch.setattr(module.Plan, "of", lambda *a: sizes.append(make(*a)) or sizes[-1])
    model = RewardModel(policy, head_of(policy))
    prompt, replies = [user("a long question " * 5)], ["yes", "no", "maybe"]
    model.score([[*prompt, assistant(reply)] for reply in replies])
    start = len(make_renderer(policy.tokenizer).start(prompt))
    assert len(sizes[-1].tokens) < start + 40 < 3 * start


def test_training_and_scoring_look_at_the_same_place():
    policy = tiny_policy()
    critic = Critic(policy, OptimConfig())
    critic.value_head.load_state_dict(head_of(policy).state_dict())
    row = {"prompt": "2+2", "chosen": "4", "rejected": "five, or so"}
    pair = encode_scored_pair(make_renderer(policy.tokenizer), row, "row 1")
    trained = run(critic.score(pack_pairs([pair]), {"value"})).columns["value"].tolist()
    assert RewardModel(policy, critic.value_head).score(TALKS[:2]) == pytest.approx(
        trained, abs=1e-5
    )


def test_a_saved_model_gives_the_same_scores_and_says_what_it_is(policy, folder):
    found, head = load_reward_model(folder, CPU)
    assert not any(p.requires_grad for p in [*found.module.parameters(), *head.parameters()])
    before = RewardModel(policy, head_of(policy)).score(TALKS)
    assert RewardModel(found, head).score(TALKS) == before
    facts = json.loads((folder / "reward_model.json").read_text())
    assert facts == {"loss": "bradley_terry", "mean": 0.5}
    assert {f.stat().st_mode & 0o777 for f in folder.glob("*.safetensors")} == {
        folder.joinpath("config.json").stat().st_mode & 0o777
    }
    half, _ = load_reward_model(folder, ModelConfig(device="cpu", dtype="bf16"))
    assert half.dtype == torch.bfloat16


def test_plain_transformers_loads_the_model_of_it(policy, folder, tmp_path):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder)
    other = stock(policy, tmp_path / "plain")
    assert all(
        torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True)
    )


def test_a_folder_that_is_no_reward_model_is_refused_by_key(policy, folder, tmp_path):
    stock(policy, tmp_path / "plain")
    for path in (tmp_path / "plain", tmp_path / "nowhere"):
        with pytest.raises(ModelError, match=r"^reward_model\.path: .*is no reward model"):
            load_reward_model(path, CPU)
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "value_head.safetensors").write_bytes(b"x")
    with pytest.raises(ModelError, match=r"^reward_model\.path: no model config"):
        load_reward_model(broken, CPU)
    for file in folder.iterdir():
        if file.name != "value_head.safetensors":
            (broken / file.name).write_bytes(file.read_bytes())
    with pytest.raises(ModelError, match=r"^reward_model\.path: the value head .* is damaged"):
        load_reward_model(broken, CPU)


def test_conversations_that_cannot_be_scored_are_errors(policy):
    model = RewardModel(policy, head_of(policy))
    with pytest.raises(
        RewardError, match=rf"tokens, the reward model's context is {policy.context}"
    ):
        model.score([TALKS[0], [user("2+2"), assistant("4 " * policy.context)]])
    for talk in ([], [user("2+2")]):
        with pytest.raises(RewardError, match="must end with a reply"):
            model.score([talk])
