"""Losses and estimators of users: whatever they do wrong is said under the name of their key."""

import pytest
import torch

from fledge.algorithms.algorithm import Algorithm, checked_loss
from fledge.algorithms.tokens import Tokens
from fledge.errors import PluginError
from fledge.types import Episode, Group, Outcome, Task


def tokens():
    logp = torch.tensor([-1.0, -2.0, -0.5], requires_grad=True)
    fixed = logp.detach()
    return Tokens(
        logp=logp,
        entropy=logp * 2,
        engine_logp=fixed,
        old_logp=fixed,
        advantage=torch.ones(3),
        weight=torch.ones(3),
        sequence=torch.zeros(3, dtype=torch.long),
        sequences=1,
    )


@pytest.mark.parametrize(
    ("loss", "said"),
    [
        (lambda x: -x.logp, "must return"),
        (lambda x: (x.logp.sum(), {}), "returned shape"),
        (lambda x: (x.logp.detach(), {}), "nothing would train"),
        (lambda x: (x.logp, {"clip": 0.5}), "statistic 'clip'"),
        (lambda x: {}["missing"], "KeyError"),
    ],
)
def test_a_loss_that_cannot_be_trusted_is_refused_by_name(loss, said):
    with pytest.raises(PluginError, match=f"algorithm.loss: .*{said}"):
        checked_loss(loss, tokens())


def test_a_good_loss_passes_and_its_statistics_carry_no_graph():
    loss, stats = checked_loss(lambda x: (-x.logp, {"p": x.logp.exp()}), tokens())
    assert loss.requires_grad and not stats["p"].requires_grad


@pytest.mark.parametrize("values", [[None, 1.0], ["x", 1.0], None])
def test_an_estimator_that_returns_no_numbers_is_refused_by_name(values):
    episodes = tuple(Episode("t", i, (), (1.0,), Outcome.OK, ()) for i in range(2))
    group = Group(Task("t", {}), 0, episodes)
    algorithm = Algorithm(
        lambda groups: [values], lambda x: (x.logp, {}), "token_mean", frozenset()
    )
    with pytest.raises(PluginError, match=r"algorithm\.advantage"):
        algorithm.judge([group])
