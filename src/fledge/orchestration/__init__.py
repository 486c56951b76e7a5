"""The Controller: places the parts, runs the one loop, keeps the books.

The names below load on first use: reading a run directory needs no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fledge.orchestration.stages import evaluate, open_run, prefer, sft, train

__all__ = ["evaluate", "open_run", "prefer", "sft", "train"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'fledge.orchestration' has no attribute {name!r}")
    from fledge.orchestration import stages

    return getattr(stages, name)
