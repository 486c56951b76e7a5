"""LoRA through PEFT, with the switches that people expect to be real: rsLoRA, DoRA, LoRA+."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from peft import LoraConfig as PeftLoraConfig
from peft import PeftModel, get_peft_model
from transformers import PreTrainedModel

from fledge.config.schema import LoraConfig
from fledge.errors import ConfigError


def add_adapter(model: PreTrainedModel, config: LoraConfig) -> PeftModel:
    """Wrap `model` so that only adapters train. A target without a match is refused by name."""
    names = {name.rsplit(".", 1)[-1] for name, _ in model.named_modules()}
    if isinstance(config.targets, list):
        for target in config.targets:
            if target not in names:
                raise ConfigError(f"model.lora.targets: the model has no module named {target!r}")
    peft_config = PeftLoraConfig(
        task_type="CAUSAL_LM",
        r=config.rank,
        lora_alpha=config.alpha,  # type: ignore[arg-type]
        target_modules=config.targets,
        use_rslora=config.rslora,
        use_dora=config.dora,
        lora_dropout=0.0,
    )
    try:
        wrapped = get_peft_model(model, peft_config)
    except ValueError as error:
        raise ConfigError(f"model.lora.targets: PEFT refuses them: {str(error)[:120]}") from None
    assert isinstance(wrapped, PeftModel)
    return wrapped


@contextmanager
def adapters_off(model: torch.nn.Module) -> Iterator[None]:
    """The base model for the time of the block: a reference policy without a second copy."""
    assert isinstance(model, PeftModel)
    with model.disable_adapter():
        yield


def is_lora_b(name: str) -> bool:
    """The matrices that LoRA+ trains faster."""
    return "lora_B" in name or "lora_embedding_B" in name
