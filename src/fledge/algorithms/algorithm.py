"""An algorithm is a bundle: an estimator, a loss with its side terms, a reduction, and how often a
batch is used.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fledge.algorithms.advantages import ADVANTAGES
from fledge.algorithms.losses import LOSSES, cross_entropy, k3
from fledge.algorithms.tokens import Stats, Tokens
from fledge.config.schema import AlgorithmConfig
from fledge.errors import FledgeError, PluginError
from fledge.plugins import bind, check_arguments, check_positional, resolve
from fledge.types import Group


@dataclass(frozen=True)
class Algorithm:
    """What the loop needs to know; built once from the configuration, free of `if`s about it
    afterwards.
    """

    advantages: Callable[[Sequence[Group]], list[list[float]]]
    policy_loss: Callable[[Tokens], tuple[Tensor, Stats]]
    reduction: str
    needs: frozenset[str]
    epochs: int = 1
    minibatches: int = 1
    kl_coef: float = 0.0
    entropy_coef: float = 0.0

    def loss(self, x: Tokens) -> tuple[Tensor, Stats]:
        """Policy loss plus the side terms that are switched on; each term is reported under
        `term/`.
        """
        loss, stats = checked_loss(self.policy_loss, x)
        stats = {"term/policy": loss.detach().abs(), **stats}
        if self.kl_coef:
            assert x.ref_logp is not None
            kl = k3(x.logp, x.ref_logp)
            loss = loss + self.kl_coef * kl
            stats |= {"policy/kl_ref": kl.detach(), "term/kl": kl.detach().abs()}
        if self.entropy_coef:
            loss = loss - self.entropy_coef * x.entropy
            stats["term/entropy"] = x.entropy.detach().abs()
        return loss, stats

    def judge(self, groups: Sequence[Group]) -> list[list[float]]:
        """One advantage per episode, group by group."""
        try:
            found = [list(map(float, values)) for values in self.advantages(groups)]
        except FledgeError:
            raise
        except Exception as error:
            raise PluginError(f"algorithm.advantage: {type(error).__name__}: {error}") from error
        for group, values in zip(groups, found, strict=True):
            if len(values) != len(group.episodes):
                raise PluginError(
                    f"algorithm.advantage: {len(values)} advantages for the {len(group.episodes)} "
                    f"episodes of task {group.task.key!r}"
                )
            if not all(map(math.isfinite, values)):
                raise PluginError(
                    f"algorithm.advantage: not finite for task {group.task.key!r}: {values}"
                )
        return found

    def state(self) -> dict[str, Any]:
        return self.advantages.state() if hasattr(self.advantages, "state") else {}

    def restore(self, state: Mapping[str, Any]) -> None:
        if hasattr(self.advantages, "restore"):
            self.advantages.restore(state)


def checked_loss(loss: Callable[[Tokens], tuple[Tensor, Stats]], x: Tokens) -> tuple[Tensor, Stats]:
    """Call a policy loss, and refuse what training could not trust, under the key's name."""
    try:
        found = loss(x)
    except FledgeError:
        raise
    except Exception as error:
        raise PluginError(f"algorithm.loss: {type(error).__name__}: {error}") from error
    if not (isinstance(found, tuple) and len(found) == 2 and isinstance(found[0], Tensor)):
        raise PluginError("algorithm.loss: must return (one loss per token, {name: statistic})")
    loss_N, stats = found
    if loss_N.shape != x.logp.shape:
        raise PluginError(
            f"algorithm.loss: returned shape {tuple(loss_N.shape)}, expected one number per "
            f"token {tuple(x.logp.shape)}"
        )
    if x.logp.requires_grad and not loss_N.requires_grad:
        raise PluginError("algorithm.loss: does not depend on the policy, so nothing would train")
    for name, values in stats.items():
        if not (isinstance(values, Tensor) and values.shape == x.logp.shape):
            raise PluginError(f"algorithm.loss: statistic {name!r} must have one number per token")
    return loss_N, {name: values.detach() for name, values in stats.items()}


def make_algorithm(config: AlgorithmConfig) -> Algorithm:
    needs = set()
    if config.kl_coef:
        needs.add("ref_logp")
    if config.updates > 1:
        # With one update per batch the engine's own log-probs are the anchor, and a pass over the
        # batch is saved.
        needs.add("old_logp")
    return Algorithm(
        advantages=_advantages(config),
        policy_loss=bind(
            config.loss.name,
            LOSSES,
            "algorithm.loss",
            positional=("tokens",),
            arguments=config.loss.arguments,
        ),
        reduction=config.reduction,
        needs=frozenset(needs),
        epochs=config.epochs,
        minibatches=config.minibatches,
        kl_coef=config.kl_coef,
        entropy_coef=config.entropy_coef,
    )


def _advantages(config: AlgorithmConfig) -> Callable[[Sequence[Group]], list[list[float]]]:
    key, spec = "algorithm.advantage", config.advantage
    found = resolve(spec.name, ADVANTAGES, key)
    if inspect.isclass(found):
        made: Any = found
        estimator: Callable[..., Any] = made(**check_arguments(found, spec.arguments, key))
        check_positional(estimator, ("groups",), key)
        return estimator
    of_group = bind(found, {}, key, positional=("group",), arguments=spec.arguments)
    return lambda groups: [list(of_group(g.episodes)) for g in groups]


def supervised() -> Algorithm:
    """Cross-entropy on weighted tokens, for `fledge sft`."""
    return Algorithm(lambda groups: [], cross_entropy, "token_mean", frozenset())
