"""clip_cov and kl_cov: what they choose, what they do to it, and that the raw advantage counts."""

from __future__ import annotations

import math
from dataclasses import replace
from statistics import fmean

import pytest
import torch
from crafted import column, gradient, is_finite, joined, parts, random_columns, tokens
from hypothesis import given, settings
from hypothesis import strategies as st

from fledge.algorithms.covariance import ClipCov, KlCov
from fledge.algorithms.losses import clipped, importance_sampling
from fledge.errors import PluginError

# Mean log-prob -2 and mean advantage 0: each covariance is the advantage times (log-prob + 2).
LOGP = [-0.5, -0.5, -1.0, -1.0, -1.75, -1.75, -5.0, -4.5]
ADVANTAGE = [2.0, -2.0, 2.0, -2.0, 1.0, -1.0, -8 / 3, 8 / 3]
COV = [3.0, -3.0, 2.0, -2.0, 0.25, -0.25, 8.0, -20 / 3]


def crafted(**columns):
    return tokens(column(LOGP), [3, 5], advantage=column(ADVANTAGE), **columns)


def draws(*numbers):
    return column(numbers)


def test_the_crafted_covariances_are_as_said():
    mean_a, mean_lp = fmean(ADVANTAGE), fmean(LOGP)
    assert mean_a == pytest.approx(0) and mean_lp == -2
    assert [(a - mean_a) * (lp - mean_lp) for a, lp in zip(ADVANTAGE, LOGP, strict=True)] == (
        pytest.approx(COV)
    )


# ---- clip_cov


def test_clip_cov_draws_among_the_tokens_between_its_bounds():
    # candidates are the first (cov 3) and the third (cov 2)
    low, high = draws(0.1, 0, 0.5, 0, 0, 0, 0, 0), draws(0.9, 0, 0.5, 0, 0, 0, 0, 0)
    assert ClipCov().prepare(crafted(), low).tolist() == [1, 0, 0, 0, 0, 0, 0, 0]
    assert ClipCov().prepare(crafted(), high).tolist() == [0, 0, 1, 0, 0, 0, 0, 0]
    wide = ClipCov(ratio=0.5)
    assert wide.prepare(crafted(), high).tolist() == [1, 0, 1, 0, 0, 0, 0, 0]
    third = ClipCov(ratio=0.5, cov_low=2.5, cov_high=9.0)
    assert third.prepare(crafted(), high).tolist() == [1, 0, 0, 0, 0, 0, 1, 0]
    assert ClipCov(cov_low=9.0, cov_high=10.0).prepare(crafted(), high).sum() == 0


def test_the_bounds_of_clip_cov_are_open():
    # two tokens, both with a covariance of exactly 1
    x = tokens(column([-1.0, -3.0]), advantage=column([1.0, -1.0]))
    assert ClipCov(cov_low=1.0).prepare(x, draws(0.1, 0.2)).sum() == 0
    assert ClipCov(cov_low=0.0, cov_high=1.0).prepare(x, draws(0.1, 0.2)).sum() == 0
    assert ClipCov(cov_low=0.5, cov_high=1.5).prepare(x, draws(0.1, 0.2)).tolist() == [1, 0]


def test_clip_cov_chooses_nothing_that_the_clip_has_cut():
    old = column(LOGP)
    old[0] -= 0.5  # its ratio is 1.65 and its advantage positive
    old[2] += 0.5  # below the bounds, but with a positive advantage that is no cut
    x = crafted(old_logp=old)
    assert ClipCov(ratio=1.0).prepare(x, torch.zeros(8)).tolist() == [0, 0, 1, 0, 0, 0, 0, 0]
    wide = ClipCov(ratio=1.0, high=1.0)
    assert wide.prepare(x, torch.zeros(8)).tolist() == [1, 0, 1, 0, 0, 0, 0, 0]
    # the lower cut, by a negative advantage: covariances of 4 each
    pair = tokens(
        column([-1.0, -5.0]), advantage=column([2.0, -2.0]), old_logp=column([-1.0, -4.5])
    )
    assert ClipCov(ratio=1.0).prepare(pair, torch.zeros(2)).tolist() == [1, 0]


def test_how_many_clip_cov_takes():
    count = 20_000
    sign = torch.ones(count).double()
    sign[::2] = -1
    x = tokens(-3 + sign, advantage=2 * sign)  # a covariance of 2 everywhere
    draw = torch.rand(count, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for ratio, expected in [(2e-4, 4), (1.3e-4, 3), (1e-6, 1), (1.0, count)]:
        chosen = ClipCov(ratio=ratio).prepare(x, draw)
        assert chosen.sum() == expected
        if expected < count:
            assert draw[chosen == 1].max() < draw[chosen == 0].min()


def test_what_clip_cov_chose_loses_its_gradient():
    columns = random_columns([40])
    loss, plain = ClipCov(), gradient(clipped, columns, [40])
    x = tokens(lengths=[40], **columns)
    columns["chosen"] = ClipCov(ratio=0.1, cov_low=0.3).prepare(x, torch.rand(40))
    assert columns["chosen"].sum() == 4
    found = gradient(loss, columns, [40])
    assert torch.equal(found, plain * (1 - columns["chosen"]))
    assert not torch.equal(found, plain)
    values, stats = loss(tokens(lengths=[40], **columns))
    assert torch.equal(stats["policy/cov_chosen_frac"], columns["chosen"])
    assert values[columns["chosen"] == 1].abs().sum() == 0
    assert {"policy/clip_frac_low", "policy/clip_frac_high"} <= stats.keys()


def test_the_bounds_of_the_clip_of_clip_cov_are_its_own():
    columns = {**random_columns([40]), "chosen": torch.zeros(40).double()}
    x = tokens(lengths=[40], **columns)
    found, _ = ClipCov(low=0.1, high=0.4)(x)
    assert torch.equal(found, clipped(x, low=0.1, high=0.4)[0])


# ---- kl_cov


def test_kl_cov_takes_the_highest_covariances():
    x, draw = crafted(), torch.rand(8)
    assert KlCov().prepare(x, draw).tolist() == [0, 0, 0, 0, 0, 0, 1, 0]
    assert KlCov(ratio=0.25).prepare(x, draw).tolist() == [1, 0, 0, 0, 0, 0, 1, 0]
    assert KlCov(ratio=0.375).prepare(x, draw).tolist() == [1, 0, 1, 0, 0, 0, 1, 0]
    assert KlCov(ratio=1.0).prepare(x, draw).tolist() == [1] * 8


def test_among_equal_covariances_the_draws_decide():
    x = tokens(column([-1.0, -1.0, -1.0, -5.0]), advantage=column([1.0, 1.0, 1.0, 0.0]))
    chosen = KlCov(ratio=0.75).prepare(x, draws(0.9, 0.1, 0.5, 0.0))
    assert chosen.tolist() == [0, 1, 1, 1]  # the last has the highest, the others are equal
    same = tokens(column([-1.0] * 4))
    assert KlCov(ratio=0.5).prepare(same, draws(0.9, 0.1, 0.5, 0.7)).tolist() == [0, 1, 1, 0]


def test_what_kl_cov_chose_is_held_back_by_its_distance():
    logp, old = column([-1.0, -1.0, -2.0, -2.0]), column([-1.5, -1.5, -1.5, -1.5])
    columns = {"logp": logp, "old_logp": old, "advantage": column([1.0, 1.0, -1.0, -1.0])}
    columns["chosen"] = column([1.0, 0.0, 1.0, 0.0])
    loss, stats = KlCov(coef=3.0)(tokens(**columns))
    up, down = math.exp(0.5), math.exp(-0.5)
    assert loss.tolist() == pytest.approx([-up + 1.5, -up, down + 1.5, down])
    assert stats["policy/cov_chosen_frac"].tolist() == [1, 0, 1, 0]
    found = gradient(KlCov(coef=3.0), columns, [4])
    assert found.tolist() == pytest.approx([-up + 3, -up, down - 3, down])


def test_kl_cov_is_exactly_inert_before_the_first_update():
    columns = random_columns()
    columns["old_logp"] = columns["engine_logp"] = columns["logp"]
    columns["chosen"] = torch.ones_like(columns["logp"])
    lengths = [len(columns["logp"])]
    found = gradient(KlCov(coef=5.0), columns, lengths)
    assert torch.equal(found, gradient(importance_sampling, columns, lengths))


# ---- both


@pytest.mark.parametrize("loss", [ClipCov(), KlCov()])
def test_without_prepare_nothing_is_trained(loss):
    with pytest.raises(PluginError, match="prepare"):
        loss(crafted())


def test_an_empty_range_of_covariances_is_refused():
    with pytest.raises(PluginError, match="cov_low below cov_high"):
        ClipCov(cov_low=5.0, cov_high=1.0)


def test_the_raw_advantage_matters():
    """An advantage that is scaled by a token count before the loss disables clip_cov silently."""
    x = crafted()
    scaled = replace(x, advantage=x.advantage / 8)
    assert ClipCov(ratio=1.0).prepare(x, torch.zeros(8)).sum() == 2
    assert ClipCov(ratio=1.0).prepare(scaled, torch.zeros(8)).sum() == 0
    # kl_cov only ranks, so that one scale for all does not matter to its choice
    assert torch.equal(
        KlCov(ratio=0.25).prepare(scaled, torch.zeros(8)),
        KlCov(ratio=0.25).prepare(x, torch.zeros(8)),
    )


@pytest.mark.parametrize("loss", [ClipCov(ratio=0.2, cov_low=0.1), KlCov(ratio=0.2)])
def test_the_choice_follows_the_tokens_into_any_order_and_cut(loss):
    lengths = [6, 1, 0, 20, 13]
    columns = random_columns(lengths)
    del columns["chosen"]
    draw = torch.rand(40, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    chosen = loss.prepare(tokens(lengths=lengths, **columns), draw)
    assert chosen.sum() == 8 and chosen.dtype == torch.float64
    order = [3, 4, 0, 2, 1]
    pieces = parts({**columns, "draw": draw, "was": chosen}, lengths)
    turned = joined([pieces[i] for i in order])
    x = tokens(lengths=[lengths[i] for i in order], **turned)
    assert torch.equal(loss.prepare(x, turned["draw"]), turned["was"])

    whole, _ = loss(tokens(lengths=lengths, chosen=chosen, **columns))
    cut = parts({**columns, "chosen": chosen}, lengths)
    pieces = [loss(tokens(lengths=[n], **p))[0] for p, n in zip(cut, lengths, strict=True)]
    assert torch.allclose(torch.cat(pieces), whole, rtol=1e-12)


log_probs = st.one_of(st.floats(-30, 0, width=32), st.sampled_from([-1e4, -math.inf]))
advantages = st.one_of(st.floats(-3, 3, width=32), st.sampled_from([0.0, 1e12, -1e12]))


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(st.lists(st.tuples(log_probs, log_probs, advantages, st.floats(0, 0.875)), max_size=9))
def test_whatever_the_tokens_are_a_bounded_number_is_chosen_and_all_is_finite(rows):
    flat = torch.tensor(rows, dtype=torch.float32).reshape(-1, 4)
    logp, old, advantage, draw = flat.T.contiguous()
    for loss in (ClipCov(ratio=0.3), KlCov(ratio=0.3)):
        most = max(1, round(0.3 * len(rows)))
        x = tokens(logp, old_logp=old, advantage=advantage)
        chosen = loss.prepare(x, draw)
        assert chosen.shape == logp.shape and chosen.dtype == logp.dtype
        assert set(chosen.tolist()) <= {0, 1} and chosen.sum() <= most
        if isinstance(loss, KlCov):
            assert chosen.sum() == min(most, len(rows))
        live = logp.clone().requires_grad_()
        found, stats = loss(replace(x, logp=live, chosen=chosen))
        (slope,) = torch.autograd.grad(found.sum(), live)
        assert is_finite(found) and is_finite(slope)
        assert all(is_finite(s) for s in stats.values())
