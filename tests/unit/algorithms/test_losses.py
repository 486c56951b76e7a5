"""Losses: closed forms, gradients, what a cut or an order must not change, and nothing that is not
finite.
"""

from __future__ import annotations

import inspect
import math
from functools import partial

import pytest
import torch
from crafted import (
    LENGTHS,
    column,
    gradient,
    is_finite,
    joined,
    numeric_gradient,
    of_ratio,
    parts,
    random_columns,
    sigmoid,
    tokens,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from fledge.algorithms.losses import (
    LOSSES,
    cispo,
    clipped,
    cross_entropy,
    dppo,
    dro,
    dual_clip,
    geo_mean,
    gspo,
    importance_sampling,
    policy_gradient,
    rollout_is,
    sapo,
)
from fledge.errors import PluginError
from fledge.plugins import check_arguments

READY = {name: f() if inspect.isclass(f) else f for name, f in LOSSES.items()}
VARIANTS = {
    **READY,
    "cross_entropy": cross_entropy,
    "clipped, clip-higher": partial(clipped, low=0.1, high=0.4),
    "dual_clip, tight": partial(dual_clip, low=0.1, high=0.3, c=1.3),
    "gspo, wide": partial(gspo, low=0.05, high=0.02),
    "cispo, engine": partial(cispo, low=0.2, high=0.3, anchor="engine"),
    "sapo, sharp": partial(sapo, tau_pos=2.0, tau_neg=0.5),
    "dppo, tight": partial(dppo, delta=0.05),
    "dppo, kl": partial(dppo, divergence="kl", delta=0.02),
    "geo_mean, tight": partial(geo_mean, bound=0.1),
    "rollout_is, tight": partial(rollout_is, low=0.2, high=0.3),
    "dro, strong": partial(dro, beta=2.0),
}


def test_the_names_of_the_losses():
    assert set(LOSSES) == {
        "clipped",
        "dual_clip",
        "gspo",
        "cispo",
        "sapo",
        "dppo",
        "clip_cov",
        "kl_cov",
        "geo_mean",
        "importance_sampling",
        "rollout_is",
        "dro",
        "policy_gradient",
    }


# ---- closed forms, by hand


def test_clipped_is_the_ppo_surrogate():
    x = of_ratio([0.5, 0.5, 1.0, 1.5, 1.5], [1.0, -1.0, 2.0, 1.0, -1.0])
    loss, stats = clipped(x, low=0.2, high=0.3)
    assert loss.tolist() == pytest.approx([-0.5, 0.8, -2.0, -1.3, 1.5])
    assert stats["policy/clip_frac_low"].tolist() == [0, 1, 0, 0, 0]
    assert stats["policy/clip_frac_high"].tolist() == [0, 0, 0, 1, 0]


def test_dual_clip_bounds_the_loss_of_bad_tokens_only():
    x = of_ratio([10.0, 10.0, 2.0, 0.5, 0.5], [-2.0, 2.0, -2.0, -2.0, 2.0])
    loss, stats = dual_clip(x, low=0.2, high=0.2, c=3.0)
    # 3 * 2 instead of 10 * 2; the others as in PPO
    assert loss.tolist() == pytest.approx([6.0, -2.4, 4.0, 1.6, -1.0])
    assert stats["policy/clip_frac_dual"].tolist() == [1, 0, 0, 0, 0]
    assert stats["policy/clip_frac_high"].tolist() == [0, 1, 0, 0, 0]
    assert stats["policy/clip_frac_low"].tolist() == [0, 0, 0, 1, 0]


def test_gspo_clips_the_geometric_mean_of_the_sequence():
    # sqrt(0.5 * 8) = 2 for the first sequence, 1.1 for the second; the third has mean 0.5
    ratio, advantage = [0.5, 8.0, 1.1, 0.25, 1.0], [1.0, -1.0, 1.0, -1.0, 1.0]
    loss, stats = gspo(of_ratio(ratio, advantage, lengths=[2, 0, 1, 2]), low=0.2, high=0.25)
    assert loss.tolist() == pytest.approx([-1.25, 2.0, -1.1, 0.8, -0.5])
    assert stats["policy/clip_frac_high"].tolist() == [1, 0, 0, 0, 0]
    assert stats["policy/clip_frac_low"].tolist() == [0, 0, 0, 1, 0]


def test_cispo_weighs_with_the_clipped_ratio_and_keeps_the_gradient():
    logp = column([-1.0, -2.0, -3.0])
    old = logp - column([0.5, 1.0, 9.0]).log()
    engine = logp - column([2.0, 0.5, 1.0]).log()
    columns = {"logp": logp, "old_logp": old, "engine_logp": engine}
    columns["advantage"] = column([2.0, -1.0, 1.0])
    loss, stats = cispo(tokens(**columns))
    # -(0.5 * 2 * -1), -(1 * -1 * -2), -(5 * 1 * -3)
    assert loss.tolist() == pytest.approx([1.0, -2.0, 15.0])
    assert stats["policy/clip_frac_high"].tolist() == [0, 0, 1]
    assert stats["policy/clip_frac_low"].tolist() == [0, 0, 0]
    assert gradient(cispo, columns, [3]).tolist() == pytest.approx([-1.0, 1.0, -5.0])
    anchored = partial(cispo, low=0.2, high=0.5, anchor="engine")
    loss, stats = anchored(tokens(**columns))
    # clip(2) = 1.5, clip(0.5) = 0.8, 1
    assert loss.tolist() == pytest.approx([3.0, -1.6, 3.0])
    assert stats["policy/clip_frac_low"].tolist() == [0, 1, 0]
    assert stats["policy/clip_frac_high"].tolist() == [1, 0, 0]


def test_sapo_gates_softly_with_a_temperature_for_each_sign():
    loss, _ = sapo(of_ratio([1.0, 1.0, 2.0, 2.0], [1.0, -1.0, 1.0, -1.0]), tau_pos=1.0, tau_neg=2.0)
    # sigmoid(0) = 1/2; sigmoid(1) = 0.7310586, sigmoid(2) = 0.8807971
    assert loss.tolist() == pytest.approx([-2.0, 1.0, -4 * 0.7310586, 2 * 0.8807971])


def moved(p: list[float], p_engine: list[float], advantage: list[float]):
    """Tokens with these probabilities; their old policy is beside the point."""
    logp = column(p).log()
    columns = {"engine_logp": column(p_engine).log(), "old_logp": logp - 3}
    return tokens(logp, advantage=column(advantage), **columns)


def test_dppo_masks_what_moved_too_far_in_the_direction_of_the_advantage():
    p = [0.5, 0.5, 0.1, 0.1, 0.25, 1e-3]
    p_engine = [0.2, 0.2, 0.4, 0.4, 0.2, 1e-6]
    loss, stats = dppo(moved(p, p_engine, [1.0, -1.0, 1.0, -1.0, 1.0, 1.0]), delta=0.2)
    # a rare token may change its ratio a thousandfold: its probability has hardly moved
    assert loss.tolist() == pytest.approx([0, 2.5, -0.25, 0, -1.25, -1000])
    assert stats["policy/masked_frac"].tolist() == [1, 0, 0, 1, 0, 0]


def test_the_kl_of_dppo_is_of_the_engine_to_the_policy():
    # KL(0.1 || 0.5) = 0.1 ln 0.2 + 0.9 ln 1.8 = 0.36806; KL(0.5 || 0.1) = 0.51083
    x = moved([0.5, 0.1, 0.5, 0.1], [0.1, 0.5, 0.1, 0.5], [1.0, -1.0, -1.0, 1.0])
    for delta, expected in [(0.36, [1, 1]), (0.37, [0, 1]), (0.51, [0, 1]), (0.52, [0, 0])]:
        _, stats = dppo(x, divergence="kl", delta=delta)
        assert stats["policy/masked_frac"].tolist() == [*expected, 0, 0]


@pytest.mark.parametrize("divergence", ["tv", "kl"])
def test_dppo_sees_moves_to_and_from_certainty(divergence):
    x = moved([1.0, 0.1, 1.0, 1.0], [0.1, 1.0, 1.0, 0.999], [1.0, -1.0, 1.0, 1.0])
    _, stats = dppo(x, divergence=divergence)
    assert stats["policy/masked_frac"].tolist() == [1, 1, 0, 0]  # the last step is a small one


@pytest.mark.parametrize("divergence", ["tv", "kl"])
@pytest.mark.parametrize("least", [-30.0, -100.0, -1e4, -math.inf])
def test_a_bounded_ratio_does_not_hide_a_large_move_from_dppo(divergence, least):
    logp, engine = column([-0.01, least, least]), column([least, -0.01, least])
    x = tokens(logp, engine_logp=engine, advantage=column([1.0, -1.0, 1.0]))
    loss, stats = dppo(x, divergence=divergence)
    assert stats["policy/masked_frac"].tolist() == [1, 1, 0]
    assert loss.tolist() == [0, 0, -1]


def test_geo_mean_holds_back_in_the_direction_of_the_advantage():
    e = math.e
    ratio = [e**0.6, e**-0.2, e**-0.9, e**-0.9, e**0.6]
    x = of_ratio(ratio, [2.0, 2.0, 2.0, -1.0, -1.0], lengths=[3, 2])
    loss, stats = geo_mean(x, bound=0.4)
    up, down = math.exp((0.4 - 0.2 - 0.9) / 3), math.exp((-0.4 + 0.6) / 2)
    assert loss.tolist() == pytest.approx([-2 * up] * 3 + [down] * 2)
    assert stats["policy/clip_frac_high"].tolist() == [1, 0, 0, 0, 0]
    assert stats["policy/clip_frac_low"].tolist() == [0, 0, 0, 1, 0]


def test_importance_sampling_starts_from_the_engine():
    logp = column([-1.0, -1.0])
    engine = logp - column([2.0, 0.5]).log()
    x = tokens(logp, engine_logp=engine, old_logp=logp - 1, advantage=column([3.0, -4.0]))
    assert importance_sampling(x)[0].tolist() == pytest.approx([-6.0, 2.0])


def test_rollout_is_drops_ratios_on_and_outside_its_bounds():
    logp = torch.full((6,), -2.0, dtype=torch.float64)
    ratio = column([0.25, 0.5 + 1e-9, 1.0, 4.0, 5.0 + 1e-9, 9.0])
    columns = {"logp": logp, "engine_logp": logp - ratio.log(), "old_logp": logp - 1}
    columns["advantage"] = column([1.0, 1.0, -1.0, 2.0, 1.0, 1.0])
    loss, stats = rollout_is(tokens(**columns))
    assert loss.tolist() == pytest.approx([0, 1.0, -2.0, 16.0, 0, 0])
    assert stats["policy/masked_frac"].tolist() == [1, 0, 0, 0, 1, 1]
    assert gradient(rollout_is, columns, [6]).tolist() == pytest.approx([0, -0.5, 1, -8, 0, 0])
    on_the_bound = tokens(column([0.0]), engine_logp=column([0.0]))
    assert rollout_is(on_the_bound, high=0.0)[1]["policy/masked_frac"].tolist() == [1]


def test_dro_is_tied_to_the_engine_by_a_square():
    logp, engine = column([-1.0, -2.0]), column([-3.0, -1.5])
    x = tokens(logp, engine_logp=engine, old_logp=logp - 1, advantage=column([2.0, -1.0]))
    # -A lp + beta / 2 (lp - lpr)^2 with beta = 0.5
    assert dro(x, beta=0.5)[0].tolist() == pytest.approx([2.0 + 1.0, -2.0 + 0.0625])


def test_policy_gradient_is_the_log_prob_times_the_advantage():
    x = tokens(column([-1.0, -2.0]), advantage=column([3.0, -0.5]))
    assert policy_gradient(x)[0].tolist() == [3.0, -1.0]


def test_cross_entropy_is_weighed_per_token():
    loss, stats = cross_entropy(tokens(column([-1.0, -2.0, -3.0]), weight=column([0.0, 0.5, 2.0])))
    assert loss.tolist() == [0.0, 1.0, 6.0]
    assert stats["sft/loss"].tolist() == [1.0, 2.0, 3.0]


# ---- a plain loop over a batch with every case in it


def plain_clipped(ratio, a, low, high):
    if a > 0:
        return -a * min(ratio, 1 + high)
    return -a * max(ratio, 1 - low)


def plain_dual_clip(ratio, a, low=0.2, high=0.2, c=3.0):
    if a < 0 and ratio > c:
        return -a * c
    return plain_clipped(ratio, a, low, high)


def plain_sapo(ratio, a, tau_pos=1.0, tau_neg=1.05):
    tau = tau_pos if a > 0 else tau_neg
    return -a * 4 / tau * sigmoid(tau * (ratio - 1))


def plain_dppo(logp, engine, a, delta=0.2, kl=False):
    p, q = math.exp(logp), math.exp(engine)
    far = abs(p - q)
    if kl:
        far = q * math.log(q / p) + (1 - q) * math.log((1 - q) / (1 - p))
    same_direction = (a > 0 and p > q) or (a < 0 and p < q)
    return 0.0 if same_direction and far > delta else -p / q * a


PLAIN = {
    "clipped": lambda lp, old, engine, a: plain_clipped(math.exp(lp - old), a, 0.2, 0.2),
    "clipped, clip-higher": lambda lp, old, engine, a: plain_clipped(
        math.exp(lp - old), a, 0.1, 0.4
    ),
    "dual_clip": lambda lp, old, engine, a: plain_dual_clip(math.exp(lp - old), a),
    "dual_clip, tight": lambda lp, old, engine, a: plain_dual_clip(
        math.exp(lp - old), a, 0.1, 0.3, 1.3
    ),
    "sapo": lambda lp, old, engine, a: plain_sapo(math.exp(lp - old), a),
    "sapo, sharp": lambda lp, old, engine, a: plain_sapo(math.exp(lp - old), a, 2.0, 0.5),
    "dppo": lambda lp, old, engine, a: plain_dppo(lp, engine, a),
    "dppo, tight": lambda lp, old, engine, a: plain_dppo(lp, engine, a, delta=0.05),
    "dppo, kl": lambda lp, old, engine, a: plain_dppo(lp, engine, a, delta=0.02, kl=True),
}


@pytest.mark.parametrize("name", PLAIN)
def test_a_plain_loop_finds_the_same(name):
    lengths = [200]
    columns = random_columns(lengths)
    rows = zip(
        *(columns[c].tolist() for c in ("logp", "old_logp", "engine_logp", "advantage")),
        strict=True,
    )
    expected = [PLAIN[name](*row) for row in rows]
    loss, stats = VARIANTS[name](tokens(lengths=lengths, **columns))
    assert loss.tolist() == pytest.approx(expected, rel=1e-9)
    for stat, values in stats.items():
        if stat != "policy/clip_frac_dual" or "tight" in name:
            assert 0 < values.mean() < 1, f"{stat} must take part in this test, not everywhere"


# ---- gradients

SMOOTH = [
    "clipped",
    "clipped, clip-higher",
    "dual_clip",
    "dual_clip, tight",
    "sapo",
    "sapo, sharp",
    "dppo",
    "dppo, tight",
    "dppo, kl",
    "clip_cov",
    "kl_cov",
    "geo_mean",
    "geo_mean, tight",
    "importance_sampling",
    "dro",
    "dro, strong",
    "policy_gradient",
    "cross_entropy",
]


@pytest.mark.parametrize("name", SMOOTH)
def test_the_gradient_equals_finite_differences(name):
    lengths = (20, 1, 0, 30)
    columns = random_columns(lengths, seed=1)
    exact = gradient(VARIANTS[name], columns, lengths)
    numeric = numeric_gradient(VARIANTS[name], columns, lengths)
    assert (numeric - exact).abs().max() < 1e-7
    assert exact.abs().max() > 0.05


def sequence_ratios(columns, lengths):
    """The geometric mean of the ratios, per token, by loops."""
    found = []
    for piece, length in zip(parts(columns, lengths), lengths, strict=True):
        pairs = zip(piece["logp"].tolist(), piece["old_logp"].tolist(), strict=True)
        total = sum(lp - old for lp, old in pairs)
        found += [math.exp(total / length)] * length if length else []
    return found


def test_the_gradient_of_gspo_is_the_sequence_ratio_where_it_is_not_cut():
    columns = random_columns()
    found = gradient(VARIANTS["gspo, wide"], columns, LENGTHS).tolist()
    expected = []
    for s, a in zip(sequence_ratios(columns, LENGTHS), columns["advantage"].tolist(), strict=True):
        cut = (a > 0 and s > 1.02) or (a < 0 and s < 0.95)
        expected.append(0.0 if cut else -s * a)
    assert found == pytest.approx(expected)
    assert 0 < expected.count(0.0) < len(expected)


@pytest.mark.parametrize(
    ("name", "anchor", "weight"),
    [
        ("cispo", "old_logp", lambda r: min(r, 5.0)),
        ("cispo, engine", "engine_logp", lambda r: min(max(r, 0.8), 1.3)),
        ("rollout_is", "engine_logp", lambda r: r if 0.5 < r < 5 else 0.0),
        ("rollout_is, tight", "engine_logp", lambda r: r if 0.8 < r < 1.3 else 0.0),
    ],
)
def test_the_gradient_of_a_weighted_log_prob_is_its_weight(name, anchor, weight):
    columns = random_columns([50])
    found = gradient(VARIANTS[name], columns, [50])
    ratios = [
        math.exp(lp - other)
        for lp, other in zip(columns["logp"].tolist(), columns[anchor].tolist(), strict=True)
    ]
    expected = [-weight(r) * a for r, a in zip(ratios, columns["advantage"].tolist(), strict=True)]
    assert found.tolist() == pytest.approx(expected)
    loss, _ = VARIANTS[name](tokens(lengths=[50], **columns))
    assert loss.tolist() == pytest.approx(
        [g * lp for g, lp in zip(expected, columns["logp"].tolist(), strict=True)]
    )


ON_POLICY = [
    "clipped",
    "dual_clip",
    "gspo",
    "cispo",
    "cispo, engine",
    "sapo",
    "sapo, sharp",
    "dppo",
    "dppo, kl",
    "clip_cov",
    "kl_cov",
    "geo_mean",
    "importance_sampling",
    "rollout_is",
    "dro",
]


@pytest.mark.parametrize("name", ON_POLICY)
def test_on_policy_the_gradient_is_the_policy_gradient(name):
    columns = random_columns()
    columns["old_logp"] = columns["engine_logp"] = columns["logp"]
    columns["chosen"] = torch.zeros_like(columns["logp"])
    if name == "geo_mean":  # an advantage per sequence, as is its ratio
        columns["advantage"] = column([1.5] * 5 + [-2.0] + [0.7] * 7 + [-0.3] * 3)
    found = gradient(VARIANTS[name], columns, LENGTHS)
    assert torch.allclose(found, -columns["advantage"], rtol=1e-12, atol=1e-12)


# ---- what must not change anything


@pytest.mark.parametrize("name", VARIANTS)
def test_neither_the_cut_nor_the_order_of_sequences_changes_a_token(name):
    columns = random_columns()
    loss = VARIANTS[name]
    whole, stats = loss(tokens(lengths=LENGTHS, **columns))
    pieces = parts(columns, LENGTHS)

    alone = [loss(tokens(lengths=[n], **p)) for p, n in zip(pieces, LENGTHS, strict=True)]
    assert torch.allclose(torch.cat([found for found, _ in alone]), whole, rtol=1e-12)
    grads = [gradient(loss, p, [n]) for p, n in zip(pieces, LENGTHS, strict=True)]
    exact = gradient(loss, columns, LENGTHS)
    assert (torch.cat(grads) - exact).norm() <= 1e-10 * exact.norm()
    for stat, values in stats.items():
        assert torch.equal(torch.cat([found[stat] for _, found in alone]), values)

    order = [3, 0, 4, 2, 1]
    shuffled = [LENGTHS[i] for i in order]
    turned, _ = loss(tokens(lengths=shuffled, **joined([pieces[i] for i in order])))
    back = dict(zip(order, turned.split(shuffled), strict=True))
    assert torch.allclose(torch.cat([back[i] for i in range(5)]), whole, rtol=1e-12)


# ---- nothing that is not finite

log_probs = st.one_of(
    st.floats(-30, 0, width=32), st.sampled_from([0.0, -1e4, -1e30, -math.inf, -1e-7])
)
advantages = st.one_of(st.floats(-3, 3, width=32), st.sampled_from([0.0, -0.0, 1e12, -1e12]))
sequences = st.lists(
    st.lists(st.tuples(log_probs, log_probs, log_probs, advantages), max_size=4),
    min_size=1,
    max_size=5,
)


@settings(max_examples=50, deadline=None, derandomize=True, database=None)
@given(sequences)
def test_losses_gradients_and_statistics_are_always_finite(rows):
    lengths = [len(s) for s in rows]
    flat = torch.tensor([t for s in rows for t in s], dtype=torch.float32).reshape(-1, 4)
    logp, old, engine, advantage = flat.T.contiguous()
    chosen = torch.ones_like(logp)
    columns = {"old_logp": old, "engine_logp": engine, "advantage": advantage, "chosen": chosen}
    for name, loss in VARIANTS.items():
        live = logp.clone().requires_grad_()
        found, stats = loss(tokens(live, lengths, **columns))
        (slope,) = torch.autograd.grad(found.sum(), live)
        assert found.shape == logp.shape and is_finite(found), name
        assert is_finite(slope), name
        assert all(s.shape == logp.shape and is_finite(s) for s in stats.values()), name
        assert not any(s.requires_grad for s in stats.values()), name


# ---- arguments that make no sense

IMPOSSIBLE = [
    ("clipped", {"low": -0.1}),
    ("clipped", {"low": 1.1}),
    ("clipped", {"high": -0.1}),
    ("clipped", {"high": math.inf}),
    ("clipped", {"high": math.nan}),
    ("dual_clip", {"c": 1.0}),
    ("dual_clip", {"low": 2}),
    ("gspo", {"low": -1e-4}),
    ("gspo", {"high": -1e-4}),
    ("cispo", {"low": 1.5}),
    ("cispo", {"high": -1}),
    ("cispo", {"anchor": "reference"}),
    ("sapo", {"tau_pos": 0}),
    ("sapo", {"tau_neg": -1}),
    ("dppo", {"delta": 0}),
    ("dppo", {"divergence": "js"}),
    ("geo_mean", {"bound": 0}),
    ("rollout_is", {"low": 1.5}),
    ("rollout_is", {"high": -0.5}),
    ("dro", {"beta": 0}),
    ("clip_cov", {"ratio": 0}),
    ("clip_cov", {"ratio": 1.5}),
    ("clip_cov", {"low": 1.5}),
    ("clip_cov", {"high": -0.5}),
    ("kl_cov", {"ratio": 0}),
    ("kl_cov", {"ratio": 2}),
    ("kl_cov", {"coef": 0}),
]


@pytest.mark.parametrize(("name", "arguments"), IMPOSSIBLE)
def test_impossible_arguments_are_refused_before_any_work(name, arguments):
    with pytest.raises(PluginError, match=rf"algorithm\.loss\.{next(iter(arguments))}: "):
        check_arguments(LOSSES[name], arguments, "algorithm.loss", positional=1)


@pytest.mark.parametrize("name", LOSSES)
def test_the_defaults_are_possible(name):
    signature = inspect.signature(LOSSES[name])
    defaults = {n: p.default for n, p in signature.parameters.items() if p.kind is p.KEYWORD_ONLY}
    assert check_arguments(LOSSES[name], defaults, "algorithm.loss", positional=1) == defaults
