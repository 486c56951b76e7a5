"""An algorithm is a bundle: an estimator, a loss with its side terms, corrections, a reduction, and
how often a batch is used. `judge` and `loss` are what runs; everything else is deciding once.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from fledge.algorithms.advantages import ADVANTAGES
from fledge.algorithms.corrections import CORRECTIONS
from fledge.algorithms.critic import clipped_value
from fledge.algorithms.kl import KL, AdaptiveCoefficient
from fledge.algorithms.losses import LOSSES, cross_entropy
from fledge.algorithms.tokens import Stats, Tokens, out_of_range, safe_log_ratio
from fledge.algorithms.trajectories import Trajectories
from fledge.config.schema import AlgorithmConfig, Plugin
from fledge.errors import PluginError
from fledge.interfaces import Batch
from fledge.plugins import bind, blame, check_arguments, check_positional, resolve
from fledge.types import Group, Outcome

PolicyLoss = Callable[[Tokens], tuple[Tensor, Stats]]
Correction = Callable[[Tokens, Tensor], Tensor]


class Estimator(Protocol):
    """`(Trajectories) -> advantage`, or `(advantage, returns)` where there is a critic."""

    def __call__(self, t: Trajectories) -> Tensor | tuple[Tensor, Tensor]: ...


@dataclass(frozen=True)
class Algorithm:
    """What the loop needs to know; built once from the configuration, free of `if`s about it
    afterwards.

    `needs` are the columns that a batch must be scored for before `judge`, `fresh` those that a
    mini-batch must be scored for before `prepare`.
    """

    estimator: Estimator
    policy_loss: PolicyLoss
    reduction: str
    needs: frozenset[str] = frozenset()
    fresh: frozenset[str] = frozenset()
    greedy: bool = False
    epochs: int = 1
    minibatches: int = 1
    seed: int = 0
    starts_here: bool = False
    """The policy is still the one that the batch began with, so it is its own `old_logp`."""
    corrections: tuple[Correction, ...] = ()
    kl_in_loss: float = 0.0
    kl_in_reward: AdaptiveCoefficient | None = None
    kl: Callable[[Tensor, Tensor], Tensor] = KL["k3"]
    entropy_coef: float = 0.0
    value_coef: float = 0.0
    value_clip: float = 0.2

    # ---- once per batch

    def judge(self, batch: Batch, step: int) -> tuple[Batch, dict[str, float]]:
        """Rewards and KL to one advantage per trained token, and what is worth knowing of them."""
        if not batch.rows:  # everything is masked or filtered: there is nothing to judge
            return batch, {}
        t, metrics = trajectories_of(batch), {}
        if self.kl_in_reward is not None:
            assert t.ref_logp is not None
            kl = self.kl(t.old_logp, t.ref_logp)
            t = t.penalised(self.kl_in_reward.coef * kl)
            metrics = {"policy/kl_ref": kl.mean().item(), "kl/coef": self.kl_in_reward.coef}
            self.kl_in_reward.update(metrics["policy/kl_ref"], len(t.lengths))
        advantage, returns = checked_estimate(self.estimator, t)
        columns = {"advantage": advantage}
        if returns is not None:
            columns["returns"] = returns
            metrics |= _value_metrics(t, returns)
        if self.fresh:
            columns["draw"] = keyed_draws(len(advantage), self.seed, step)
        return batch.with_columns(**columns), metrics | _advantage_metrics(advantage)

    # ---- once per mini-batch

    def prepare(self, mini: Batch) -> Batch:
        """What a loss must decide for the whole mini-batch, so that the cut cannot change it."""
        if not self.fresh:
            return mini
        fresh = mini.columns["fresh_logp"]
        x = Tokens.of(mini.columns, fresh, torch.zeros_like(fresh), mini.lengths.to(fresh.device))
        x = self._anchored(x)
        draw = mini.columns["draw"].to(fresh.device)
        return mini.with_columns(chosen=checked_choice(self.policy_loss, x, draw))

    def _anchored(self, x: Tokens) -> Tokens:
        return replace(x, old_logp=x.logp.detach()) if self.starts_here else x

    # ---- once per micro-batch

    def loss(self, x: Tokens) -> tuple[Tensor, Stats]:
        """Policy loss plus the side terms that are switched on; each term is reported under
        `term/`.
        """
        x = self._anchored(x)
        loss, stats = checked_loss(self.policy_loss, x)
        if self.corrections:
            weight, found = self._corrected(x)
            loss = loss * weight
            stats |= found
        stats |= {
            "term/policy": loss.detach().abs(),
            "policy/clamped_frac": out_of_range(x),
        }
        if self.kl_in_loss:
            assert x.ref_logp is not None
            kl = self.kl(x.logp, x.ref_logp)
            loss = loss + self.kl_in_loss * kl
            stats |= {"policy/kl_ref": kl.detach(), "term/kl": kl.detach().abs()}
        if self.entropy_coef:
            loss = loss - self.entropy_coef * x.entropy
            stats["term/entropy"] = x.entropy.detach().abs()
        if self.value_coef:
            value_loss, found = self.value_loss(x)
            loss = loss + self.value_coef * value_loss
            stats |= found
        return loss, stats

    def _corrected(self, x: Tokens) -> tuple[Tensor, Stats]:
        """How much each token counts, given what the engine and the trainer think of it."""
        log_rho = safe_log_ratio(x.old_logp, x.engine_logp)
        weight = torch.ones_like(log_rho)
        for correction in self.corrections:
            weight = weight * checked_weight(correction, x, log_rho)
        return weight, {
            "correction/weight": weight,
            "correction/weight_max": weight,
            "correction/dropped_frac": (weight == 0).to(weight.dtype),
        }

    def value_loss(self, x: Tokens) -> tuple[Tensor, Stats]:
        """The critic's loss, wherever the critic lives."""
        return clipped_value(x, self.value_clip)

    # ---- what must survive

    def state(self) -> dict[str, Any]:
        found = {}
        if hasattr(self.estimator, "state"):
            found["advantage"] = self.estimator.state()
        if self.kl_in_reward is not None:
            found["kl"] = self.kl_in_reward.state()
        return found

    def restore(self, state: Mapping[str, Any]) -> None:
        if hasattr(self.estimator, "restore"):
            self.estimator.restore(state["advantage"])
        if self.kl_in_reward is not None:
            self.kl_in_reward.restore(state["kl"])


def make_algorithm(config: AlgorithmConfig, seed: int = 0) -> Algorithm:
    """Resolve every part by name, and find out what must be scored for it."""
    estimator = make_estimator(config.advantage)
    loss = make_loss(config.loss)
    needs = set(getattr(estimator, "needs", ()))
    _refuse_unknown_needs(needs, config)
    if config.kl.coef:
        needs.add("ref_logp")
    if config.recomputed and config.updates > 1:
        # With one update per batch no pass over the batch is needed: the engine's log-probs are the
        # anchor, or those of the update's own forward pass are.
        needs.add("old_logp")
    in_reward = config.kl.coef and config.kl.placement == "reward"
    value_head = "value" in needs and config.critic.model == "head"
    return Algorithm(
        estimator=estimator,
        policy_loss=loss,
        reduction=config.reduction,
        needs=frozenset(needs),
        fresh=frozenset({"fresh_logp"} if hasattr(loss, "prepare") else ()),
        greedy=getattr(estimator, "greedy", False),
        epochs=config.epochs,
        minibatches=config.minibatches,
        seed=seed,
        starts_here=config.recomputed and config.updates == 1,
        corrections=tuple(_correction(c, i) for i, c in enumerate(config.correction)),
        kl_in_loss=0.0 if in_reward else config.kl.coef,
        kl_in_reward=(
            AdaptiveCoefficient(config.kl.coef, config.kl.target, config.kl.horizon)
            if in_reward
            else None
        ),
        kl=KL[config.kl.estimator],
        entropy_coef=config.entropy_coef,
        value_coef=config.critic.coef if value_head else 0.0,
        value_clip=config.critic.clip,
    )


def _refuse_unknown_needs(needs: set[str], config: AlgorithmConfig) -> None:
    key = f"algorithm.advantage: {config.advantage.label}"
    unknown = needs - {"value", "ref_logp", "teacher_logp"}
    if unknown:
        raise PluginError(
            f"{key} needs {min(unknown)!r}, which nobody computes (there are: value, ref_logp, "
            "teacher_logp)"
        )
    if "teacher_logp" in needs and config.teacher is None:
        raise PluginError(f"{key} needs a teacher; set algorithm.teacher")


def make_estimator(spec: Plugin, key: str = "algorithm.advantage") -> Estimator:
    """A class is made with the recipe's arguments and may have a state; a function marked with
    `on_batch` sees the whole batch; any other function sees the episodes of one task.
    """
    found = resolve(spec.name, ADVANTAGES, key)
    if inspect.isclass(found):
        made = _made(found, spec, key)
        check_positional(made, ("trajectories",), key)
        return cast(Estimator, made)
    over_batch = getattr(found, "over_batch", False)
    positional = ("trajectories",) if over_batch else ("group",)
    bound = bind(found, {}, key, positional=positional, arguments=spec.arguments)
    if not over_batch:
        return partial(_group_by_group, bound)
    if bound is not found:  # a partial does not carry the marks of its function
        bound.needs, bound.greedy = found.needs, found.greedy  # type: ignore[attr-defined]
    return bound


def _group_by_group(of_group: Callable[..., Sequence[float]], t: Trajectories) -> Tensor:
    """One advantage per episode, repeated for each of its trained tokens."""
    found: list[float] = []
    for group in t.charged():
        given = of_group(group.episodes)
        if isinstance(given, Mapping):
            raise PluginError(
                "algorithm.advantage: must return a list, one number per episode, not a mapping"
            )
        values = [float(v) for v in given]
        if len(values) != len(group.episodes):
            raise PluginError(
                f"algorithm.advantage: {len(values)} advantages for the {len(group.episodes)} "
                f"episodes of task {group.task.key!r}"
            )
        if not all(map(math.isfinite, values)):
            raise PluginError(
                f"algorithm.advantage: not finite for task {group.task.key!r}: {values}"
            )
        found += values
    return t.per_token(torch.tensor(found, dtype=t.reward.dtype))


def make_loss(spec: Plugin, key: str = "algorithm.loss") -> PolicyLoss:
    """A function of tokens, or a class that is made with the recipe's arguments; one with `prepare`
    sees each mini-batch whole before its losses are asked for.
    """
    found = resolve(spec.name, LOSSES, key)
    if inspect.isclass(found):
        made = _made(found, spec, key)
        check_positional(made, ("tokens",), key)
        if hasattr(made, "prepare"):
            check_positional(made.prepare, ("tokens", "draw"), f"{key}: prepare")
        return cast(PolicyLoss, made)
    return bind(found, {}, key, positional=("tokens",), arguments=spec.arguments)


def _made(found: Any, spec: Plugin, key: str) -> Any:
    """An object of a plug-in's class, with the recipe's arguments."""
    arguments = check_arguments(found, spec.arguments, key)
    with blame(f"{key}: {spec.label}"):
        return found(**arguments)


def _correction(spec: Plugin, index: int) -> Correction:
    return bind(
        spec.name,
        CORRECTIONS,
        f"algorithm.correction[{index}]",
        positional=("tokens", "log_rho"),
        arguments=spec.arguments,
    )


def supervised() -> Algorithm:
    """Cross-entropy on weighted tokens, for `fledge sft`."""
    return Algorithm(lambda t: t.reward, cross_entropy, "token_mean")


# ---- what plug-ins return

TAKEN = (
    *("optim/", "mismatch/", "time/", "perf/", "eval/", "reward/", "term/", "stale/", "_"),
    *("policy/loss", "policy/entropy", "policy/kl_", "policy/clamped_frac"),
)
"""How names of metrics begin that a loss must not write into."""


def checked_estimate(estimator: Estimator, t: Trajectories) -> tuple[Tensor, Tensor | None]:
    """Call an estimator, and refuse what training could not trust, under the key's name."""
    key = "algorithm.advantage"
    with blame(key):
        found = estimator(t)
    advantage, returns = found if isinstance(found, tuple) and len(found) == 2 else (found, None)
    for column in (advantage,) if returns is None else (advantage, returns):
        if not isinstance(column, Tensor) or column.shape != t.reward.shape:
            raise PluginError(
                f"{key}: must return one number per trained token {tuple(t.reward.shape)}, or be a "
                "function of one task's episodes that returns one per episode"
            )
        if not column.is_floating_point():
            raise PluginError(f"{key}: must return real numbers, not {column.dtype}")
        if not column.isfinite().all():
            place = int((~column.isfinite()).nonzero()[0, 0])
            raise PluginError(f"{key}: not finite for task {_task_at(t, place)!r}")
    if returns is None and t.value is not None:
        raise PluginError(
            f"{key}: asks for values, so it must return (advantage, returns): the critic learns "
            "from the returns"
        )
    return advantage, returns


def _task_at(t: Trajectories, token: int) -> str:
    return t.groups[int(t.prompt[t.sequence[token]])].task.key


def checked_loss(loss: PolicyLoss, x: Tokens, key: str = "algorithm.loss") -> tuple[Tensor, Stats]:
    """Call a loss, and refuse what training could not trust, under the key's name."""
    with blame(key):
        found = loss(x)
    if not (isinstance(found, tuple) and len(found) == 2 and isinstance(found[0], Tensor)):
        raise PluginError(f"{key}: must return (one loss per token, {{name: statistic}})")
    loss_N, stats = found
    if loss_N.shape != x.logp.shape:
        raise PluginError(
            f"{key}: returned shape {tuple(loss_N.shape)}, expected one number per "
            f"token {tuple(x.logp.shape)}"
        )
    if x.logp.requires_grad and not loss_N.requires_grad:
        raise PluginError(f"{key}: does not depend on the policy, so nothing would train")
    if not isinstance(stats, Mapping):
        raise PluginError(f"{key}: must return (one loss per token, {{name: statistic}})")
    for name, values in stats.items():
        if not (isinstance(values, Tensor) and values.shape == x.logp.shape):
            raise PluginError(f"{key}: statistic {name!r} must have one number per token")
        if not isinstance(name, str) or name.startswith(TAKEN):
            raise PluginError(f"{key}: {name!r} is the name of a metric of the run; choose another")
    return loss_N, {name: values.detach() for name, values in stats.items()}


def checked_weight(correction: Correction, x: Tokens, log_rho: Tensor) -> Tensor:
    key = "algorithm.correction"
    with blame(key):
        weight = correction(x, log_rho)
    if not isinstance(weight, Tensor) or weight.shape != log_rho.shape:
        raise PluginError(f"{key}: must return one weight per token {tuple(log_rho.shape)}")
    if not weight.isfinite().all():
        raise PluginError(f"{key}: a weight is not finite")
    return weight.detach().to(log_rho)


def checked_choice(loss: PolicyLoss, x: Tokens, draw: Tensor) -> Tensor:
    key = "algorithm.loss: prepare"
    with blame(key):
        chosen = cast(Any, loss).prepare(x, draw)
    if not isinstance(chosen, Tensor) or chosen.shape != x.logp.shape:
        raise PluginError(f"{key}: must return one number per token {tuple(x.logp.shape)}")
    return chosen


# ---- helpers of `judge`


def trajectories_of(batch: Batch) -> Trajectories:
    """The batch as estimators see it: on the CPU, episode after episode."""
    groups: tuple[Group, ...] = batch.groups
    episodes = [e for g in groups for e in g.episodes]
    columns = {name: c.cpu() for name, c in batch.columns.items()}
    real = {name: c.float() for name, c in columns.items() if c.is_floating_point()}
    counts = torch.zeros(len(episodes), dtype=torch.long)
    for row in batch.rows:
        counts[row.sequence] += len(row.trained)
    return Trajectories(
        groups=groups,
        lengths=counts,
        prompt=torch.tensor(
            [i for i, g in enumerate(groups) for _ in g.episodes], dtype=torch.long
        ),
        reward=real["reward"],
        episode_reward=torch.tensor([e.reward for e in episodes]),
        turn=columns["turn"],
        engine_logp=real["engine_logp"],
        old_logp=real.get("old_logp", real["engine_logp"]),
        ref_logp=real.get("ref_logp"),
        teacher_logp=real.get("teacher_logp"),
        value=real.get("value"),
        bootstrap=_bootstrap(real.get("bootstrap"), counts, episodes),
    )


def _bootstrap(column: Tensor | None, lengths: Tensor, episodes: Sequence[Any]) -> Tensor | None:
    """The value of what a truncated episode did not live to see; 0 where it came to its end."""
    if column is None:
        return None
    cut = torch.tensor([e.outcome is Outcome.TRUNCATED for e in episodes])
    last = (lengths.cumsum(0) - 1).clamp(min=0)
    found = column[last] if len(column) else torch.zeros(len(episodes))
    return found * (cut & (lengths > 0))


def keyed_draws(count: int, seed: int, step: int) -> Tensor:
    """A uniform number per token that depends on the seed, the step and the token alone."""
    generator = torch.Generator().manual_seed((seed * 1_000_003 + step) % 2**63)
    return torch.rand(count, generator=generator, dtype=torch.float64)


def _advantage_metrics(advantage: Tensor) -> dict[str, float]:
    if not len(advantage):
        return {}
    return {
        "advantage/mean": advantage.mean().item(),
        "advantage/min": advantage.min().item(),
        "advantage/max": advantage.max().item(),
    }


def _value_metrics(t: Trajectories, returns: Tensor) -> dict[str, float]:
    if t.value is None or len(returns) < 2:
        return {}
    spread = returns.var()
    explained = 1 - (returns - t.value).var() / spread if spread > 0 else torch.tensor(0.0)
    return {
        "critic/value_mean": t.value.mean().item(),
        "critic/returns_mean": returns.mean().item(),
        "critic/explained_variance": explained.item(),
    }
