"""Plug-ins: found by name, checked before work starts."""

import sys

import pytest

from fledge.errors import PluginError
from fledge.plugins import bind, check_arguments, resolve

SOURCE = """
def score(prompt, response, meta): return 1.0
def typed(x, *, low: float = 0.2, name: str = "a"): return low
def needs(x, *, low: float): return low
class Thing:
    @staticmethod
    def inner(x): return x
number = 3
"""


@pytest.fixture(autouse=True)
def my_plugins(tmp_path, monkeypatch):
    (tmp_path / "mine_xyz.py").write_text(SOURCE)
    (tmp_path / "broken_xyz.py").write_text("import nothing_like_this")
    (tmp_path / "raising_xyz.py").write_text("1 / 0")
    monkeypatch.chdir(tmp_path)
    yield
    for name in ("mine_xyz", "broken_xyz", "raising_xyz"):
        sys.modules.pop(name, None)


def refusal(spec, **options):
    with pytest.raises(PluginError) as caught:
        bind(spec, {"known": len}, "algorithm.loss", **options)
    return str(caught.value)


def test_names_are_found_in_the_working_directory_and_among_built_ins():
    assert resolve("mine_xyz:score", {}, "k")("p", "r", {}) == 1.0
    assert resolve("mine_xyz:Thing.inner", {}, "k")(5) == 5
    assert resolve("known", {"known": len}, "k") is len
    assert resolve(len, {}, "k") is len


def test_what_cannot_be_found_is_said_by_name():
    assert "did you mean 'known'" in refusal("knwn")
    assert "cannot import 'nowhere_xyz'" in refusal("nowhere_xyz:f")
    assert "has no 'missing'" in refusal("mine_xyz:missing")
    assert "not something that can be called" in refusal("mine_xyz:number")
    assert "nothing_like_this" in refusal("broken_xyz:f")
    assert "ZeroDivisionError" in refusal("raising_xyz:f")


def test_signatures_are_checked_before_use():
    said = refusal("mine_xyz:score", positional=("tokens",))
    assert said.startswith("algorithm.loss.response: score(prompt, response, meta) needs this")
    said = refusal("mine_xyz:typed", positional=("tokens",), arguments={"hihg": 1})
    assert "has no such argument" in said and "low, name" in said
    assert "algorithm.loss.low" in refusal("mine_xyz:needs", positional=("tokens",))
    said = refusal("mine_xyz:typed", positional=("tokens",), arguments={"low": "much"})
    assert said.startswith("algorithm.loss.low:") and "'much'" in said


def test_a_required_keyword_does_not_hide_a_wrong_signature():
    said = refusal("mine_xyz:needs", positional=("a", "b"), arguments={"low": 1})
    assert "cannot be called as needs(a, b)" in said


def test_arguments_are_converted_by_their_types():
    bound = bind("mine_xyz:typed", {}, "k", positional=("x",), arguments={"low": 1})
    assert bound("x") == 1.0 and isinstance(bound("x"), float)
    assert check_arguments(lambda **rest: None, {"any": 1}, "k") == {"any": 1}
