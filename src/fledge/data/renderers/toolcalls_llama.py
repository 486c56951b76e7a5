"""Calls that are a whole reply, or its last lines: JSON as Llama 3 writes it, and Python.

A reply that begins like a call is an attempt at one, whatever follows. One that says something
first has calls only where a call that can be read begins a line and nothing comes after it: prose
that shows an example is prose.
"""

from __future__ import annotations

import ast
import json
import keyword
import math
import re
import unicodedata
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from fledge.data.renderers.codec import Markup
from fledge.data.renderers.toolcalls import Reading, call_of, described, dumps, read_json, unread
from fledge.errors import DataError
from fledge.types import CallStatus, Tool, ToolCall

PYTHON_TAG = "<|python_tag|>"
JSON_BEGINS = re.compile(r'^\{\s*"(?:name|type|parameters|arguments)"', re.MULTILINE)
BETWEEN = re.compile(r"\s*;\s*(?=\{)")
LIST_BEGINS = re.compile(r"^\[\s*[^\W\d][\w.]*\s*\(", re.MULTILINE)


def read_trailing(
    text: str, begins: re.Pattern[str], calls_in: Callable[[str], tuple[ToolCall, ...]]
) -> Reading:
    body = text.strip()
    for found in begins.finditer(body):
        calls = calls_in(body[found.start() :])
        if found.start() == 0 or all(call.status == "ok" for call in calls):
            return body[: found.start()].strip(), calls
    return text, ()


@dataclass(frozen=True)
class Llama3Json:
    """`{"name": ..., "parameters": {...}}`; several of them are separated by `; `."""

    name: str = "llama3"

    def announce(self, tools: Sequence[Tool]) -> list[str]:
        pieces: list[str] = [
            Markup(
                "Given the following functions, please respond with a JSON for a function call "
                "with its proper arguments that best answers the given prompt.\n\n"
                'Respond in the format {"name": function name, "parameters": dictionary of '
                "argument name and its value}.Do not use variables.\n\n"
            )
        ]
        for tool in tools:
            pieces.append(json.dumps(described(tool), ensure_ascii=False, indent=4) + "\n\n")
        return pieces

    def write(self, calls: Sequence[ToolCall], tools: Sequence[Tool]) -> list[str]:
        return [
            "; ".join(
                dumps({"name": call.name, "parameters": dict(call.arguments)})
                if call.status == "ok"
                else call.raw
                for call in calls
            )
        ]

    def read(self, text: str, tools: Sequence[Tool]) -> Reading:
        if text.lstrip().startswith(PYTHON_TAG):
            text = text.lstrip().removeprefix(PYTHON_TAG)
        return read_trailing(text, JSON_BEGINS, self._calls)

    @staticmethod
    def _calls(text: str) -> tuple[ToolCall, ...]:
        calls: list[ToolCall] = []
        place = 0
        while True:
            found = read_json(text, place)
            if found is None:
                status: CallStatus = "bad_json" if text.endswith("}") else "unfinished"
                return (*calls, unread(status, text[place:]))
            value, end = found
            calls.append(call_of(value, text[place:end], ["parameters", "arguments"]))
            if end == len(text):
                return tuple(calls)
            between = BETWEEN.match(text, end)
            if between is None:
                return (*calls[:-1], unread("bad_json", text[place:]))
            place = between.end()


@dataclass(frozen=True)
class Pythonic:
    """`[f(a=1), g(b="x")]`: Python syntax, of which nothing but literals is understood."""

    name: str = "pythonic"

    def announce(self, tools: Sequence[Tool]) -> list[str]:
        pieces: list[str] = [
            Markup(
                "You can call functions. To do so, reply with nothing but a list of calls in "
                "Python syntax with keyword arguments: [name(argument=value), ...]\n\n"
                "The functions, as JSON:\n"
            )
        ]
        return pieces + [f"{dumps(described(tool)['function'])}\n" for tool in tools]

    def write(self, calls: Sequence[ToolCall], tools: Sequence[Tool]) -> list[str]:
        broken = [call.raw for call in calls if call.status != "ok"]
        if broken:
            return broken  # one that cannot be read makes its whole list unreadable
        return [f"[{', '.join(map(_python, calls))}]"]

    def read(self, text: str, tools: Sequence[Tool]) -> Reading:
        return read_trailing(text, LIST_BEGINS, self._calls)

    @staticmethod
    def _calls(text: str) -> tuple[ToolCall, ...]:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # "\d" in a string is fine with Python, and with us
                tree = ast.parse(text, mode="eval").body
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return (unread("bad_json" if text.endswith("]") else "unfinished", text),)
        if not isinstance(tree, ast.List):
            return (unread("bad_shape", text),)
        calls = tuple(_call(node) for node in tree.elts)
        if all(calls):
            return tuple(call for call in calls if call)
        return (unread("bad_shape", text),)


def _call(node: ast.expr) -> ToolCall | None:
    if not isinstance(node, ast.Call) or node.args or not _dotted(node.func):
        return None
    arguments: dict[str, Any] = {}
    for argument in node.keywords:
        if argument.arg is None or argument.arg in arguments:
            return None
        try:
            arguments[argument.arg] = ast.literal_eval(argument.value)
        except (ValueError, TypeError, RecursionError, MemoryError):
            return None
    return ToolCall(ast.unparse(node.func), arguments) if _is_json(arguments) else None


def _dotted(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) or (isinstance(node, ast.Attribute) and _dotted(node.value))


def _is_json(value: object) -> bool:
    match value:
        case None | bool() | int():
            return True
        case float():
            return math.isfinite(value)
        case str():
            return not any("\ud800" <= character <= "\udfff" for character in value)
        case list():
            return all(map(_is_json, value))
        case dict():
            return all(isinstance(k, str) and _is_json(k) and _is_json(value[k]) for k in value)
        case _:
            return False


def _python(call: ToolCall) -> str:
    for name in (*call.name.split("."), *call.arguments):
        plain = name.isidentifier() and unicodedata.normalize("NFKC", name) == name
        if not plain or keyword.iskeyword(name):
            raise DataError(
                f"a call of {call.name!r} cannot be written in Python: {name!r} is no name there; "
                f"set model.tool_format to another format"
            )
    return f"{call.name}({', '.join(f'{k}={v!r}' for k, v in call.arguments.items())})"
