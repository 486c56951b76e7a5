"""Extension by name: `"my_package.my_module:thing"`, a key of a built-in dict, or a function
object.

`resolve` finds the object, `check_arguments` validates the arguments a recipe gives it against its
typed signature, and `bind` does both. Nothing is registered at import time and nothing is imported
until it is used.
"""

from __future__ import annotations

import difflib
import functools
import importlib
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pydantic import ConfigDict, TypeAdapter, ValidationError

from fledge.errors import FledgeError, PluginError


@contextmanager
def blame(key: str) -> Iterator[None]:
    """What a plug-in raises is said under the setting that named it; our own errors pass."""
    try:
        yield
    except FledgeError:
        raise
    except Exception as error:
        raise PluginError(f"{key}: {type(error).__name__}: {error}") from error


def nearest(name: str, known: list[str]) -> str:
    """`"; did you mean 'x'?"` for the closest known name, or an empty string."""
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else ""


def resolve(
    spec: str | Callable[..., Any], builtins: Mapping[str, Callable[..., Any]], key: str
) -> Callable[..., Any]:
    """The callable behind `spec`; `key` is the configuration key that an error names."""
    if callable(spec):
        return spec
    if spec in builtins:
        return builtins[spec]
    if ":" not in spec:
        known = sorted(builtins)
        raise PluginError(
            f"{key}: {spec!r} is not built in{nearest(spec, known)} (built in: "
            f"{', '.join(known) or 'none'}; "
            f'or name your own as "module:name")'
        )
    module_name, _, attribute = spec.partition(":")
    found = _import(module_name, spec, key)
    for part in attribute.split("."):
        if not hasattr(found, part):
            raise PluginError(f"{key}: {spec!r}: module {module_name!r} has no {attribute!r}")
        found = getattr(found, part)
    if not callable(found):
        raise PluginError(
            f"{key}: {spec!r} is a {type(found).__name__}, not something that can be called"
        )
    function: Callable[..., Any] = found
    return function


def _import(module_name: str, spec: str, key: str) -> Any:
    # A console script does not have the working directory on its path, but that is where users keep
    # their reward functions.
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        return importlib.import_module(module_name)
    except ImportError as error:
        raise PluginError(f"{key}: cannot import {module_name!r} for {spec!r}: {error}") from error
    except Exception as error:
        raise PluginError(
            f"{key}: importing {module_name!r} for {spec!r} failed: {type(error).__name__}: {error}"
        ) from error


def check_positional(function: Callable[..., Any], names: tuple[str, ...], key: str) -> None:
    """Refuse a function that cannot be called with these positional arguments."""
    signature = _signature(function, key)
    try:
        signature.bind(*names)
    except TypeError:
        raise PluginError(
            f"{key}: {_name(function)}{signature} cannot be called as "
            f"{_name(function)}({', '.join(names)})"
        ) from None


def check_arguments(
    function: Callable[..., Any], arguments: Mapping[str, Any], key: str, positional: int = 0
) -> dict[str, Any]:
    """The arguments, validated and converted by the signature after its first `positional`
    parameters.
    """
    signature = _signature(function, key)
    parameters = [
        p
        for place, p in enumerate(signature.parameters.values())
        if place >= positional or p.kind is p.KEYWORD_ONLY
    ]
    open_ended = any(p.kind is p.VAR_KEYWORD for p in parameters)
    typed = {p.name: p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    hints = _hints(function)
    checked: dict[str, Any] = {}
    for name, value in arguments.items():
        if name not in typed:
            if open_ended:
                checked[name] = value
                continue
            raise PluginError(
                f"{key}.{name}: {_name(function)} has no such argument{nearest(name, list(typed))} "
                f"(it takes: {', '.join(typed) or 'none'})"
            )
        checked[name] = _convert(hints.get(name, Any), value, f"{key}.{name}")
    missing = [n for n, p in typed.items() if p.default is p.empty and n not in checked]
    if missing:
        raise PluginError(
            f"{key}.{missing[0]}: {_name(function)}{signature} needs this argument; "
            "set it in the recipe, or name a function that does not"
        )
    return checked


def bind(
    spec: str | Callable[..., Any],
    builtins: Mapping[str, Callable[..., Any]],
    key: str,
    *,
    positional: tuple[str, ...] = (),
    arguments: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """Resolve, check the signature, and fix the recipe's arguments: what is left takes
    `positional`.
    """
    function = resolve(spec, builtins, key)
    checked = check_arguments(function, arguments or {}, key, len(positional))
    bound = functools.partial(function, **checked) if checked else function
    check_positional(bound, positional, key)
    return bound


def _convert(hint: Any, value: Any, key: str) -> Any:
    try:
        return TypeAdapter(hint, config=ConfigDict(arbitrary_types_allowed=True)).validate_python(
            value
        )
    except ValidationError as error:
        raise PluginError(f"{key}: {error.errors()[0]['msg']} (got {value!r})") from None


def _hints(function: Callable[..., Any]) -> dict[str, Any]:
    target = function.__init__ if inspect.isclass(function) else function
    try:
        return inspect.get_annotations(inspect.unwrap(target), eval_str=True)
    except (NameError, TypeError):
        return {}


def _signature(function: Callable[..., Any], key: str) -> inspect.Signature:
    try:
        return inspect.signature(function)
    except (ValueError, TypeError):
        raise PluginError(
            f"{key}: {_name(function)} has no readable signature; wrap it in a plain function"
        ) from None


def _name(function: Callable[..., Any]) -> str:
    inner = function.func if isinstance(function, functools.partial) else function
    return getattr(inner, "__name__", type(inner).__name__)
