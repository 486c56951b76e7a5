"""Content hashes of tensors: cheap, on the device where they live, and sensitive to order."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch
from torch import Tensor, nn

_VIEW = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_PERIOD = 8191


@torch.no_grad()
def tensor_hash(tensor: Tensor) -> str:
    """Two wrapping sums over the bits, one of them weighted by position, with shape and dtype.

    A changed, moved or swapped element changes it. It detects accidents; it is no defence against
    an adversary.
    """
    bits = tensor.detach().contiguous().view(_VIEW[tensor.element_size()]).flatten().long()
    weights = torch.arange(1, _PERIOD + 1, device=bits.device)
    padded = nn.functional.pad(bits, (0, -len(bits) % _PERIOD)).view(-1, _PERIOD)
    rows = torch.arange(1, len(padded) + 1, device=bits.device)
    weighted = ((padded * weights).sum(1) * rows).sum()
    return f"{bits.sum().item():x}.{weighted.item():x}.{tuple(tensor.shape)}.{tensor.dtype}"


def hashes(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    return {name: tensor_hash(tensor) for name, tensor in tensors.items()}


def module_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Every parameter and buffer by name, as the live tensors; tied ones appear once under their
    first name.
    """
    found: dict[str, Tensor] = dict(module.named_parameters())
    found.update((name, b) for name, b in module.named_buffers())
    return found


def digest(hashes: Mapping[str, str]) -> str:
    """One short name for a set of tensor hashes."""
    text = "\n".join(f"{name}={value}" for name, value in sorted(hashes.items()))
    return hashlib.sha256(text.encode()).hexdigest()[:16]
