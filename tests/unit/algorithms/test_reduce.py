"""Reductions: the share of each row, whatever the loss."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fledge.algorithms.reduce import REDUCTIONS, token_weights

COUNTS = [3, 1, 0, 5, 2]
SEQUENCES = [0, 0, 1, 2, 3]  # the first sequence has two rows, the second has nothing to train
PROMPTS = [0, 0, 0, 1, 1]


def totals(reduction: str) -> list[float]:
    """The share of each row in a loss of 1 per token."""
    weights = token_weights(reduction, COUNTS, SEQUENCES, PROMPTS, max_length=8)
    return [w * c for w, c in zip(weights, COUNTS, strict=True)]


def test_token_mean_weighs_every_token_alike():
    assert totals("token_mean") == pytest.approx([3 / 11, 1 / 11, 0, 5 / 11, 2 / 11])


def test_sequence_mean_gives_every_sequence_the_same_share():
    third = 1 / 3
    assert totals("sequence_mean") == pytest.approx([third * 3 / 4, third / 4, 0, third, third])


def test_prompt_mean_gives_every_prompt_the_same_share():
    assert totals("prompt_mean") == pytest.approx([3 / 8, 1 / 8, 0, 5 / 14, 2 / 14])


def test_token_sums_over_a_fixed_length_grow_with_the_sequence():
    assert totals("sequence_mean_token_sum_norm") == pytest.approx(
        [3 / 24, 1 / 24, 0, 5 / 24, 2 / 24]
    )


@pytest.mark.parametrize("reduction", REDUCTIONS)
@given(rows=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 4)), min_size=1, max_size=12))
@settings(max_examples=30, deadline=None, derandomize=True, database=None)
def test_means_sum_to_one_and_norms_to_the_mean_length(reduction: str, rows):
    counts = [c for c, _ in rows]
    prompts = [p for _, p in rows]
    sequences = list(range(len(rows)))
    weights = token_weights(reduction, counts, sequences, prompts, max_length=10)
    total = sum(w * c for w, c in zip(weights, counts, strict=True))
    if not any(counts):
        assert total == 0
    elif reduction == "sequence_mean_token_sum_norm":
        alive = [c for c in counts if c]
        assert total == pytest.approx(sum(alive) / len(alive) / 10)
    else:
        assert total == pytest.approx(1)


def test_an_unknown_reduction_is_refused():
    with pytest.raises(ValueError, match="unknown reduction"):
        token_weights("mean", [1], [0], [0], 8)
