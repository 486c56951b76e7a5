"""Preference losses: `(Tokens) -> (one loss per trained token, statistics)`, on pairs of replies.

A pair is one sequence of `Tokens`: `x.side` is +1 on the tokens of the chosen reply and -1 on those
of the rejected one. Each token carries the loss of its whole pair, so `sequence_mean` makes the
mean over pairs of it. Statistics are means over pairs; where both replies are equally good in the
eyes of the model, the order counts as half right.

`dpo` and `ipo` train a policy against a frozen reference. `bradley_terry` is a loss `of_scores`: it
trains a reward model, and each reply has one token, whose `value` is the score.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

import torch
from pydantic import Field
from torch import Tensor
from torch.nn.functional import logsigmoid

from fledge.algorithms.algorithm import checked_loss
from fledge.algorithms.tokens import Stats, Tokens, safe_logp
from fledge.config.schema import Plugin
from fledge.plugins import bind, resolve

F = TypeVar("F", bound=Callable[..., Any])
Beta = Annotated[float, Field(gt=0, allow_inf_nan=False)]


def of_scores(loss: F) -> F:
    """Mark a loss that compares `x.value`: with it, `fledge prefer` trains a reward model."""
    marked: Any = loss
    marked.of_scores = True
    return loss


def dpo(
    x: Tokens,
    *,
    beta: Beta = 0.1,
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = 0.0,
    nll: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0,
) -> tuple[Tensor, Stats]:
    r"""$-\log\sigma(m)$ with the margin $m = \beta\,(\sum_{chosen} - \sum_{rejected})
    \log\frac{\pi}{\mathrm{ref}}$ (arXiv:2305.18290).

    `label_smoothing` is the share of pairs that are taken to be the wrong way round:
    $-(1-\epsilon)\log\sigma(m) - \epsilon\log\sigma(-m)$. `nll` is the weight of the chosen
    reply's mean negative log-likelihood: a margin also grows when both replies become unlikely, the
    rejected one faster, and this holds the chosen one up (arXiv:2404.19733).
    """
    reward = beta * _log_ratio(x)
    margin = x.sequence_sum(_side(x) * reward)
    right, wrong = -logsigmoid(margin), -logsigmoid(-margin)
    loss = (1 - label_smoothing) * right + label_smoothing * wrong
    if nll:
        chosen = (_side(x) > 0).to(x.logp)
        said = x.sequence_sum(chosen * safe_logp(x.logp)) / x.sequence_sum(chosen).clamp(min=1)
        loss = loss - nll * said
    return loss, _policy_stats(x, reward, margin)


def ipo(x: Tokens, *, beta: Beta = 0.1, average: bool = True) -> tuple[Tensor, Stats]:
    r"""$(h - \frac{1}{2\beta})^2$ with h the difference of the replies' log-ratios to the reference
    (arXiv:2310.12036).

    A reply's log-ratio is the mean over its tokens: with sums, as in the paper, one target cannot
    fit replies of 5 and of 500 tokens. `average=False` takes sums.
    """
    ratio = _log_ratio(x)
    if average:
        ratio = ratio / _reply_length(x)
    gap = x.sequence_sum(_side(x) * ratio)
    return (gap - 1 / (2 * beta)).square(), _policy_stats(x, beta * ratio, beta * gap)


@of_scores
def bradley_terry(x: Tokens) -> tuple[Tensor, Stats]:
    r"""$-\log\sigma(s_{chosen} - s_{rejected})$, the loss of reward models (Bradley & Terry, 1952;
    arXiv:2203.02155).
    """
    assert x.value is not None, "bradley_terry needs a value head"
    margin = x.sequence_sum(_side(x) * x.value)
    return -logsigmoid(margin), _pair_stats(x, margin)


def _side(x: Tokens) -> Tensor:
    assert x.side is not None, "a preference loss needs pairs"
    return x.side


def _log_ratio(x: Tokens) -> Tensor:
    """Of policy to reference, per token. No exponential is taken of it, so it needs no bound."""
    assert x.ref_logp is not None, "a preference loss needs a reference"
    return safe_logp(x.logp) - safe_logp(x.ref_logp)


def _reply_length(x: Tokens) -> Tensor:
    """Trained tokens of the reply that each token belongs to."""
    chosen = (_side(x) > 0).to(x.logp)
    lengths = x.sequence_sum(chosen), x.sequence_sum(1 - chosen)
    return torch.where(chosen.bool(), *lengths)


def _policy_stats(x: Tokens, reward: Tensor, margin: Tensor) -> Stats:
    """With the implicit rewards of both replies: both may fall while their margin grows."""
    side, reward = _side(x), reward.detach()
    zero = torch.zeros_like(reward)
    return {
        **_pair_stats(x, margin),
        "pair/chosen_reward": x.once(x.sequence_sum(torch.where(side > 0, reward, zero))),
        "pair/rejected_reward": x.once(x.sequence_sum(torch.where(side < 0, reward, zero))),
    }


def _pair_stats(x: Tokens, margin: Tensor) -> Stats:
    right = (1 + margin.detach().sign()) / 2
    return {"pair/accuracy": x.once(right), "pair/margin": x.once(margin)}


PREFERENCES: dict[str, Callable[..., Any]] = {
    "dpo": dpo,
    "ipo": ipo,
    "bradley_terry": bradley_terry,
}


@dataclass(frozen=True)
class Preference:
    """A preference loss with the recipe's arguments, and which of the two kinds it is."""

    loss: Callable[[Tokens], tuple[Tensor, Stats]]
    of_scores: bool

    def __call__(self, x: Tokens) -> tuple[Tensor, Stats]:
        return checked_loss(self.loss, x, "loss")


def make_preference(spec: Plugin) -> Preference:
    """The loss behind the key `loss`: built in, or `"module:name"`."""
    found = resolve(spec.name, PREFERENCES, "loss")
    bound = bind(found, {}, "loss", positional=("tokens",), arguments=spec.arguments)
    return Preference(bound, getattr(found, "of_scores", False))
