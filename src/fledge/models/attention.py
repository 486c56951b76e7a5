"""The one attention of fledge, plugged into Hugging Face models: packed for training, paged for generation.

Both run inside the unmodified module through the attention interface and are chosen by the `layout` keyword of `forward`.
Tokens of all sequences lie side by side in one row (`[1, T]`); a layout says which of them may see each other, so that
nothing ever attends to padding or to a neighbour. What a layout does not implement is refused by name, never ignored.

Shapes: T tokens, B sequences, L longest sequence, H query heads, K key/value heads, D head size.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from fledge.errors import ModelError

NAME = "fledge"
BLOCK = 16
"""Tokens per page of the key/value cache."""


class Layout(Protocol):
    def attend(
        self, layer: int, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, scale: float, window: int | None
    ) -> Tensor:
        """Attention output, `[T, H, D]`."""
        ...


@dataclass(frozen=True, slots=True)
class Span:
    """Where one sequence lies among the packed tokens: a prefix, perhaps shared with its neighbours, then its own tokens.

    >>> Span(prefix_start=0, prefix=3, start=3, length=5, owner=True).total
    8
    """

    prefix_start: int
    prefix: int
    start: int
    length: int
    owner: bool
    """The one sequence for which the outputs of a shared prefix are computed."""

    @property
    def total(self) -> int:
        return self.prefix + self.length


@dataclass(frozen=True)
class Bucket:
    """Sequences of similar length, padded on the right, where a causal mask already hides the padding.

    `gather` picks the bucket's B*L tokens out of T (padding repeats token 0), `keep` the wanted outputs out of B*L.
    """

    gather: Tensor
    keep: Tensor
    length: int


@dataclass(frozen=True)
class PackedLayout:
    """Block-diagonal causal attention over whole sequences: what training and scoring use."""

    buckets: tuple[Bucket, ...]
    restore: Tensor
    """Order that puts the buckets' tokens back into packed order."""

    @classmethod
    def of_lengths(cls, lengths: Sequence[int], device: torch.device) -> PackedLayout:
        """Sequences side by side that share nothing."""
        starts = itertools.accumulate(lengths, initial=0)
        return cls.of([Span(0, 0, s, n, True) for s, n in zip(starts, lengths, strict=False)], device)

    @classmethod
    def of(cls, spans: Sequence[Span], device: torch.device) -> PackedLayout:
        buckets, positions = [], []
        for rows in _similar(sorted(spans, key=lambda s: s.total)):
            place_L = torch.arange(rows[-1].total)
            numbers = [(s.prefix_start, s.prefix, s.start, s.total, s.owner) for s in rows]
            first_B, prefix_B, start_B, total_B, owner_B = torch.tensor(numbers).T[..., None]
            packed_BL = torch.where(place_L < prefix_B, first_B + place_L, start_B + place_L - prefix_B)
            real_BL = place_L < total_B
            gather = torch.where(real_BL, packed_BL, 0).flatten()
            keep = (real_BL & ((place_L >= prefix_B) | owner_B.bool())).flatten().nonzero()[:, 0]
            buckets.append(Bucket(gather.to(device), keep.to(device), len(place_L)))
            positions.append(gather[keep])
        restore = torch.argsort(torch.cat(positions)).to(device)
        return cls(tuple(buckets), restore)

    def attend(
        self, layer: int, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, scale: float, window: int | None
    ) -> Tensor:
        outputs = []
        for bucket in self.buckets:
            q, k, v = (_pad(x, bucket) for x in (q_THD, k_TKD, v_TKD))
            mask = _window_mask(bucket.length, window, q.device)
            out = scaled_dot_product_attention(
                q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale,
                enable_gqa=q.shape[1] != k.shape[1],
            )  # fmt: skip
            flat = out.transpose(1, 2).reshape(-1, *q_THD.shape[1:])
            outputs.append(flat.index_select(0, bucket.keep))
        return torch.cat(outputs).index_select(0, self.restore)


def _similar(spans: Sequence[Span]) -> list[list[Span]]:
    """Sequences in ascending length, cut so that padding stays below a quarter of each bucket."""
    buckets: list[list[Span]] = []
    tokens = 0
    for span in spans:
        tokens += span.total
        if buckets and tokens >= 0.75 * span.total * (len(buckets[-1]) + 1):
            buckets[-1].append(span)
        else:
            buckets.append([span])
            tokens = span.total
    return buckets


def _pad(x_TND: Tensor, bucket: Bucket) -> Tensor:
    padded = x_TND.index_select(0, bucket.gather)
    return padded.view(-1, bucket.length, *x_TND.shape[1:]).transpose(1, 2)


def _window_mask(length: int, window: int | None, device: torch.device) -> Tensor | None:
    if window is None or length <= window:
        return None
    place = torch.arange(length, device=device)
    distance = place[:, None] - place
    return (distance >= 0) & (distance < window)


@dataclass
class PagedCache:
    """Keys and values of all layers in pages of `BLOCK` tokens. Page 0 is scratch: padding reads and writes there.

    Which page belongs to whom is the scheduler's business; this only stores.
    """

    keys: list[Tensor]
    values: list[Tensor]

    @classmethod
    def allocate(
        cls, layers: int, blocks: int, kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device
    ) -> PagedCache:
        def pages() -> list[Tensor]:
            shape = (blocks, BLOCK, kv_heads, head_dim)
            return [torch.zeros(shape, dtype=dtype, device=device) for _ in range(layers)]

        return cls(pages(), pages())


@dataclass
class PagedLayout:
    """New tokens of B requests against their cached context: prefill (many new tokens) or decode (one each).

    `slots` is where each new token's key and value go, `blocks_BN` the pages of each request's context (padded with page 0),
    `place_BQ` the position of each new token in its own sequence. For ragged prefill `gather` and `keep` pad and unpad queries.
    """

    cache: PagedCache
    slots: Tensor
    blocks_BN: Tensor
    place_BQ: Tensor
    gather: Tensor | None = None
    keep: Tensor | None = None
    _masks: dict[int | None, Tensor] = field(default_factory=dict)

    def attend(
        self, layer: int, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, scale: float, window: int | None
    ) -> Tensor:
        keys, values = self.cache.keys[layer], self.cache.values[layer]
        keys.flatten(0, 1).index_copy_(0, self.slots, k_TKD)
        values.flatten(0, 1).index_copy_(0, self.slots, v_TKD)
        batch, width = self.place_BQ.shape
        q = q_THD if self.gather is None else q_THD.index_select(0, self.gather)
        q = q.view(batch, width, *q.shape[1:]).transpose(1, 2)
        k, v = self._context(keys), self._context(values)
        out = scaled_dot_product_attention(
            q, k, v, attn_mask=self._mask(window), scale=scale, enable_gqa=q.shape[1] != k.shape[1]
        )
        flat = out.transpose(1, 2).reshape(-1, *q_THD.shape[1:])
        return flat if self.keep is None else flat.index_select(0, self.keep)

    def _context(self, pages: Tensor) -> Tensor:
        chosen = pages.index_select(0, self.blocks_BN.flatten())
        return chosen.view(len(self.blocks_BN), -1, *pages.shape[2:]).transpose(1, 2)

    def _mask(self, window: int | None) -> Tensor:
        if window not in self._masks:
            place_L = torch.arange(self.blocks_BN.shape[1] * BLOCK, device=self.place_BQ.device)
            distance_BQL = self.place_BQ[:, :, None] - place_L
            visible = distance_BQL >= 0
            if window is not None:
                visible &= distance_BQL < window
            self._masks[window] = visible[:, None]
        return self._masks[window]


def fledge_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    layout: Layout | None = None,
    **rest: Any,
) -> tuple[Tensor, None]:
    """The function that Hugging Face attention layers call: `[1, N, T, D]` in, `[1, T, H, D]` out."""
    if layout is None:
        raise ModelError(
            "this model runs with fledge's attention, which needs a layout; "
            "load an export for plain use"
        )
    refused = sorted(k for k, v in rest.items() if k in _CHANGES_RESULT and v is not None)
    if dropout:
        refused.append("dropout")
    if refused or attention_mask is not None:
        what = ", ".join(refused) or "attention_mask"
        raise ModelError(f"model.path: {type(module).__name__} asks for {what}, which is not supported")
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    layer = module.layer_idx
    assert isinstance(layer, int)
    return layout.attend(layer, q, k, v, scale, sliding_window)[None], None


_CHANGES_RESULT = frozenset(
    {"softcap", "s_aux", "sinks", "head_mask", "position_bias", "is_causal", "indices", "alibi"}
)
"""Keywords by which models ask for another result; those that only carry information are left alone."""

AttentionInterface.register(NAME, fledge_attention)
