"""Advantages from a whole batch: `(Trajectories) -> one number per trained token`, or that and the
returns that a critic learns from. Pure functions, but for `Reinforce`, which has a memory.

Legend: N trained tokens, S episodes, G groups, T turns, K reward components.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fledge.algorithms.bounds import NotNegative, Share
from fledge.algorithms.tokens import safe_log_ratio
from fledge.algorithms.trajectories import Trajectories, discounted_to_go, on_batch, whiten
from fledge.errors import PluginError
from fledge.types import Episode


@on_batch()
class Reinforce:
    r"""REINFORCE: $A_i = r_i - b$, with b a running average of earlier batch means (0 before the
    first batch).

    The baseline never contains the batch it is subtracted from, so it does not bias the gradient.
    """

    def __init__(self, *, baseline: bool = True, decay: Share = 0.9) -> None:
        self.baseline = baseline
        self.decay = decay
        self.average: float | None = None

    def __call__(self, t: Trajectories) -> Tensor:
        baseline = (self.average or 0.0) if self.baseline else 0.0
        if len(t.episode_reward):
            mean = t.episode_reward.double().mean().item()
            before = mean if self.average is None else self.average
            self.average = self.decay * before + (1 - self.decay) * mean
        return t.per_token(t.episode_reward - baseline)

    def state(self) -> dict[str, Any]:
        return {"average": self.average}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.average = state["average"]


@on_batch()
def reinforce_pp(t: Trajectories, *, gamma: Share = 1.0) -> Tensor:
    r"""REINFORCE++: $R_t = r_t + \gamma R_{t+1}$, whitened over the batch (arXiv:2501.03262)."""
    return whiten(t.to_go(t.reward, gamma))


@on_batch()
def reinforce_pp_baseline(t: Trajectories) -> Tensor:
    r"""REINFORCE++ with $r_i - \bar r$ of the group, whitened over the batch (arXiv:2501.03262).

    A group without spread is at 0 before whitening, hence near it afterwards, unless all are so.
    """
    deviation_S1, _ = _deviations(t.episode_reward[:, None], _group_sizes(t))
    return whiten(t.per_token(deviation_S1[:, 0]))


@on_batch(needs={"value"})
def gae(
    t: Trajectories, *, gamma: Share = 1.0, lam: Share = 0.95, whitened: bool = True
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation, whitened over the batch, and the returns before that."""
    advantage, returns = gae_parts(t, gamma, lam)
    return (whiten(advantage) if whitened else advantage), returns


def gae_parts(t: Trajectories, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    r"""$\delta_t = r_t + \gamma V_{t+1} - V_t,\ A_t = \delta_t + \gamma\lambda A_{t+1}$, and the
    returns $A + V$ (arXiv:1506.02438).

    The next state is that of the episode's next trained token, whatever was observed in between;
    behind the last one it is worth `bootstrap`.
    """
    assert t.value is not None and t.bootstrap is not None
    following = t.value.roll(-1)
    spoken = t.lengths > 0
    following[(t.lengths.cumsum(0) - 1)[spoken]] = t.bootstrap[spoken].to(following)
    delta = following.mul_(gamma).add_(t.reward).sub_(t.value)
    advantage = t.to_go(delta, gamma * lam)
    return advantage, advantage + t.value


@on_batch()
def gdpo(t: Trajectories, *, weights: Mapping[str, float] | None = None) -> Tensor:
    r"""Decoupled rewards: $A_i = \sum_k w_k (c_{ik} - \bar c_k) / (\mathrm{std}_k + 10^{-6})$
    within the group, then whitened over the batch (arXiv:2601.05242).

    Only `components` count: what shaping or a KL did to the total reward is not in them.
    """
    episodes = [e for g in t.groups for e in g.episodes]
    names = _component_names(episodes)
    for name in weights or {}:
        if name not in names:
            raise PluginError(
                f"algorithm.advantage: gdpo has a weight for {name!r}, but the rewards are made of "
                f"{', '.join(names)}"
            )
    components_SK = t.reward.new_tensor([[e.components[n] for n in names] for e in episodes])
    sizes = _group_sizes(t)
    deviation_SK, count_SK = _deviations(components_SK.view(-1, len(names)), sizes)
    weight_K = t.reward.new_tensor([(weights or {}).get(name, 1.0) for name in names])
    normalised_SK = deviation_SK / _scale(deviation_SK, count_SK, sizes)
    return whiten(t.per_token(normalised_SK @ weight_K))


@on_batch(greedy=True)
def remax(t: Trajectories) -> Tensor:
    r"""$A_i = r_i - r_\mathrm{greedy}$, the reward of the same policy without randomness
    (arXiv:2310.10505).

    A task whose greedy episode was lost has nothing to compare with: zeros.
    """
    sizes = _group_sizes(t)
    greedy = [0.0 if g.greedy is None else g.greedy.reward for g in t.groups]
    lost = torch.tensor([g.greedy is None for g in t.groups], dtype=torch.bool)
    baseline = t.episode_reward.new_tensor(greedy).repeat_interleave(sizes)
    deviation = t.episode_reward - baseline
    return t.per_token(deviation.masked_fill(lost.repeat_interleave(sizes), 0))


@on_batch()
def turn(
    t: Trajectories,
    *,
    gamma: Share = 1.0,
    to_go: bool = True,
    baseline: bool = True,
    scale_by_std: bool = False,
) -> Tensor:
    r"""Each turn is judged by what came from it on: $R_k = \sum_{j \ge k} \gamma^{j-k} r_j$, minus
    the mean of $R_k$ over the group's episodes that have a turn k.

    `to_go=False` judges a turn by its own reward. A turn that one episode alone has gets 0.
    """
    if scale_by_std and not baseline:
        raise PluginError("algorithm.advantage: turn cannot scale_by_std without its baseline")
    reward_ST, has_ST, places, counts = _turn_rewards(t)
    width = reward_ST.shape[1]
    if to_go:
        full = torch.full((len(reward_ST),), width)
        reward_ST = discounted_to_go(reward_ST.view(-1), full, gamma).view(-1, width)
    if baseline:
        sizes = _group_sizes(t)
        reward_ST, count_ST = _deviations(reward_ST, sizes, has_ST)
        if scale_by_std:
            reward_ST = reward_ST / _scale(reward_ST, count_ST, sizes)
    return reward_ST.reshape(-1)[places].repeat_interleave(counts)


@on_batch(needs={"teacher_logp"})
def distillation(t: Trajectories, *, reward: NotNegative = 0.0) -> Tensor:
    r"""$A_t = -(\log\pi_\mathrm{old} - \log\pi_\mathrm{teacher})$: the reverse KL to the teacher on
    the policy's own tokens (arXiv:2306.13649).

    `reward` is the weight of the episode's reward, less the mean of its group, on top of it.
    """
    assert t.teacher_logp is not None
    advantage = safe_log_ratio(t.teacher_logp, t.old_logp)
    if reward:
        deviation, _ = _deviations(t.episode_reward[:, None], _group_sizes(t))
        advantage = advantage + reward * t.per_token(deviation[:, 0])
    return advantage


# ---- groups


def _group_sizes(t: Trajectories) -> Tensor:
    return torch.tensor([len(g.episodes) for g in t.groups], dtype=torch.long)


def _over_groups(x_SK: Tensor, sizes_G: Tensor, how: str = "sum", initial: float = 0) -> Tensor:
    """Reduced over the episodes of each group, repeated for each of them."""
    if not len(sizes_G):
        return x_SK
    found = torch.segment_reduce(x_SK, how, lengths=sizes_G, axis=0, initial=initial)
    return found.repeat_interleave(sizes_G, 0)


def _deviations(
    x_SK: Tensor, sizes_G: Tensor, has_SK: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """From the group's mean over the episodes that have an entry, and how many those are.

    Entries are measured from the largest before they are averaged, so that equal ones, or a single
    one, give exactly 0.
    """
    has_SK = torch.ones_like(x_SK, dtype=torch.bool) if has_SK is None else has_SK
    top_SK = _over_groups(x_SK.masked_fill(~has_SK, -torch.inf), sizes_G, "max", -torch.inf)
    shifted_SK = (x_SK - top_SK).masked_fill(~has_SK, 0)
    count_SK = _over_groups(has_SK.to(x_SK), sizes_G)
    mean_SK = _over_groups(shifted_SK, sizes_G) / count_SK.clamp(min=1)
    return (shifted_SK - mean_SK).masked_fill(~has_SK, 0), count_SK


def _scale(deviation_SK: Tensor, count_SK: Tensor, sizes_G: Tensor) -> Tensor:
    """The group's unbiased standard deviation, kept off 0."""
    squares_SK = _over_groups(deviation_SK.square(), sizes_G)
    return (squares_SK / (count_SK - 1).clamp(min=1)).sqrt() + 1e-6


# ---- components and turns


def _component_names(episodes: list[Episode]) -> list[str]:
    """The components that each episode has; they must be the same for all."""
    names = sorted({name for e in episodes for name in e.components})
    for episode in episodes:
        missing = [name for name in names if name not in episode.components]
        if missing or not names:
            what = f"no component {missing[0]!r}" if missing else "no components"
            raise PluginError(
                f"algorithm.advantage: gdpo needs the parts of each reward, but episode "
                f"{episode.index} of task {episode.task_key!r} has {what}; return Step(components="
                "{...}) from every last step"
            )
    return names


def _turn_rewards(t: Trajectories) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The reward of each turn as a table, which of its entries are turns, and `by_turn`'s places
    and counts.

    An episode without trained tokens is still one to compare with, so its turns are in the table.
    """
    episodes = (e for g in t.groups for e in g.episodes)
    silent = {
        s: _rewards_by_turn(episode)
        for s, (episode, length) in enumerate(zip(episodes, t.lengths.tolist(), strict=True))
        if not length
    }
    width = max([1, *t.turns.tolist(), *map(len, silent.values())])
    reward_ST, places, counts = t.by_turn(t.reward, width)
    has_ST = torch.zeros_like(reward_ST, dtype=torch.bool)
    has_ST.view(-1)[places] = True
    for s, rewards in silent.items():
        reward_ST[s, : len(rewards)] = reward_ST.new_tensor(rewards)
        has_ST[s, : len(rewards)] = True
    return reward_ST, has_ST, places, counts


def _rewards_by_turn(episode: Episode) -> list[float]:
    """A turn's own reward and those of its single tokens."""
    found = list(episode.rewards)
    if not any(segment.rewards for segment in episode.segments):
        return found
    before = 0
    for segment in episode.segments:
        turns = segment.turns
        last = before + max(turns, default=-1)
        found += [0.0] * (last + 1 - len(found))
        for place, reward in zip(turns, segment.rewards, strict=False):
            if place >= 0:
                found[before + place] += reward
        before = last + 1
    return found
