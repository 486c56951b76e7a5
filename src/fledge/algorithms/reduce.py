"""Reductions as weights: the loss is always `sum(weight_t * loss_t)`, so it cannot depend on how
the batch was cut.

The weights of a mini-batch are computed once, from counts of the whole mini-batch, before it is cut
into micro-batches.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from fledge.errors import ConfigError

REDUCTIONS = ("token_mean", "sequence_mean", "sequence_mean_token_sum_norm", "prompt_mean")


def token_weights(
    reduction: str,
    counts: Sequence[int],
    sequences: Sequence[int],
    prompts: Sequence[int],
    max_length: int | None = None,
) -> list[float]:
    """One weight per row, for each of its trained tokens.

    `counts[r]` trained tokens of row r, which is part of sequence `sequences[r]` of prompt
    `prompts[r]`.

    token_mean: all tokens alike. sequence_mean: mean over sequences of their token means.
    sequence_mean_token_sum_norm: mean over sequences of token sums divided by a fixed length (Dr.
    GRPO). prompt_mean: mean over prompts of token means.

    >>> token_weights("token_mean", [1, 3], [0, 1], [0, 0])
    [0.25, 0.25]
    >>> token_weights("sequence_mean", [1, 3], [0, 1], [0, 0])
    [0.5, 0.16666666666666666]
    """
    if reduction == "sequence_mean_token_sum_norm" and max_length is None:
        raise ConfigError(
            "algorithm.norm_length: sequence_mean_token_sum_norm divides by a fixed length, and "
            "none is set"
        )
    per_sequence: Counter[int] = Counter()
    per_prompt: Counter[int] = Counter()
    for count, sequence, prompt in zip(counts, sequences, prompts, strict=True):
        per_sequence[sequence] += count
        per_prompt[prompt] += count
    total = sum(counts)
    alive_sequences = sum(1 for n in per_sequence.values() if n)
    alive_prompts = sum(1 for n in per_prompt.values() if n)

    def weight(row: int) -> float:
        if not counts[row]:
            return 0.0
        if reduction == "token_mean":
            return 1 / total
        if reduction == "sequence_mean":
            return 1 / (alive_sequences * per_sequence[sequences[row]])
        if reduction == "sequence_mean_token_sum_norm":
            return 1 / (alive_sequences * (max_length or 1))
        if reduction == "prompt_mean":
            return 1 / (alive_prompts * per_prompt[prompts[row]])
        raise ValueError(f"unknown reduction {reduction!r}")

    return [weight(row) for row in range(len(counts))]
