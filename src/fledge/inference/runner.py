"""Runs the model for the engine: ragged prefill, batched decode, sampling. All tensors of the
engine live here.

The decode batch is a set of tensors that advance by themselves from step to step; they are rebuilt
only when a request joins or leaves. Nothing here decides who runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fledge.inference.sampling import Columns, draw
from fledge.inference.scheduler import Admission, Request
from fledge.models.attention import BLOCK, PagedCache, PagedLayout
from fledge.models.load import Policy

PREFILL_TOKENS = 8192
"""Padded tokens per prefill pass: bounds activations and masks."""

Drawn = list[tuple[Request, int, float, float]]
"""Request, token, log-prob as drawn, plain log-prob."""


@dataclass
class DecodeBatch:
    """One row per running request."""

    requests: list[Request]
    token: Tensor
    place: Tensor
    table: Tensor
    columns: Columns
    last_place: int

    @classmethod
    def of(cls, requests: Sequence[Request], device: torch.device) -> DecodeBatch:
        places = [r.place for r in requests]
        widest = max(len(r.blocks) for r in requests)
        return cls(
            requests=list(requests),
            token=torch.tensor([r.sampled[-1] for r in requests], device=device),
            place=torch.tensor(places, device=device),
            table=torch.tensor(
                [r.blocks + [0] * (widest - len(r.blocks)) for r in requests], device=device
            ),
            columns=Columns.of(
                [r.sampling for r in requests], [len(r.sampled) for r in requests], device
            ),
            last_place=max(places),
        )

    def advance(self, token: Tensor) -> None:
        self.token = token
        self.place += 1
        self.columns.index += 1
        self.last_place += 1


class Runner:
    """The model, its cache, and the two kinds of step."""

    def __init__(self, policy: Policy, blocks: int) -> None:
        self.policy = policy
        self.device = policy.device
        config = policy.config
        self.cache = PagedCache.allocate(
            config.num_hidden_layers,
            blocks,
            *kv_shape(policy),
            dtype=policy.dtype,
            device=self.device,
        )
        self._batch: DecodeBatch | None = None

    @torch.inference_mode()
    def prefill(self, admissions: Sequence[Admission]) -> Drawn:
        """Compute each distinct prompt once, hand its last page to the followers, and draw
        everyone's first token.
        """
        drawn: Drawn = []
        for chunk in _chunks(admissions):
            logits = self._prefill_logits([a.leader for a in chunk])
            self._copy_last_pages(chunk)
            members = [m for a in chunk for m in a.members]
            rows = torch.tensor(
                [i for i, a in enumerate(chunk) for _ in a.members], device=self.device
            )
            columns = Columns.of([m.sampling for m in members], [0] * len(members), self.device)
            drawn.extend(_to_host(members, draw(logits.index_select(0, rows), columns)))
        self._batch = None
        return drawn

    def _prefill_logits(self, leaders: Sequence[Request]) -> Tensor:
        device = self.device
        new = [len(r.prompt) - r.cached for r in leaders]
        longest, batch = max(new), len(leaders)
        tokens = torch.tensor([t for r in leaders for t in r.prompt[r.cached :]], device=device)
        offset_BQ = torch.arange(longest, device=device).expand(batch, longest)
        new_B = torch.tensor(new, device=device)[:, None]
        cached_B = torch.tensor([r.cached for r in leaders], device=device)[:, None]
        real_BQ = offset_BQ < new_B
        place_BQ = torch.where(real_BQ, offset_BQ + cached_B, 0)
        pages = max(-(-len(r.prompt) // BLOCK) for r in leaders)
        table_BN = torch.tensor([_padded(r.blocks, pages) for r in leaders], device=device)
        slot_BQ = table_BN.gather(1, place_BQ // BLOCK) * BLOCK + place_BQ % BLOCK
        keep = real_BQ.flatten().nonzero()[:, 0]
        start_B = new_B.cumsum(0) - new_B
        gather = torch.where(real_BQ, start_B + offset_BQ, 0).flatten()
        layout = PagedLayout(self.cache, slot_BQ.flatten()[keep], table_BN, place_BQ, gather, keep)
        hidden = self.policy.hidden(tokens, place_BQ.flatten()[keep], layout)
        logits: Tensor = self.policy.head(hidden.index_select(0, (start_B + new_B)[:, 0] - 1))
        return logits

    def _copy_last_pages(self, admissions: Sequence[Admission]) -> None:
        pairs = [
            (a.leader.blocks[page], follower.blocks[page])
            for a in admissions
            for page in [len(a.leader.prompt) // BLOCK]
            if len(a.leader.prompt) % BLOCK
            for follower in a.followers
        ]
        if pairs:
            source, target = torch.tensor(pairs, device=self.device).T
            for pages in (*self.cache.keys, *self.cache.values):
                pages[target] = pages[source]

    @torch.inference_mode()
    def decode(self, running: Sequence[Request]) -> Drawn:
        """Feed everyone's newest token and draw the next."""
        batch = self._batch
        if batch is None or batch.requests != running:
            batch = self._batch = DecodeBatch.of(running, self.device)
        page = batch.place // BLOCK
        slots = batch.table.gather(1, page[:, None])[:, 0] * BLOCK + batch.place % BLOCK
        used = batch.last_place // BLOCK + 1
        layout = PagedLayout(self.cache, slots, batch.table[:, :used], batch.place[:, None])
        hidden = self.policy.hidden(batch.token, batch.place, layout)
        drawn = draw(self.policy.head(hidden), batch.columns)
        batch.advance(drawn[0])
        return _to_host(batch.requests, drawn)


def kv_shape(policy: Policy) -> tuple[int, int]:
    """Key/value heads and head size."""
    config = policy.config
    heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    return getattr(config, "num_key_value_heads", None) or heads, head_dim


def bytes_per_block(policy: Policy) -> int:
    kv_heads, head_dim = kv_shape(policy)
    return 2 * policy.config.num_hidden_layers * BLOCK * kv_heads * head_dim * policy.dtype.itemsize


def _chunks(admissions: Sequence[Admission]) -> list[list[Admission]]:
    """Cut so that the padded size of each prefill stays bounded."""
    chunks: list[list[Admission]] = []
    longest = 0
    for admission in admissions:
        new = len(admission.leader.prompt) - admission.leader.cached
        longest = max(longest, new)
        if not chunks or longest * (len(chunks[-1]) + 1) > PREFILL_TOKENS:
            chunks.append([])
            longest = new
        chunks[-1].append(admission)
    return chunks


def _padded(blocks: Sequence[int], pages: int) -> list[int]:
    chosen = list(blocks[:pages])
    return chosen + [0] * (pages - len(chosen))


def _to_host(requests: Sequence[Request], drawn: tuple[Tensor, Tensor, Tensor]) -> Drawn:
    tokens, logps, plain = (column.tolist() for column in drawn)
    return list(zip(requests, tokens, logps, plain, strict=True))
