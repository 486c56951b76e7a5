"""Every preset on the quickstart's task: same start, same seed, same budget. Writes the curve of
each and one table.

python scripts/compare.py               all of them, one after the other
python scripts/compare.py gspo ppo      only these
python scripts/compare.py --smoke       tiny sizes, to see it run; nothing in docs/ changes

A run that is finished is not run again: runs/compare holds them. Delete it to start anew.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import fledge
from fledge.config.presets import PRESETS
from fledge.orchestration.rundir import live_lines

PAGES = Path(__file__).resolve().parent.parent / "docs" / "algorithms"
EVERY = 10
RECIPES: dict[str, dict[str, Any]] = {
    "sft": {
        "train": {"name": "arithmetic_demonstrations", "forget": 0.0},
        "optim": {"lr": 7e-4, "beta2": 0.95},
    },
    "dpo": {
        "train": {"name": "arithmetic_pairs"},
        "optim": {"lr": 2e-4, "beta2": 0.95},
        "loss": {"name": "dpo", "nll": 1.0},
    },
}
SUPERVISED = tuple(RECIPES)
NAMES = [*PRESETS, *SUPERVISED]
BEGIN, END = "<!-- compare: begin -->", "<!-- compare: end -->"


@dataclass(frozen=True)
class Result:
    """What a run has shown: held-out accuracy by step, and what it took."""

    name: str
    accuracy: dict[int, float]
    episodes: int
    updates: int
    cpu: float


def read(file: Path) -> Result:
    found = json.loads(file.read_text())
    return Result(**{**found, "accuracy": {int(s): v for s, v in found["accuracy"].items()}})


class Comparison:
    """Runs in one folder that all start from the same warm start."""

    def __init__(self, folder: Path, smoke: bool = False, seed: int = 0) -> None:
        self.folder, self.smoke, self.seed = folder, smoke, seed
        self.recipe = fledge.load_config(fledge.TrainConfig, "quickstart").config

    def start(self) -> str:
        """The warm start of the quickstart; what every run begins with."""
        report = self._run_dir("start") / "report.json"
        if report.exists() and json.loads(report.read_text())["finished"]:
            return str(report.parent / "model")
        stage = self.recipe.warm_start
        assert stage is not None
        data = stage.model_dump(exclude={"steps", "optim"})
        values = {
            "steps": stage.steps,
            "model": self.recipe.model.model_dump(),
            "optim": stage.optim.model_dump(),
            "data": data,
        }
        return str(self._finished(fledge.sft, fledge.SftConfig, "start", values)["model"])

    def run(self, name: str, label: str = "", **algorithm: Any) -> Result:
        """Train one preset, or read what it left when it was trained before. `algorithm` are
        settings on top of it, and `label` tells such a run from the plain one.
        """
        label = label or name
        known = self.folder / f"{label}.json"
        if known.exists():
            return read(known)
        start = self.start()
        if name == "distill":
            algorithm = {"teacher": self._teacher(), **algorithm}
        began = time.process_time()
        result = (
            self._supervised(name, start, began)
            if name in SUPERVISED
            else self._train(label, start, began, {"name": name, **algorithm})
        )
        known.write_text(json.dumps(asdict(result)))
        return result

    def _train(self, label: str, start: str, began: float, algorithm: dict[str, Any]) -> Result:
        values = {
            "steps": self.recipe.steps,
            "model": {"path": start},
            "env": "arithmetic",
            "data": self._data(),
            "rollout": self.recipe.rollout.model_dump(),
            "algorithm": algorithm,
            "optim": self.recipe.optim.model_dump(),
            "eval": {"every": EVERY},
        }
        report = self._finished(fledge.train, fledge.TrainConfig, label, values)
        run = Path(report["model"]).parent
        steps = [line for line in live_lines(run, "metrics") if line["step"]]
        config = fledge.load_config(fledge.TrainConfig, run / "config.yaml").config
        return Result(
            label,
            {int(step): found["average"] for step, found in report["evaluations"].items()},
            sum(1 for _ in live_lines(run, "episodes")),
            len(steps) * config.algorithm.updates,
            time.process_time() - began,
        )

    def _data(self) -> dict[str, Any]:
        """The quickstart's problems; for a look only, the few that are there to choose settings
        by.
        """
        data = self.recipe.data.model_dump()
        return {**data, "train": {"name": "arithmetic", "split": "tuning"}} if self.smoke else data

    def _teacher(self) -> str:
        """What distillation imitates: the result of GRPO."""
        self.run("grpo")
        return str(self._run_dir("grpo") / "model")

    def _supervised(self, name: str, start: str, began: float) -> Result:
        """Demonstrations that carry, or pairs of sums with and without carries; scored now and then
        by raising `steps`.
        """
        total = 1 if self.smoke else self.recipe.steps
        recipe = RECIPES[name]
        kinds = {"sft": (fledge.sft, fledge.SftConfig), "dpo": (fledge.prefer, fledge.PreferConfig)}
        accuracy = {0: self._score(start)}
        every = 1 if self.smoke else EVERY
        for step in range(every, total + 1, every):
            values = {
                "steps": step,
                "model": {"path": start},
                "data": {"train": recipe["train"], "batch_size": 4 if self.smoke else 512},
                "optim": recipe["optim"],
                **({"loss": recipe["loss"]} if "loss" in recipe else {}),
            }
            report = self._finished(*kinds[name], name, values, smoke=False)
            accuracy[step] = self._score(report["model"])
        return Result(name, accuracy, 0, total, time.process_time() - began)

    def _score(self, model: str) -> float:
        overrides = [
            "warm_start=null",
            "model.random_init=false",
            f"model.path={model}",
            *(["data.eval_size=4"] if self.smoke else []),
        ]
        return fledge.evaluate("quickstart", overrides)[1].average

    def _run_dir(self, name: str) -> Path:
        return self.folder / (f"{name}-smoke" if self.smoke and name not in SUPERVISED else name)

    def _finished(
        self, run: Any, schema: Any, name: str, values: dict[str, Any], smoke: bool | None = None
    ) -> dict[str, Any]:
        common = {
            "run_dir": str(self.folder / name),
            "seed": self.seed,
            "console": "quiet",
            "checkpoint": {"every": 1000, "keep_last": 1},
        }
        smoke = self.smoke if smoke is None else smoke
        config = fledge.load_config(schema, {**common, **values}, environ={}, smoke=smoke)
        report: dict[str, Any] = run(config)
        if not report["finished"]:
            raise KeyboardInterrupt
        return report


# ---- what is written


def table(results: Sequence[Result]) -> str:
    """All runs side by side; the steps of the columns are those that every run was scored at."""
    steps = sorted(set.intersection(*(set(r.accuracy) for r in results)))
    shown = [step for step in steps if step % (2 * EVERY) == 0] or steps
    lines = [
        "| preset | " + " | ".join(f"step {s}" for s in shown) + " | episodes | updates | CPU s |",
        "| --- |" + " --- |" * (len(shown) + 3),
    ]
    for r in results:
        scores = " | ".join(f"{r.accuracy[step]:.3f}" for step in shown)
        link = f"[{r.name}]({page_of(r.name)})"
        lines.append(f"| {link} | {scores} | {r.episodes} | {r.updates} | {r.cpu:.0f} |")
    return "\n".join(lines)


def page_of(name: str) -> str:
    """File names without signs that mean something in a link."""
    return f"{name.replace('++', 'pp')}.md"


WIDTH, HEIGHT = 480, 220
LEFT, RIGHT, TOP, BOTTOM = 40, 16, 16, 36


def curve(result: Result, other: Result | None = None) -> str:
    """Held-out accuracy by step as an SVG, with another run in grey to compare with."""
    last = max(result.accuracy)

    def x(step: int) -> float:
        return round(LEFT + (WIDTH - LEFT - RIGHT) * step / last, 1)

    def y(score: float) -> float:
        return round(TOP + (HEIGHT - TOP - BOTTOM) * (1 - score), 1)

    def line(r: Result, colour: str, width: int) -> str:
        points = " ".join(f"{x(step)},{y(score)}" for step, score in sorted(r.accuracy.items()))
        return f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="{width}"/>'

    def text(place: tuple[float, float], words: object, anchor: str, colour: str = "#333") -> str:
        at = f'x="{place[0]}" y="{place[1]}" text-anchor="{anchor}" fill="{colour}"'
        return f"<text {at}>{words}</text>"

    parts = [f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>']
    for share in (0, 0.25, 0.5, 0.75, 1):
        ends = f'x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(share)}" y2="{y(share)}"'
        parts += [f'<line {ends} stroke="#ddd"/>', text((LEFT - 6, y(share) + 4), share, "end")]
    parts += [text((x(step), HEIGHT - 20), step, "middle") for step in sorted(result.accuracy)]
    if other is not None and other.name != result.name:
        parts += [line(other, "#aaa", 1), text((WIDTH - 20, y(0.25)), other.name, "end", "#888")]
    parts += [
        line(result, "#0a58ca", 2),
        text((WIDTH - 20, y(0.12)), result.name, "end", "#0a58ca"),
        text((LEFT, HEIGHT - 4), "held-out accuracy by step", "start"),
    ]
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
    return "\n".join([f'{head}font-family="sans-serif" font-size="11">', *parts, "</svg>\n"])


def write(results: Sequence[Result], folder: Path, known: Path) -> None:
    """The curves; that of GRPO is in all of them, once it has been run."""
    reference = read(known) if known.exists() else None
    for result in results:
        name = page_of(result.name).removesuffix(".md")
        (folder / f"{name}.svg").write_text(curve(result, reference))


def put_between(page: Path, text: str) -> None:
    """Replace what is between the two marks of a page."""
    before, rest = page.read_text().split(BEGIN)
    after = rest.split(END)[1]
    page.write_text(f"{before}{BEGIN}\n{text}\n{END}{after}")


def main(arguments: Sequence[str]) -> int:
    smoke = "--smoke" in arguments
    names = [a for a in arguments if not a.startswith("-")] or NAMES
    unknown = [name for name in names if name not in NAMES]
    if unknown:
        print(f"no such preset: {unknown[0]} (there are: {', '.join(NAMES)})", file=sys.stderr)
        return 2
    folder = Path("runs") / ("compare-smoke" if smoke else "compare")
    folder.mkdir(parents=True, exist_ok=True)
    comparison = Comparison(folder, smoke)
    results = []
    for name in names:
        results.append(comparison.run(name))
        print(f"{name}: {results[-1].accuracy}", flush=True)
    print(table(results))
    write(results, folder if smoke else PAGES, folder / "grpo.json")
    if not smoke and names == NAMES:
        put_between(PAGES / "README.md", table(results))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
