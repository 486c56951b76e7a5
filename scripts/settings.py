"""Writes docs/settings.md: every setting with its default and meaning, from the schema itself.

python scripts/settings.py
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, get_args

from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from fledge.config.load import walk_keys
from fledge.config.schema import PreferConfig, SftConfig, TrainConfig

PAGE = Path(__file__).resolve().parent.parent / "docs" / "settings.md"

HEAD = """# Settings

Made from the schema by `python scripts/settings.py`. In a recipe the dots are nesting; on the
command line write `key=value`. A setting of type *plug-in* is a built-in name, `"module:name"`, or
`{name: ..., argument: ...}`.
"""


COMMON = (
    "`run_dir`, `seed`, `steps`, `threads`, `console`, `model`, `optim`, `checkpoint` and "
    "`tracking` are as above.\n"
)


def page() -> str:
    """The whole page."""
    return "\n".join(
        [
            HEAD,
            "## `fledge train`\n",
            *table((k, f) for k, f in walk_keys(TrainConfig) if "warm_start.optim" not in k),
            "\n`warm_start.optim` has the keys of `optim`.",
            "\n## `fledge sft`\n",
            COMMON,
            *table((k, f) for k, f in walk_keys(SftConfig) if k.startswith("data.")),
            "\n## `fledge prefer`\n",
            COMMON,
            *table((k, f) for k, f in walk_keys(PreferConfig) if k.startswith(("data.", "loss"))),
            "",
        ]
    )


def table(keys: Iterable[tuple[str, FieldInfo]]) -> Iterator[str]:
    yield "| key | default | meaning |"
    yield "| --- | --- | --- |"
    for key, field in keys:
        meaning = (field.description or "").replace("|", "\\|")
        choices = [f"`{c}`" for c in get_args(field.annotation) if isinstance(c, str)]
        listed = f" ({', '.join(choices)})" if choices else ""
        shown = "by method" if key == "optim.lr" else default(field)
        yield f"| `{key}` | {shown} | {meaning}{listed} |"


def default(field: FieldInfo) -> str:
    if field.is_required():
        return "needed"
    value: Any = field.get_default(call_default_factory=True)
    if value is PydanticUndefined or value is None:
        return "none"
    name = getattr(value, "label", None)
    return f"`{name or json.dumps(value)}`"


if __name__ == "__main__":
    PAGE.write_text(page())
