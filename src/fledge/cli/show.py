"""What commands print when they are done: tables and summaries as text. Computes nothing itself.

Replies come from a model, so `printable` is between them and the terminal.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fledge.config import Resolved
    from fledge.orchestration.evaluation import Evaluation

ANSWERS = 3
WIDEST = 60


def settings_table(resolved: Resolved[Any]) -> str:
    """`key  value  origin`, one line each."""
    rows = [("key", "value", "origin"), *resolved.table()]
    key, value = (max(len(row[i]) for row in rows) for i in (0, 1))
    value = min(value, WIDEST)
    return "\n".join(f"{k:<{key}}  {v:<{value}}  {origin}" for k, v, origin in rows)


def train_summary(report: Mapping[str, Any], run_dir: str, cost: str) -> str:
    """The end of `fledge train`: scores, answers, cost, health, and what to do next."""
    lines = [""]
    stages = _stages(report)
    if stages:
        lines.append("held-out score (mean reward)")
        width = max(len(name) for name, _ in stages)
        for name, found in stages:
            lines.append(f"  {name:<{width}}  {found['average']:.3f}{_unscored(found)}")
            lines += [f"    {line}" for line in answers(found["answers"])]
        lines.append("")
    lines += [health(report["health"]), *_ending(report, run_dir, cost)]
    if stages:
        lines.append(f"      fledge eval {run_dir}")
    lines.append(f"      fledge export {run_dir} OUT")
    return "\n".join(lines)


def sft_summary(report: Mapping[str, Any], run_dir: str, cost: str) -> str:
    lines = ["", *_ending(report, run_dir, cost), f"      fledge export {run_dir} OUT"]
    return "\n".join(lines)


def prefer_summary(report: Mapping[str, Any], run_dir: str, cost: str) -> str:
    """The end of `fledge prefer`: how many held-out pairs are in the right order, and what next."""
    lines = [""]
    found = report["evaluations"]
    scores = [(step, found[step]["accuracy"]) for step in found if "accuracy" in found[step]]
    if scores:
        lines.append("held-out accuracy (pairs in the right order)")
        lines += [f"  {'before' if step == '0' else 'after':<6}  {a:.3f}" for step, a in scores]
        lines.append("")
    if report["trained"] == "a policy":
        return "\n".join(
            [*lines, *_ending(report, run_dir, cost), f"      fledge export {run_dir} OUT"]
        )
    lines += [f"time: {cost}", f"reward model: {report['model']}"]
    lines.append(f"next: fledge train RECIPE reward_model.path={report['model']}")
    return "\n".join(lines)


def _stages(report: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    """Named evaluations in the order of training."""
    warm = report.get("before")
    found = report.get("evaluations") or {}
    stages: list[tuple[str, Mapping[str, Any]]] = []
    if warm is not None and warm["evaluation"] is not None:
        stages.append(("before", warm["evaluation"]))
    if "0" in found:
        stages.append(("before" if warm is None else "after supervised warm start", found["0"]))
    last = max(map(int, found), default=0)
    if last:
        stages.append(("after RL", found[str(last)]))
    return stages


def answers(found: Sequence[Sequence[Any]]) -> Iterable[str]:
    """`prompt -> reply   right`, aligned; a reward of 1 or more is right."""
    shown = [(f"{one_line(p)} -> {one_line(a)}", r) for p, a, r in islice(found, ANSWERS)]
    width = max((len(text) for text, _ in shown), default=0)
    return [f"{text:<{width}}  {'right' if reward >= 1 else 'wrong'}" for text, reward in shown]


def health(found: Mapping[str, Any]) -> str:
    warnings = [f"{text} (x{count})" for text, count in found["warnings"].items()]
    dropped = [f"{count} {outcome}" for outcome, count in found["dropped_episodes"].items()]
    parts = [
        f"health: {found['publishes_proven']} publishes proven",
        f"worst mismatch {found['worst_mismatch']:.1e}",
        f"warnings: {'; '.join(warnings)}" if warnings else "no warnings",
    ]
    if dropped:
        parts.append(f"dropped episodes: {', '.join(dropped)}")
    return ", ".join(parts)


def _ending(report: Mapping[str, Any], run_dir: str, cost: str) -> list[str]:
    return [
        f"time: {cost}",
        f"model: {report['model']}",
        f"next: fledge chat {run_dir}",
    ]


def _unscored(found: Mapping[str, Any]) -> str:
    failed = found.get("failed", 0)
    return f"  ({found['tasks']} tasks; {failed} episodes could not be scored)" if failed else ""


def evaluation(name: str, found: Evaluation) -> str:
    """The end of `fledge eval`."""
    scores = [f"avg@{found.samples} {found.average:.3f}"]
    if found.samples > 1:
        scores.append(f"pass@{found.samples} {found.passed:.3f}")
    failed = f", {found.failed} episodes failed" if found.failed else ""
    lines = [f"{name}: {'  '.join(scores)}  ({found.tasks} tasks{failed})"]
    return "\n".join([*lines, *(f"  {line}" for line in answers(found.answers))])


def one_line(text: str) -> str:
    """Short and on one line.

    >>> one_line("a\\nb")
    'a\\\\nb'
    """
    line = printable(text).replace("\n", "\\n").replace("\t", "\\t")
    return line if len(line) <= WIDEST else f"{line[: WIDEST - 3]}..."


def printable(text: str) -> str:
    """Control characters made visible: a model must not be able to steer the terminal.

    >>> printable("a\\x1b[2Jb")
    'a\\\\x1b[2Jb'
    """
    return "".join(c if c.isprintable() or c in "\n\t" else f"\\x{ord(c):02x}" for c in text)
