"""Every built-in loss, correction and side term gives the same gradient however a mini-batch is
cut and ordered, in fp64 to 1e-10 and in fp32 to 1e-5; and only trained tokens take part in it.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from fledge.algorithms import CORRECTIONS, LOSSES, Algorithm, make_algorithm, token_weights
from fledge.config.schema import AlgorithmConfig
from fledge.data.batch import Batch
from fledge.trainer import LocalTrainer, copy_of
from helpers import make_exact, ragged_batch, run, tiny_policy, trainer_of

SEQUENCE_LOSSES = ("gspo", "geo_mean")
ARGUMENTS = {
    "clip_cov": {"ratio": 0.1, "cov_low": 0.0, "cov_high": 50.0},
    "kl_cov": {"ratio": 0.1},
    "cispo": {"low": 0.3, "high": 0.3},
    "dppo": {"delta": 1e-4},
    "rollout_is": {"low": 0.3, "high": 0.3},
    "token_clamp": {"eps": 0.1},
    "geometric_mask": {"low": 0.9, "high": 1.1},
    "outlier_mask": {"low": 0.5, "high": 2.0},
    "token_tis": {"cap": 1.2},
    "icepop": {"low": 0.7, "high": 1.5},
}
"""Bounds that some tokens of the crafted batch are inside of and others are not."""


def named(name: str) -> dict[str, object]:
    return {"name": name, **ARGUMENTS.get(name, {})}


SETTINGS: dict[str, dict[str, object]] = {name: {"loss": named(name)} for name in LOSSES} | {
    f"correction {name}": {"correction": [named(name)]} for name in CORRECTIONS
}
SETTINGS["all side terms"] = {
    "kl": {"coef": 0.1, "estimator": "k2"},
    "entropy_coef": 0.05,
    "advantage": "gae",
    "critic": {"model": "head"},
}


def algorithm(name: str) -> Algorithm:
    settings = {"old": "recomputed", "epochs": 2, **SETTINGS[name]}
    return make_algorithm(AlgorithmConfig(**settings))


@functools.cache
def trained(double: bool) -> LocalTrainer:
    policy = tiny_policy()
    if double:
        make_exact(policy.model)
    reference = {"ref_logp": copy_of(policy, frozen=True)}
    trainer = trainer_of(policy, frozen=reference, value_head=True)
    torch.nn.init.normal_(trainer.value_head.linear.weight, generator=_generator(3))
    if double:
        trainer.value_head.double()
    return trainer


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def two_rows_per_sequence(batch: Batch) -> Batch:
    """Episodes with several segments: neighbours become one sequence."""
    rows = tuple(replace(row, sequence=number // 2) for number, row in enumerate(batch.rows))
    return replace(batch, rows=rows)


def mini_batch(algo: Algorithm, trainer: LocalTrainer, reduction: str) -> Batch:
    """Old, engine and reference log-probs near the present ones, so that every bound acts."""
    batch = run(trainer.score(two_rows_per_sequence(ragged_batch()), {"old_logp"}))
    present = batch.columns["old_logp"].double()
    count = len(present)

    def near(seed: int, scale: float) -> Tensor:
        noise = torch.randn(count, generator=_generator(seed), dtype=torch.float64)
        return present + scale * noise

    batch = batch.with_columns(
        old_logp=near(5, 0.3),
        engine_logp=near(6, 0.4),
        ref_logp=near(7, 0.5),
        value=near(8, 1.0),
        returns=near(9, 1.0),
        draw=torch.rand(count, generator=_generator(10), dtype=torch.float64),
        fresh_logp=present,
    )
    reduce = functools.partial(token_weights, reduction, max_length=12)
    return algo.prepare(next(iter(batch.updates(1, 1, 0, reduce))))


def gradients(trainer: LocalTrainer, micros: Sequence[Batch], algo: Algorithm) -> dict[str, Tensor]:
    trainer.optimizer.clear()
    for micro in micros:
        run(trainer.forward_backward(micro, algo.loss))
    found = {name: g.clone() for name, g in trainer.optimizer.gradients().items()}
    trainer.optimizer.clear()
    trainer.metrics()
    return found


def whole_sequences(batch: Batch) -> list[list[int]]:
    found: dict[int, list[int]] = {}
    for index, row in enumerate(batch.rows):
        found.setdefault(row.sequence, []).append(index)
    return list(found.values())


@pytest.mark.parametrize(("double", "allowed"), [(True, 1e-10), (False, 1e-5)])
@pytest.mark.parametrize("name", SETTINGS)
def test_the_gradient_does_not_depend_on_cut_or_order(name: str, double: bool, allowed: float):
    algo, trainer = algorithm(name), trained(double)
    reduction = "sequence_mean" if name in SEQUENCE_LOSSES else "token_mean"
    batch = mini_batch(algo, trainer, reduction)
    whole = gradients(trainer, batch.micros(10**9), algo)
    sequences = whole_sequences(batch)
    backwards = [i for indices in reversed(sequences) for i in indices]
    budget = batch.micros(40)
    assert 1 < len(budget) < len(sequences)
    for cut in (
        [batch.select(indices) for indices in sequences],
        [batch.select(backwards)],
        budget,
    ):
        other = gradients(trainer, cut, algo)
        assert whole.keys() == other.keys()
        for tensor, gradient in whole.items():
            gap = (gradient - other[tensor]).norm() / gradient.norm()
            assert gap <= allowed, f"{tensor} differs by {gap:.2g}"


def test_the_crafted_mini_batch_is_one_in_which_every_bound_acts():
    """A check of the test above: what is never clipped or chosen is not compared."""
    trainer = trained(True)
    for name in SETTINGS:
        algo = algorithm(name)
        batch = mini_batch(algo, trainer, "token_mean")
        for micro in batch.micros(10**9):
            run(trainer.forward_backward(micro, algo.loss))
        metrics = trainer.metrics()
        trainer.optimizer.clear()
        acts = [
            v for k, v in metrics.items() if k.startswith(("policy/clip_frac", "policy/masked"))
        ]
        acts += [metrics["policy/cov_chosen_frac"]] if "cov" in name else []
        if name.startswith("correction"):
            acts.append(abs(metrics["correction/weight"] - 1))
        unbounded = ("policy_gradient", "importance_sampling", "sapo", "dro")
        assert any(acts) or name in unbounded, f"{name}: {metrics}"


@pytest.mark.parametrize("name", SETTINGS)
def test_untrained_tokens_take_no_part(name: str):
    """Columns cover trained tokens only; what follows the last one changes nothing either."""
    algo, trainer = algorithm(name), trained(True)
    reduction = "sequence_mean" if name in SEQUENCE_LOSSES else "token_mean"
    batch = mini_batch(algo, trainer, reduction)
    padded = replace(
        batch,
        rows=tuple(replace(row, token_ids=(*row.token_ids, 3, 3, 3)) for row in batch.rows),
    )
    ours, other = (gradients(trainer, [b], algo) for b in (batch, padded))
    assert all(torch.equal(gradient, other[tensor]) for tensor, gradient in ours.items())
