"""The Trainer: owns the parameters; scores tokens, adds up gradients, steps, saves and loads."""

from fledge.trainer.local import LocalTrainer
from fledge.trainer.schedule import learning_rate

__all__ = ["LocalTrainer", "learning_rate"]
