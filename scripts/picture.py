"""The picture of a run in the README: what its display showed, replayed from its run directory.

python scripts/picture.py runs/quickstart docs/quickstart.svg
"""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from fledge.orchestration.console import View
from fledge.orchestration.rundir import live_lines


def picture(run: Path, out: Path) -> None:
    """Feed the recorded metrics to the live view, and save what it shows as SVG."""
    report = json.loads((run / "report.json").read_text())
    lines = list(live_lines(run, "metrics"))
    clock = Replay(lines[0]["time"])
    view = View("quickstart: grpo on arithmetic", max(line["step"] for line in lines), clock)
    for line in lines:
        clock.now = line["time"]
        step = line.pop("step")
        view.step(step, {k: v for k, v in line.items() if "/" in k})
    view.phase("finished")
    console = Console(record=True, width=88, file=io.StringIO(), force_terminal=True)
    console.print(Text("$ make train", style="bold"))
    console.print(view)
    for name, evaluation in stages(report):
        score = f"{evaluation['average']:.1%} of 500 held-out problems"
        console.print(f"\n[bold]{name}: {score}", highlight=False)
        for prompt, reply, reward in evaluation["answers"]:
            mark = "[green]✓" if reward >= 1 else "[red]✗"
            console.print(f"  {mark}[/] {prompt} = {reply}", highlight=False)
    console.save_svg(str(out), title="fledge")


class Replay:
    """The time of the line that is being shown."""

    def __init__(self, now: float) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


def stages(report: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    evaluations = report["evaluations"]
    last = max(evaluations, key=int)
    return [
        ("after the warm start", evaluations["0"]),
        ("after RL", evaluations[last]),
    ]


if __name__ == "__main__":
    picture(Path(sys.argv[1]), Path(sys.argv[2]))
