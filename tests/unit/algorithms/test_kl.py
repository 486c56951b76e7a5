"""Estimates of the KL to the reference, and the coefficient that follows a target."""

from __future__ import annotations

import math

import pytest
import torch
from crafted import column, is_finite
from hypothesis import given, settings
from hypothesis import strategies as st

from fledge.algorithms.kl import KL, AdaptiveCoefficient, absolute, k1, k2, k3

P = column([0.2, 0.5, 0.3])
Q = column([0.4, 0.1, 0.5])
EXACT = 0.2 * math.log(0.5) + 0.5 * math.log(5) + 0.3 * math.log(0.6)


def test_closed_forms():
    logp, ref = column([-1.0, -2.0, -3.0]), column([-1.5, -1.0, -3.0])
    assert k1(logp, ref).tolist() == [0.5, -1.0, 0.0]
    assert k2(logp, ref).tolist() == [0.125, 0.5, 0.0]
    assert k3(logp, ref).tolist() == pytest.approx([math.exp(-0.5) - 0.5, math.exp(1.0) - 2.0, 0.0])
    assert absolute(logp, ref).tolist() == [0.5, 1.0, 0.0]
    assert {"k1": k1, "k2": k2, "k3": k3, "abs": absolute} == KL


@pytest.mark.parametrize("estimate", [k1, k3])
def test_k1_and_k3_are_unbiased(estimate):
    assert (P * estimate(P.log(), Q.log())).sum().item() == pytest.approx(EXACT)


@pytest.mark.parametrize("estimate", [k2, k3, absolute])
def test_these_are_never_negative_and_0_for_equals(estimate):
    assert (estimate(P.log(), Q.log()) > 0).all()
    assert estimate(P.log(), P.log()).tolist() == [0, 0, 0]


@pytest.mark.parametrize("name", KL)
def test_gradients_equal_finite_differences(name):
    logp = P.log().requires_grad_()
    (exact,) = torch.autograd.grad(KL[name](logp, Q.log()).sum(), logp)
    step = 1e-6
    up, down = KL[name](P.log() + step, Q.log()), KL[name](P.log() - step, Q.log())
    assert ((up - down) / (2 * step) - exact).abs().max() < 1e-8


def test_the_expected_gradient_of_k2_is_that_of_the_kl_and_of_k1_it_is_0():
    logits = column([0.3, -0.2, 0.5]).requires_grad_()
    logp = logits.log_softmax(0)
    (exact,) = torch.autograd.grad((logp.exp() * (logp - Q.log())).sum(), logits)
    for estimate, expected in [(k2, exact), (k1, torch.zeros(3).double())]:
        logp = logits.log_softmax(0)
        mean = (logp.exp().detach() * estimate(logp, Q.log())).sum()
        (found,) = torch.autograd.grad(mean, logits)
        assert torch.allclose(found, expected, atol=1e-12)


log_probs = st.one_of(st.floats(-40, 0, width=32), st.sampled_from([-1e4, -math.inf]))


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(st.lists(st.tuples(log_probs, log_probs), max_size=6))
def test_estimates_and_their_gradients_are_always_finite(rows):
    logp, ref = torch.tensor(rows, dtype=torch.float32).reshape(-1, 2).T.contiguous()
    for estimate in KL.values():
        live = logp.clone().requires_grad_()
        found = estimate(live, ref)
        (slope,) = torch.autograd.grad(found.sum(), live)
        assert found.shape == logp.shape and is_finite(found) and is_finite(slope)


# ---- the coefficient


def test_the_coefficient_rises_above_the_target_and_falls_below():
    found = AdaptiveCoefficient(0.1, target=0.05, horizon=100)
    found.update(0.055, episodes=10)  # an error of 0.1, for a tenth of the horizon
    assert found.coef == pytest.approx(0.1 * 1.01)
    found.update(0.045, episodes=10)
    assert found.coef == pytest.approx(0.1 * 1.01 * 0.99)
    found.update(0.05, episodes=10)
    assert found.coef == pytest.approx(0.1 * 1.01 * 0.99)


@pytest.mark.parametrize(("kl", "factor"), [(9.0, 1.02), (math.inf, 1.02), (0.0, 0.98), (-5, 0.98)])
def test_the_error_is_bounded(kl, factor):
    found = AdaptiveCoefficient(0.1, target=0.05, horizon=100)
    found.update(kl, episodes=10)
    assert found.coef == pytest.approx(0.1 * factor)


def test_without_a_target_the_coefficient_is_fixed():
    found = AdaptiveCoefficient(0.1, target=None, horizon=100)
    found.update(7.0, episodes=1000)
    assert found.coef == 0.1


def test_the_coefficient_stays_positive_and_can_come_back():
    found = AdaptiveCoefficient(0.1, target=0.05, horizon=1)
    found.update(0.0, episodes=1000)  # two hundred times the horizon's worth of correction
    assert found.coef == pytest.approx(0.01)
    for _ in range(1000):
        found.update(0.0, episodes=1000)
        assert found.coef > 0
    for _ in range(20):
        found.update(1.0, episodes=1000)
    assert found.coef > 0.1


def test_the_coefficient_survives_saving():
    ours, other = (AdaptiveCoefficient(0.1, target=0.05, horizon=100) for _ in range(2))
    ours.update(0.2, episodes=10)
    other.restore(ours.state())
    assert other.coef == ours.coef != 0.1
