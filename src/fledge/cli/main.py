"""The `fledge` command: what it accepts, and how it ends.

Each command is a short function here that imports what it needs when it runs, so that parsing and
`--help` stay fast and without torch. `run` turns every ending into an exit code and one line:
0 done, 1 a check failed or a bug, 2 something the user can cure, 130 stopped before the end.
"""

from __future__ import annotations

import errno
import os
import re
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from io import TextIOWrapper
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup
from typer.main import get_command

from fledge.errors import FledgeError

Summary = Callable[[Mapping[str, Any], str, str], str]
BEGAN = time.monotonic()


class Stopped(Exception):
    """Ctrl-C in a command."""


class Commands(TyperGroup):
    def invoke(self, ctx: Any) -> Any:
        """Typer would end silently on Ctrl-C; `run` has something to say about it."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as error:
            raise Stopped from error


app = typer.Typer(
    cls=Commands,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # importing rich would double the time of --help
    context_settings={"help_option_names": ["-h", "--help"]},
)
env_app = typer.Typer(help="Tools for authors of environments.")
app.add_typer(env_app, name="env")

Settings = Annotated[
    list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Settings, as steps=20.")
]
Smoke = Annotated[
    bool, typer.Option("--smoke", help="Tiny sizes in RUN_DIR-smoke, to see whether it works.")
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print all settings and their origin.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show the stack trace of an error.")]
"""Declared on each command for its help; `run` reads it: errors come before parsing, too."""

RunPath = Annotated[Path, typer.Argument(metavar="RUN", help="The run_dir of a run.")]
TAKES_SETTINGS = ("train", "sft", "prefer", "eval", "env")


def _print_version(asked: bool) -> None:
    if asked:
        from fledge import __version__

        print(f"fledge {__version__}")
        raise typer.Exit


@app.callback()
def top(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Print it."),
    ] = False,
) -> None:
    """Reinforcement-learning post-training for language models."""


@app.command()
def train(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="RECIPE | KEY=VALUE",
            help="A recipe (a file, or the built-in quickstart) and settings, as steps=20.",
        ),
    ] = None,
    smoke: Smoke = False,
    dry_run: DryRun = False,
    debug: Debug = False,
) -> int:
    """Train with reinforcement learning, or resume the run in run_dir."""
    recipe, settings = recipe_and_settings(arguments or [])
    return _work("train", recipe, settings, smoke, dry_run)


@app.command()
def sft(
    recipe: Annotated[str, typer.Argument(help="A recipe file, or a built-in name.")],
    settings: Settings = None,
    smoke: Smoke = False,
    dry_run: DryRun = False,
    debug: Debug = False,
) -> int:
    """Fine-tune on demonstrations, or resume the run in run_dir."""
    return _work("sft", recipe, settings or [], smoke, dry_run)


@app.command()
def prefer(
    recipe: Annotated[str, typer.Argument(help="A recipe file, or a built-in name.")],
    settings: Settings = None,
    smoke: Smoke = False,
    dry_run: DryRun = False,
    debug: Debug = False,
) -> int:
    """Learn from preference pairs (a policy or a reward model), or resume the run in run_dir."""
    return _work("prefer", recipe, settings or [], smoke, dry_run)


@app.command("eval")
def evaluate(
    source: Annotated[str, typer.Argument(metavar="RUN_OR_RECIPE", help="What to score.")],
    settings: Settings = None,
    debug: Debug = False,
) -> int:
    """Score a run (its newest checkpoint) or a recipe's model on held-out tasks."""
    from fledge.cli import show
    from fledge.orchestration import evaluate as run_evaluation

    print(show.evaluation(*run_evaluation(source, settings or [])))
    return 0


@app.command()
def export(
    run: RunPath,
    out: Annotated[Path, typer.Argument(metavar="OUT", help="A folder that does not exist yet.")],
    adapter: Annotated[
        bool, typer.Option("--adapter", help="Only the LoRA adapter, in PEFT's format.")
    ] = False,
    debug: Debug = False,
) -> int:
    """Write a run's model as Hugging Face transformers loads it, adapters merged in."""
    from fledge.cli.export import export_run

    export_run(run, out, adapter=adapter)
    print(f"wrote {'the adapter' if adapter else 'the model'} of {run} to {out}")
    return 0


@app.command()
def chat(
    run: RunPath,
    prompt: Annotated[str | None, typer.Option(help="Answer this one message and exit.")] = None,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 takes the likeliest token.")] = 0.0,
    debug: Debug = False,
) -> int:
    """Talk to the newest checkpoint of a run."""
    from fledge.cli.chat import chat as run_chat

    run_chat(run, prompt, temperature)
    return 0


@app.command()
def replay(
    run: RunPath,
    episode: Annotated[
        str | None,
        typer.Argument(metavar="EPISODE", help="Its number, or TASK or TASK/INDEX; none lists."),
    ] = None,
    debug: Debug = False,
) -> int:
    """Show an episode again, token by token: trained, cleared, context; log-probs and rewards."""
    from fledge.cli.replay import replay as run_replay

    run_replay(run, episode)
    return 0


@app.command()
def doctor(
    target: Annotated[
        str, typer.Argument(metavar="MODEL_OR_RUN_OR_RECIPE", help="What to examine.")
    ] = "tiny",
    debug: Debug = False,
) -> int:
    """Check this machine, and that a model is trained and sampled exactly."""
    from fledge.cli.doctor import doctor as run_doctor

    return run_doctor(target)


@app.command()
def bench(
    smoke: Annotated[bool, typer.Option("--smoke", help="A few seconds, to see it run.")] = False,
    debug: Debug = False,
) -> int:
    """Measure generation and training speed."""
    from fledge.cli.bench import run as run_bench

    return run_bench(smoke)


@env_app.command("check")
def env_check(
    name: Annotated[str, typer.Argument(metavar="ENV", help='Built-in, or "module:Class".')],
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Its arguments.")
    ] = None,
    data: Annotated[
        str | None, typer.Option(metavar="SOURCE", help="Its tasks, as in data.train.")
    ] = None,
    debug: Debug = False,
) -> int:
    """Play episodes with canned replies and report what breaks the contract."""
    from fledge.cli.env import check

    return check(name, arguments or [], data)


def _work(kind: str, recipe: str, settings: Sequence[str], smoke: bool, dry_run: bool) -> int:
    """Run or resume one kind of training, or only show its settings."""
    from fledge import config, orchestration
    from fledge.cli import show

    schemas = {
        "train": config.TrainConfig,
        "sft": config.SftConfig,
        "prefer": config.PreferConfig,
    }
    resolved: config.Resolved[Any] = config.load_config(
        schemas[kind], recipe, settings, smoke=smoke
    )
    if dry_run:
        print(show.settings_table(resolved))
        return 0
    report = getattr(orchestration, kind)(resolved)
    return _close(report, resolved.config.run_dir, getattr(show, f"{kind}_summary"))


def recipe_and_settings(arguments: Sequence[str]) -> tuple[str, list[str]]:
    """The recipe may be left out: `fledge train steps=20` is the quickstart with a setting.

    >>> recipe_and_settings(["steps=20"])
    ('quickstart', ['steps=20'])
    """
    first, *rest = arguments or [""]
    if first and ("=" not in first or Path(first).exists()):
        return first, rest
    return "quickstart", list(arguments)


def cost() -> str:
    """Time since this process began, and CPU time of it and of the children it has waited for."""
    import resource

    used = [resource.getrusage(w) for w in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    cpu = sum(u.ru_utime + u.ru_stime for u in used)
    return f"{time.monotonic() - BEGAN:.0f} s, {cpu:.0f} s of CPU"


def _close(report: dict[str, Any], run_dir: str, summary: Summary) -> int:
    if not report["finished"]:
        return 130  # how to continue has been said by the run itself
    print(summary(report, run_dir, cost()))
    return 0


def main(argv: Sequence[str] | None = None) -> None:
    """The console script."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            # A reply may hold anything; a terminal that cannot show it must not end the command.
            stream.reconfigure(errors="replace")
    sys.exit(run(list(sys.argv[1:] if argv is None else argv)))


def run(argv: list[str]) -> int:
    """Run one command line; returns its exit code and never raises for anything a user can do."""
    try:
        arguments = argv or ["--help"]
        code = get_command(app).main(arguments, prog_name="fledge", standalone_mode=False)
        sys.stdout.flush()
        return code if isinstance(code, int) else 0
    except Stopped:
        resumable = argv[0] in ("train", "sft", "prefer")
        how = "; give the same command again to continue from the last checkpoint"
        print(f"stopped{how if resumable else ''}", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader has gone; the interpreter must not try to flush to it once more.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 1
    except Exception as error:
        if "--debug" in argv or os.environ.get("FLEDGE_DEBUG") == "1":
            traceback.print_exc()
        code, text = describe(error, argv)
        print(f"error: {' '.join(text.split())}", file=sys.stderr)
        return code


def describe(error: Exception, argv: Sequence[str]) -> tuple[int, str]:
    """Exit code and text of whatever ended a command."""
    if isinstance(error, FledgeError):
        return error.exit_code, str(error)
    # Typer carries its own copy of click since 0.26, so the class has no address that lasts.
    if hasattr(error, "format_message"):
        return 2, _usage(error, argv)
    if (number := _system_error(error)) is not None:
        return 2, _system_text(error, number)
    if isinstance(error, MemoryError) or re.search(
        r"OutOfMemory|allocate memory", f"{type(error).__name__} {error}"
    ):
        return 2, (
            "memory is full; lower optim.micro_tokens, engine.cache_mb or rollout.groups_per_step, "
            "or set model.dtype=bf16 or model.lora.rank=16"
        )
    return 1, (
        f"{type(error).__name__}: {error} (this is a bug in fledge or in a plug-in; "
        "run again with --debug for the stack trace)"
    )


def _usage(error: Any, argv: Sequence[str]) -> str:
    option = str(getattr(error, "option_name", None) or "")
    given = next((i for i, a in enumerate(argv) if a.partition("=")[0] == option), None)
    if given is not None and argv[0] in TAKES_SETTINGS and _is_setting(option.lstrip("-")):
        _, equals, value = argv[given].partition("=")
        value = value if equals else next(iter(argv[given + 1 : given + 2]), "VALUE")
        key = option.lstrip("-")
        return f"there is no option {option}; settings have no dashes, write {key}={value}"
    command = error.ctx.command_path if getattr(error, "ctx", None) else "fledge"
    return f"{str(error.format_message()).rstrip('.')}; see {command} --help"


def _is_setting(name: str) -> bool:
    from fledge.config import PreferConfig, SftConfig, TrainConfig

    schemas = (TrainConfig, SftConfig, PreferConfig)
    return any(name.partition(".")[0] in schema.model_fields for schema in schemas)


def _system_error(error: Exception) -> int | None:
    if isinstance(error, OSError):
        return error.errno or 0
    found = re.search(r"\(os error (\d+)\)", str(error))  # how safetensors says it
    return int(found[1]) if found else None


def _system_text(error: Exception, number: int) -> str:
    where = f": {error.filename}" if isinstance(error, OSError) and error.filename else ""
    text = f"{os.strerror(number) if number else error}{where}"
    if number in (errno.ENOSPC, errno.EDQUOT):
        return f"{text}; free space, or name another run_dir"
    return text


if __name__ == "__main__":
    main()
