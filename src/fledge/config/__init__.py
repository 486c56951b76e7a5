"""Configuration: typed keys (`schema`) and the layers they come from (`load`)."""

from fledge.config.load import Resolved, load_config
from fledge.config.schema import Plugin, PreferConfig, SftConfig, TrainConfig

__all__ = ["Plugin", "PreferConfig", "Resolved", "SftConfig", "TrainConfig", "load_config"]
