"""What happens to groups between the rollouts and the advantages: rewards are changed, groups
repeated, episodes taken out of the loss. Pure functions; what goes in stays as it is.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import cycle, zip_longest

from fledge.config.schema import ShapingConfig
from fledge.errors import PluginError
from fledge.plugins import blame
from fledge.types import Episode, Group, Outcome, Segment

TokenReward = Callable[[Segment], Sequence[float]]


def shape(
    groups: Sequence[Group],
    shaping: ShapingConfig,
    max_new_tokens: int,
    token_reward: TokenReward | None = None,
) -> list[Group]:
    """The groups as estimators and the loss shall see them: first the rewards, then which groups
    there are, then what is left out of the loss.

    The greedy episode of a group is rewarded like the others, which are compared with it.
    """
    buffer = round(shaping.overlong_buffer * max_new_tokens)

    def rewarded(episode: Episode) -> Episode:
        if token_reward is not None:
            episode = with_token_rewards(episode, token_reward)
        if shaping.zero_unless_stopped:
            episode = without_gains_if_truncated(episode)
        if buffer:
            episode = punished_if_long(episode, max_new_tokens, buffer, shaping.overlong_penalty)
        return episode

    found = [
        replace(
            group,
            episodes=tuple(map(rewarded, group.episodes)),
            greedy=None if group.greedy is None else rewarded(group.greedy),
        )
        for group in groups
    ]
    if shaping.dynamic_sampling == "replace":
        found = with_silent_replaced(found)
    if shaping.mask_truncated:
        found = [_masked(g, "mask_truncated", _is_truncated) for g in found]
    if shaping.mask_zero_variance:
        found = [
            g if has_spread(g) else _masked(g, "mask_zero_variance", lambda _: True) for g in found
        ]
    return found


def has_spread(group: Group) -> bool:
    """Whether there is something to compare: two episodes with different rewards."""
    return len({e.reward for e in group.episodes}) > 1


# ---- rewards


def with_token_rewards(episode: Episode, token_reward: TokenReward) -> Episode:
    """Each segment with what its trained tokens earn by themselves. A number for any other token is
    dropped: no advantage could carry it.
    """
    segments = []
    for segment in episode.segments:
        values = _token_rewards(segment, token_reward)
        pairs = zip(values, segment.trained, strict=True)
        earned = tuple(value if trained else 0.0 for value, trained in pairs)
        segments.append(replace(segment, rewards=earned))
    return replace(episode, segments=tuple(segments))


def _token_rewards(segment: Segment, token_reward: TokenReward) -> list[float]:
    key = "algorithm.token_reward"
    with blame(key):
        values = [float(value) for value in token_reward(segment)]
    if len(values) != len(segment.token_ids):
        raise PluginError(
            f"{key}: {len(values)} rewards for a segment of {len(segment.token_ids)} tokens; "
            "return one for each, 0 where there is none"
        )
    for place, value in enumerate(values):
        if not math.isfinite(value):
            raise PluginError(f"{key}: the reward of token {place} of a segment is {value}")
    return values


def without_gains_if_truncated(episode: Episode) -> Episode:
    """No positive reward for an episode that did not come to its end; a loss is kept."""
    if not _is_truncated(episode):
        return episode
    return replace(
        episode,
        rewards=tuple(min(r, 0.0) for r in episode.rewards),
        segments=tuple(
            replace(s, rewards=tuple(min(r, 0.0) for r in s.rewards)) for s in episode.segments
        ),
    )


def punished_if_long(episode: Episode, longest: int, buffer: int, penalty: float) -> Episode:
    r"""Soft overlong punishment of each reply of n tokens (arXiv:2503.14476): 0 up to
    `longest - buffer`, then $-(n - (\mathrm{longest} - \mathrm{buffer})) / \mathrm{buffer}$, at
    most -1, times `penalty`.
    """
    over = [max(0, length - (longest - buffer)) for length in _reply_lengths(episode)]
    if not any(over):
        return episode
    charges = [-min(1.0, tokens / buffer) * penalty for tokens in over]
    pairs = zip_longest(episode.rewards, charges, fillvalue=0.0)
    return replace(episode, rewards=tuple(reward + charge for reward, charge in pairs))


def _reply_lengths(episode: Episode) -> list[int]:
    """Sampled tokens of each turn, whether they are trained or not."""
    found: list[int] = []
    for segment in episode.segments:
        lengths = Counter(turn for turn in segment.turns if turn >= 0)
        found += [lengths[turn] for turn in range(len(lengths))]
    return found


# ---- groups and masks


def with_silent_replaced(groups: Sequence[Group]) -> list[Group]:
    """Groups without spread give their places to those with spread, which take turns."""
    loud = [g for g in groups if has_spread(g)]
    if not loud:
        return list(groups)
    spare = cycle(loud)
    return [g if has_spread(g) else next(spare) for g in groups]


def _masked(group: Group, rule: str, applies: Callable[[Episode], bool]) -> Group:
    episodes = (
        replace(e, masked=rule) if applies(e) and not e.masked else e for e in group.episodes
    )
    return replace(group, episodes=tuple(episodes))


def _is_truncated(episode: Episode) -> bool:
    return episode.outcome is Outcome.TRUNCATED


# ---- what is worth knowing


def shaping_metrics(before: Sequence[Group], after: Sequence[Group]) -> dict[str, float]:
    """The mean reward after shaping, and the shares of episodes masked and of groups replaced; each
    only if shaping has changed it.
    """
    found: dict[str, float] = {}
    rewards, shaped = ([e.reward for g in groups for e in g.episodes] for groups in (before, after))
    if shaped and shaped != rewards:
        found["reward/shaped_mean"] = sum(shaped) / len(shaped)
    masked = sum(bool(e.masked) for g in after for e in g.episodes)
    if masked:
        found["shaping/masked_frac"] = masked / len(shaped)
    names = [[(g.task.key, g.epoch) for g in groups] for groups in (before, after)]
    replaced = sum(old != new for old, new in zip(*names, strict=True))
    if replaced:
        found["shaping/replaced_frac"] = replaced / len(after)
    return found
