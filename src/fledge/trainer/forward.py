"""From rows of tokens to log-probs: each prompt is computed once for all its rows, and full logits
are never built.

`Plan` lays the tokens of a micro-batch side by side; `head_scores` turns hidden states into
log-probs and entropies in chunks that are recomputed in the backward pass, so memory is bounded by
one chunk and not by tokens x vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fledge.data.batch import Row
from fledge.models.attention import PackedLayout, Span

CHUNK_LOGITS = 2**23
"""Logits held at once: 32 MiB in fp32."""


@dataclass(frozen=True)
class Plan:
    """Packed inputs, and for each trained token which hidden state predicts it."""

    tokens: Tensor
    places: Tensor
    layout: PackedLayout
    predictors: Tensor
    targets: Tensor

    @classmethod
    def of(cls, rows: Sequence[Row], device: torch.device) -> Plan:
        tokens: list[int] = []
        places: list[int] = []
        spans: list[Span] = []
        predictors: list[int] = []
        targets: list[int] = []
        prompts: dict[tuple[int, ...], int] = {}
        for row in rows:
            prompt = row.token_ids[: row.prefix]
            if prompt not in prompts:
                prompts[prompt] = len(tokens)
                spans.append(Span(len(tokens), row.prefix))
                tokens.extend(prompt)
                places.extend(range(row.prefix))
            start, length = len(tokens), row.needed - row.prefix
            tokens.extend(row.token_ids[row.prefix : row.needed])
            places.extend(range(row.prefix, row.needed))
            if length:
                spans.append(Span(start, length, prompts[prompt], row.prefix))
            for place in row.trained:
                before = place - 1
                inside = before - row.prefix
                predictors.append(start + inside if inside >= 0 else prompts[prompt] + before)
                targets.append(row.token_ids[place])
        return cls(
            tokens=torch.tensor(tokens, device=device),
            places=torch.tensor(places, device=device),
            layout=PackedLayout.of(spans, device),
            predictors=torch.tensor(predictors, device=device),
            targets=torch.tensor(targets, device=device),
        )


def head_scores(
    head: nn.Module, hidden_NH: Tensor, targets_N: Tensor, temperature: float
) -> tuple[Tensor, Tensor]:
    """Log-prob of each target and entropy of each distribution, at `temperature`."""

    def chunk_scores(hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        logits = head(hidden)
        logits = logits if logits.dtype == torch.float64 else logits.float()
        if temperature != 1.0:
            logits = logits / temperature
        logp_CV = logits.log_softmax(-1)
        entropy = -(logp_CV.exp() * logp_CV).sum(-1)
        return logp_CV.gather(1, targets[:, None])[:, 0], entropy

    vocabulary = cast(Tensor, head.weight).shape[0]
    size = max(1, CHUNK_LOGITS // vocabulary)
    if len(hidden_NH) <= size:
        return chunk_scores(hidden_NH, targets_N)
    parts = [
        checkpoint(chunk_scores, hidden, targets, use_reentrant=False)
        for hidden, targets in zip(hidden_NH.split(size), targets_N.split(size), strict=True)
    ]
    logps, entropies = zip(*parts, strict=True)
    return torch.cat(logps), torch.cat(entropies)
