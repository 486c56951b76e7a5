"""The error tree. Every error a user can meet is a `FledgeError`; its text names the setting.

    FledgeError              exit code 2, one line, no stack trace without --debug
    ├── ConfigError          a key, a value, or two values that do not fit together
    ├── DataError            tasks or demonstrations that are missing, empty or malformed
    ├── ModelError           a model that cannot be loaded, or not be run exactly
    ├── PluginError          a "module:name" that cannot be found, called, or trusted
    ├── RewardError          a reward that is not a usable number, with the environment's name
    ├── CheckpointError      a checkpoint that cannot be written, is damaged, or is another's
    ├── WeightSyncError      the engine does not serve the weights that were published
    ├── EngineError          a request that can never run, or an engine that is closed
    ├── SandboxError         model-written code cannot be run safely here (`fledge.envs.sandbox`)
    └── TrainingError        training that can no longer be right

Errors of the programmer are plain `assert` and `TypeError`; they are never caught.
"""

from __future__ import annotations


class FledgeError(Exception):
    """Base of all errors that a user can cause or cure."""

    exit_code = 2


class ConfigError(FledgeError):
    """A configuration key or value is wrong."""


class DataError(FledgeError):
    """Tasks or demonstrations are missing, empty or malformed."""


class ModelError(FledgeError):
    """A model cannot be loaded, or cannot be run exactly."""


class PluginError(FledgeError):
    """A plug-in cannot be resolved, or its signature does not fit."""


class PolicyError(Exception):
    """Raised by an environment for a reply that ends the episode as the policy's own mistake. The
    episode is trained on with this reward; it is not a failure of the environment.
    """

    def __init__(self, message: str, reward: float = 0.0) -> None:
        super().__init__(message)
        self.reward = reward


class RewardError(FledgeError):
    """An environment returned something that is not a usable reward."""


class CheckpointError(FledgeError):
    """A checkpoint cannot be written or read."""


class WeightSyncError(FledgeError):
    """The engine does not serve the weights that were published."""


class EngineError(FledgeError):
    """A request can never run, or the engine is closed or stuck."""


class TrainingError(FledgeError):
    """Training cannot go on without being wrong."""
