"""The program that runs first inside the sandbox: `python -I -S -c <this text> JOB REPORT`.

It reads its job from one descriptor, writes the files, lowers its own limits, says on the report
descriptor that it got this far, and only then lets the candidate in. It holds no secret and no
expected value, so a candidate that takes it over gains nothing. It is never imported outside, and
imports as little as it can: its start is most of the cost of a short run.
"""

from __future__ import annotations

import builtins
import marshal
import os
import resource
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:  # `typing` alone would double the time to start
    from typing import Any

MAIN = "main.py"


def main(job_fd: int, report_fd: int) -> None:
    with open(job_fd, "rb") as stream:
        job: dict[str, Any] = marshal.load(stream)
    os.chdir(job["work"])
    for name, data in job["files"].items():
        if os.path.dirname(name):
            os.makedirs(os.path.dirname(name), exist_ok=True)
        with open(name, "wb") as file:
            file.write(data)
    for name, limits in job["limits"].items():
        resource.setrlimit(getattr(resource, name), limits)
    os.write(report_fd, b"\n")
    if job["argv"]:
        become(job["argv"], report_fd)
    run(job, report_fd)


def become(argv: list[str], report_fd: int) -> None:
    os.close(report_fd)
    try:
        os.execvp(argv[0], argv)
    except OSError as error:
        print(f"{argv[0]}: {error.strerror}", file=sys.stderr)
        sys.exit(127)


def run(job: dict[str, Any], report_fd: int) -> None:
    """Run the candidate as `__main__`, with a traceback that starts in its own file."""
    module = type(sys)("__main__")
    path = os.path.join(job["work"], MAIN)
    vars(module).update(__file__=path, __builtins__=builtins)
    # `site` would have made these, and `-S` leaves it out; programs end themselves with them.
    vars(builtins).update(exit=sys.exit, quit=sys.exit)
    sys.modules["__main__"] = module
    sys.argv = [MAIN]
    sys.path.insert(0, job["work"])
    calls = job["calls"]
    if calls is None:
        os.close(report_fd)
    try:
        exec(compile(job["files"][MAIN], path, "exec"), vars(module))
        if calls is not None:
            answer(vars(module)[job["function"]], calls, report_fd)
    except SystemExit:
        raise
    except BaseException as error:
        trace = error.__traceback__
        trace = trace.tb_next if trace else None
        sys.excepthook(type(error), error.with_traceback(trace), trace)
        sys.exit(1)


def answer(function: Any, calls: list[str], report_fd: int) -> None:
    """One line of JSON per call, each from arguments that no earlier call can have changed."""
    import json

    for call in calls:
        arguments = json.loads(call)
        try:
            named = isinstance(arguments, dict)
            value = function(**arguments) if named else function(*arguments)
            line = json.dumps({"value": value})
        except BaseException as error:
            line = json.dumps({"error": describe(error), "memory": isinstance(error, MemoryError)})
        data = line.encode() + b"\n"
        while data:
            data = data[os.write(report_fd, data) :]


def describe(error: BaseException) -> str:
    try:
        return f"{type(error).__name__}: {error}"[:1000]
    except BaseException:
        return type(error).__name__


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
