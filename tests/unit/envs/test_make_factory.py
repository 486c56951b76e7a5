import subprocess
import sys

import pytest

from fledge.config import Plugin
from fledge.envs import ENVIRONMENTS, Environment, make_factory
from fledge.errors import PluginError
from fledge.types import Step, Task, user

HERE = __name__
TASK = Task("t", {"prompt": "1+1", "answer": "2"})


class Mine(Environment):
    def __init__(self, task: Task, *, turns: int, hint: str = ""):
        super().__init__(task)
        self.turns, self.hint = turns, hint

    async def reset(self):
        return [user("go")]

    async def step(self, reply):
        return Step(terminated=True)


class Positional(Mine):
    def __init__(self, task: Task, turns: int):
        super().__init__(task, turns=turns)


class NoStep(Environment):
    async def reset(self):
        return []


class NotAnEnvironment:
    def __init__(self, task):
        pass


class SyncStep(Mine):
    def step(self, reply):
        return Step()


class NoTask(Mine):
    def __init__(self):
        pass


def a_function(task):
    return Mine(task, turns=1)


def test_built_in_names_build_a_new_environment_each_time():
    assert {"arithmetic", "reward", "gsm8k", "text2sql"} <= set(ENVIRONMENTS)
    factory = make_factory(Plugin(name="arithmetic"))
    assert factory(TASK) is not factory(TASK)


def test_arguments_are_validated_and_converted_before_any_task():
    made = make_factory(Plugin(name=f"{HERE}:Mine", turns="3"))(TASK)
    assert (made.turns, made.hint, made.key) == (3, "", "t")
    for arguments, said in (
        ({}, r"env\.turns"),
        ({"turns": "many"}, r"env\.turns"),
        ({"turns": 1, "hnt": "x"}, r"env\.hnt.*hint"),
    ):
        with pytest.raises(PluginError, match=said):
            make_factory(Plugin(name=f"{HERE}:Mine", **arguments))


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("NoStep", "NoStep does not define step"),
        ("NotAnEnvironment", "no `async def reset`"),
        ("SyncStep", "no `async def step`"),
        ("NoTask", "cannot be called"),
        ("a_function", "not a class"),
    ],
)
def test_what_is_no_environment_is_refused(name, said):
    with pytest.raises(PluginError, match=said) as caught:
        make_factory(Plugin(name=f"{HERE}:{name}", **({"turns": 1} if name == "SyncStep" else {})))
    assert str(caught.value).startswith("env: ")


def test_arguments_need_not_be_keyword_only():
    assert make_factory(Plugin(name=f"{HERE}:Positional", turns=2))(TASK).turns == 2
    with pytest.raises(PluginError, match=r"env\.turns: Positional\(.*needs this"):
        make_factory(Plugin(name=f"{HERE}:Positional"))


def test_a_misspelt_name_gets_the_nearest():
    with pytest.raises(PluginError, match="did you mean 'arithmetic'"):
        make_factory(Plugin(name="arithmetics"))


def test_an_author_of_environments_needs_no_torch():
    code = (
        "import sys, fledge.envs; sys.exit('torch' in sys.modules or 'tokenizers' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
