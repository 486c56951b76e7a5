"""Runs model-written code where it can do no harm, and says what it did.

    sandbox = Sandbox(wall_seconds=5)
    result = await sandbox.run("print(6 * 7)")                     # result.stdout == "42\\n"
    outcomes = await sandbox.call("def f(x): return x + 1", "f", [[1], [2]])

`runner` has `Sandbox`, `bubblewrap` the walls, `cgroups` the limits that count a whole tree,
`process` the one place that starts, reads and ends a process, `inside` the program that runs first
behind the walls, `attacks` what is tried before anything is trusted. Nothing here
compares an answer: what is expected never enters the sandbox.
"""

from fledge.envs.sandbox.attacks import Check, Report, probe
from fledge.envs.sandbox.results import Outcome, Result, SandboxError, Status
from fledge.envs.sandbox.runner import Sandbox

__all__ = ["Check", "Outcome", "Report", "Result", "Sandbox", "SandboxError", "Status", "probe"]
