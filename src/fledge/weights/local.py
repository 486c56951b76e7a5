"""Publishing when trainer and engine share one module: nothing is moved, and still everything is
proven.

(a) every tensor that the engine captured lies where the trainer's live one lies; (b) the engine
forgets all cache pages of the old version and refuses to read any later; (c) a canary decoded by
the engine and scored by the trainer agree.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fledge.data.batch import Batch, Row
from fledge.errors import WeightSyncError
from fledge.interfaces import InferenceEngine, Trainer
from fledge.models.fingerprint import digest
from fledge.types import Proof, Sampling

CANARY_GAP = {torch.float32: 1e-3, torch.bfloat16: 0.3, torch.float16: 0.1, torch.float64: 1e-3}
"""Largest log-prob difference that two right paths of a dtype may show on a few tokens."""


class SharedMemoryTransport:
    """One process, one copy of the weights."""

    def __init__(self, canary: Sequence[int], temperature: float, dtype: torch.dtype) -> None:
        self._canary = tuple(canary)
        self._sampling = Sampling(max_new_tokens=2, temperature=temperature)
        self._gap = CANARY_GAP[dtype]

    async def publish(self, trainer: Trainer, engine: InferenceEngine, version: int) -> Proof:
        await engine.pause()
        await engine.update(version)
        served, owned = engine.addresses(), trainer.addresses()
        for name in sorted(served.keys() | owned.keys()):
            if served.get(name) != owned.get(name):
                raise WeightSyncError(
                    f"version {version}: the engine does not read the trainer's {name!r}; "
                    "the parameter was replaced instead of updated in place"
                )
        await engine.resume()
        gap = await self._canary_gap(trainer, engine, version)
        if not gap <= self._gap:
            raise WeightSyncError(
                f"version {version}: engine and trainer disagree on the canary by {gap:.2g} "
                f"(log-prob, allowed {self._gap:.2g})"
            )
        return Proof(version, len(served), digest(trainer.fingerprint()), gap)

    async def _canary_gap(self, trainer: Trainer, engine: InferenceEngine, version: int) -> float:
        said = await engine.generate(self._canary, self._sampling)
        if set(said.versions) != {version}:
            raise WeightSyncError(
                f"the engine says version {said.versions[0]} after version {version} was published"
            )
        places = tuple(range(len(self._canary), len(self._canary) + len(said.token_ids)))
        row = Row((*self._canary, *said.token_ids), places, sequence=0, prompt=0)
        scored = await trainer.score(Batch((row,), {}), {"old_logp"})
        gap = scored.columns["old_logp"].cpu().double() - torch.tensor(
            said.logps, dtype=torch.float64
        )
        return float(gap.abs().max())
