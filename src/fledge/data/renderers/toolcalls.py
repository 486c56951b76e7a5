"""How tools are announced to a model, and how its calls are written and read.

A call that cannot be read has a status that says why, and its text; it never becomes a call that
nobody wrote. Nothing here is lenient: a repeated key, a number that is not finite, or half a
surrogate makes a call unreadable.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol

from fledge.data.renderers.codec import Markup
from fledge.types import CallStatus, Tool, ToolCall

OPEN, CLOSE = "<tool_call>", "</tool_call>"
SPACE = re.compile(r"\s*")
ENDS = re.compile(r"\s*</tool_call>")

Reading = tuple[str, tuple[ToolCall, ...]]
"""What a reply says beside its calls, and the calls."""


class ToolFormat(Protocol):
    """One way to write calls. Pieces are `Markup` where they are the format's own."""

    @property
    def name(self) -> str: ...

    def announce(self, tools: Sequence[Tool]) -> list[str]: ...

    def write(self, calls: Sequence[ToolCall], tools: Sequence[Tool]) -> list[str]: ...

    def read(self, text: str, tools: Sequence[Tool]) -> Reading: ...


def dumps(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def described(tool: Tool) -> dict[str, Any]:
    """A tool as chat templates want it."""
    function = {
        "name": tool.name,
        "description": tool.description,
        "parameters": dict(tool.parameters),
    }
    return {"type": "function", "function": function}


def unread(status: CallStatus, raw: str, name: str = "") -> ToolCall:
    return ToolCall(name, {}, status, raw.strip())


# --- strict JSON ----------------------------------------------------------------------------------


def _pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key is repeated")
    return found


def _constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is not JSON")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is too large")
    return value


DECODER = json.JSONDecoder(object_pairs_hook=_pairs, parse_constant=_constant, parse_float=_finite)


def read_json(text: str, start: int = 0) -> tuple[Any, int] | None:
    """The JSON value that begins at `start` and the place after it; None where there is none.

    >>> read_json('[1] x'), read_json('{"a": 1, "a": 2}')
    (([1], 3), None)
    """
    begin = SPACE.match(text, start)
    assert begin is not None
    try:
        value, end = DECODER.raw_decode(text, begin.end())
        dumps(value).encode()  # half a surrogate is no text
    except (ValueError, RecursionError):
        return None
    return value, end


def call_of(value: object, raw: str, fields: Sequence[str]) -> ToolCall:
    """A JSON value as a call: a name, and an object under one of `fields`."""
    if not isinstance(value, dict):
        return unread("bad_shape", raw)
    name = value.get("name")
    if not isinstance(name, str) or not name:
        return unread("bad_shape", raw)
    found = [field for field in fields if field in value]
    others = {k: v for k, v in value.items() if k not in ("name", *found)}
    if len(found) != 1 or not isinstance(value[found[0]], dict) or not _harmless(others):
        return unread("bad_shape", raw, name)
    return ToolCall(name, value[found[0]])


def _harmless(others: Mapping[str, object]) -> bool:
    return not others or others == {"type": "function"}


# --- calls between <tool_call> tags ---------------------------------------------------------------


def read_tagged(text: str, one: TaggedReader, tools: Sequence[Tool]) -> Reading:
    """Each `<tool_call>` is one call, whatever is in it; the text around them is what was said."""
    said: list[str] = []
    calls: list[ToolCall] = []
    place = 0
    while (start := text.find(OPEN, place)) >= 0:
        said.append(text[place:start])
        call, place = _tagged(text, start + len(OPEN), one, tools)
        calls.append(call)
    if not calls:
        return text, ()
    said.append(text[place:])
    return "\n".join(part.strip() for part in said if part.strip()), tuple(calls)


class TaggedReader(Protocol):
    def __call__(
        self, text: str, start: int, tools: Sequence[Tool]
    ) -> tuple[ToolCall, int] | CallStatus:
        """The call that begins at `start` and the place after it, or why there is none."""
        ...


def _tagged(
    text: str, start: int, one: TaggedReader, tools: Sequence[Tool]
) -> tuple[ToolCall, int]:
    found = one(text, start, tools)
    if not isinstance(found, str):
        call, end = found
        if ends := ENDS.match(text, end):
            return call, ends.end()
        found = "bad_json"
    stop = text.find(CLOSE, start)
    if stop < 0:
        return unread("unfinished", text[start:]), len(text)
    return unread(found, text[start:stop]), stop + len(CLOSE)


def write_tagged(bodies: Sequence[tuple[ToolCall, str]]) -> list[str]:
    pieces: list[str] = []
    for call, body in bodies:
        text = body if call.status == "ok" else call.raw
        pieces += [Markup(f"\n{OPEN}\n" if pieces else f"{OPEN}\n"), text]
        if call.status != "unfinished":
            pieces.append(Markup(f"\n{CLOSE}"))
    return pieces


@dataclass(frozen=True)
class Hermes:
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, announced as Qwen does."""

    name: str = "hermes"

    def announce(self, tools: Sequence[Tool]) -> list[str]:
        pieces: list[str] = [
            Markup(
                "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
                "You are provided with function signatures within <tools></tools> XML tags:\n"
                "<tools>"
            )
        ]
        pieces += [f"\n{dumps(described(tool))}" for tool in tools]
        pieces.append(
            Markup(
                "\n</tools>\n\nFor each function call, return a json object with function name and "
                f"arguments within {OPEN}{CLOSE} XML tags:\n{OPEN}\n"
                f'{{"name": <function-name>, "arguments": <args-json-object>}}\n{CLOSE}'
            )
        )
        return pieces

    def write(self, calls: Sequence[ToolCall], tools: Sequence[Tool]) -> list[str]:
        return write_tagged(
            [(c, dumps({"name": c.name, "arguments": dict(c.arguments)})) for c in calls]
        )

    def read(self, text: str, tools: Sequence[Tool]) -> Reading:
        return read_tagged(text, self._one, tools)

    @staticmethod
    def _one(text: str, start: int, tools: Sequence[Tool]) -> tuple[ToolCall, int] | CallStatus:
        found = read_json(text, start)
        if found is None:
            return "bad_json"
        value, end = found
        return call_of(value, text[start:end], ["arguments"]), end
