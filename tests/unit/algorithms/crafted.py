"""Tokens made by hand, and the same batch cut and ordered in other ways."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fledge.algorithms.tokens import Tokens

LENGTHS = (5, 1, 0, 7, 3)

LIMIT_OF_COST = 3.0 if torch.backends.cpu.get_cpu_capability() == "DEFAULT" else 12.0
"""In units of one exponential and three products. Where exponentials are vectorised widely the unit
is a few passes over memory, and what is counted is calls; a loop over tokens would still show.
"""


def tokens(logp: Tensor, lengths: Sequence[int] | None = None, **columns: Tensor) -> Tokens:
    """One sequence unless told otherwise; on policy, with an advantage of 1, unless told so."""
    return Tokens.of(
        {"advantage": torch.ones_like(logp), **columns},
        logp,
        torch.zeros_like(logp),
        torch.tensor([len(logp)] if lengths is None else list(lengths)),
        value=columns.get("new_value"),
    )


def of_ratio(ratio: Sequence[float], advantage: Sequence[float], **more: object) -> Tokens:
    """Tokens with these ratios to both the old policy and the engine's."""
    zeros = torch.zeros(len(ratio), dtype=torch.float64)
    logp = torch.tensor(ratio, dtype=torch.float64).log()
    columns = {"old_logp": zeros, "engine_logp": zeros, "advantage": column(advantage)}
    return tokens(logp, **{**columns, **more})  # type: ignore[arg-type]


def column(numbers: Sequence[float]) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64)


def random_columns(lengths: Sequence[int] = LENGTHS, seed: int = 0) -> dict[str, Tensor]:
    """A policy that has moved by about 0.4 per token, in both directions and for both signs."""
    generator = torch.Generator().manual_seed(seed)

    def noise() -> Tensor:
        return torch.randn(sum(lengths), generator=generator, dtype=torch.float64)

    logp = -noise().abs() - 0.05
    old = (logp + 0.4 * noise()).clamp(max=-0.01)
    return {
        "logp": logp,
        "old_logp": old,
        "engine_logp": (old + 0.1 * noise()).clamp(max=-0.01),
        "advantage": noise(),
        "weight": noise().abs(),
        "chosen": (noise() > 0).double(),
    }


def gradient(
    loss: Callable[..., tuple[Tensor, object]], columns: dict[str, Tensor], lengths
) -> Tensor:
    logp = columns["logp"].clone().requires_grad_()
    found, _ = loss(tokens(lengths=lengths, **{**columns, "logp": logp}))
    return torch.autograd.grad(found.sum(), logp)[0]


def numeric_gradient(loss, columns: dict[str, Tensor], lengths, step: float = 1e-6) -> Tensor:
    """Central differences of the summed loss, one token after the other."""

    def value(place: int, shift: float) -> float:
        logp = columns["logp"].clone()
        logp[place] += shift
        return loss(tokens(lengths=lengths, **{**columns, "logp": logp}))[0].sum().item()

    places = range(len(columns["logp"]))
    return column([(value(i, step) - value(i, -step)) / (2 * step) for i in places])


def parts(columns: dict[str, Tensor], lengths: Sequence[int]) -> list[dict[str, Tensor]]:
    """The columns of each sequence alone."""
    cut = {name: values.split(list(lengths)) for name, values in columns.items()}
    return [{name: cut[name][i] for name in columns} for i in range(len(lengths))]


def joined(pieces: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {name: torch.cat([piece[name] for piece in pieces]) for name in pieces[0]}


def is_finite(values: Tensor) -> bool:
    return bool(values.isfinite().all())


def sigmoid(z: float) -> float:
    return 1 / (1 + math.exp(-z))
