"""Drawing tokens: frequencies, filters, seeds. Fixed logits, no model."""

from __future__ import annotations

import dataclasses
import functools
import math

import numpy as np
import pytest
import torch

from fledge.inference.sampling import Columns, draw, uniform
from fledge.types import Sampling
from helpers import filtered_probabilities

DRAWS = 20_000
LOGITS = np.array(
    [2.0, -1.0, 0.3, 1.2, 0.9, -0.2, -2.5, 1.9, 0.0, 0.1, -0.6, 1.1, -4.0, 0.7, -1.4, 0.5],
    dtype=np.float32,
)
CPU = torch.device("cpu")


@functools.cache
def seeds() -> torch.Tensor:
    """The column of the seeds 0 to 19,999, made once: it is the slow part."""
    return Columns.of([Sampling(seed=s) for s in range(DRAWS)], [0] * DRAWS, CPU).seed


def draws(sampling: Sampling, *, by: str = "seed") -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """20,000 first tokens of different seeds, or 20,000 tokens of one seed."""
    one = Columns.of([sampling], [0], CPU)
    many = {
        field.name: getattr(one, field.name).expand(DRAWS)
        for field in dataclasses.fields(one)
        if isinstance(getattr(one, field.name), torch.Tensor)
    }
    many |= {"seed": seeds()} if by == "seed" else {"index": torch.arange(DRAWS)}
    columns = dataclasses.replace(one, **many)
    token, logp, plain = draw(torch.from_numpy(LOGITS).expand(DRAWS, -1), columns)
    return token.numpy(), logp.double().numpy(), plain.double().numpy()


def chi_square_p(observed: np.ndarray, expected: np.ndarray) -> float:
    """Chance of a fit at least this bad: the upper incomplete gamma function."""
    statistic = ((observed - expected) ** 2 / expected).sum()
    freedom = len(expected) - 1
    half = torch.tensor([freedom / 2, statistic / 2], dtype=torch.float64)
    return torch.special.gammaincc(half[0], half[1]).item()


SETTINGS = {
    "plain": Sampling(),
    "cool": Sampling(temperature=0.7),
    "hot": Sampling(temperature=1.3),
    "top_k": Sampling(top_k=5),
    "top_p": Sampling(top_p=0.8),
    "min_p": Sampling(min_p=0.15),
    "top_k_top_p": Sampling(top_k=8, top_p=0.7),
    "hot_min_p": Sampling(temperature=1.3, min_p=0.2),
    "all": Sampling(temperature=0.7, top_k=10, top_p=0.9, min_p=0.05),
}


@pytest.mark.parametrize("by", ["seed", "index"])
@pytest.mark.parametrize("name", sorted(SETTINGS))
def test_tokens_are_drawn_as_often_as_the_settings_say(name: str, by: str):
    probability = filtered_probabilities(LOGITS, SETTINGS[name])
    token, logp, _ = draws(SETTINGS[name], by=by)
    counts = np.bincount(token, minlength=len(LOGITS))
    allowed = probability > 0
    assert counts[~allowed].sum() == 0, "a filtered token was drawn"
    assert chi_square_p(counts[allowed], DRAWS * probability[allowed]) > 1e-3
    assert np.abs(logp - np.log(probability[token])).max() < 1e-5


def test_the_settings_really_filter():
    """A check of the tests above: each filter leaves out something, and not the same."""
    kept = {
        name: frozenset(np.flatnonzero(filtered_probabilities(LOGITS, s)))
        for name, s in SETTINGS.items()
    }
    assert len(kept["plain"]) == len(kept["cool"]) == len(LOGITS)
    assert len(kept["top_k"]) == 5
    filters = [kept[n] for n in ("top_k", "top_p", "min_p", "top_k_top_p", "hot_min_p", "all")]
    assert all(len(f) < len(LOGITS) for f in filters) and len(set(filters)) >= 5


def test_chi_square_knows_a_wrong_frequency():
    expected = np.array([5000.0, 15000.0])
    assert chi_square_p(np.array([5000, 15000]), expected) == pytest.approx(1.0)
    # 5% of a chi-square with one degree of freedom lie above 3.841
    off = math.sqrt(3.841 * 3750)
    assert chi_square_p(expected + np.array([off, -off]), expected) == pytest.approx(0.05, abs=1e-3)
    assert chi_square_p(np.array([5500, 14500]), expected) < 1e-3


def test_plain_log_probs_ignore_temperature_and_filters():
    token, logp, plain = draws(SETTINGS["all"])
    softmax = np.exp(LOGITS.astype(np.float64)) / np.exp(LOGITS.astype(np.float64)).sum()
    assert np.abs(plain - np.log(softmax[token])).max() < 1e-5
    assert np.abs(plain - logp).max() > 0.1


def test_greedy_takes_the_largest_logit_and_shares_a_batch_with_sampling():
    settings = [Sampling(temperature=0.0, top_k=3), Sampling(seed=5), Sampling(temperature=0.0)]
    columns = Columns.of(settings, [0, 0, 4], CPU)
    logits = torch.from_numpy(LOGITS).expand(3, -1).clone()
    logits[2, 12] = 9.0
    token, logp, plain = draw(logits, columns)
    assert token[0] == 0 and token[2] == 12
    assert logp[0] == logp[2] == 0.0 and logp[1] < 0 and plain[0] < 0


def test_a_neighbour_with_filters_does_not_filter_others():
    alone = draw(torch.from_numpy(LOGITS)[None], Columns.of([Sampling(seed=3)], [7], CPU))
    both = Columns.of([Sampling(seed=3), Sampling(top_k=1, seed=3)], [7, 7], CPU)
    token, logp, _ = draw(torch.from_numpy(LOGITS).expand(2, -1), both)
    assert token[0] == alone[0][0] and logp[0] == pytest.approx(alone[1][0].item(), abs=1e-6)
    assert token[1] == 0 and logp[1] == 0


def test_the_most_likely_token_survives_the_tightest_filters():
    tight = Sampling(top_p=1e-9, min_p=1.0)
    token, logp, _ = draws(tight)
    assert set(token) == {0} and set(logp) == {0.0}


def test_uniform_numbers_fill_the_unit_interval():
    found = uniform(seeds(), torch.zeros(DRAWS, dtype=torch.int64)).numpy()
    assert found.min() >= 0 and found.max() < 1
    counts = np.histogram(found, bins=50, range=(0, 1))[0]
    assert chi_square_p(counts, np.full(50, DRAWS / 50)) > 1e-3


@pytest.mark.parametrize("apart", [1, 2, 64])
def test_first_draws_of_neighbouring_seeds_are_uncorrelated(apart: int):
    found = uniform(seeds(), torch.zeros(DRAWS, dtype=torch.int64)).numpy()
    correlation = np.corrcoef(found[:-apart], found[apart:])[0, 1]
    assert abs(correlation) < 4 / math.sqrt(DRAWS)


def test_the_next_draw_of_a_seed_is_not_the_draw_of_the_next_seed():
    settings = [Sampling(seed=s) for s in range(1000)]
    now = Columns.of(settings, [0] * 1000, CPU)
    later = Columns.of(settings, [1] * 1000, CPU)
    first = uniform(now.seed, now.index).numpy()
    second = uniform(later.seed, later.index).numpy()
    assert len({*first, *second}) == 2000
    assert abs(np.corrcoef(first[1:], second[:-1])[0, 1]) < 4 / math.sqrt(1000)


@pytest.mark.parametrize("seed", [0, -1, 2**63 - 1, 2**63, 2**64 - 1])
def test_any_integer_is_a_seed(seed: int):
    columns = Columns.of([Sampling(seed=seed)], [0], CPU)
    token, _, _ = draw(torch.from_numpy(LOGITS)[None], columns)
    assert 0 <= token.item() < len(LOGITS)


def test_logits_of_minus_infinity_are_never_drawn():
    logits = torch.from_numpy(LOGITS).clone()
    logits[[0, 15]] = -torch.inf
    columns = Columns.of([Sampling(seed=s) for s in range(2000)], [0] * 2000, CPU)
    token, logp, _ = draw(logits.expand(2000, -1), columns)
    assert not {0, 15} & set(token.tolist()) and logp.isfinite().all()
