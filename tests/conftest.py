"""What all tests share: one thread, and a tiny policy for tests that only read it.

Imports are lazy, so that tests without a model start without torch.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import pytest


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """More threads make tiny models slower and change the last bits of sums."""
    if "torch" in sys.modules:
        import torch

        torch.set_num_threads(1)


@pytest.fixture(scope="session")
def policy() -> Iterator[Any]:
    """A tiny policy that no test may change."""
    from fledge.models.fingerprint import module_tensors, tensor_hash
    from helpers import tiny_policy

    made = tiny_policy()
    before = {name: tensor_hash(t) for name, t in module_tensors(made.model).items()}
    yield made
    after = {name: tensor_hash(t) for name, t in module_tensors(made.model).items()}
    assert before == after, "a test has changed the shared policy"


@pytest.fixture(scope="session")
def stock_model(policy: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Plain transformers' view of `policy`."""
    from helpers import stock

    return stock(policy, tmp_path_factory.mktemp("stock"))
