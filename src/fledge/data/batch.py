"""Batches: rows of tokens with columns over their *trained* tokens, and every way of cutting them
that changes nothing.

A row is one exact token sequence. A column holds one number per trained token, row after row.
`updates` cuts a batch into mini-batches (one optimiser step each) and those into micro-batches (one
forward/backward each) by a token budget; the weight of each token in the loss is fixed per
mini-batch, before the cut.
"""

from __future__ import annotations

import math
import random
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby

import torch
from torch import Tensor

from fledge.errors import TrainingError
from fledge.types import Episode, Group, Pair, Sample

Reduce = Callable[[Sequence[int], Sequence[int], Sequence[int]], list[float]]
"""`(trained tokens, sequence, prompt) of each row -> weight of each of its tokens`."""


@dataclass(frozen=True, slots=True)
class Row:
    """One token sequence. `trained` lists the places of its trained tokens, in order; place 0
    cannot be predicted.

    >>> row = Row(token_ids=(5, 6, 7, 8), trained=(2, 3), sequence=0, prompt=0)
    >>> row.prefix, row.needed
    (2, 3)
    """

    token_ids: tuple[int, ...]
    trained: tuple[int, ...]
    sequence: int
    prompt: int

    @property
    def prefix(self) -> int:
        """Tokens before the first trained one: what rows of one prompt have in common."""
        return self.trained[0]

    @property
    def needed(self) -> int:
        """Tokens whose hidden states predict something: all before the last trained one."""
        return self.trained[-1]


@dataclass(frozen=True)
class Batch:
    """Rows and their columns. `first` marks rows that no update has changed the policy for yet."""

    rows: tuple[Row, ...]
    columns: Mapping[str, Tensor]
    first: bool = True
    groups: tuple[Group, ...] = field(default=(), repr=False)

    @property
    def trained_tokens(self) -> int:
        return sum(len(r.trained) for r in self.rows)

    def with_columns(self, **columns: Tensor) -> Batch:
        assert all(len(c) == self.trained_tokens for c in columns.values()), (
            "a column has the wrong length"
        )
        return replace(self, columns={**self.columns, **columns})

    def per_row(self, values: Sequence[float]) -> Tensor:
        """A column that repeats one value per row for each of its trained tokens."""
        counts = torch.tensor([len(r.trained) for r in self.rows])
        return torch.tensor(values, dtype=torch.float64).repeat_interleave(counts)

    def select(self, indices: Sequence[int]) -> Batch:
        """The rows with these indices, in this order."""
        starts = [0]
        for row in self.rows:
            starts.append(starts[-1] + len(row.trained))
        spans = [torch.arange(starts[i], starts[i + 1]) for i in indices]
        index = torch.cat(spans) if spans else torch.empty(0, dtype=torch.long)
        columns = {name: column[index.to(column.device)] for name, column in self.columns.items()}
        return replace(self, rows=tuple(self.rows[i] for i in indices), columns=columns, groups=())

    def micros(self, token_budget: int) -> list[Batch]:
        """Whole sequences cut by the token budget; a prompt that neighbours share is counted once.

        The rows of a sequence stay together: losses that compare whole sequences need them.
        """
        cuts: list[list[int]] = []
        used = 0
        prompt: tuple[int, ...] | None = None
        for _, found in groupby(range(len(self.rows)), lambda i: self.rows[i].sequence):
            indices = list(found)
            cost, last = self._cost(indices, prompt)
            if not cuts or used + cost > token_budget:
                cuts.append([])
                used = 0
                cost, last = self._cost(indices, None)
            cuts[-1] += indices
            used += cost
            prompt = last
        return [self.select(cut) for cut in cuts]

    def _cost(
        self, indices: Sequence[int], prompt: tuple[int, ...] | None
    ) -> tuple[int, tuple[int, ...] | None]:
        """Tokens that these rows add after a row with `prompt`, and the last prompt of theirs."""
        cost = 0
        for row in (self.rows[i] for i in indices):
            own = row.token_ids[: row.prefix]
            cost += row.needed - row.prefix + (0 if own == prompt else row.prefix)
            prompt = own
        return cost, prompt

    def updates(
        self, epochs: int, minibatches: int, key: int | str, reduce: Reduce
    ) -> Iterator[Batch]:
        """One mini-batch per optimiser step, with its `scale` column; prompts stay whole. `key`
        settles their order.
        """
        prompts = sorted({row.prompt for row in self.rows})
        for epoch in range(epochs):
            order = list(prompts)
            if minibatches > 1:
                random.Random(f"{key}/{epoch}").shuffle(order)
            for part in range(minibatches):
                chosen = set(order[part::minibatches])
                picked = [i for i, row in enumerate(self.rows) if row.prompt in chosen]
                if picked:
                    mini = self.select(picked).weighed(reduce)
                    yield replace(mini, first=self.first and epoch == 0 and part == 0)

    @property
    def lengths(self) -> Tensor:
        """Trained tokens of each sequence; its rows must be neighbours."""
        counts: dict[int, int] = {}
        last = None
        for row in self.rows:
            assert row.sequence == last or row.sequence not in counts, "a sequence is torn apart"
            counts[row.sequence] = counts.get(row.sequence, 0) + len(row.trained)
            last = row.sequence
        return torch.tensor(list(counts.values()), dtype=torch.long)

    def weighed(self, reduce: Reduce) -> Batch:
        counts = [len(r.trained) for r in self.rows]
        weights = reduce(counts, [r.sequence for r in self.rows], [r.prompt for r in self.rows])
        return self.with_columns(scale=self.per_row(weights))


def pack(groups: Sequence[Group]) -> Batch:
    """All trained tokens of the groups' episodes, with the reward that arrives at each. Rows of one
    group are neighbours, so that they can share their prompt.
    """
    rows: list[Row] = []
    columns: dict[str, list[float]] = {"engine_logp": [], "reward": [], "turn": []}
    sequence = 0
    for prompt, group in enumerate(groups):
        for episode in group.episodes:
            _add_episode(episode, sequence, prompt, rows, columns)
            sequence += 1
    return Batch(
        tuple(rows),
        {
            "engine_logp": torch.tensor(columns["engine_logp"]),
            "reward": torch.tensor(columns["reward"], dtype=torch.float64),
            "turn": torch.tensor(columns["turn"], dtype=torch.long),
        },
        groups=tuple(groups),
    )


def _add_episode(
    episode: Episode, sequence: int, prompt: int, rows: list[Row], columns: dict[str, list[float]]
) -> None:
    first, before = len(columns["turn"]), 0
    for segment in () if episode.masked else episode.segments:
        places = tuple(i for i, trained in enumerate(segment.trained) if trained)
        turns = segment.turns
        if places:
            rows.append(Row(segment.token_ids, places, sequence, prompt))
            logps = [segment.logps[i] for i in places]
            odd = [logp for logp in logps if not math.isfinite(logp)]
            if odd:
                raise TrainingError(
                    f"engine: episode {episode.index} of task {episode.task_key!r} has a trained "
                    f"token with the log-prob {odd[0]}, so it cannot have been sampled"
                )
            columns["engine_logp"] += logps
            columns["reward"] += [segment.rewards[i] if segment.rewards else 0.0 for i in places]
            columns["turn"] += [before + turns[i] for i in places]
        before += 1 + max(turns, default=-1)
    _place_turn_rewards(episode.rewards, columns["turn"], columns["reward"], first)


def _place_turn_rewards(
    rewards: Sequence[float], turns: Sequence[float], column: list[float], first: int
) -> None:
    """A turn's reward arrives at its last trained token, or at the last one before it; a turn that
    no trained token has led to cannot teach anything.
    """
    for turn, reward in enumerate(rewards):
        last = bisect_right(turns, turn, lo=first) - 1
        if last >= first:
            column[last] += reward


def pack_samples(samples: Sequence[Sample]) -> Batch:
    """Supervised rows: the trained tokens of each sample with their weights."""
    rows: list[Row] = []
    weights: list[float] = []
    for index, sample in enumerate(samples):
        places = sample.trained
        if places:
            rows.append(Row(sample.token_ids, places, index, index))
            weights.extend(sample.weights[i] for i in places)
    return Batch(tuple(rows), {"weight": torch.tensor(weights)})


def pack_pairs(pairs: Sequence[Pair]) -> Batch:
    """Both halves of a pair are one sequence, so they are never cut apart; `side` tells them
    apart.
    """
    rows: list[Row] = []
    sides: list[float] = []
    for index, pair in enumerate(pairs):
        for sample, side in ((pair.chosen, 1.0), (pair.rejected, -1.0)):
            rows.append(Row(sample.token_ids, sample.trained, index, index))
            sides += [side] * len(sample.trained)
    return Batch(tuple(rows), {"side": torch.tensor(sides)})


def after_the_end(rows: Sequence[Row]) -> tuple[Row, ...]:
    """Each row with one more place to predict, right after its last trained token: the hidden state
    there is that of the finished reply. What the token there would be plays no part.
    """
    found = []
    for row in rows:
        end = row.trained[-1] + 1
        found.append(replace(row, token_ids=(*row.token_ids[:end], 0), trained=(*row.trained, end)))
    return tuple(found)
