"""The Generator: turns a task into a group of finished, scored, token-exact episodes."""

from fledge.rollout.generator import EpisodeGenerator, Limits

__all__ = ["EpisodeGenerator", "Limits"]
