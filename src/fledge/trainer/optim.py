"""AdamW whose state is always fp32, whatever the dtype of the weights, and whose gradients add up
in fp32.

Weights in bf16 or fp16 get an fp32 master copy here: small updates would otherwise round to
nothing, silently. fp16 adds dynamic loss scaling. State is named by parameter, so it is saved as
plain tensors and loads whatever the order.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fledge.config.schema import OptimConfig
from fledge.errors import TrainingError
from fledge.models.lora import is_lora_b

_LOW = (torch.bfloat16, torch.float16)


class Optimizer:
    """AdamW over named parameters, with gradient clipping and (for fp16) loss scaling."""

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], config: OptimConfig, plus_ratio: float = 1.0
    ) -> None:
        assert parameters, "nothing to train"
        self._weights = dict(parameters)
        self._masters = {n: _master(p) for n, p in self._weights.items()}
        self._clip = config.clip_norm
        fast = [p for n, p in self._masters.items() if is_lora_b(n)]
        slow = [p for n, p in self._masters.items() if not is_lora_b(n)]
        groups = [{"params": slow, "ratio": 1.0}, {"params": fast, "ratio": plus_ratio}]
        self._adam = torch.optim.AdamW(
            [g for g in groups if g["params"]],
            lr=config.lr,
            betas=(config.beta1, config.beta2),
            weight_decay=config.weight_decay,
            fused=True,
        )
        device = next(iter(self._weights.values())).device.type
        half = any(p.dtype == torch.float16 for p in self._weights.values())
        self._scaler = torch.amp.GradScaler(device, enabled=half, init_scale=2.0**12)
        for name, weight in self._weights.items():
            if weight.dtype in _LOW:
                weight.register_post_accumulate_grad_hook(self._move_gradient(self._masters[name]))

    @staticmethod
    def _move_gradient(master: Tensor) -> Any:
        def hook(weight: Tensor) -> None:
            assert weight.grad is not None
            gradient = weight.grad.float()
            master.grad = gradient if master.grad is None else master.grad.add_(gradient)
            weight.grad = None

        return hook

    def scale(self, loss: Tensor) -> Tensor:
        scaled: Tensor = self._scaler.scale(loss)
        return scaled

    def step(self, rate: float) -> dict[str, float]:
        """Clip, update, clear. A gradient that is not finite never reaches the weights."""
        for group in self._adam.param_groups:
            group["lr"] = rate * group["ratio"]
        self._scaler.unscale_(self._adam)
        gradients = [p.grad for p in self._masters.values() if p.grad is not None]
        if not gradients:
            raise TrainingError("optim_step was asked for, but no gradient has been accumulated")
        for name, master in self._masters.items():
            laid_out = master.grad is None or master.grad.stride() == master.stride()
            assert laid_out, f"gradient and parameter {name} differ in layout"
        norm = torch.nn.utils.get_total_norm(gradients)
        found = {"optim/grad_norm": norm.item(), "optim/lr": rate}
        if not norm.isfinite():
            if not self._scaler.is_enabled():
                raise TrainingError(
                    f"the gradient is not finite ({norm.item()}); lower optim.lr, or use "
                    "model.dtype=fp32"
                )
        else:
            torch.nn.utils.clip_grads_with_norm_(self._masters.values(), self._clip, norm)
        self._scaler.step(self._adam)
        self._scaler.update()
        if self._scaler.is_enabled():
            found |= {
                "optim/loss_scale": self._scaler.get_scale(),
                "optim/skipped": float(not norm.isfinite()),
            }
        self._publish_masters()
        self.clear()
        return found

    @torch.no_grad()
    def _publish_masters(self) -> None:
        for name, weight in self._weights.items():
            if weight.dtype in _LOW:
                weight.copy_(self._masters[name])

    def clear(self) -> None:
        self._adam.zero_grad(set_to_none=True)

    def gradients(self) -> dict[str, Tensor]:
        """Accumulated gradients by parameter name, unscaled."""
        scale = self._scaler.get_scale() if self._scaler.is_enabled() else 1.0
        return {n: p.grad / scale for n, p in self._masters.items() if p.grad is not None}

    def tensors(self) -> dict[str, Tensor]:
        """Everything that must survive, as named tensors."""
        found = {}
        for name, master in self._masters.items():
            if self._weights[name].dtype in _LOW:
                found[f"master.{name}"] = master.detach()
            for key, value in self._adam.state.get(master, {}).items():
                found[f"{key}.{name}"] = value
        return {name: tensor.contiguous() for name, tensor in found.items()}

    @torch.no_grad()
    def load_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        self._adam.state.clear()
        for name, master in self._masters.items():
            if f"master.{name}" in tensors:
                master.copy_(tensors[f"master.{name}"])
            kept = {
                k: tensors[f"{k}.{name}"]
                for k in ("step", "exp_avg", "exp_avg_sq")
                if f"{k}.{name}" in tensors
            }
            if kept:
                self._adam.state[master] = {k: _laid_out_like(master, v) for k, v in kept.items()}

    def scaler_state(self) -> dict[str, Any]:
        return dict(self._scaler.state_dict())

    def load_scaler_state(self, state: Mapping[str, Any]) -> None:
        if state:
            self._scaler.load_state_dict(dict(state))


def _laid_out_like(master: Tensor, value: Tensor) -> Tensor:
    """A copy with the strides of `master`: the fused kernel walks both as plain memory."""
    if value.shape != master.shape:
        return value.to(master.device).clone()
    return torch.empty_like(master).copy_(value)


def _master(weight: nn.Parameter) -> nn.Parameter:
    return nn.Parameter(weight.detach().float().clone()) if weight.dtype in _LOW else weight
