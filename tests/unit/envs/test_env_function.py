import asyncio
import functools
import subprocess
import sys
import threading
import time

import pytest

from fledge.config import Plugin
from fledge.envs import make_factory
from fledge.envs.threads import in_thread
from fledge.errors import DataError, PluginError, RewardError
from fledge.types import Task, assistant, user

HERE = __name__
seen = []


def exact(prompt, response, meta):
    seen.append((prompt, response, dict(meta), threading.current_thread()))
    meta.clear()
    return response == meta.get("answer", "4")


async def exact_async(prompt, response, meta):
    await asyncio.sleep(0)
    return 0.5


class Grader:
    async def __call__(self, prompt, response, meta):
        return 0.25


grader = Grader()
partial_async = functools.partial(exact_async)


def two_arguments(prompt, response):
    return 1.0


def nothing(prompt, response, meta):
    return None


def not_a_number(prompt, response, meta):
    return float("nan")


def broken(prompt, response, meta):
    raise OSError("sandbox is gone")


def parts(prompt, response, meta):
    return {"right": True, "short": 0.25}


def no_parts(prompt, response, meta):
    return {}


def one_bad_part(prompt, response, meta):
    return {"right": 1.0, "short": None}


def factory(name, **arguments):
    return make_factory(Plugin(name="reward", function=f"{HERE}:{name}", **arguments))


def play(environment, reply="4"):
    async def episode():
        opening = await environment.reset()
        return opening, await environment.step(assistant(reply))

    return asyncio.run(episode())


def test_function_scores_the_reply_in_a_thread_and_cannot_change_the_task():
    seen.clear()
    task = Task("t", {"prompt": "2+2", "answer": "4"})
    opening, step = play(factory("exact")(task))
    assert opening == [user("2+2")]
    assert (step.reward, step.terminated) == (1.0, True)
    assert type(step.reward) is float
    (call,) = seen
    assert call[:3] == ("2+2", "4", {"prompt": "2+2", "answer": "4"})
    assert call[3] is not threading.main_thread()
    assert task.data == {"prompt": "2+2", "answer": "4"}


@pytest.mark.parametrize(
    ("name", "reward"), [("exact_async", 0.5), ("grader", 0.25), ("partial_async", 0.5)]
)
def test_async_functions_are_awaited(name, reward):
    assert play(factory(name)(Task("t", {"prompt": "x"})))[1].reward == reward


def test_prompt_key_and_message_prompts():
    listed = [{"role": "system", "content": "Add."}, {"role": "user", "content": "2+2"}]
    seen.clear()
    opening, _ = play(factory("exact", prompt_key="question")(Task("t", {"question": listed})))
    assert [m.role for m in opening] == ["system", "user"]
    assert seen[0][0] == "2+2"


def test_missing_prompt_field_is_named_with_those_there_are():
    with pytest.raises(DataError, match=r"env\.prompt_key.*'prompt'.*question"):
        factory("exact")(Task("t", {"question": "x"}))


def test_a_function_may_return_the_named_parts_of_a_reward():
    step = play(factory("parts")(Task("t", {"prompt": "x"})))[1]
    assert step.components == {"right": 1.0, "short": 0.25} and step.reward == 0
    with pytest.raises(RewardError, match=r"no_parts, task 't', gave the reward {}"):
        play(factory("no_parts")(Task("t", {"prompt": "x"})))
    with pytest.raises(RewardError, match=r"one_bad_part, task 't', short gave the reward None"):
        play(factory("one_bad_part")(Task("t", {"prompt": "x"})))


def test_without_a_function_the_reward_is_left_to_a_model():
    step = play(make_factory(Plugin(name="reward"))(Task("t", {"prompt": "x"})))[1]
    assert (step.reward, step.terminated) == (0.0, True)


def test_everything_about_the_function_is_checked_before_any_task():
    with pytest.raises(PluginError, match=r"env\.function.*two_arguments"):
        factory("two_arguments")
    with pytest.raises(PluginError, match=r"env\.function.*no 'missing'"):
        factory("missing")
    with pytest.raises(PluginError, match=r"env\.promt_key.*prompt_key"):
        factory("exact", promt_key="x")


@pytest.mark.parametrize("name", ["nothing", "not_a_number"])
def test_what_is_no_reward_is_refused(name):
    with pytest.raises(RewardError, match=rf"env\.function: {name}, task 't', gave the reward"):
        play(factory(name)(Task("t", {"prompt": "x"})))


def test_a_failing_function_is_not_a_reward_of_zero():
    with pytest.raises(OSError, match="sandbox is gone"):
        play(factory("broken")(Task("t", {"prompt": "x"})))


def test_a_function_that_never_returns_does_not_outlive_its_timeout():
    """In a process of its own: what must not happen is that the process cannot end."""
    code = (
        "import asyncio, time\n"
        "from fledge.envs.threads import in_thread\n"
        "async def main():\n"
        "    try:\n"
        "        await asyncio.wait_for(in_thread(time.sleep, 1e6), 0.1)\n"
        "    except TimeoutError:\n"
        "        print('given up')\n"
        "asyncio.run(main())\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=True
    )
    assert done.stdout == "given up\n" and done.stderr == ""


def test_slow_functions_do_not_queue():
    async def many():
        began = time.monotonic()
        await asyncio.gather(*(in_thread(time.sleep, 0.2) for _ in range(64)))
        return time.monotonic() - began

    assert asyncio.run(many()) < 2.0


@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt, StopIteration, ValueError])
def test_whatever_a_function_raises_arrives_as_an_ordinary_error(kind):
    def fail():
        raise kind("stop")

    with pytest.raises((RuntimeError, ValueError), match="stop"):
        asyncio.run(in_thread(fail))
