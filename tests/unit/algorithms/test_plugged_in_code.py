"""Losses and estimators of users: whatever they do wrong is said under the name of their key."""

import pytest
import torch

from fledge.algorithms import make_algorithm
from fledge.algorithms.algorithm import checked_loss
from fledge.algorithms.tokens import Tokens
from fledge.config.schema import AlgorithmConfig
from fledge.data.batch import pack
from fledge.errors import PluginError
from fledge.types import Episode, Group, Outcome, Task


def tokens():
    logp = torch.tensor([-1.0, -2.0, -0.5], requires_grad=True)
    return Tokens.of({"advantage": torch.ones(3)}, logp, logp * 2, torch.tensor([3]))


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
    algorithm = make_algorithm(AlgorithmConfig(advantage=lambda group: values))
    with pytest.raises(PluginError, match=r"algorithm\.advantage"):
        algorithm.judge(pack([Group(Task("t", {}), 0, episodes)]), step=0)


class NoPrepare:
    """A loss of a class: made once, called for each micro-batch."""

    def __init__(self, *, scale: float = 1.0) -> None:
        self.scale = scale

    def __call__(self, x: Tokens):
        return -self.scale * x.logp, {}


def test_a_loss_may_be_a_class_with_arguments():
    spec = {"name": NoPrepare, "scale": 3.0}
    loss, _ = make_algorithm(AlgorithmConfig(loss=spec)).loss(tokens())
    assert loss.tolist() == [3.0, 6.0, 1.5]
    with pytest.raises(PluginError, match=r"algorithm\.loss\.sclae.*scale"):
        make_algorithm(AlgorithmConfig(loss={"name": NoPrepare, "sclae": 3.0}))


@pytest.mark.parametrize(
    ("correction", "said"),
    [
        (lambda x, log_rho: 1 / 0, "ZeroDivisionError"),
        (lambda x, log_rho: 1.0, "must return one weight per token"),
        (lambda x, log_rho: log_rho[:1], "must return one weight per token"),
    ],
)
def test_a_correction_that_cannot_be_trusted_is_refused_by_name(correction, said):
    algorithm = make_algorithm(AlgorithmConfig(correction=[correction]))
    with pytest.raises(PluginError, match=rf"algorithm\.correction: .*{said}"):
        algorithm.loss(tokens())
