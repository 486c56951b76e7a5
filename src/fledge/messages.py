"""Reading messages and tools out of rows: the one place where a prompt becomes `Message` records.

Tool calls are read as the public data sets write them: `{"name": ..., "arguments": ...}`, bare or
under `function`, with arguments that are an object or the JSON text of one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from fledge.errors import DataError
from fledge.types import Message, Tool, ToolCall

ROLES = ("system", "user", "assistant", "tool")
THINK_OPEN, THINK_CLOSE = "<think>", "</think>"


def messages_of(value: object, where: str) -> list[Message]:
    """A prompt as messages; `where` is the field that an error names.

    >>> messages_of("2+2", "prompt")[0].role
    'user'
    >>> messages_of([{"role": "system", "content": "Add."}], "prompt")[0].role
    'system'
    """
    if isinstance(value, str):
        return [Message("user", value)]
    if not isinstance(value, Sequence) or not value:
        raise DataError(f"{where}: must be text or a list of messages, got {_short(value)}")
    return [_message(item, f"{where}[{index}]") for index, item in enumerate(value)]


def reply_of(text: str) -> Message:
    """An assistant's message from its text. Thinking at the beginning becomes `reasoning`: only
    there do its tags become the tokens that a model has for them.

    >>> reply_of("<think>add</think>4")
    Message(role='assistant', content='4', tool_calls=(), reasoning='add', tool='')
    """
    body = text.lstrip()
    if body.startswith(THINK_OPEN) and THINK_CLOSE in body:
        reasoning, _, rest = body.removeprefix(THINK_OPEN).partition(THINK_CLOSE)
        return Message("assistant", rest.lstrip("\n"), reasoning=reasoning.strip())
    return Message("assistant", text)


def tools_of(value: object, where: str) -> list[Tool]:
    """The tools that a row offers.

    >>> tools_of([{"name": "now", "description": "The time."}], "tools")[0].name
    'now'
    """
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise DataError(f"{where}: must be a list of tools, got {_short(value)}")
    return [_tool(item, f"{where}[{index}]") for index, item in enumerate(value)]


def _tool(item: object, where: str) -> Tool:
    found = _unwrapped(item, where)
    description = found.get("description") or ""
    parameters = found.get("parameters") or {"type": "object", "properties": {}}
    if not isinstance(description, str):
        raise DataError(f"{where}.description: must be text, got {_short(description)}")
    if not isinstance(parameters, Mapping):
        raise DataError(f"{where}.parameters: must be a JSON schema, got {_short(parameters)}")
    return Tool(_name(found, where), description, parameters)


def _message(item: object, where: str) -> Message:
    if not isinstance(item, Mapping):
        raise DataError(f'{where}: must be {{"role": ..., "content": ...}}, got {_short(item)}')
    role, content = item.get("role"), item.get("content")
    if role not in ROLES:
        raise DataError(f"{where}.role: must be one of {', '.join(ROLES)}, got {_short(role)}")
    calls = item.get("tool_calls")
    if calls and content is None:
        content = ""
    if not isinstance(content, str):
        raise DataError(f"{where}.content: must be text, got {_short(content)}")
    if role == "assistant":
        return _assistant(item, content, calls, where)
    if calls:
        raise DataError(f"{where}.tool_calls: only an assistant calls tools, not the {role}")
    return Message(
        role, content, tool=_text(item, ("tool", "name"), where) if role == "tool" else ""
    )


def _assistant(item: Mapping[str, object], content: str, calls: object, where: str) -> Message:
    reasoning = _text(item, ("reasoning", "reasoning_content"), where)
    said = Message("assistant", content, reasoning=reasoning) if reasoning else reply_of(content)
    if not calls:
        return said
    if not isinstance(calls, Sequence) or isinstance(calls, str):
        raise DataError(f"{where}.tool_calls: must be a list of calls, got {_short(calls)}")
    read = tuple(_call(call, f"{where}.tool_calls[{i}]") for i, call in enumerate(calls))
    return Message("assistant", said.content, read, said.reasoning)


def _call(item: object, where: str) -> ToolCall:
    found = _unwrapped(item, where)
    arguments = found.get("arguments", {})
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            raise DataError(f"{where}.arguments: not JSON: {_short(arguments)}") from None
    if not isinstance(arguments, Mapping):
        raise DataError(f"{where}.arguments: must be an object, got {_short(arguments)}")
    return ToolCall(_name(found, where), arguments)


def _unwrapped(item: object, where: str) -> Mapping[str, object]:
    """`{"type": "function", "function": {...}}` and the bare form are both common."""
    inner = item.get("function", item) if isinstance(item, Mapping) else item
    if not isinstance(inner, Mapping):
        raise DataError(f'{where}: must be {{"name": ..., ...}}, got {_short(inner)}')
    return inner


def _name(found: Mapping[str, object], where: str) -> str:
    name = found.get("name")
    if not isinstance(name, str) or not name:
        raise DataError(f"{where}.name: must be text, got {_short(name)}")
    return name


def _text(item: Mapping[str, object], names: Sequence[str], where: str) -> str:
    """The first of the fields that is there and not empty."""
    for name in names:
        value = item.get(name)
        if value is not None and not isinstance(value, str):
            raise DataError(f"{where}.{name}: must be text, got {_short(value)}")
        if value:
            return value
    return ""


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
