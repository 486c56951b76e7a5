"""The critic's loss: by hand, by finite differences, and never anything that is not finite."""

from __future__ import annotations

import pytest
import torch
from crafted import column, is_finite, tokens
from hypothesis import given, settings
from hypothesis import strategies as st

from fledge.algorithms.critic import clipped_value


def valued(new, old, returns):
    return tokens(torch.zeros_like(old), new_value=new, value=old, returns=returns)


def test_the_worse_of_the_free_and_the_bounded_value_counts():
    new = column([1.0, 1.0, 1.0, -1.0, 0.1])
    old = column([0.0, 0.0, 0.0, 0.0, 0.0])
    returns = column([2.0, 1.0, 0.0, -3.0, 0.5])
    loss, stats = clipped_value(valued(new, old, returns), clip=0.2)
    # bounded values are 0.2, 0.2, 0.2, -0.2, 0.1; the third is worse without its bound
    expected = [1.8**2 / 2, 0.8**2 / 2, 1.0 / 2, 2.8**2 / 2, 0.4**2 / 2]
    assert loss.tolist() == pytest.approx(expected)
    assert stats["critic/clip_frac"].tolist() == [1, 1, 0, 1, 0]
    assert stats["critic/error"].tolist() == pytest.approx([1.0, 0.0, 1.0, 2.0, 0.4])
    wide, _ = clipped_value(valued(new, old, returns), clip=5.0)
    assert wide.tolist() == pytest.approx([0.5, 0.0, 0.5, 2.0, 0.08])


def random_values(count=60):
    generator = torch.Generator().manual_seed(0)
    noise = [torch.randn(count, generator=generator, dtype=torch.float64) for _ in range(3)]
    return noise[0], noise[0] + 0.3 * noise[1], noise[2]


def test_the_gradient_equals_finite_differences():
    old, new, returns = random_values()
    live = new.clone().requires_grad_()
    loss, stats = clipped_value(valued(live, old, returns), clip=0.2)
    (exact,) = torch.autograd.grad(loss.sum(), live)
    step = 1e-6
    up, _ = clipped_value(valued(new + step, old, returns), clip=0.2)
    down, _ = clipped_value(valued(new - step, old, returns), clip=0.2)
    assert ((up - down) / (2 * step) - exact).abs().max() < 1e-7
    cut = stats["critic/clip_frac"] == 1
    assert 0 < cut.sum() < len(cut)
    assert (exact[cut] == 0).all()
    assert torch.allclose(exact[~cut], (new - returns)[~cut])


numbers = st.floats(-1e6, 1e6, width=32)


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(st.lists(st.tuples(numbers, numbers, numbers), max_size=6))
def test_losses_gradients_and_statistics_are_always_finite(rows):
    old, new, returns = torch.tensor(rows, dtype=torch.float32).reshape(-1, 3).T.contiguous()
    live = new.clone().requires_grad_()
    loss, stats = clipped_value(valued(live, old, returns), clip=0.2)
    (slope,) = torch.autograd.grad(loss.sum(), live)
    assert is_finite(loss) and is_finite(slope)
    assert all(is_finite(s) and not s.requires_grad for s in stats.values())
    assert (loss >= 0).all()
