"""Layers: defaults < preset < recipe < `FLEDGE__A__B=` environment < dotted overrides. Each value
remembers where it came from.
"""

from __future__ import annotations

import copy
import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, Generic, TypeVar

import yaml
from pydantic import BaseModel, ValidationError

from fledge.config.presets import PRESETS, default_rate
from fledge.config.schema import (
    MAY_CHANGE_ON_RESUME,
    SMOKE,
    CommonConfig,
    Plugin,
    PreferConfig,
    TrainConfig,
    built_in_name,
)
from fledge.errors import ConfigError
from fledge.plugins import nearest

ENV_PREFIX = "FLEDGE__"
_EXPONENT = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)[eE][+-]?\d+")
C = TypeVar("C", bound=CommonConfig)


@dataclass(frozen=True)
class Resolved(Generic[C]):
    """A validated configuration and the origin of each of its values.

    `origins["rollout.group_size"]` is `"default"`, `"recipe quickstart"`, `"environment
    FLEDGE__..."`, `"override"` or `"preset grpo"`.
    """

    config: C
    origins: Mapping[str, str]

    def values(self) -> dict[str, Any]:
        return dict(_flatten(self.config.model_dump(mode="json")))

    def origin(self, key: str) -> str:
        """Where the value of `key` came from; a value inside a set section inherits the section's
        origin.
        """
        while key:
            if key in self.origins:
                return self.origins[key]
            key = key.rpartition(".")[0]
        return "default"

    def was_set(self, key: str) -> bool:
        return not self.origin(key).startswith("default")

    def table(self) -> list[tuple[str, str, str]]:
        return [(key, json.dumps(value), self.origin(key)) for key, value in self.values().items()]

    def to_yaml(self) -> str:
        """The resolved configuration with each origin as a comment: a valid recipe."""
        lines = yaml.safe_dump(
            self.config.model_dump(mode="json"), sort_keys=False, width=10_000
        ).splitlines()
        return "\n".join(_with_origin(lines, self)) + "\n"

    def hash(self) -> str:
        """Identity of what is learned: keys that may change on resume are left out."""
        return hashlib.sha256(json.dumps(self.fixed(), sort_keys=True).encode()).hexdigest()[:16]

    def fixed(self) -> dict[str, Any]:
        return fixed_values(self.values())


def fixed_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values that a resumed run must share with the run it continues."""
    free = tuple(f"{key}." for key in MAY_CHANGE_ON_RESUME)
    return {
        k: v
        for k, v in values.items()
        if k not in MAY_CHANGE_ON_RESUME and not k.startswith(free) and not _is_file(k, v)
    }


def _is_file(key: str, value: Any) -> bool:
    """Files may move: what is in them is compared by content."""
    sources = ("data.train.name", "data.eval.name", "warm_start.train.name")
    return key == "model.path" or (
        key in sources and str(value).endswith((".jsonl", ".json", ".parquet"))
    )


def load_config(
    schema: type[C],
    recipe: str | Path | Mapping[str, Any] | None = None,
    overrides: Sequence[str] = (),
    environ: Mapping[str, str] | None = None,
    smoke: bool = False,
) -> Resolved[C]:
    """Read the layers and validate them; every complaint names its key and where the value came
    from. `smoke` caps every size and writes to another run directory.
    """
    layers: list[tuple[str, dict[str, Any]]] = []
    if recipe is not None:
        layers.append(_read_recipe(recipe))
    for name, text in sorted((os.environ if environ is None else environ).items()):
        if name.startswith(ENV_PREFIX):
            key = name.removeprefix(ENV_PREFIX).lower().replace("__", ".")
            layers.append((f"environment {name}", _nest(key, _parse_value(text))))
    for override in overrides:
        key, equals, text = override.partition("=")
        if not equals or not key:
            raise ConfigError(f"override {override!r} is not of the form key=value")
        layers.append(("override", _nest(key.strip(), _parse_value(text))))
    if issubclass(schema, TrainConfig):
        layers.insert(0, _preset_layer(layers))
    layers.insert(0, _rate_layer(schema, layers))
    merged: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for origin, layer in layers:
        _merge(merged, layer, origin, origins)
    resolved = Resolved(_validate(schema, merged, origins), origins)
    if smoke:
        _merge(merged, _smoke_layer(resolved), "--smoke", origins)
        resolved = Resolved(_validate(schema, merged, origins), origins)
    return resolved


def _smoke_layer(resolved: Resolved[Any]) -> dict[str, Any]:
    values = resolved.values()
    layer: dict[str, Any] = {"run_dir": f"{values['run_dir']}-smoke"}
    for key, cap in SMOKE.items():
        # 0 held-out tasks means all of them where there is a set of its own, none otherwise.
        everything = key == "data.eval_size" and "data.eval.name" in values and not values[key]
        if values.get(key) is not None and (values[key] > cap or everything):
            _merge(layer, _nest(key, cap), "", {})
    return layer


Layers = Sequence[tuple[str, Mapping[str, Any]]]


def _preset_layer(layers: Layers) -> tuple[str, dict[str, Any]]:
    name = str(_last(layers, "algorithm", "name", "grpo"))
    return f"preset {name}", {"algorithm": copy.deepcopy(PRESETS.get(name, {}))}


def _rate_layer(schema: type[Any], layers: Layers) -> tuple[str, dict[str, Any]]:
    """The learning rate that fits the method, for recipes that name none."""
    method = "train" if issubclass(schema, TrainConfig) else "sft"
    if issubclass(schema, PreferConfig):
        given = [layer["loss"] for _, layer in layers if "loss" in layer]
        names = [loss.get("name") if isinstance(loss, Mapping) else loss for loss in given]
        name = next((built_in_name(name) for name in reversed(names) if name), "dpo")
        method = "reward_model" if name == "bradley_terry" else "prefer"
    lora = _last(layers, "model", "lora", None)
    origin, rate = default_rate(method, lora is not None)
    return origin, {"optim": {"lr": rate}}


def _last(layers: Layers, section: str, key: str, default: Any) -> Any:
    """The value that the highest layer gives to a key."""
    for _, layer in reversed(layers):
        found = layer.get(section)
        if isinstance(found, Mapping) and key in found:
            return found[key]
    return default


def _read_recipe(recipe: str | Path | Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    if isinstance(recipe, Mapping):
        return "recipe", dict(recipe)
    path = Path(recipe)
    name = str(recipe)
    if not path.exists() and path.suffix == "":
        built_in = resources.files("fledge.recipes") / f"{recipe}.yaml"
        if not built_in.is_file():
            known = sorted(
                p.name.removesuffix(".yaml")
                for p in resources.files("fledge.recipes").iterdir()
                if p.name.endswith(".yaml")
            )
            raise ConfigError(
                f"recipe {name!r}: no such file or built-in recipe{nearest(name, known)} (built "
                f"in: {', '.join(known)})"
            )
        text = built_in.read_text()
    else:
        try:
            text = path.read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"recipe {name!r} cannot be read: {getattr(error, 'strerror', None) or error}"
            ) from None
    try:
        loaded = yaml.safe_load(text)
    except yaml.YAMLError as error:
        where = getattr(error, "problem_mark", None)
        line = f" at line {where.line + 1}" if where else ""
        raise ConfigError(
            f"recipe {name!r} is not valid YAML or JSON{line}: {getattr(error, 'problem', error)}"
        ) from None
    if not isinstance(loaded, dict):
        raise ConfigError(
            f"recipe {name!r} must be a mapping of keys to values, not {type(loaded).__name__}"
        )
    return f"recipe {path.name}", _with_numbers(loaded)


def _parse_value(text: str) -> Any:
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        return text
    return _with_numbers(value)


def _with_numbers(value: Any) -> Any:
    """YAML 1.1 reads 1e-4 as text; people mean the number."""
    if isinstance(value, dict):
        return {key: _with_numbers(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_with_numbers(inner) for inner in value]
    if isinstance(value, str) and _EXPONENT.fullmatch(value):
        return float(value)
    return value


def _nest(key: str, value: Any) -> dict[str, Any]:
    first, _, rest = key.partition(".")
    return {first: _nest(rest, value) if rest else value}


def _merge(
    into: dict[str, Any],
    layer: Mapping[str, Any],
    origin: str,
    origins: dict[str, str],
    prefix: str = "",
) -> None:
    for key, value in layer.items():
        path = f"{prefix}{key}"
        old = into.get(key)
        if isinstance(old, str) and isinstance(value, Mapping) and "name" not in value:
            into[key] = old = {"name": old}  # `loss: clipped` followed by loss.high=0.28
            origins[f"{path}.name"] = origins.pop(path, origin)
        replaced = path != "algorithm" and isinstance(old, dict) and _renames(old, value)
        if isinstance(value, Mapping) and isinstance(old, dict) and not replaced:
            _merge(old, value, origin, origins, f"{path}.")
        else:
            for stale in [k for k in origins if k.startswith(f"{path}.")]:
                del origins[stale]
            into[key] = {} if isinstance(value, Mapping) else value
            if isinstance(value, Mapping) and value:
                _merge(into[key], value, origin, origins, f"{path}.")
            else:
                origins[path] = origin


def _renames(old: Mapping[str, Any], new: Any) -> bool:
    """Another plug-in replaces the old one whole: its arguments mean nothing to the new one."""
    return (
        isinstance(new, Mapping) and "name" in old and new.get("name", old["name"]) != old["name"]
    )


def _validate(schema: type[C], merged: Mapping[str, Any], origins: Mapping[str, str]) -> C:
    try:
        return schema.model_validate(merged)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"])
        origin = origins.get(key) or next(
            (o for k, o in origins.items() if key.startswith(f"{k}.") or k.startswith(f"{key}.")),
            "",
        )
        came = f" (from {origin})" if origin else ""
        if first["type"] == "extra_forbidden":
            known = _known_keys(schema)
            raise ConfigError(f"{key}: no such key{nearest(key, known)}{came}") from None
        if first["type"] == "missing":
            raise ConfigError(
                f"{key}: this key is needed and has no default; set it in the recipe or as "
                f"{key}=VALUE"
            ) from None
        message = first["msg"].removeprefix("Value error, ")
        if first["type"] == "value_error":
            raise ConfigError(message) from None
        raise ConfigError(f"{key}: {message}, got {first['input']!r}{came}") from None


def _known_keys(schema: type[BaseModel]) -> list[str]:
    return [key for key, _ in walk_keys(schema)]


def walk_keys(schema: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every dotted key of a schema with its field; sections are walked into, plug-in arguments are
    not.
    """
    for name, field in schema.model_fields.items():
        inner = next((t for t in _candidates(field.annotation) if _is_section(t)), None)
        if inner is None:
            yield f"{prefix}{name}", field
        else:
            yield from walk_keys(inner, f"{prefix}{name}.")


def _candidates(annotation: Any) -> tuple[Any, ...]:
    return (annotation, *getattr(annotation, "__args__", ()))


def _is_section(annotation: Any) -> bool:
    return (
        isinstance(annotation, type)
        and issubclass(annotation, BaseModel)
        and not issubclass(annotation, Plugin)
    )


def _flatten(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, dict) and value:
            yield from _flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _with_origin(lines: Sequence[str], resolved: Resolved[Any]) -> Iterator[str]:
    stack: list[tuple[int, str]] = []
    for line in lines:
        indent = len(line) - len(line.lstrip())
        name, colon, rest = line.strip().partition(":")
        if not colon or line.lstrip().startswith("- "):
            yield line
            continue
        while stack and stack[-1][0] >= indent:
            stack.pop()
        stack.append((indent, name))
        key = ".".join(part for _, part in stack)
        yield f"{line}  # {resolved.origin(key)}" if rest.strip() else line
