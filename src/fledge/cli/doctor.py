"""`fledge doctor`: is this machine fit, and is this model trained and sampled exactly?

Prints one line per check as it is made; what fails says what to do. The checks of a model are in
`checks.py`; here are those of the machine, the order, and the table.
"""

from __future__ import annotations

import os
import platform
import shutil
import time
from collections.abc import Callable, Iterator
from functools import partial
from importlib import metadata, resources
from pathlib import Path

import torch
from packaging.requirements import Requirement
from rich.console import Console
from rich.table import Table

from fledge.cli import checks
from fledge.cli.checks import Check, Subject, guarded
from fledge.config import SftConfig, TrainConfig, load_config
from fledge.config.schema import CommonConfig, ModelConfig
from fledge.errors import ConfigError
from fledge.models.load import Policy
from fledge.orchestration import open_run
from fledge.orchestration.setup import make_policy

NEEDED = ("torch", "transformers", "peft", "safetensors", "tokenizers")
EXTRAS = {
    "datasets": "data",
    "pyarrow": "data",
    "tensorboard": "tensorboard",
    "wandb": "wandb",
    "mlflow-skinny": "mlflow",
}
GIB = 2**30
PIPE_WIDTH = 160
"""Columns where there is no terminal to ask."""


def doctor(target: str) -> int:
    """Examine the machine and `target`; returns 0 when everything passes, else 1."""
    began = time.monotonic()
    console = Console()
    if not console.is_terminal:
        console = Console(width=PIPE_WIDTH)
    found = _show(console, "machine", machine())
    policy = open_target(target)
    found += _show(console, f"model {target}", examine(policy))
    failed = sum(not check.ok for check in found)
    seconds = time.monotonic() - began
    verdict = f"{failed} of {len(found)} checks fail" if failed else f"all {len(found)} checks pass"
    console.print(f"\n{verdict} ({seconds:.0f} s)", style="red" if failed else "green")
    return 1 if failed else 0


def _show(console: Console, title: str, lines: Iterator[Check]) -> list[Check]:
    """One table row at a time, so that a slow check is seen to be running."""
    console.print(f"\n{title}", style="bold", markup=False)
    found = []
    for check in lines:
        found.append(check)
        mark, style = ("FAIL", "red") if not check.ok else ("ok", "green")
        if check.ok and check.advice:
            mark, style = "note", "yellow"
        row = Table.grid(padding=(0, 2))
        row.add_column(width=4, style=style)
        row.add_column(width=44)
        row.add_column(overflow="fold")
        row.add_row(mark, check.name, _text(check))
        console.print(row, markup=False)
    return found


def _text(check: Check) -> str:
    return f"{check.detail} -> {check.advice}" if check.advice else check.detail


def open_target(target: str) -> Policy:
    """A run directory, a recipe (built-in or file), or a model: in this order."""
    path = Path(target)
    if (path / "config.yaml").is_file():
        return open_run(path)[1]
    if target == "tiny":
        return make_policy(CommonConfig(model=ModelConfig(random_init=True)))
    recipe = resources.files("fledge.recipes") / f"{target}.yaml"
    if path.suffix in (".yaml", ".yml", ".json") or (not path.exists() and recipe.is_file()):
        return make_policy(_recipe(target))
    return make_policy(CommonConfig(model=ModelConfig(path=target)))


def _recipe(target: str) -> CommonConfig:
    """Whichever kind of recipe it is; if it is neither, the complaint as a train recipe counts."""
    try:
        return load_config(TrainConfig, target).config
    except ConfigError as error:
        try:
            return load_config(SftConfig, target).config
        except ConfigError:
            raise error from None


# ---- the machine


def machine() -> Iterator[Check]:
    python = platform.python_version_tuple()
    old = (int(python[0]), int(python[1])) < (3, 11)
    yield Check("python", not old, platform.python_version(), "use 3.11 or later" if old else "")
    wanted = _wanted()
    for name in NEEDED:
        yield _version(name, wanted.get(name))
    yield Check("optional packages", True, ", ".join(_extras()))
    yield _devices()
    yield _threads()
    yield _memory_and_disk()


def _wanted() -> dict[str, Requirement]:
    """What this version of fledge asks for; nothing when it runs from a source tree."""
    try:
        lines = metadata.requires("fledge") or []
    except metadata.PackageNotFoundError:
        return {}
    found = [Requirement(line) for line in lines if "extra ==" not in line]
    return {requirement.name: requirement for requirement in found}


def _version(name: str, wanted: Requirement | None) -> Check:
    try:
        version = metadata.version(name)
    except metadata.PackageNotFoundError:
        return Check(name, False, "not installed", f"pip install '{wanted or name}'")
    if wanted is not None and not wanted.specifier.contains(version, prereleases=True):
        return Check(name, False, f"{version} is not supported", f"pip install '{wanted}'")
    return Check(name, True, version)


def _extras() -> Iterator[str]:
    for name, extra in EXTRAS.items():
        try:
            yield f"{name} {metadata.version(name)}"
        except metadata.PackageNotFoundError:
            yield f"{name} absent (pip install 'fledge[{extra}]')"


def _devices() -> Check:
    found = [f"cpu ({platform.machine()})"]
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        found.append(f"cuda:{index} {properties.name} {properties.total_memory / GIB:.0f} GiB")
    return Check("devices", True, ", ".join(found))


def _threads() -> Check:
    cores = usable_cores()
    asked = os.environ.get("OMP_NUM_THREADS", "")
    detail = f"{cores:g} usable cores, OMP_NUM_THREADS={asked or 'not set'}"
    if asked.isdigit() and int(asked) > cores:
        advice = "threads that wait for a core slow everything down; set it lower or unset it"
        return Check("threads", True, detail, advice)
    return Check("threads", True, detail)


def usable_cores() -> float:
    """Cores that this process may run on, with a container's quota taken into account."""
    affinity = getattr(os, "sched_getaffinity", None)
    cores = float(len(affinity(0)) if affinity else os.cpu_count() or 1)
    quota = Path("/sys/fs/cgroup/cpu.max")
    if quota.is_file():
        limit, period = quota.read_text().split()
        if limit != "max":
            cores = min(cores, int(limit) / int(period))
    return cores


def _memory_and_disk() -> Check:
    free = shutil.disk_usage(Path.cwd()).free / GIB
    memory = available_memory()
    known = "unknown" if memory is None else f"{memory / GIB:.1f} GiB"
    detail = f"{known} of memory available, {free:.1f} GiB free on this disk"
    return Check("memory and disk", True, detail)


def available_memory() -> int | None:
    meminfo = Path("/proc/meminfo")
    if not meminfo.is_file():
        return None
    lines = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
    return int(lines["MemAvailable"].split()[0]) * 1024 if "MemAvailable" in lines else None


# ---- the model


def examine(policy: Policy) -> Iterator[Check]:
    """Every check of a model, the one that trains it near the end."""
    yield fits(policy)
    subject = Subject.of(policy)
    yield from checks.template(subject)
    after = "log-probs still equal after training"
    looks: dict[str, Callable[[Subject], Check]] = {
        checks.STOCK: checks.stock_agreement,
        checks.CUT: checks.cut_invariance,
        checks.RATE: checks.zero_rate,
        checks.SEED: checks.seeds,
        checks.LEARN: checks.overfit_one_prompt,
        after: partial(checks.stock_agreement, name=after),
    }
    for name, look in looks.items():
        yield guarded(name, partial(look, subject))


def fits(policy: Policy) -> Check:
    """Room for training: gradients, optimiser state and masters, beside the weights loaded now."""
    parameters = list(policy.module.parameters())
    trained = sum(p.numel() for p in parameters if p.requires_grad)
    each = 12 if policy.dtype == torch.float32 else 16
    need = trained * each
    if policy.device.type == "cuda":
        free: int | None = torch.cuda.mem_get_info(policy.device)[0]
    else:
        free = available_memory()
    total = sum(p.numel() for p in parameters)
    detail = (
        f"{type(policy.model).__name__}, {total / 1e6:.1f}M parameters, {policy.dtype}, "
        f"on {policy.device}; training takes {need / GIB:.2f} GiB more"
    )
    if free is not None and need > free:
        advice = (
            f"only {free / GIB:.1f} GiB are free; set model.lora.rank=16 or use a smaller model"
        )
        return Check("training fits into memory", False, detail, advice)
    return Check("training fits into memory", True, detail)
