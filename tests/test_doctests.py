"""The worked examples in the docstrings are right."""

import doctest
import importlib
import pkgutil

import pytest

import fledge

MODULES = sorted(m.name for m in pkgutil.walk_packages(fledge.__path__, "fledge."))


@pytest.mark.parametrize("name", MODULES)
def test_examples(name):
    found = doctest.testmod(importlib.import_module(name))
    assert found.failed == 0


def test_records_carry_examples():
    tried = doctest.testmod(importlib.import_module("fledge.types")).attempted
    assert tried >= 12
