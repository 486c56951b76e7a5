"""The one attention of fledge, plugged into Hugging Face models: packed for training, paged for
generation.

Both run inside the unmodified module through the attention interface and are chosen by the `layout`
keyword of `forward`. Tokens of all sequences lie side by side in one row (`[1, T]`); a layout says
which of them may see each other, so that nothing ever attends to padding or to a neighbour. What a
layout does not implement is refused by name, never ignored.

Shapes: T tokens, B sequences, L longest sequence, H query heads, K key/value heads, D head size.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
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
        self,
        layer: int,
        q_THD: Tensor,
        k_TKD: Tensor,
        v_TKD: Tensor,
        scale: float,
        window: int | None,
    ) -> Tensor:
        """Attention output, `[T, H, D]`."""
        ...


@dataclass(frozen=True, slots=True)
class Span:
    """Where one sequence lies among the packed tokens: its own tokens, after a prefix that others
    may share.

    >>> Span(start=3, length=5, prefix_start=0, prefix=3).total
    8
    """

    start: int
    length: int
    prefix_start: int = 0
    prefix: int = 0

    @property
    def total(self) -> int:
        return self.prefix + self.length


@dataclass(frozen=True)
class Bucket:
    """Sequences of similar length, padded on the right. Only their own tokens ask; prefix and own
    tokens answer.

    `queries` and `keys` pick B*Q and B*L tokens out of T (padding repeats token 0), `keep` the real
    outputs out of B*Q.
    """

    queries: Tensor
    keys: Tensor
    keep: Tensor
    place_BQ: Tensor
    prefixed: bool

    @classmethod
    def of(cls, spans: Sequence[Span]) -> tuple[Bucket, Tensor]:
        """The bucket, and the packed position of each kept output."""
        numbers = [(s.start, s.length, s.prefix_start, s.prefix) for s in spans]
        start_B, length_B, first_B, prefix_B = torch.tensor(numbers).T[..., None]
        place_Q = torch.arange(max(s.length for s in spans))
        place_L = torch.arange(max(s.total for s in spans))
        own_BQ = place_Q < length_B
        queries = torch.where(own_BQ, start_B + place_Q, 0).flatten()
        key_BL = torch.where(place_L < prefix_B, first_B + place_L, start_B + place_L - prefix_B)
        keys = torch.where(place_L < prefix_B + length_B, key_BL, 0).flatten()
        keep = own_BQ.flatten().nonzero()[:, 0]
        prefixed = any(s.prefix for s in spans)
        return cls(queries, keys, keep, place_Q + prefix_B, prefixed), queries[keep]

    def to(self, device: torch.device) -> Bucket:
        queries, keys, keep, place_BQ = (
            x.to(device) for x in (self.queries, self.keys, self.keep, self.place_BQ)
        )
        return Bucket(queries, keys, keep, place_BQ, self.prefixed)

    def mask(self, window: int | None) -> Tensor | None:
        """None where plain causal attention is right: padding lies behind every real token, so it
        is never seen.
        """
        batch, longest = len(self.place_BQ), len(self.keys) // len(self.place_BQ)
        if not self.prefixed and (window is None or longest <= window):
            return None
        distance_BQL = self.place_BQ[..., None] - torch.arange(longest, device=self.keys.device)
        visible = distance_BQL >= 0
        if window is not None:
            visible &= distance_BQL < window
        return visible.view(batch, 1, -1, longest)


@dataclass(frozen=True)
class PackedLayout:
    """Exact block-diagonal causal attention over whole sequences: what training and scoring use."""

    buckets: tuple[Bucket, ...]
    restore: Tensor
    """Order that puts the buckets' outputs back into packed order."""
    _masks: dict[int | None, list[Tensor | None]] = field(default_factory=dict)

    @classmethod
    def of_lengths(cls, lengths: Sequence[int], device: torch.device) -> PackedLayout:
        """Sequences side by side that share nothing."""
        starts = itertools.accumulate(lengths, initial=0)
        return cls.of([Span(s, n) for s, n in zip(starts, lengths, strict=False)], device)

    @classmethod
    def of(cls, spans: Sequence[Span], device: torch.device) -> PackedLayout:
        whole = [s for s in spans if not s.prefix]
        prefixed = [s for s in spans if s.prefix]
        made = [Bucket.of(rows) for rows in [*_similar(whole), *_similar(prefixed)]]
        restore = torch.argsort(torch.cat([positions for _, positions in made]))
        return cls(tuple(bucket.to(device) for bucket, _ in made), restore.to(device))

    def attend(
        self,
        layer: int,
        q_THD: Tensor,
        k_TKD: Tensor,
        v_TKD: Tensor,
        scale: float,
        window: int | None,
    ) -> Tensor:
        if window not in self._masks:
            self._masks[window] = [bucket.mask(window) for bucket in self.buckets]
        outputs = []
        for bucket, mask in zip(self.buckets, self._masks[window], strict=True):
            batch = len(bucket.place_BQ)
            q = _pick(q_THD, bucket.queries, batch)
            k, v = _pick(k_TKD, bucket.keys, batch), _pick(v_TKD, bucket.keys, batch)
            out = scaled_dot_product_attention(
                q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale,
                enable_gqa=q.shape[1] != k.shape[1],
            )  # fmt: skip
            flat = out.transpose(1, 2).reshape(-1, *q_THD.shape[1:])
            outputs.append(flat.index_select(0, bucket.keep))
        return torch.cat(outputs).index_select(0, self.restore)


def _similar(spans: Sequence[Span]) -> list[list[Span]]:
    """Ascending length, cut so that padding stays below a quarter of each bucket."""
    buckets: list[list[Span]] = []
    tokens = 0
    for span in sorted(spans, key=lambda s: (s.length, s.prefix)):
        tokens += span.length
        if buckets and tokens >= 0.75 * span.length * (len(buckets[-1]) + 1):
            buckets[-1].append(span)
        else:
            buckets.append([span])
            tokens = span.length
    return buckets


def _pick(x_TND: Tensor, index: Tensor, batch: int) -> Tensor:
    return x_TND.index_select(0, index).view(batch, -1, *x_TND.shape[1:]).transpose(1, 2)


@dataclass
class PagedCache:
    """Keys and values of all layers in pages of `BLOCK` tokens. Page 0 is scratch: padding reads
    and writes there.

    Which page belongs to whom is the scheduler's business; this only stores.
    """

    keys: list[Tensor]
    values: list[Tensor]

    @classmethod
    def allocate(
        cls,
        layers: int,
        blocks: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> PagedCache:
        shape = (blocks, BLOCK, kv_heads, head_dim)
        tensors = [_zeros(shape, dtype, device) for _ in range(2 * layers)]
        return cls(tensors[:layers], tensors[layers:])


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros; on the CPU without touching the memory, so that a large cache costs nothing until it
    is used. Zeros and not just anything: masked positions are multiplied by 0, which NaN survives.
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    count = math.prod(shape) * dtype.itemsize
    return torch.from_numpy(np.zeros(count, dtype=np.uint8)).view(dtype).view(shape)


@dataclass
class PagedLayout:
    """New tokens of B requests against their cached context: prefill (many new tokens) or decode
    (one each).

    `slots` is where each new token's key and value go, `blocks_BN` the pages of each request's
    context (padded with page 0), `place_BQ` the position of each new token in its own sequence. For
    ragged prefill `gather` and `keep` pad and unpad queries.
    """

    cache: PagedCache
    slots: Tensor
    blocks_BN: Tensor
    place_BQ: Tensor
    gather: Tensor | None = None
    keep: Tensor | None = None
    _masks: dict[int | None, Tensor] = field(default_factory=dict)

    def attend(
        self,
        layer: int,
        q_THD: Tensor,
        k_TKD: Tensor,
        v_TKD: Tensor,
        scale: float,
        window: int | None,
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
    """What Hugging Face attention layers call: `[1, N, T, D]` in, `[1, T, H, D]` out."""
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
        raise ModelError(
            f"model.path: {type(module).__name__} asks for {what}, which is not supported"
        )
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    layer = module.layer_idx
    assert isinstance(layer, int)
    return layout.attend(layer, q, k, v, scale, sliding_window)[None], None


_CHANGES_RESULT = frozenset(
    {"softcap", "s_aux", "sinks", "head_mask", "position_bias", "is_causal", "indices", "alibi"}
)
"""Keywords by which models ask for another result; those that only carry information are left
alone.
"""

AttentionInterface.register(NAME, fledge_attention)
