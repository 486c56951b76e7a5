"""The reward model of an RL run: loaded once, put around generators whose episodes it scores."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from fledge.config import TrainConfig
from fledge.interfaces import Generator
from fledge.models.fingerprint import digest, hashes, module_tensors
from fledge.models.reward import load_reward_model
from fledge.rollout.reward_model import RewardModelGenerator
from fledge.trainer.reward import RewardModel


@dataclass(frozen=True)
class LearnedReward:
    """`identity` is what a resumed run must share with the one it continues."""

    model: RewardModel | None = None
    weight: float = 0.0
    identity: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, config: TrainConfig) -> LearnedReward:
        """Of a run without a reward model: one that adds nothing."""
        found = config.reward_model
        if found is None:
            return cls()
        policy, head = load_reward_model(found.path, config.model)
        tensors = {**module_tensors(policy.model), **head.state_dict(prefix="value_head.")}
        model = RewardModel(policy, head, config.optim.micro_tokens)
        return cls(model, found.weight, {"reward_model.weights": digest(hashes(tensors))})

    def around(self, generator: Generator) -> Generator:
        if self.model is None:
            return generator
        return RewardModelGenerator(generator, self.model.score, self.weight)
