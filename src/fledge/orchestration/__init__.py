"""The Controller: places the parts, runs the one loop, keeps the books."""

from fledge.orchestration.stages import evaluate, open_run, sft, train

__all__ = ["evaluate", "open_run", "sft", "train"]
