"""Episodes, groups and trajectories of given rewards and lengths, made the way a batch is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from hypothesis import settings
from hypothesis import strategies as st
from torch import Tensor

from fledge.algorithms.trajectories import Trajectories
from fledge.data.batch import pack
from fledge.types import Episode, Group, Outcome, Segment, Task

steady = settings(max_examples=25, deadline=None, derandomize=True, database=None)


def segment(*replies: int, gap: int = 2) -> Segment:
    """Two tokens of prompt, then replies of these lengths with `gap` observed tokens between."""
    sampled = [False, False]
    for index, length in enumerate(replies):
        sampled += [False] * (gap if index else 0) + [True] * length
    return Segment(
        token_ids=tuple(range(len(sampled))),
        logps=tuple(-0.5 if s else 0.0 for s in sampled),
        trained=tuple(sampled),
        versions=tuple(0 if s else -1 for s in sampled),
    )


def episode(
    rewards: float | Sequence[float],
    lengths: int | Sequence[int] = 1,
    *,
    index: int = 0,
    key: str = "t",
    outcome: Outcome = Outcome.OK,
    components: Mapping[str, float] | None = None,
    masked: str = "",
    gap: int = 2,
) -> Episode:
    replies = [lengths] if isinstance(lengths, int) else lengths
    return Episode(
        key,
        index,
        segments=(segment(*replies, gap=gap),),
        rewards=tuple(rewards) if isinstance(rewards, Sequence) else (float(rewards),),
        outcome=outcome,
        messages=(),
        components=components or {},
        masked=masked,
    )


def group(*episodes: Episode, key: str = "t", greedy: Episode | None = None) -> Group:
    return Group(Task(key, {}), 0, episodes, greedy=greedy)


def simple(*rewards: float, lengths: Sequence[int] | None = None, key: str = "t") -> Group:
    """One turn per episode."""
    sizes = lengths or [1] * len(rewards)
    pairs = enumerate(zip(rewards, sizes, strict=True))
    return group(*(episode(r, n, index=i, key=key) for i, (r, n) in pairs), key=key)


def trajectories(
    *groups: Group, dtype: torch.dtype = torch.float64, **columns: Any
) -> Trajectories:
    batch = pack(groups)
    episodes = [e for g in groups for e in g.episodes]
    lengths = torch.zeros(len(episodes), dtype=torch.long)
    for row in batch.rows:
        lengths[row.sequence] += len(row.trained)
    logp = batch.columns["engine_logp"].to(dtype)
    given = {
        "groups": groups,
        "lengths": lengths,
        "prompt": torch.tensor([i for i, g in enumerate(groups) for _ in g.episodes]),
        "reward": batch.columns["reward"].to(dtype),
        "episode_reward": torch.tensor([e.reward for e in episodes], dtype=dtype),
        "turn": batch.columns["turn"],
        "engine_logp": logp,
        "old_logp": logp,
    }
    return Trajectories(**{**given, **columns})


def numbers(count: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, generator=generator, dtype=torch.float64)


any_reward = st.floats(-1e6, 1e6) | st.sampled_from([0.0, 1.0, 0.1])


@st.composite
def random_groups(draw: Any, least: float = -1e6, count: int = 4, size: int = 4) -> list[Group]:
    """Groups of one and of more; episodes without tokens, with several turns, with components."""
    reward = any_reward.map(lambda r: max(r, least))
    found = []
    for g in range(draw(st.integers(1, count))):
        episodes = []
        for i in range(draw(st.integers(1, size))):
            rewards = draw(st.lists(reward, min_size=1, max_size=3))
            length = st.integers(0, 20)
            lengths = draw(st.lists(length, min_size=len(rewards), max_size=len(rewards)))
            parts = {"a": rewards[0], "b": sum(rewards[1:])}
            episodes.append(episode(rewards, lengths, index=i, key=str(g), components=parts))
        greedy = draw(st.sampled_from([None, episodes[0]]))
        found.append(group(*episodes, key=str(g), greedy=greedy))
    return found
