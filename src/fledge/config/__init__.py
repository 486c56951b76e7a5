"""Configuration: typed keys (`schema`) and the layers they come from (`load`)."""

from fledge.config.load import Resolved, load_config
from fledge.config.schema import Plugin, SftConfig, TrainConfig

__all__ = ["Plugin", "Resolved", "SftConfig", "TrainConfig", "load_config"]
