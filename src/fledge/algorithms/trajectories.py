"""What an estimator over a whole batch sees, and the two operations that most of them need:
discounted sums to the end of an episode, and whitening.

Legend: N trained tokens, episode after episode; S episodes, of which some may have no trained
token. Observations, prompts and padding are not in here, so they cannot enter a mean.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from fledge.algorithms.tokens import segment_sums
from fledge.types import Group

F = TypeVar("F", bound=Callable[..., Any])
BLOCK = 16


@dataclass(frozen=True)
class Trajectories:
    """The trained tokens of a batch before any update.

    `reward` is what arrives at each token: a turn's reward at its last token, penalties where they
    arise. `episode_reward` adds them up and knows also episodes without trained tokens. `bootstrap`
    is the value of what would have come next, 0 where an episode is over.
    """

    groups: tuple[Group, ...]
    lengths: Tensor
    prompt: Tensor
    reward: Tensor
    episode_reward: Tensor
    turn: Tensor
    engine_logp: Tensor
    old_logp: Tensor
    ref_logp: Tensor | None = None
    teacher_logp: Tensor | None = None
    value: Tensor | None = None
    bootstrap: Tensor | None = None

    @property
    def sequence(self) -> Tensor:
        """The episode of each token."""
        return torch.arange(len(self.lengths)).repeat_interleave(self.lengths)

    def per_episode(self, x: Tensor) -> Tensor:
        """Sums over the tokens of each episode."""
        return segment_sums(x, self.lengths)

    def per_token(self, x: Tensor) -> Tensor:
        """A number per episode, repeated for each of its trained tokens."""
        return x.repeat_interleave(self.lengths)

    def to_go(self, x: Tensor, decay: float) -> Tensor:
        r"""$y_t = x_t + \\mathrm{decay}\\, y_{t+1}$ within each episode."""
        return discounted_to_go(x, self.lengths, decay)

    def penalised(self, penalty: Tensor) -> Trajectories:
        """With a number per token taken off the rewards, wherever an estimator may look for
        them.
        """
        return replace(
            self,
            groups=self._with_turn_penalties(penalty),
            reward=self.reward - penalty,
            episode_reward=self.episode_reward - self.per_episode(penalty),
        )

    def _with_turn_penalties(self, penalty: Tensor) -> tuple[Group, ...]:
        turns = [max(1, len(e.rewards)) for g in self.groups for e in g.episodes]
        starts = torch.tensor([0, *turns]).cumsum(0)
        place = self.per_token(starts[:-1]) + self.turn
        sums = torch.bincount(place, weights=penalty, minlength=int(starts[-1])).tolist()
        cut = iter(range(len(turns)))
        groups = []
        for group in self.groups:
            episodes = []
            for episode in group.episodes:
                start = int(starts[next(cut)])
                rewards = episode.rewards or (0.0,)
                kept = (r - sums[start + i] for i, r in enumerate(rewards))
                episodes.append(replace(episode, rewards=tuple(kept)))
            groups.append(replace(group, episodes=tuple(episodes)))
        return tuple(groups)


def on_batch(*, needs: Collection[str] = (), greedy: bool = False) -> Callable[[F], F]:
    """Marks an estimator over a whole batch: `(Trajectories) -> one advantage per trained token`.

    `needs` names the columns it reads beyond rewards: `value`, `teacher_logp` or `ref_logp`.
    `greedy` asks for one greedy episode per task, in `Group.greedy`. An estimator without this mark
    gets the episodes of one task and returns one advantage for each.
    """

    def mark(estimator: F) -> F:
        estimator.over_batch = True  # type: ignore[attr-defined]
        estimator.needs = frozenset(needs)  # type: ignore[attr-defined]
        estimator.greedy = greedy  # type: ignore[attr-defined]
        return estimator

    return mark


def whiten(x: Tensor) -> Tensor:
    """Mean 0 and standard deviation 1 over the trained tokens; what has no spread becomes 0.

    >>> whiten(torch.tensor([1.0, 2.0, 3.0])).tolist()
    [-1.0, 0.0, 1.0]
    """
    if len(x) < 2:
        return torch.zeros_like(x)
    variance, mean = torch.var_mean(x)
    centred = x - mean
    if variance <= 1e-12 * mean.square():
        return torch.zeros_like(x)
    return centred / (variance.sqrt() + 1e-8)


def discounted_to_go(x: Tensor, lengths: Tensor, decay: float) -> Tensor:
    """Discounted sums from each entry to the end of its segment, without a loop over entries.

    >>> discounted_to_go(torch.tensor([1.0, 1.0, 4.0]), torch.tensor([2, 1]), 0.5).tolist()
    [1.5, 1.0, 4.0]
    """
    if not len(x):
        return x.clone()
    width = -(-int(lengths.max()) // BLOCK) * BLOCK
    rows = len(lengths)
    if len(x) == rows * width:
        return _rows_to_go(x.view(rows, width), decay).view(-1)
    gaps = torch.arange(rows) * width - (lengths.cumsum(0) - lengths)
    place = gaps.repeat_interleave(lengths).add_(torch.arange(len(x)))
    padded = x.new_zeros(rows * width).scatter_(0, place, x).view(rows, width)
    return _rows_to_go(padded, decay).view(-1).index_select(0, place)


def _rows_to_go(x_RW: Tensor, decay: float) -> Tensor:
    """The same along rows. Inside a block of 16 the sums are one matrix product; the heads of the
    blocks are summed by the same rule, with the decay of a whole block.
    """
    rows, width = x_RW.shape
    blocks = -(-width // BLOCK)
    if width % BLOCK:
        x_RW = torch.nn.functional.pad(x_RW, (0, blocks * BLOCK - width))
    steps = torch.arange(BLOCK)
    powers = torch.tensor([decay**k for k in range(BLOCK + 1)], dtype=x_RW.dtype)
    inside = powers[(steps[:, None] - steps).clamp(min=0)].tril()
    sums = (x_RW.view(-1, BLOCK) @ inside).view(rows, blocks, BLOCK)
    if blocks > 1:
        heads = _rows_to_go(sums[:, :, 0], decay**BLOCK)
        sums[:, :-1] += heads[:, 1:, None] * powers[BLOCK - steps]
    return sums.view(rows, -1)[:, :width]
