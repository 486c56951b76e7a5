import asyncio
import functools
import threading
import time
from dataclasses import dataclass
from typing import Annotated, Literal

import pytest
from pydantic import BaseModel, Field

from fledge.envs.check import check_env
from fledge.envs.tools import (
    TagEnvironment,
    Toolbox,
    ToolEnvironment,
    ToolFailure,
    as_tool,
    between,
    cut,
)
from fledge.errors import DataError, PluginError
from fledge.types import Message, Outcome, Step, Task, ToolCall, assistant, user

TASK = Task("t", {})


def add(a: int, b: int = 1) -> int:
    """The sum of two numbers.

    Whole ones only.

    Args:
        a: the first
        b (int): the second, which
            may be left out
    """
    return a + b


async def later(text: str) -> str:
    """Say it later."""
    await asyncio.sleep(0.01)
    return text


def nap(seconds: float) -> str:
    """Sleep."""
    time.sleep(seconds)
    return "awake"


def broken(kind: str) -> str:
    """Fail."""
    raise {"os": FileNotFoundError(2, "No such file or directory", "/srv/private/key.txt"),
           "path": ValueError("cannot read /srv/private/key.txt or C:\\secrets\\key"),
           "own_timeout": TimeoutError("the pump timed out"),
           "exit": SystemExit(3),
           "long": ValueError("x" * 10_000)}[kind]  # fmt: skip


def down() -> str:
    """Not there."""
    raise ToolFailure("the server is gone")


def ask(toolbox, *calls):
    return asyncio.run(toolbox.answer(calls))


def call(name, /, **arguments):
    return ToolCall(name, arguments)


def test_a_function_becomes_a_tool():
    tool = as_tool(add)
    assert (tool.name, tool.description) == ("add", "The sum of two numbers.\n\nWhole ones only.")
    assert tool.parameters == {
        "type": "object",
        "additionalProperties": False,
        "properties": {
            "a": {"type": "integer", "description": "the first"},
            "b": {"type": "integer", "default": 1,
                  "description": "the second, which may be left out"},
        },
        "required": ["a"],
    }  # fmt: skip


class Point(BaseModel):
    x: int
    title: str = "p"


def draw(
    schema: Point, copy: Annotated[int, Field(ge=1, description="how often")], json: Literal["a"]
) -> str:
    """Names that pydantic uses itself."""
    return f"{schema.x} {copy} {json}"


def test_names_and_nested_types_are_those_of_the_function():
    parameters = as_tool(draw).parameters
    assert list(parameters["properties"]) == ["schema", "copy", "json"]
    assert parameters["properties"]["copy"]["description"] == "how often"
    assert "title" not in parameters and "title" in parameters["$defs"]["Point"]["properties"]
    (answer,) = ask(Toolbox([draw]), call("draw", schema={"x": 4}, copy=2, json="a"))
    assert answer == Message("tool", "4 2 a", tool="draw")


def untyped(a) -> int:
    """No type."""
    return a


def silent(a: int) -> int:
    return a


def positional(a: int, /) -> int:
    """By place."""
    return a


def spread(*a: int) -> int:
    """Many."""
    return 0


def opaque(a: threading.Thread) -> int:
    """No schema."""
    return 0


def misdescribed(a: int) -> int:
    """One.

    Args:
        b: not there
    """
    return a


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (untyped, "tool untyped: a has no type"),
        (silent, "tool silent: give it a docstring"),
        (positional, "cannot be given by name"),
        (spread, "cannot be given by name"),
        (opaque, "tool opaque: no JSON schema"),
        (misdescribed, "describes 'b', which it lacks"),
    ],
)
def test_a_function_that_cannot_be_a_tool_is_refused(function, said):
    with pytest.raises(PluginError, match=said):
        as_tool(function)


def test_a_toolbox_is_checked_when_it_is_made():
    with pytest.raises(PluginError, match="two tools named 'add'"):
        Toolbox([add, add])
    with pytest.raises(PluginError, match="'ad', which is no tool"):
        Toolbox([add], timeouts={"ad": 1.0})
    with pytest.raises(PluginError, match="max_output"):
        Toolbox([add], max_output=10)


def test_answers_come_in_the_order_of_the_calls():
    toolbox = Toolbox([add, later, nap])
    calls = [call("nap", seconds=0.05), call("add", a=2, b="3"), call("later", text="x")]
    answers = ask(toolbox, *calls, call("add", a=1))
    assert [a.content for a in answers] == ["awake", "5", "x", "2"]
    assert [(a.role, a.tool) for a in answers][:2] == [("tool", "nap"), ("tool", "add")]
    assert (toolbox.calls, toolbox.errors) == (4, 0)


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (call("ad", a=1), "error: there is no tool 'ad'; did you mean 'add'? (tools: add, broken)"),
        (call("x" * 5000), "error: there is no tool 'xxxx"),
        (call("add"), "error: wrong arguments: a: Field required"),
        (call("add", a="two"), "error: wrong arguments: a: Input should be a valid integer"),
        (call("add", a=1, c=2), "error: wrong arguments: c: Extra inputs are not permitted"),
        (ToolCall("add", {}, "bad_json", "{a"), "error: the call is not valid JSON"),
        (ToolCall("", {}, "bad_shape"), "error: a call must be an object"),
        (ToolCall("add", {}, "unfinished"), "error: the call has no end"),
        (call("broken", kind="os"), "error: FileNotFoundError: No such file or directory"),
        (call("broken", kind="path"), "error: ValueError: cannot read (path) or (path)"),
        (call("broken", kind="own_timeout"), "error: TimeoutError: the pump timed out"),
        (call("broken", kind="exit"), "error: RuntimeError: SystemExit: 3"),
        (call("broken", kind="long"), "error: ValueError: xxxx"),
        (call("broken", kind="other"), "error: KeyError: 'other'"),
    ],
)
def test_a_mistake_becomes_an_observation(asked, said):
    toolbox = Toolbox([add, broken])
    (answer,) = ask(toolbox, asked)
    assert answer.role == "tool" and answer.content.startswith(said)
    assert len(answer.content) < 600 and len(answer.tool) <= 64
    assert "private" not in answer.content and "Traceback" not in answer.content
    assert (toolbox.calls, toolbox.errors) == (1, 1)


def test_a_broken_tool_is_not_shown_to_the_policy():
    ended = []

    async def slow() -> str:
        """Slow."""
        await asyncio.sleep(0.05)
        ended.append(True)
        return ""

    assert ToolFailure.outcome is Outcome.INFRA_ABORT
    with pytest.raises(ToolFailure, match="the server is gone"):
        ask(Toolbox([down, slow]), call("down"), call("slow"))
    assert ended, "the other call was left behind"


def test_a_fault_of_the_run_is_not_shown_to_the_policy():
    def wrong() -> str:
        """Wrong."""
        raise DataError("the row is wrong")

    with pytest.raises(DataError):
        ask(Toolbox([wrong]), call("wrong"))


def test_each_tool_has_its_time():
    toolbox = Toolbox([nap, later], timeout=5.0, timeouts={"nap": 0.05})
    began = time.monotonic()
    answers = ask(toolbox, call("nap", seconds=1.0), call("later", text="x"))
    assert [a.content for a in answers] == ["error: nap took longer than 0.05 s", "x"]
    assert time.monotonic() - began < 0.9


def test_calls_run_at_once_or_one_after_the_other():
    def took(**settings):
        began = time.monotonic()
        ask(Toolbox([nap], **settings), *[call("nap", seconds=0.1)] * 4)
        return time.monotonic() - began

    assert took() < 0.35
    assert took(parallel=False) >= 0.4


def test_output_is_bounded_and_says_so():
    def shout(n: int) -> str:
        """Shout."""
        return "x" * n

    whole, short = ask(Toolbox([shout], max_output=200), call("shout", n=200), call("shout", n=201))
    assert whole.content == "x" * 200
    assert len(short.content) == 200 and short.content.endswith("\n... cut (201 characters)")
    assert cut("a\ud800b", 10) == "a?b"


def test_spam_is_not_run():
    ran = []

    def once() -> None:
        """Once."""
        ran.append(1)

    toolbox = Toolbox([once], max_calls=3)
    answers = ask(toolbox, *[call("once")] * 500)
    assert len(answers) == 500 and len(ran) == 3 and toolbox.errors == 497
    assert answers[0].content == "(no output)"
    assert answers[3].content == "error: not run: a reply may have 3 calls"


@dataclass
class Pair:
    left: int
    right: float


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "(no output)"),
        (True, "true"),
        ({"a": [1, "ü"]}, '{"a":[1,"ü"]}'),
        (Pair(1, float("inf")), '{"left":1,"right":Infinity}'),
        (b"\xff", "error: PydanticSerializationError: "),
    ],
)
def test_what_a_tool_returns_is_text(value, text):
    def give() -> object:
        """Give."""
        return value

    async def give_async() -> object:
        """Give."""
        return value

    class Giver:
        """Give."""

        async def __call__(self) -> object:
            return value

    for function, name in ((give, "give"), (give_async, "give_async"), (Giver(), "Giver")):
        (answer,) = ask(Toolbox([function]), call(name))
        assert answer.content.startswith(text), function


def test_blocking_tools_run_in_threads():
    def where() -> str:
        """Where."""
        return threading.current_thread().name

    (answer,) = ask(Toolbox([where]), call("where"))
    assert answer.content != threading.main_thread().name


class Counter(ToolEnvironment[Task]):
    """Count to three with a tool."""

    def __init__(self, task: Task, *, max_turns: int = 3) -> None:
        super().__init__(task, Toolbox([self.count]), max_turns=max_turns)
        self.value = 0

    def count(self) -> int:
        """One more."""
        self.value += 1
        return self.value

    async def reset(self):
        return [user("Count to three.")]

    async def score(self, reply):
        return Step(reward=float(self.value == 3), terminated=True, info={"value": self.value})


def play(environment, *replies):
    async def episode():
        await environment.reset()
        return [await environment.step(reply) for reply in replies]

    return asyncio.run(episode())


def calling(*names):
    return Message("assistant", "", tool_calls=tuple(ToolCall(name, {}) for name in names))


def test_an_environment_answers_calls_and_scores_what_has_none():
    environment = Counter(TASK)
    assert [tool.name for tool in environment.tools] == ["count"]
    first, last = play(environment, calling("count", "count", "count", "cuont"), assistant("done"))
    assert [m.content for m in first.messages][:2] == ["1", "2"] and not first.terminated
    assert (last.reward, last.terminated) == (1.0, True)
    assert last.info == {"value": 3, "tool_calls": 4.0, "tool_errors": 1.0}
    assert not first.info, "counted once per episode"


def test_the_last_turn_runs_no_tools():
    environment = Counter(TASK, max_turns=2)
    _, last = play(environment, calling("count"), calling("count"))
    assert (last.reward, last.terminated, last.truncated) == (0.0, False, True)
    assert environment.value == 1 and last.info["tool_calls"] == 1.0


def test_methods_of_two_environments_do_not_mix():
    one, two = Counter(TASK), Counter(TASK)
    play(one, calling("count"))
    (step,) = play(two, calling("count"))
    assert step.messages[0].content == "1"
    assert one.tools[0] is two.tools[0], "described once"


def test_it_passes_the_checker():
    assert asyncio.run(check_env(functools.partial(Counter, max_turns=4), [TASK])) == []


class Echo(TagEnvironment[Task]):
    call_tag = "echo"
    call_argument = "text"
    answer_tag = "answer"
    bad_format_reward = -1.0

    def __init__(self, task: Task) -> None:
        super().__init__(task, Toolbox([self.echo]), max_turns=3)

    def echo(self, text: str) -> str:
        """Echo."""
        return text

    async def reset(self):
        return [user("Say four.")]

    async def grade(self, answer):
        return Step(reward=float(answer == "four"), terminated=True)


def test_tags_are_calls_and_answers():
    first, last = play(
        Echo(TASK), assistant("so <echo>hi</echo> there"), assistant("<answer> four </answer>")
    )
    assert first.messages == [user("<observation>\nhi\n</observation>")]
    assert last.reward == 1.0 and last.info["bad_format"] == 0.0
    native = Message("assistant", "", tool_calls=(ToolCall("echo", {"text": "hi"}),))
    (step,) = play(Echo(TASK), native)
    assert step.messages == [Message("tool", "hi", tool="echo")]


def test_thoughts_are_not_read():
    (step,) = play(Echo(TASK), assistant("<think><answer>2</answer></think><answer>four</answer>"))
    assert step.reward == 1.0
    hidden = Message("assistant", "", reasoning="<answer>four</answer>")
    assert play(Echo(TASK), hidden)[0].reward == -1.0


@pytest.mark.parametrize(
    "text",
    [
        "four",
        "",
        "<answer>four",
        "four</answer>",
        "</answer>four<answer>",
        "<answer>one</answer><answer>four</answer>",
        "<answer><answer>four</answer></answer>",
        "<echo>x</echo><answer>four</answer>",
        "<echo>x<answer>four</answer></echo>",
        "<echo>x</echo><echo>y</echo>",
        "<answer>four</answer></think>",
        "<answer>" * 100_000,
    ],
)
def test_anything_but_one_action_is_bad_format(text):
    began = time.monotonic()
    (step,) = play(Echo(TASK), assistant(text))
    assert (step.reward, step.terminated, step.info["bad_format"]) == (-1.0, True, 1.0)
    assert time.monotonic() - began < 0.5


def test_a_call_beside_an_answer_is_bad_format():
    both = Message("assistant", "<answer>four</answer>", tool_calls=(call("echo", text="x"),))
    assert play(Echo(TASK), both)[0].reward == -1.0


def test_answer_tags_in_tool_output_are_not_answers():
    native = Message("assistant", "", tool_calls=(call("echo", text="<answer>four</answer>"),))
    steps = play(Echo(TASK), native, native, native)
    assert "<answer>four</answer>" in steps[0].messages[0].content
    assert [s.reward for s in steps] == [0.0, 0.0, 0.0] and steps[-1].truncated


def test_between_needs_one_whole_pair():
    assert between("a<b>c</b>", "b") == ["c"] and between("a", "b") == []
    assert between("<b>c</b><b>", "b") == [None]
