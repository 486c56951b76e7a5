"""What a run gives back. A candidate's failure is data; our own is a `SandboxError`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from fledge.errors import FledgeError

Status = Literal["ok", "error", "timeout", "memory", "output_limit", "killed"]
"""`error` is a non-zero exit, `killed` a signal that was not ours (a crash, a `kill`)."""


class SandboxError(FledgeError):
    """The sandbox itself failed or cannot be trusted here; the candidate is not to blame.

    An episode that meets it ends as `infra_abort`.
    """


@dataclass(frozen=True, slots=True)
class Result:
    """One run. Output is cut at the limit, and bytes that are not UTF-8 are replaced.

    >>> Result("42\\n", "", 0, "ok").status
    'ok'
    """

    stdout: str
    stderr: str
    exit_code: int
    status: Status


@dataclass(frozen=True, slots=True)
class Outcome:
    """One call of a candidate's function: its value as plain JSON data, or why there is none.

    >>> Outcome("ok", value=[1, 2]).value
    [1, 2]
    """

    status: Status
    value: Any = None
    error: str = ""
