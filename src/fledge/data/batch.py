"""Batches: rows of tokens with columns over their *trained* tokens, and every way of cutting them
that changes nothing.

A row is one exact token sequence. A column holds one number per trained token, row after row.
`updates` cuts a batch into mini-batches (one optimiser step each) and those into micro-batches (one
forward/backward each) by a token budget; the weight of each token in the loss is fixed per
mini-batch, before the cut.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from fledge.types import Group, Sample

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
        """Whole rows cut by the token budget; a prompt that neighbours share is counted once."""
        cuts: list[list[int]] = []
        used = 0
        prompt: tuple[int, ...] | None = None
        for index, row in enumerate(self.rows):
            own = row.needed - row.prefix
            shared = prompt == row.token_ids[: row.prefix]
            if not cuts or used + own + (0 if shared else row.prefix) > token_budget:
                cuts.append([])
                used, shared = 0, False
            cuts[-1].append(index)
            used += own + (0 if shared else row.prefix)
            prompt = row.token_ids[: row.prefix]
        return [self.select(cut) for cut in cuts]

    def updates(self, epochs: int, minibatches: int, seed: int, reduce: Reduce) -> Iterator[Batch]:
        """One mini-batch per optimiser step, with its `scale` column; prompts stay whole."""
        prompts = sorted({row.prompt for row in self.rows})
        for epoch in range(epochs):
            order = list(prompts)
            if minibatches > 1:
                random.Random(f"{seed}/{epoch}").shuffle(order)
            for part in range(minibatches):
                chosen = set(order[part::minibatches])
                picked = [i for i, row in enumerate(self.rows) if row.prompt in chosen]
                if picked:
                    mini = self.select(picked).weighed(reduce)
                    yield replace(mini, first=self.first and epoch == 0 and part == 0)

    def weighed(self, reduce: Reduce) -> Batch:
        counts = [len(r.trained) for r in self.rows]
        weights = reduce(counts, [r.sequence for r in self.rows], [r.prompt for r in self.rows])
        return self.with_columns(scale=self.per_row(weights))


def pack(groups: Sequence[Group]) -> Batch:
    """All trained tokens of the groups' episodes. Rows of one group are neighbours, so that they
    can share their prompt.
    """
    rows: list[Row] = []
    logps: list[float] = []
    sequence = 0
    for prompt, group in enumerate(groups):
        for episode in group.episodes:
            for segment in episode.segments:
                places = tuple(i for i, trained in enumerate(segment.trained) if trained)
                if places:
                    rows.append(Row(segment.token_ids, places, sequence, prompt))
                    logps.extend(segment.logps[i] for i in places)
            sequence += 1
    return Batch(tuple(rows), {"engine_logp": torch.tensor(logps)}, groups=tuple(groups))


def with_advantages(batch: Batch, advantages: Sequence[Sequence[float]]) -> Batch:
    """Lift one number per episode to all its trained tokens."""
    flat = [value for group in advantages for value in group]
    return batch.with_columns(advantage=batch.per_row([flat[row.sequence] for row in batch.rows]))


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
