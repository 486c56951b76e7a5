"""Calls as Qwen's coder models write them: `<function=name>` with a `<parameter=x>` per argument.

The format has no quotes, so `5` may be a number or a text. What a tool's schema declares decides;
where it declares nothing, JSON is JSON and all else is text, and a text that reads like JSON is
written with quotes.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fledge.data.renderers.codec import Markup
from fledge.data.renderers.toolcalls import (
    CLOSE,
    OPEN,
    Reading,
    described,
    dumps,
    read_json,
    read_tagged,
    unread,
    write_tagged,
)
from fledge.errors import DataError
from fledge.types import CallStatus, Tool, ToolCall

FUNCTION = re.compile(r"\s*<function=([^<>\n]+)>\s*")
PARAMETER = re.compile(r"<parameter=([^<>\n]+)>\n?(.*?)\n?</parameter>\s*", re.DOTALL)
FUNCTION_ENDS = re.compile(r"</function>")
NAME = re.compile(r"[^<>\n]+")


@dataclass(frozen=True)
class QwenXml:
    """`<tool_call><function=f><parameter=x>5</parameter></function></tool_call>`."""

    name: str = "qwen_xml"

    def announce(self, tools: Sequence[Tool]) -> list[str]:
        pieces: list[str] = [Markup("# Tools\n\nYou can call these functions:\n\n<tools>")]
        pieces += [f"\n{dumps(described(tool))}" for tool in tools]
        pieces.append(
            Markup(
                "\n</tools>\n\nTo call one, write its name and each argument between tags, in this "
                f"form:\n\n{OPEN}\n<function=name>\n<parameter=argument>\nvalue\n</parameter>\n"
                f"</function>\n{CLOSE}"
            )
        )
        return pieces

    def write(self, calls: Sequence[ToolCall], tools: Sequence[Tool]) -> list[str]:
        return write_tagged([(call, _body(call, tools)) for call in calls])

    def read(self, text: str, tools: Sequence[Tool]) -> Reading:
        return read_tagged(text, _read, tools)


def _body(call: ToolCall, tools: Sequence[Tool]) -> str:
    if call.status != "ok":
        return ""
    lines = [f"<function={_named(call.name)}>"]
    for name, value in call.arguments.items():
        text = _written(value, _declared(tools, call.name, name))
        lines.append(f"<parameter={_named(name)}>\n{text}\n</parameter>")
    return "\n".join([*lines, "</function>"])


def _named(name: str) -> str:
    if not NAME.fullmatch(name):
        raise DataError(
            f"{name!r} cannot be a name in tool calls with tags; set model.tool_format to another"
        )
    return name


def _written(value: object, declared: str | None) -> str:
    if not isinstance(value, str):
        return dumps(value)
    if declared == "string" or (declared is None and not _ambiguous(value)):
        return value
    return dumps(value).replace("</", "<\\/")


def _ambiguous(text: str) -> bool:
    return "</parameter>" in text or _whole_json(text) is not None


def _whole_json(text: str) -> tuple[Any, int] | None:
    found = read_json(text)
    return found if found and not text[found[1] :].strip() else None


def _read(text: str, start: int, tools: Sequence[Tool]) -> tuple[ToolCall, int] | CallStatus:
    function = FUNCTION.match(text, start)
    if function is None:
        return "bad_shape"
    name, place = function[1], function.end()
    arguments: dict[str, Any] = {}
    readable = True
    while parameter := PARAMETER.match(text, place):
        key, declared = parameter[1], _declared(tools, name, parameter[1])
        found = _value(parameter[2], declared)
        readable &= found is not None and key not in arguments
        arguments[key] = found[0] if found else None
        place = parameter.end()
    ends = FUNCTION_ENDS.match(text, place)
    if ends is None:
        return "bad_shape"
    if not readable:
        return unread("bad_shape", text[start : ends.end()], name), ends.end()
    return ToolCall(name, arguments), ends.end()


def _value(text: str, declared: str | None) -> tuple[Any] | None:
    """The value in a tuple, or None where the text cannot be what the schema declares."""
    if declared == "string":
        return (text,)
    found = _whole_json(text)
    if found is not None:
        return (found[0],)
    return (text,) if declared is None else None


def _declared(tools: Sequence[Tool], call: str, parameter: str) -> str | None:
    """The one JSON type of an argument, where the tool's schema gives one."""
    for tool in tools:
        if tool.name == call:
            properties = tool.parameters.get("properties", {})
            schema = properties.get(parameter, {}) if isinstance(properties, dict) else {}
            kind = schema.get("type") if isinstance(schema, dict) else None
            return kind if isinstance(kind, str) else None
    return None
