"""`fledge env check`: an environment against its contract, without a model."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from fledge.config import TrainConfig, load_config
from fledge.data.sources import GENERATORS
from fledge.data.tasks import load_rows, to_tasks
from fledge.envs import check_env, make_factory
from fledge.errors import ConfigError

TASKS = 5


def check(name: str, arguments: Sequence[str], data: str | None) -> int:
    """Prints each problem; returns the exit code."""
    if data is None and name not in GENERATORS:
        raise ConfigError(f"--data: {name} needs tasks; name a file or a generator of its rows")
    recipe = {"env": {"name": name}, "data": {"train": data or name}}
    settings = [f"env.{argument}" for argument in arguments]
    config = load_config(TrainConfig, recipe, settings, environ={}).config
    factory = make_factory(config.env)
    tasks = to_tasks(load_rows(config.data.train, "--data"), "--data")[:TASKS]
    problems = asyncio.run(check_env(factory, tasks))
    for problem in problems:
        print(f"problem: {problem}")
    if not problems:
        print(f"ok: {name} keeps the contract ({len(tasks)} tasks tried)")
    return 1 if problems else 0
