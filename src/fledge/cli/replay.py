"""`fledge replay`: an episode of a run again, exact to the token, from `episodes.jsonl` alone.

Green was sampled and is trained, yellow was sampled and cleared by a rule, grey is context that the
policy saw; tokens of the template are dim.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text
from transformers import AutoTokenizer

from fledge.cli.show import printable
from fledge.errors import DataError
from fledge.orchestration.rundir import live_lines
from fledge.orchestration.stages import run_config

SHOWN = 20
"""Episodes in a list."""

TRAINED, CLEARED, CONTEXT, TEMPLATE = "green", "yellow", "bright_black", "dim bright_black"


def replay(run: Path, wanted: str | None) -> None:
    """Print one episode, or a list of the latest to choose from."""
    lines = list(live_lines(run, "episodes"))
    if not lines:
        raise DataError(f"run {run}: there are no episodes in episodes.jsonl")
    console = Console(highlight=False)
    if wanted is None:
        console.print(listed(lines))
        return
    line = chosen(lines, wanted)
    tokenizer = _tokenizer(run)
    console.print(heading(line))
    for number, segment in enumerate(line["segments"], 1):
        if len(line["segments"]) > 1:
            console.print(Text(f"segment {number}", style="bold"))
        console.print(coloured(segment, tokenizer))
        console.print(said(segment, tokenizer))


def listed(lines: Sequence[Mapping[str, Any]]) -> Table:
    """The latest episodes with the numbers that name them."""
    table = Table(box=None)
    for name in ("episode", "step", "task", "outcome", "reward", "tokens", "last reply"):
        table.add_column(name)
    for number in range(max(0, len(lines) - SHOWN), len(lines)):
        line = lines[number]
        replies = [m["content"] for m in line["messages"] if m["role"] == "assistant"]
        table.add_row(
            str(number + 1),
            str(line["step"]),
            f"{line['task_key']}/{line['index']}",
            line["outcome"],
            f"{line['reward']:g}",
            str(line["response_tokens"]),
            printable(replies[-1])[:40] if replies else "",
        )
    return table


def chosen(lines: Sequence[Mapping[str, Any]], wanted: str) -> Mapping[str, Any]:
    """By number, or the latest of a task, or of a task and an index in its group."""
    if wanted.isdigit() and 1 <= int(wanted) <= len(lines):
        return lines[int(wanted) - 1]
    task, _, index = wanted.rpartition("/")
    for line in reversed(lines):
        if line["task_key"] == wanted or (line["task_key"], str(line["index"])) == (task, index):
            return line
    raise DataError(
        f"episode {wanted!r}: there is none of that number (1 to {len(lines)}) or task; without an "
        "episode the command lists the latest"
    )


def heading(line: Mapping[str, Any]) -> str:
    rewards = " + ".join(f"{r:g}" for r in line["rewards"]) or "none"
    text = f"step {line['step']}, task {line['task_key']}/{line['index']}: {line['outcome']}"
    text += f", reward {line['reward']:g} ({rewards})"
    parts = ", ".join(f"{name} {value:g}" for name, value in line["components"].items())
    return text + (f"; {parts}" if parts else "") + (f"; {line['error']}" if line["error"] else "")


def styles(segment: Mapping[str, Any], special: set[int]) -> list[str]:
    """A colour for each token."""
    found = [TEMPLATE if token in special else CONTEXT for token in segment["ids"]]
    for start, end, _ in segment["sampled"]:
        found[start:end] = [TRAINED] * (end - start)
    for place, _ in segment.get("cleared", ()):
        found[place] = CLEARED
    return found


def coloured(segment: Mapping[str, Any], tokenizer: Any) -> Text:
    """The whole text in the colours of its tokens."""
    text = Text()
    ids = segment["ids"]
    for token, style in zip(ids, styles(segment, set(tokenizer.all_special_ids)), strict=True):
        text.append(printable(tokenizer.decode([token])), style=style)
    return text


def said(segment: Mapping[str, Any], tokenizer: Any) -> Table:
    """What was sampled, token by token."""
    table = Table(box=None)
    for name in ("place", "token", "id", "log-prob", "version", "cleared by"):
        table.add_column(name)
    rules = dict(segment.get("cleared", ()))
    logps = iter(segment["logps"])
    for start, end, version in segment["sampled"]:
        for place in range(start, end):
            token = segment["ids"][place]
            table.add_row(
                str(place),
                Text(repr(tokenizer.decode([token]))),
                str(token),
                f"{next(logps):.4f}",
                str(version),
                rules.get(place, ""),
            )
    return table


def _tokenizer(run: Path) -> Any:
    """Of the run's export, or of the model that it began with."""
    for folder in (run / "model", run / "warm_start" / "model"):
        if (folder / "tokenizer.json").exists():
            return AutoTokenizer.from_pretrained(str(folder))
    from fledge.models.load import load_tokenizer

    return load_tokenizer(run_config(run).config.model.path)
