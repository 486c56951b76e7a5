"""Losses and reductions: gradients against finite differences, and nothing that is not finite."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fledge.algorithms import REDUCTIONS, make_algorithm, token_weights
from fledge.algorithms.losses import clipped, cross_entropy, k3, policy_gradient
from fledge.algorithms.tokens import Tokens, safe_ratio
from fledge.config.schema import AlgorithmConfig
from fledge.errors import PluginError


def tokens(logp: Tensor, **columns: Tensor) -> Tokens:
    given = {
        "entropy": torch.zeros_like(logp),
        "engine_logp": logp.detach(),
        "old_logp": logp.detach(),
        "advantage": torch.ones_like(logp),
        "weight": torch.ones_like(logp),
        "sequence": torch.zeros(len(logp), dtype=torch.long),
        "sequences": 1,
    }
    return Tokens(logp=logp, **{**given, **columns})


def random_columns(count: int = 200) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)

    def noise() -> Tensor:
        return torch.randn(count, generator=generator, dtype=torch.float64)

    logp = -noise().abs()
    return {"logp": logp, "old_logp": logp + 0.4 * noise(), "advantage": noise()}


def gradient(loss, columns: dict[str, Tensor]) -> Tensor:
    logp = columns["logp"].clone().requires_grad_()
    found, _ = loss(tokens(**{**columns, "logp": logp}))
    return torch.autograd.grad(found.sum(), logp)[0]


@pytest.mark.parametrize("bounds", [{}, {"low": 0.1, "high": 0.4}])
def test_the_gradient_of_clipped_equals_finite_differences(bounds):
    columns = random_columns()
    step = 1e-6

    def value(shift: float) -> Tensor:
        return clipped(tokens(**{**columns, "logp": columns["logp"] + shift}), **bounds)[0]

    numeric = (value(step) - value(-step)) / (2 * step)
    exact = gradient(lambda x: clipped(x, **bounds), columns)
    assert (numeric - exact).abs().max() < 1e-6
    share = (exact == 0).double().mean()
    assert 0.1 < share < 0.6, "clipping must take part in this test, but not everywhere"


def test_clipped_is_the_ppo_surrogate():
    ratio = torch.tensor([0.5, 0.5, 1.0, 1.5, 1.5], dtype=torch.float64)
    advantage = torch.tensor([1.0, -1.0, 2.0, 1.0, -1.0], dtype=torch.float64)
    x = tokens(ratio.log(), old_logp=torch.zeros(5).double(), advantage=advantage)
    loss, stats = clipped(x, low=0.2, high=0.3)
    assert loss.tolist() == pytest.approx([-0.5, 0.8, -2.0, -1.3, 1.5])
    assert stats["policy/clip_frac_low"].tolist() == [0, 1, 0, 0, 0]
    assert stats["policy/clip_frac_high"].tolist() == [0, 0, 0, 1, 0]


def test_on_policy_the_gradient_of_clipped_is_the_policy_gradient():
    columns = random_columns()
    columns["old_logp"] = columns["logp"]
    assert torch.allclose(gradient(clipped, columns), gradient(policy_gradient, columns))
    assert torch.equal(gradient(policy_gradient, columns), -columns["advantage"])


def test_cross_entropy_is_weighed_per_token():
    weight = torch.tensor([0.0, 0.5, 2.0])
    loss, stats = cross_entropy(tokens(torch.tensor([-1.0, -2.0, -3.0]), weight=weight))
    assert loss.tolist() == [0.0, 1.0, 6.0]
    assert stats["sft/loss"].tolist() == [1.0, 2.0, 3.0]


def test_k3_is_unbiased_and_never_negative():
    p = torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64)
    q = torch.tensor([0.4, 0.1, 0.5], dtype=torch.float64)
    found = k3(p.log(), q.log())
    assert (found >= 0).all()
    assert (p * found).sum() == pytest.approx((p * (p / q).log()).sum().item())
    assert k3(p.log(), p.log()).tolist() == [0, 0, 0]


numbers = st.floats(-1e4, 0, allow_nan=False, width=32)


@settings(max_examples=80, deadline=None, derandomize=True, database=None)
@given(
    st.lists(
        st.tuples(numbers, numbers, numbers, st.floats(-1e3, 1e3, width=32)),
        min_size=1,
        max_size=8,
    )
)
def test_no_loss_is_ever_nan_however_far_the_log_probs_are_apart(rows):
    logp, old, reference, advantage = torch.tensor(rows, dtype=torch.float32).T
    config = AlgorithmConfig(kl_coef=0.1, entropy_coef=0.01, epochs=2)
    algorithm = make_algorithm(config)
    for loss in (algorithm.loss, policy_gradient, cross_entropy):
        live = logp.clone().requires_grad_()
        x = tokens(live, old_logp=old, ref_logp=reference, advantage=advantage)
        value, stats = loss(x)
        value.sum().backward()
        assert value.isfinite().all() and live.grad.isfinite().all()
        assert all(s.isfinite().all() for s in stats.values())
    assert safe_ratio(logp, old).isfinite().all()


# ---- side terms


def test_side_terms_are_added_with_their_coefficients_and_reported():
    logp = torch.tensor([-1.0, -2.0])
    reference, entropy = torch.tensor([-1.5, -1.0]), torch.tensor([0.3, 0.7])
    x = tokens(logp, ref_logp=reference, entropy=entropy)
    plain, _ = make_algorithm(AlgorithmConfig()).loss(x)
    both, stats = make_algorithm(AlgorithmConfig(kl_coef=0.5, entropy_coef=0.25)).loss(x)
    expected = plain + 0.5 * k3(logp, reference) - 0.25 * entropy
    assert torch.allclose(both, expected)
    assert {"term/policy", "term/kl", "term/entropy", "policy/kl_ref"} <= stats.keys()
    assert stats["term/entropy"].tolist() == pytest.approx([0.3, 0.7])


def test_only_what_is_needed_is_scored():
    assert make_algorithm(AlgorithmConfig()).needs == frozenset()
    assert make_algorithm(AlgorithmConfig(kl_coef=0.1)).needs == {"ref_logp"}
    assert make_algorithm(AlgorithmConfig(epochs=2)).needs == {"old_logp"}
    assert make_algorithm(AlgorithmConfig(minibatches=2)).needs == {"old_logp"}


def reduced(x):
    return -x.logp.mean(), {}


def test_a_loss_that_reduces_by_itself_is_refused():
    algorithm = make_algorithm(AlgorithmConfig(loss=f"{__name__}:reduced"))
    with pytest.raises(PluginError, match=r"expected one number per token \(3,\)"):
        algorithm.loss(tokens(torch.tensor([-1.0, -2.0, -3.0])))


def test_arguments_of_a_loss_have_an_effect():
    x = tokens(torch.zeros(1), old_logp=torch.full((1,), -1.0))
    wide, _ = make_algorithm(AlgorithmConfig(loss={"name": "clipped", "high": 0.5})).loss(x)
    assert wide.item() == pytest.approx(-1.5)


def test_a_sequence_mean_covers_each_sequence_alone():
    x = tokens(torch.zeros(5), sequence=torch.tensor([0, 1, 0, 1, 1]), sequences=2)
    found = x.sequence_mean(torch.tensor([1.0, 10.0, 3.0, 20.0, 60.0]))
    assert found.tolist() == [2.0, 30.0, 2.0, 30.0, 30.0]


# ---- reductions

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
