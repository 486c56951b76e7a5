"""What an estimator over a whole batch sees, and the two operations that most of them need:
discounted sums to the end of an episode, and whitening.

Legend: N trained tokens, episode after episode; S episodes, of which some may have no trained
token. Observations, prompts and padding are not in here, so they cannot enter a mean.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any, TypeVar

import torch
from torch import Tensor

from fledge.algorithms.tokens import segment_sums
from fledge.types import Episode, Group

F = TypeVar("F", bound=Callable[..., Any])
BLOCK = 16


@dataclass(frozen=True)
class Trajectories:
    """The trained tokens of a batch before any update.

    `reward` is what arrives at each token: a turn's reward at its last token, penalties where they
    arise. `episode_reward` adds them up and knows also episodes without trained tokens. `bootstrap`
    is the value of what would have come next, 0 where an episode is over. `penalty` has been taken
    off `reward` and `episode_reward` already, but not off the episodes in `groups`.
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
    penalty: Tensor | None = None

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
        r"""$y_t = x_t + \mathrm{decay}\, y_{t+1}$ within each episode."""
        return discounted_to_go(x, self.lengths, decay)

    def penalised(self, penalty: Tensor) -> Trajectories:
        """With a number per token taken off the rewards, wherever an estimator may look for
        them.
        """
        return replace(
            self,
            penalty=penalty if self.penalty is None else self.penalty + penalty,
            reward=self.reward - penalty,
            episode_reward=self.episode_reward - self.per_episode(penalty),
        )

    def charged(self) -> tuple[Group, ...]:
        """The groups, with what was taken off each turn taken off its reward. Made only for
        estimators that look at episodes: the records are many.
        """
        if self.penalty is None:
            return self.groups
        turns = self.turns.tolist()
        most = max([1, *turns])
        table = (
            self.per_episode(self.penalty)[:, None]
            if most == 1
            else self.by_turn(self.penalty, most)[0]
        )
        charges = zip(turns, table.tolist(), strict=True)
        return tuple(
            replace(g, episodes=tuple(_charged(e, *next(charges)) for e in g.episodes))
            for g in self.groups
        )

    @property
    def turns(self) -> Tensor:
        """How many turns of each episode there are, up to the last one with a trained token."""
        if not len(self.turn):
            return torch.zeros_like(self.lengths)
        last = self.turn[(self.lengths.cumsum(0) - 1).clamp(min=0)]
        return (last + 1) * (self.lengths > 0)

    def by_turn(self, x: Tensor, width: int) -> tuple[Tensor, Tensor, Tensor]:
        """Sums over the tokens of each turn, as a table of episodes and `width` turns; the places
        in it, row after row, that have tokens; and how many tokens each of those has.
        """
        starts = torch.arange(len(self.lengths)) * width
        place = self.per_token(starts).add_(self.turn)
        places, counts = torch.unique_consecutive(place, return_counts=True)
        table = x.new_zeros(len(self.lengths) * width)
        if len(places):
            table[places] = segment_sums(x, counts)
        return table.view(-1, width), places, counts


def _charged(e: Episode, turns: int, charges: list[float]) -> Episode:
    if turns == len(e.rewards) == 1:
        rewards: tuple[float, ...] = (e.rewards[0] - charges[0],)
    else:
        pairs = zip_longest(e.rewards, charges[:turns], fillvalue=0.0)
        rewards = tuple(reward - charge for reward, charge in pairs)
    # Spelled out: `replace` takes four times as long, and there are many.
    return Episode(
        e.task_key,
        e.index,
        e.segments,
        rewards,
        e.outcome,
        e.messages,
        e.info,
        e.error,
        e.components,
        e.masked,
    )


def on_batch(*, needs: Collection[str] = (), greedy: bool = False) -> Callable[[F], F]:
    """Marks an estimator over a whole batch: `(Trajectories) -> one advantage per trained token`.

    `needs` names the columns it reads beyond rewards: `value`, `teacher_logp` or `ref_logp`.
    `greedy` asks for one greedy episode per task, in `Group.greedy`. An estimator without this mark
    gets the episodes of one task and returns one advantage for each.
    """

    wanted = frozenset([needs] if isinstance(needs, str) else needs)

    def mark(estimator: F) -> F:
        estimator.over_batch = True  # type: ignore[attr-defined]
        estimator.needs = wanted  # type: ignore[attr-defined]
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
    # Not `torch.var_mean`, which takes ten times as long on a CPU.
    mean = x.mean()
    centred = x - mean
    std = (centred.square().sum() / (len(x) - 1)).sqrt()
    if std <= 8 * torch.finfo(x.dtype).eps * mean.abs():  # nothing but rounding
        return torch.zeros_like(x)
    return centred.mul_(1 / (std + 1e-8))


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
    # Segments are aligned at their ends: what stands before them in a row is other segments' and
    # has no part in a sum that runs to the end, so nothing has to be masked.
    ends = lengths.cumsum(0)
    padded = torch.cat([x.new_zeros(width), x]).unfold(0, width, 1).index_select(0, ends)
    sums = _rows_to_go(padded, decay).view(-1)
    return sums.index_select(0, _places(lengths, torch.arange(1, rows + 1) * width - lengths))


def _places(lengths: Tensor, starts: Tensor) -> Tensor:
    """`starts[i] .. starts[i] + lengths[i]` of all segments in one: steps of 1, and a jump where a
    segment begins. One sum is cheaper than repeating the starts and counting up from them.
    """
    spoken = lengths > 0
    lengths, starts = lengths[spoken], starts[spoken]
    steps = torch.ones(int(lengths.sum()), dtype=torch.long)
    ends = starts + lengths - 1
    steps[0] = starts[0]
    steps[lengths.cumsum(0)[:-1]] = starts[1:] - ends[:-1]
    return steps.cumsum_(0)


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
        sums[:, :-1].addcmul_(heads[:, 1:, None], powers[BLOCK - steps])
    return sums.view(rows, -1)[:, :width]
