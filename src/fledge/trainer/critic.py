"""A critic: a second model with the same verbs, whose head says what a state is worth.

Reward models are trained the same way; theirs is the worth of a finished reply.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from fledge.algorithms.tokens import Tokens
from fledge.config.schema import OptimConfig
from fledge.data.batch import Batch
from fledge.models.load import Policy
from fledge.trainer.forward import Plan
from fledge.trainer.local import LocalTrainer, hidden_states


class Critic(LocalTrainer):
    """Trains a value head and the model under it. It has no use for log-probs, so it computes
    none; its language-model head is left alone.
    """

    prefix = "critic"

    def __init__(
        self,
        policy: Policy,
        optim: OptimConfig,
        *,
        plus_ratio: float = 1.0,
        gradient_checkpointing: bool = False,
    ) -> None:
        tied = policy.config.tie_word_embeddings
        if not tied:
            policy.head.requires_grad_(False)
        super().__init__(
            policy,
            optim,
            plus_ratio=plus_ratio,
            gradient_checkpointing=gradient_checkpointing,
            value_head=True,
        )

    def _tokens(self, micro: Batch, plan: Plan) -> Tokens:
        assert self.value_head is not None
        value = self.value_head(hidden_states(self.policy, plan))
        none = torch.zeros_like(value.detach())
        return Tokens.of(micro.columns, none, none, micro.lengths.to(value.device), value)

    def _record(self, micro: Batch, x: Tokens, stats: Mapping[str, Tensor]) -> None:
        self._write_down(stats)

    def metrics(self) -> dict[str, float]:
        """Under `critic/`, so that they do not hide the policy's."""
        return {name.replace("optim/", "critic/"): v for name, v in super().metrics().items()}
