"""Scores of conversations by a trained reward model. It never trains."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fledge.data.batch import Batch, Row
from fledge.data.render import make_renderer
from fledge.errors import RewardError
from fledge.interfaces import Renderer
from fledge.models.load import Policy
from fledge.models.value import ValueHead
from fledge.trainer.forward import Plan
from fledge.trainer.local import hidden_states
from fledge.types import Message


class RewardModel:
    """One number per conversation: the value head's at the end of the last reply, as in training.

    It reads text, not the policy's tokens: it has a tokenizer of its own.
    """

    def __init__(
        self,
        policy: Policy,
        head: ValueHead,
        micro_tokens: int = 16384,
        renderer: Renderer | None = None,
    ) -> None:
        self._policy = policy
        self._head = head
        self._micro_tokens = micro_tokens
        self._renderer = renderer or make_renderer(policy.tokenizer)

    @torch.no_grad()
    def score(self, conversations: Sequence[Sequence[Message]]) -> list[float]:
        """Conversations that begin alike share the computation of what is before the last reply,
        where they are neighbours.
        """
        batch = Batch(tuple(self._row(c, i) for i, c in enumerate(conversations)), {})
        found: list[float] = []
        for micro in batch.micros(self._micro_tokens):
            plan = Plan.of(micro.rows, self._policy.device)
            values = self._head(hidden_states(self._policy, plan))
            found += values[1::2].tolist()  # each row has two places, and the second is its end
        return found

    def _row(self, messages: Sequence[Message], index: int) -> Row:
        """Two places: where the last reply begins (so that what is before it can be shared), and
        right after its end.
        """
        if not messages or messages[-1].role != "assistant":
            raise RewardError("a conversation must end with a reply of the assistant to be scored")
        ids, _ = self._renderer.encode(messages)
        begins, end = len(self._renderer.start(messages[:-1])), len(ids)
        if end >= self._policy.context:
            raise RewardError(
                f"the conversation has {end} tokens, the reward model's context is "
                f"{self._policy.context}; shorten prompts or replies, or train a reward model with "
                "a longer context"
            )
        return Row((*ids, 0), (begins, end), index, index)
