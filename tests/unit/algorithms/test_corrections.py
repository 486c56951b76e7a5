"""Off-policy corrections: closed forms on hand-made ratios, and what a cut cannot change."""

from __future__ import annotations

import inspect
import math
from functools import partial

import pytest
import torch
from crafted import LENGTHS, column, is_finite, joined, parts, tokens
from hypothesis import given, settings
from hypothesis import strategies as st

from fledge.algorithms.corrections import (
    CORRECTIONS,
    geometric_mask,
    icepop,
    outlier_mask,
    product_mask,
    sequence_tis,
    token_clamp,
    token_mask,
    token_tis,
)
from fledge.algorithms.tokens import safe_log_ratio
from fledge.errors import PluginError
from fledge.plugins import check_arguments

READY = {**CORRECTIONS, "token_clamp": partial(token_clamp, eps=0.2)}


def weights(correction, ratios, lengths=None):
    rho = column(ratios)
    return correction(tokens(torch.zeros_like(rho), lengths), rho.log()).tolist()


def test_the_names_of_the_corrections():
    assert set(CORRECTIONS) == {
        "token_tis",
        "token_clamp",
        "sequence_tis",
        "geometric_mask",
        "product_mask",
        "outlier_mask",
        "token_mask",
        "icepop",
    }


def test_token_tis_caps_from_above_only():
    assert weights(token_tis, [0.01, 1.0, 1.9, 3.0]) == pytest.approx([0.01, 1.0, 1.9, 2.0])
    assert weights(partial(token_tis, cap=5.0), [3.0, 9.0]) == pytest.approx([3.0, 5.0])


def test_token_clamp_bounds_both_sides():
    assert weights(partial(token_clamp, eps=0.2), [0.5, 0.9, 1.1, 3.0]) == pytest.approx(
        [0.8, 0.9, 1.1, 1.2]
    )


def test_sequence_tis_caps_the_product():
    ratios, lengths = [0.5, 1.5, 2.0, 3.0, 0.1], [2, 0, 2, 1]
    assert weights(sequence_tis, ratios, lengths) == pytest.approx([0.75, 0.75, 2.0, 2.0, 0.1])
    wide = partial(sequence_tis, cap=10.0)
    assert weights(wide, ratios, lengths) == pytest.approx([0.75, 0.75, 6.0, 6.0, 0.1])


def test_a_geometric_mask_looks_at_the_mean_of_a_sequence():
    # sqrt(1.2 / 1.2) = 1, sqrt(1.2 * 0.9) = 1.039, 1.011, 0.985, 0.995
    ratios, lengths = [1.2, 1 / 1.2, 1.2, 0.9, 1.011, 0.985, 0.995], [2, 2, 1, 1, 1]
    assert weights(geometric_mask, ratios, lengths) == [1, 1, 0, 0, 0, 0, 1]
    wide = partial(geometric_mask, low=0.98, high=1.04)
    assert weights(wide, ratios, lengths) == [1] * 7


def test_a_product_mask_looks_at_the_product_of_a_sequence():
    ratios, lengths = [1.5, 1.5, 0.6, 0.8, 0.9, 0.9, 1.9], [2, 2, 2, 1]
    assert weights(product_mask, ratios, lengths) == [0, 0, 0, 0, 1, 1, 1]
    wide = partial(product_mask, low=0.4, high=2.5)
    assert weights(wide, ratios, lengths) == [1] * 7


def test_one_outlier_drops_its_whole_sequence():
    ratios, lengths = [1.0, 101.0, 1.0, 99.0, 1.1e-4, 0.9e-4, 1.0], [3, 0, 2, 2]
    assert weights(outlier_mask, ratios, lengths) == [0, 0, 0, 1, 1, 0, 0]
    narrow = partial(outlier_mask, low=0.5, high=50.0)
    assert weights(narrow, ratios, lengths) == [0] * 7


def test_a_token_mask_may_have_either_bound():
    ratios = [0.4, 0.6, 1.0, 1.9, 2.1]
    assert weights(token_mask, ratios) == [0, 1, 1, 1, 0]
    assert weights(partial(token_mask, low=None), ratios) == [1, 1, 1, 1, 0]
    assert weights(partial(token_mask, high=None), ratios) == [0, 1, 1, 1, 1]
    assert weights(partial(token_mask, low=0.0), ratios) == [1, 1, 1, 1, 0]
    assert weights(partial(token_mask, low=None, high=None), ratios) == [1] * 5
    assert weights(token_mask, [0.5, 2.0]) == [1, 1]  # the bounds belong to the inside


def test_icepop_keeps_the_ratio_inside_its_bounds():
    assert weights(icepop, [0.4, 0.6, 1.0, 4.9, 5.1]) == pytest.approx([0, 0.6, 1.0, 4.9, 0])
    assert weights(partial(icepop, low=0.3, high=1.0), [0.4, 1.2]) == pytest.approx([0.4, 0])


@pytest.mark.parametrize("name", READY)
def test_where_engine_and_trainer_agree_every_weight_is_1(name):
    assert weights(READY[name], [1.0] * 4, [3, 0, 1]) == [1] * 4


def test_a_long_product_is_bounded_before_its_exponential():
    rho = torch.full((1000,), 20.0)
    assert weights(partial(sequence_tis, cap=1e30), rho.exp().tolist()) == pytest.approx(
        [math.exp(20)] * 1000
    )
    assert weights(partial(sequence_tis, cap=1e30), [math.exp(-20)] * 1000) == pytest.approx(
        [math.exp(-20)] * 1000
    )


@pytest.mark.parametrize("name", READY)
def test_neither_the_cut_nor_the_order_of_sequences_changes_a_weight(name):
    correction = READY[name]
    generator = torch.Generator().manual_seed(3)
    log_rho = 0.5 * torch.randn(sum(LENGTHS), generator=generator, dtype=torch.float64)
    whole = correction(tokens(log_rho, LENGTHS), log_rho)
    pieces = parts({"log_rho": log_rho}, LENGTHS)
    alone = [correction(tokens(p["log_rho"]), p["log_rho"]) for p in pieces]
    assert torch.allclose(torch.cat(alone), whole, rtol=1e-12)
    order = [4, 2, 0, 1, 3]
    lengths = [LENGTHS[i] for i in order]
    turned = joined([pieces[i] for i in order])["log_rho"]
    back = dict(zip(order, correction(tokens(turned, lengths), turned).split(lengths), strict=True))
    assert torch.allclose(torch.cat([back[i] for i in range(5)]), whole, rtol=1e-12)


log_probs = st.one_of(st.floats(-40, 0, width=32), st.sampled_from([-1e4, -math.inf]))
sequences = st.lists(st.lists(st.tuples(log_probs, log_probs), max_size=4), min_size=1, max_size=5)


@settings(max_examples=80, deadline=None, derandomize=True, database=None)
@given(sequences)
def test_weights_are_finite_never_negative_and_carry_no_gradient(rows):
    lengths = [len(s) for s in rows]
    flat = torch.tensor([t for s in rows for t in s], dtype=torch.float32).reshape(-1, 2)
    old, engine = flat.T.contiguous()
    x = tokens(old.clone().requires_grad_(), lengths, old_logp=old, engine_logp=engine)
    for name, correction in READY.items():
        found = correction(x, safe_log_ratio(old, engine))
        assert found.shape == old.shape and is_finite(found), name
        assert (found >= 0).all() and not found.requires_grad, name


IMPOSSIBLE = [
    ("token_tis", {"cap": 0}),
    ("token_tis", {"cap": math.nan}),
    ("token_clamp", {"eps": -0.1}),
    ("token_clamp", {"eps": 1.5}),
    ("sequence_tis", {"cap": -1}),
    ("geometric_mask", {"low": 1.1}),
    ("geometric_mask", {"high": 0.9}),
    ("product_mask", {"low": -1}),
    ("product_mask", {"high": 0.5}),
    ("outlier_mask", {"low": 2}),
    ("outlier_mask", {"high": 0.1}),
    ("token_mask", {"low": -0.1}),
    ("token_mask", {"high": 0.9}),
    ("icepop", {"low": 1.5}),
    ("icepop", {"high": math.inf}),
]


@pytest.mark.parametrize(("name", "arguments"), IMPOSSIBLE)
def test_impossible_arguments_are_refused_before_any_work(name, arguments):
    with pytest.raises(PluginError, match=rf"correction\.{next(iter(arguments))}: "):
        check_arguments(CORRECTIONS[name], arguments, "correction", positional=2)


@pytest.mark.parametrize("name", CORRECTIONS)
def test_the_defaults_are_possible(name):
    parameters = inspect.signature(CORRECTIONS[name]).parameters.values()
    given = {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}
    given = {"eps": 0.2} if name == "token_clamp" else given
    assert check_arguments(CORRECTIONS[name], given, "correction", positional=2) == given
