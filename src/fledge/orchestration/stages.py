"""Whole commands as functions: `train`, `sft`, `prefer`, `evaluate`, and opening a run. The command
line only prints around them.

A run with a `warm_start` is two runs: a supervised one in `<run_dir>/warm_start`, and RL that
begins from its export. Each resumes by itself.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import yaml
from safetensors import SafetensorError

from fledge.algorithms.preferences import make_preference
from fledge.config import PreferConfig, Resolved, SftConfig, TrainConfig, load_config
from fledge.config.schema import CommonConfig, ModelConfig
from fledge.data.render import make_renderer
from fledge.envs import make_factory
from fledge.errors import CheckpointError, ConfigError
from fledge.inference import NativeEngine
from fledge.models.load import Policy, export, restore_weights
from fledge.orchestration.books import Books
from fledge.orchestration.checkpoint import has_checkpoint, read_latest
from fledge.orchestration.evaluation import Evaluation, Evaluator
from fledge.orchestration.files import why, write_atomic
from fledge.orchestration.learned_reward import LearnedReward
from fledge.orchestration.loop import train as run_loop
from fledge.orchestration.run import Run
from fledge.orchestration.setup import make_policy, make_tasks
from fledge.orchestration.supervised import PreferRun, SftRun, SupervisedRun

EXPORT = "model"
"""The folder of a run that holds its export."""


def train(resolved: Resolved[TrainConfig]) -> dict[str, Any]:
    """Run or resume `fledge train`; returns the report that is also in `report.json`."""
    began = time.monotonic()
    before = None
    if resolved.config.warm_start is not None:
        before = _warm_start(resolved)
        if before is None:
            return {"finished": False, "step": 0}
    run = Run(resolved, make_policy(resolved.config, _starting_model(resolved.config)))
    with run.books as books:
        books.began = began  # the warm start counts, too
        step = asyncio.run(_run_and_close(run))
        if step != books.saved_step:  # somebody asked to stop between two checkpoints
            run.save(step)
        report: dict[str, Any] = {} if before is None else {"before": before}
        report |= {"evaluations": run.evaluations, "health": run.health.report()}
        return _finish(books, partial(export, run.policy.policy), step, report)


async def _run_and_close(run: Run) -> int:
    try:
        return await run_loop(run)
    finally:
        await run.engine.close()


def sft(resolved: Resolved[SftConfig], run_dir: str | None = None) -> dict[str, Any]:
    """Run or resume `fledge sft`; returns the report. `run_dir` is that of the whole run, where
    this is its warm start.
    """
    return _supervise(SftRun(resolved, make_policy(resolved.config)), run_dir)


def prefer(resolved: Resolved[PreferConfig]) -> dict[str, Any]:
    """Run or resume `fledge prefer`; returns the report. Trains a policy or a reward model, as the
    loss says.
    """
    return _supervise(PreferRun(resolved, make_policy(resolved.config)))


def _supervise(run: SupervisedRun[Any, Any], run_dir: str | None = None) -> dict[str, Any]:
    with run.books as books:
        step = asyncio.run(run.train())
        if step != books.saved_step:
            run.save(step)
        report = {"trained": run.trains, "evaluations": run.evaluations}
        return _finish(books, lambda folder: asyncio.run(run.export(folder)), step, report, run_dir)


def _finish(
    books: Books,
    write: Callable[[Path], None],
    step: int,
    report: dict[str, Any],
    run_dir: str | None = None,
) -> dict[str, Any]:
    """Export what is finished with `write`, write the report, or say how to continue."""
    config, folder = books.resolved.config, books.run_dir.path
    report |= {"finished": step == config.steps, "step": step}
    if report["finished"]:
        try:
            write(folder / EXPORT)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(
                f"run_dir: training is finished and saved, but exporting to {folder / EXPORT} "
                f"failed: {why(error)}; free space and give the same command again"
            ) from error
        report["model"] = str(folder / EXPORT)
    report["seconds"] = books.seconds()
    books.run_dir.write_report(report)
    if not report["finished"]:
        again = run_dir or config.run_dir
        books.said_goodbye(step, f"give the same command again (run_dir={again})")
    return report


def _warm_start(resolved: Resolved[TrainConfig]) -> dict[str, Any] | None:
    """The supervised run that RL begins from. Returns the score of the model before it, or None if
    it was stopped early.
    """
    config = resolved.config
    folder = Path(config.run_dir) / "warm_start"
    scored = folder / "before.json"
    if not has_checkpoint(config.run_dir):
        how = {key: v for key, v in resolved.values().items() if key.split(".")[0] in _SCORED_BY}
        if not scored.exists() or json.loads(scored.read_text())["how"] != how:
            if config.console != "quiet":
                print("scoring the model before any training", flush=True)
            found = _score(config, make_policy(config, _without_adapter(config.model)))
            record = {"how": how, "evaluation": None if found is None else found.record()}
            _make_folder(folder)
            write_atomic(scored, json.dumps(record))
        if not sft(_sft_config(config, folder), config.run_dir)["finished"]:
            return None
    return {"evaluation": json.loads(scored.read_text())["evaluation"]}


_SCORED_BY = ("seed", "model", "env", "data", "eval", "rollout")
"""Sections that the score of the untrained model depends on."""


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"run_dir: cannot create {folder}: {why(error)}; name another") from None


def _sft_config(config: TrainConfig, folder: Path) -> Resolved[SftConfig]:
    stage = config.warm_start
    assert stage is not None
    data = stage.model_dump(exclude={"steps", "optim"})
    values = {
        "run_dir": str(folder),
        "seed": config.seed,
        "steps": stage.steps,
        "threads": config.threads,
        "console": config.console,
        "model": _without_adapter(config.model).model_dump(),
        "optim": stage.optim.model_dump(),
        "data": data,
        "checkpoint": {"every": max(1, stage.steps // 4), "keep_last": 1},
    }
    return load_config(SftConfig, values, environ={})


def _without_adapter(model: ModelConfig) -> ModelConfig:
    return model.model_copy(update={"lora": None})


def _starting_model(config: CommonConfig) -> ModelConfig:
    """The model that training begins from: as configured, or what the warm start left."""
    if getattr(config, "warm_start", None) is None:
        return config.model
    left = {
        "path": str(Path(config.run_dir) / "warm_start" / EXPORT),
        "random_init": False,
        "overrides": {},
    }
    return config.model.model_copy(update=left)


def open_run(run_dir: str | Path, overrides: Sequence[str] = ()) -> tuple[CommonConfig, Policy]:
    """The configuration of a run and its policy as of the newest checkpoint."""
    resolved = run_config(run_dir, overrides)
    _refuse_reward_model(resolved.config, run_dir)
    saved = read_latest(run_dir)
    if saved is None:
        raise CheckpointError(f"run {run_dir}: there is no checkpoint yet")
    policy = make_policy(resolved.config, _starting_model(resolved.config))
    try:
        restore_weights(policy, saved.path / "weights")
    except (OSError, ValueError) as error:
        raise CheckpointError(f"checkpoint {saved.path} cannot be loaded: {error}") from error
    return resolved.config, policy


def _refuse_reward_model(config: CommonConfig, run_dir: str | Path) -> None:
    if isinstance(config, PreferConfig) and make_preference(config.loss).of_scores:
        raise ConfigError(
            f"run {run_dir}: its loss={config.loss.label} trains a reward model, which scores and "
            f"does not talk; its export is {Path(run_dir) / EXPORT}, for reward_model.path"
        )


def run_config(run_dir: str | Path, overrides: Sequence[str] = ()) -> Resolved[Any]:
    """The configuration that a run directory was made with, with `overrides` on top."""
    path = Path(run_dir) / "config.yaml"
    if not path.exists():
        raise ConfigError(f"run {run_dir}: no config.yaml there; name the run_dir of a run")
    try:
        values = yaml.safe_load(path.read_text())
    except (yaml.YAMLError, UnicodeDecodeError, OSError):
        values = None
    if not isinstance(values, dict):
        raise ConfigError(f"run {run_dir}: its config.yaml is damaged")
    schema: type[CommonConfig] = SftConfig
    for own, kind in (("env", TrainConfig), ("loss", PreferConfig)):
        schema = kind if own in values else schema
    return load_config(schema, {**values, "run_dir": str(run_dir)}, overrides, environ={})


def evaluate(source: str | Path, overrides: Sequence[str] = ()) -> tuple[str, Evaluation]:
    """Score a run (its newest checkpoint) or a recipe (its starting model) on held-out tasks; with
    the environment's name.
    """
    if (Path(source) / "config.yaml").exists():
        config, policy = open_run(source, overrides)
    else:
        config = load_config(TrainConfig, source, overrides).config
        policy = make_policy(config)
    if not isinstance(config, TrainConfig):
        raise ConfigError(
            f"run {source} is supervised, so it has no environment to be scored in; give a train "
            "run or recipe"
        )
    found = _score(config, policy)
    if found is None:
        raise ConfigError(
            "data.eval: there is nothing to evaluate on; set data.eval or data.eval_size"
        )
    return config.env.label, found


def _score(config: TrainConfig, policy: Policy) -> Evaluation | None:
    environment = make_factory(config.env)
    tasks = make_tasks(config, environment, policy).eval
    if not tasks:
        return None
    engine = NativeEngine(policy, config.engine.cache_mb)
    renderer, learned = make_renderer(policy.tokenizer), LearnedReward.of(config)
    evaluator = Evaluator(
        config, engine, renderer, environment, tasks, policy.context, learned.around
    )
    return asyncio.run(evaluator())
