"""Tools: typed Python functions that a policy may call, and environments that answer its calls.

`as_tool` describes a function to a policy, `Toolbox` validates and runs calls, `ToolEnvironment`
plays an episode with them, and `TagEnvironment` reads calls and the answer from tags as well.

Who failed decides what happens. A mistake of the policy (an unknown tool, wrong arguments, a call
that cannot be read, an exception or a timeout inside a tool) becomes an observation, so that it can
be learned from. A tool whose own ground gave way raises `ToolFailure`, which is never shown to the
policy: the episode is retried, then set aside. Nothing here runs a tool in a sandbox.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model
from pydantic.errors import PydanticUserError
from pydantic.json_schema import GenerateJsonSchema
from pydantic_core import to_json

from fledge.envs.base import Environment
from fledge.envs.threads import in_thread
from fledge.errors import FledgeError, PluginError
from fledge.plugins import nearest
from fledge.types import Message, Outcome, Step, Task, Tool, ToolCall, user

T = TypeVar("T")
LONGEST_NAME = 64
LONGEST_ERROR = 500
LEAST_OUTPUT = 100
"""Room for an error and the mark of a cut."""


class ToolFailure(Exception):
    """The ground under a tool gave way: a server is down, a disk is full. Not the policy's doing,
    so it goes up instead of becoming an observation. No `FledgeError`, because those end a run.
    """

    outcome: ClassVar[Outcome] = Outcome.INFRA_ABORT


class _Mistake(Exception):
    """What the policy is told about a call that did not work."""


# ---- describing a function


class _Untitled(GenerateJsonSchema):
    """Titles repeat the names; they cost prompt tokens and say nothing."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False


@dataclass(frozen=True)
class _Description:
    """What the policy is told, and the model that reads its arguments."""

    tool: Tool
    reader: type[BaseModel]

    def read(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments that were given, converted; those left out keep the function's default."""
        try:
            found = self.reader.model_validate(dict(arguments))
        except ValidationError as error:
            raise _Mistake(f"wrong arguments: {_complaints(error)}") from None
        fields = self.reader.model_fields
        return {str(fields[name].alias): getattr(found, name) for name in found.model_fields_set}


def as_tool(function: Callable[..., Any]) -> Tool:
    """What a policy is told about a function: its name, its docstring, and a JSON schema of its
    parameters. Lines `name: text` under `Args:` in the docstring describe single parameters.

    >>> def add(a: int, b: int = 1) -> int:
    ...     '''The sum of two numbers.'''
    ...     return a + b
    >>> as_tool(add).description, as_tool(add).parameters["required"]
    ('The sum of two numbers.', ['a'])
    """
    return _describe(function).tool


def _describe(function: Callable[..., Any]) -> _Description:
    # A method is bound anew in every episode; what it looks like does not change.
    inner = getattr(function, "__func__", function)
    return _described(inner, inner is not function)


@functools.lru_cache(maxsize=1024)
def _described(function: Callable[..., Any], bound: bool) -> _Description:
    name = getattr(function, "__name__", type(function).__name__)
    what, about = _docstring(inspect.getdoc(function) or "")
    if not what:
        raise PluginError(f"tool {name}: give it a docstring; it is all that the policy is told")
    parameters = _parameters(function, name)[int(bound) :]
    fields: dict[str, Any] = {
        f"argument_{place}": (p.annotation, _field(p, about.get(p.name)))
        for place, p in enumerate(parameters)
    }
    # A line for an earlier parameter is no reason to ignore a misspelt one.
    unknown = sorted(set(about) - {p.name for p in parameters})
    if unknown:
        raise PluginError(f"tool {name}: its docstring describes {unknown[0]!r}, which it lacks")
    try:
        reader = create_model(name, __config__=ConfigDict(extra="forbid"), **fields)
        schema = reader.model_json_schema(schema_generator=_Untitled)
    except PydanticUserError as error:
        first = str(error).splitlines()[0]
        raise PluginError(f"tool {name}: no JSON schema for its parameters: {first}") from None
    for part in (schema, *schema.get("$defs", {}).values()):
        part.pop("title", None)
    return _Description(Tool(name, what, schema), reader)


def _parameters(function: Callable[..., Any], name: str) -> list[inspect.Parameter]:
    try:
        found = list(inspect.signature(function, eval_str=True).parameters.values())
    except (NameError, TypeError, ValueError) as error:
        raise PluginError(f"tool {name}: its signature cannot be read: {error}") from None
    for place, parameter in enumerate(found):
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise PluginError(f"tool {name}: {parameter} cannot be given by name; write it out")
        untyped = parameter.annotation is parameter.empty
        if untyped and not (place == 0 and parameter.name == "self"):
            raise PluginError(f"tool {name}: {parameter.name} has no type; annotate it")
    return found


def _field(parameter: inspect.Parameter, about: str | None) -> Any:
    default: Any = ... if parameter.default is parameter.empty else parameter.default
    if about is None:
        return Field(default, alias=parameter.name)
    return Field(default, alias=parameter.name, description=about)


def _docstring(text: str) -> tuple[str, dict[str, str]]:
    """What a tool does, and what is said about its parameters under `Args:`. A line that is
    indented further goes on with the one before; the first one that is not indented ends it.
    """
    what, _, rest = text.partition("\nArgs:\n")
    about: dict[str, str] = {}
    margin, name = 0, ""
    for line in rest.splitlines():
        indent = len(line) - len(line.lstrip())
        begun = re.match(r"\s+(\w+)(?: \([^)]*\))?:\s*(.*)", line)
        margin = margin or indent
        if begun and indent == margin:
            name, about[begun[1]] = begun[1], begun[2]
        elif name and indent > margin:
            about[name] += f" {line.strip()}"
        else:
            break
    return what.strip(), about


def _complaints(error: ValidationError) -> str:
    """The first three, each with the name that the policy wrote."""
    said = [f"{'.'.join(map(str, e['loc'])) or 'call'}: {e['msg']}" for e in error.errors()[:3]]
    return "; ".join(said)


# ---- running calls

UNREADABLE = {
    "bad_json": "the call is not valid JSON",
    "bad_shape": "a call must be an object with a name and arguments",
    "unfinished": "the call has no end",
}


class Toolbox:
    """Functions by name, for the calls of one episode; counts `calls` and `errors`.

    Blocking functions run in threads of their own, async ones are awaited. `timeout` is in seconds
    per call, `timeouts` those of single tools: a blocking function that is given up on ends by
    itself or not at all, so let it keep a limit of its own. Only the first `max_calls` of a reply
    are run, one after the other unless `parallel`. Answers keep to `max_output` characters.
    """

    def __init__(
        self,
        functions: Iterable[Callable[..., Any]],
        *,
        timeout: float = 10.0,
        timeouts: Mapping[str, float] | None = None,
        max_output: int = 4000,
        max_calls: int = 8,
        parallel: bool = True,
    ) -> None:
        if max_output < LEAST_OUTPUT:
            raise PluginError(f"toolbox: max_output must be {LEAST_OUTPUT} or more")
        self._tools: dict[str, tuple[_Description, Callable[..., Any]]] = {}
        for function in functions:
            description = _describe(function)
            if description.tool.name in self._tools:
                raise PluginError(f"toolbox: there are two tools named {description.tool.name!r}")
            self._tools[description.tool.name] = description, function
        unknown = sorted(set(timeouts or {}) - set(self._tools))
        if unknown:
            raise PluginError(f"toolbox: timeouts names {unknown[0]!r}, which is no tool of it")
        self.timeout = timeout
        self.timeouts = dict(timeouts or {})
        self.max_output = max_output
        self.max_calls = max_calls
        self.parallel = parallel
        self.calls = 0
        self.errors = 0

    @property
    def tools(self) -> tuple[Tool, ...]:
        return tuple(description.tool for description, _ in self._tools.values())

    async def answer(self, calls: Sequence[ToolCall]) -> list[Message]:
        """One message of role `tool` per call, in their order. Raises `ToolFailure` where a tool
        does, after every other call has ended.
        """
        run, left = calls[: self.max_calls], calls[self.max_calls :]
        answers: list[Message | BaseException] = []
        if self.parallel:
            answers = await asyncio.gather(*map(self._answer, run), return_exceptions=True)
        else:
            answers = [await self._answer(call) for call in run]
        refused = f"not run: a reply may have {self.max_calls} calls"
        answers += [self._refuse(call, refused) for call in left]
        messages: list[Message] = []
        for answer in answers:
            if isinstance(answer, BaseException):
                raise answer
            messages.append(answer)
        return messages

    async def _answer(self, call: ToolCall) -> Message:
        try:
            text = await self._run(call)
        except _Mistake as mistake:
            return self._refuse(call, str(mistake))
        self.calls += 1
        return Message("tool", cut(text or "(no output)", self.max_output), tool=call.name)

    def _refuse(self, call: ToolCall, why: str) -> Message:
        self.calls += 1
        self.errors += 1
        return Message("tool", cut(f"error: {why}", self.max_output), tool=_name(call))

    async def _run(self, call: ToolCall) -> str:
        if call.status != "ok":
            raise _Mistake(UNREADABLE[call.status])
        if call.name not in self._tools:
            known = sorted(self._tools)
            raise _Mistake(
                f"there is no tool {_name(call)!r}{nearest(_name(call), known)} "
                f"(tools: {', '.join(known) or 'none'})"
            )
        description, function = self._tools[call.name]
        arguments = description.read(call.arguments)
        limit = self.timeouts.get(call.name, self.timeout)
        clock = asyncio.timeout(limit)
        try:
            async with clock:
                return await _text_of_call(function, arguments)
        except (ToolFailure, FledgeError):
            raise
        except Exception as error:
            if clock.expired():
                raise _Mistake(f"{call.name} took longer than {limit:g} s") from None
            raise _Mistake(_say(error)) from None


async def _text_of_call(function: Callable[..., Any], arguments: Mapping[str, Any]) -> str:
    if inspect.iscoroutinefunction(function):
        return _text(await function(**arguments))

    def work() -> Any:
        result = function(**arguments)
        return result if inspect.isawaitable(result) else _text(result)

    result = await in_thread(work)
    return _text(await result) if inspect.isawaitable(result) else str(result)


def _text(result: object) -> str:
    """What a tool returned, as the policy reads it: text as it is, anything else as JSON."""
    if result is None or isinstance(result, str):
        return result or ""
    return to_json(result, inf_nan_mode="constants", fallback=str).decode()


def cut(text: str, limit: int) -> str:
    """At most `limit` characters, with a mark where something is missing; always valid Unicode.

    >>> cut("x" * 200, 30)
    'xxxxx\\n... cut (200 characters)'
    """
    if len(text) > limit:
        mark = f"\n... cut ({len(text)} characters)"
        text = text[: limit - len(mark)] + mark
    return text.encode("utf-8", "replace").decode()


PATH = re.compile(r"(?<![\w./])(?:/[\w.@+~-]+){2,}/?|\b[A-Za-z]:\\[^\s'\"]+|\\\\[^\s'\"]+")


def _say(error: Exception) -> str:
    """An exception in words: no traceback, no path of this host."""
    known = error.strerror if isinstance(error, OSError) else None
    text = PATH.sub("(path)", known or str(error)).strip()
    name = type(error).__name__
    return cut(f"{name}: {text}" if text else name, LONGEST_ERROR)


def _name(call: ToolCall) -> str:
    return call.name[:LONGEST_NAME]


# ---- environments


class ToolEnvironment(Environment[T]):
    """Answers tool calls with its toolbox; a reply without any is handed to `score`.

    A reply that calls tools on turn `max_turns` ends the episode: truncated, with the reward
    `unfinished_reward`. The last step's `info` has `tool_calls` and `tool_errors`.
    """

    unfinished_reward: ClassVar[float] = 0.0

    def __init__(self, task: Task, toolbox: Toolbox, *, max_turns: int = 8) -> None:
        super().__init__(task)
        self.toolbox = toolbox
        self.tools = toolbox.tools
        self.max_turns = max_turns
        self.turns = 0

    async def score(self, reply: Message) -> Step:
        """The step for a reply that calls no tool: a reward and `terminated`, or messages to go on
        with.
        """
        raise NotImplementedError

    async def step(self, reply: Message) -> Step:
        self.turns += 1
        last = self.turns >= self.max_turns
        calls = self.calls_of(reply)
        if not calls:
            step = await self.score(reply)
        elif last:
            step = Step(reward=self.unfinished_reward)
        else:
            step = Step(messages=await self.observe(reply, calls))
        if last and not step.terminated:
            step = replace(step, truncated=True)
        if not (step.terminated or step.truncated):
            return step
        counts = {"tool_calls": self.toolbox.calls, "tool_errors": self.toolbox.errors}
        return replace(step, info={**step.info, **{k: float(v) for k, v in counts.items()}})

    def calls_of(self, reply: Message) -> Sequence[ToolCall]:
        """What a reply asks for."""
        return reply.tool_calls

    async def observe(self, reply: Message, calls: Sequence[ToolCall]) -> Sequence[Message]:
        """What the policy sees of the answers."""
        return await self.toolbox.answer(calls)


@dataclass(frozen=True)
class Action:
    """What a reply does: it calls tools, or it answers, or neither (both at once is neither)."""

    calls: tuple[ToolCall, ...] = ()
    answer: str | None = None


class TagEnvironment(ToolEnvironment[T]):
    """A protocol for models with and without native tool calls: `<call_tag>text</call_tag>` is a
    call of the tool of that name, `<answer_tag>text</answer_tag>` ends the episode.

    One action per reply. Two answers, an answer beside a call, a tag that is not closed or no
    action at all are bad format: the episode ends with `bad_format_reward`. Only what the policy
    wrote is read, and of that only what follows its thoughts; nothing that a tool returned is.
    """

    call_tag: ClassVar[str]
    call_argument: ClassVar[str] = "query"
    answer_tag: ClassVar[str]
    bad_format_reward: ClassVar[float] = 0.0

    async def grade(self, answer: str) -> Step:
        """The last step, for the text between the answer tags."""
        raise NotImplementedError

    def action(self, reply: Message) -> Action:
        said = reply.content.rpartition("</think>")[2]
        asked, answer = between(said, self.call_tag), between(said, self.answer_tag)
        chosen = [bool(reply.tool_calls), asked != [], answer != []]
        if chosen.count(True) != 1 or None in (*asked, *answer):
            return Action()
        if asked and asked[0] is not None:
            return Action(calls=(ToolCall(self.call_tag, {self.call_argument: asked[0]}),))
        return Action(calls=reply.tool_calls, answer=answer[0] if answer else None)

    def calls_of(self, reply: Message) -> Sequence[ToolCall]:
        return self.action(reply).calls

    async def observe(self, reply: Message, calls: Sequence[ToolCall]) -> Sequence[Message]:
        answers = await self.toolbox.answer(calls)
        if reply.tool_calls:
            return answers
        # A policy that writes tags may have a chat template without a role for tools.
        return [user(f"<observation>\n{a.content}\n</observation>") for a in answers]

    async def score(self, reply: Message) -> Step:
        answer = self.action(reply).answer
        if answer is None:
            return Step(reward=self.bad_format_reward, terminated=True, info={"bad_format": 1.0})
        step = await self.grade(answer.strip())
        return replace(step, info={"bad_format": 0.0, **step.info})


def between(text: str, tag: str) -> list[str | None]:
    """What stands in a tag: nothing, one text, or None for anything that is not one whole pair.

    >>> between("so <sql>SELECT 1</sql>", "sql"), between("none", "sql"), between("<sql>", "sql")
    (['SELECT 1'], [], [None])
    """
    opening, closing = f"<{tag}>", f"</{tag}>"
    counts = text.count(opening), text.count(closing)
    if counts == (0, 0):
        return []
    start, end = text.find(opening), text.find(closing)
    if counts != (1, 1) or end < start:
        return [None]
    return [text[start + len(opening) : end]]
