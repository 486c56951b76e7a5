"""The Trainer: owns the parameters; scores tokens, adds up gradients, steps, saves and loads."""

from fledge.trainer.critic import Critic
from fledge.trainer.local import LocalTrainer, copy_of
from fledge.trainer.schedule import learning_rate

__all__ = ["Critic", "LocalTrainer", "copy_of", "learning_rate"]
