"""Loading and exporting models. The same `Policy` object is trained, generated from and exported.

`load_policy` reads a Hugging Face folder or hub name, applies the overrides to the model's own
config, installs fledge's attention and proves, on a few tokens, that the result equals the stock
model. What it cannot run exactly it refuses by name.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from peft.tuners.lora import LoraLayer
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging as hf_logging

from fledge.config.schema import ModelConfig
from fledge.errors import ConfigError, ModelError
from fledge.models import attention
from fledge.models.attention import PackedLayout
from fledge.models.lora import add_adapter
from fledge.plugins import nearest

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
PROBE_GAP = {torch.float32: 1e-4, torch.bfloat16: 0.25, torch.float16: 0.05, torch.float64: 1e-9}
"""How far logits of two right attention paths may differ on the start-up probe."""


@dataclass
class Policy:
    """A causal LM with its tokenizer: `module` is what is trained (with adapters, if any), `model`
    the Hugging Face model in it.
    """

    module: nn.Module
    model: Any
    tokenizer: PreTrainedTokenizerBase
    source: str

    @property
    def body(self) -> nn.Module:
        return self.model.get_decoder()

    @property
    def head(self) -> nn.Module:
        return self.model.get_output_embeddings()

    @property
    def vocabulary(self) -> int:
        """Tokens that the model knows; a tokenizer may use fewer."""
        return int(self.model.get_input_embeddings().weight.shape[0])

    @property
    def parameters(self) -> int:
        """How many numbers the model has, adapters included."""
        return sum(p.numel() for p in self.module.parameters())

    @property
    def config(self) -> PretrainedConfig:
        return self.model.config

    @property
    def context(self) -> int:
        return int(self.config.max_position_embeddings)

    @property
    def device(self) -> torch.device:
        return self.model.device

    @property
    def dtype(self) -> torch.dtype:
        return self.model.dtype

    @property
    def has_adapter(self) -> bool:
        return isinstance(self.module, PeftModel)

    def hidden(self, tokens_T: Tensor, places_T: Tensor, layout: attention.Layout) -> Tensor:
        """Last hidden states `[T, hidden]` of tokens that lie side by side."""
        out = self.body(
            input_ids=tokens_T[None], position_ids=places_T[None], use_cache=False, layout=layout
        )
        return out.last_hidden_state[0]

    def fingerprint(self) -> str:
        """Identity of the architecture and the tokenizer, not of the weights."""
        shape = {k: v for k, v in self.config.to_dict().items() if k not in _NOT_IDENTITY}
        vocabulary = self.tokenizer.backend_tokenizer.to_str()
        text = json.dumps(shape, sort_keys=True, default=str) + vocabulary
        return hashlib.sha256(text.encode()).hexdigest()[:16]


_NOT_IDENTITY = {"_name_or_path", "transformers_version", "dtype", "torch_dtype", "architectures"}


def load_policy(config: ModelConfig, seed: int, key: str = "model.path") -> Policy:
    """The model a recipe asks for, ready to train and to generate from; `key` is the setting that
    named it.
    """
    try:
        return _load(config, seed)
    except ModelError as error:
        raise ModelError(str(error).replace("model.path", key, 1)) from error


def _load(config: ModelConfig, seed: int) -> Policy:
    path = _locate(config.path)
    hf_config = _with_overrides(_read_config(path), config.overrides)
    tokenizer = _read_tokenizer(path)
    device = _device(config.device)
    model: Any = _build(path, hf_config, config, seed).to(device)  # type: ignore[arg-type]
    policy = Policy(model, model, tokenizer, config.path)
    _check_vocabulary(policy)
    install_attention(policy)
    if device.type == "cpu":
        store_by_column(model)
    if config.lora is not None:
        torch.manual_seed(seed)  # adapters begin at random, and a resumed run must begin alike
        policy.module = add_adapter(model, config.lora)
    policy.module.eval()
    return policy


def load_tokenizer(path: str) -> PreTrainedTokenizerBase:
    """The tokenizer alone, by the same names as a model."""
    return _read_tokenizer(_locate(path))


def _locate(path: str) -> str:
    if path == "tiny":
        return str(resources.files("fledge.models") / "tiny")
    if Path(path).exists():
        return path
    if path.startswith((".", "/", "~")) or path.count("/") != 1:
        raise ModelError(
            f"model.path: {path!r} is no folder here; name one, a hub model (owner/name), or tiny"
        )
    return path


def _read_config(path: str) -> PretrainedConfig:
    try:
        return AutoConfig.from_pretrained(path)
    except (OSError, ValueError) as error:
        raise ModelError(f"model.path: no model config in {path!r}: {_first_line(error)}") from None


def _read_tokenizer(path: str) -> PreTrainedTokenizerBase:
    try:
        return AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(f"model.path: no tokenizer in {path!r}: {_first_line(error)}") from None


def _with_overrides(config: PretrainedConfig, overrides: Mapping[str, Any]) -> PretrainedConfig:
    """The model's config with some of its own fields changed, and whatever it derives from them."""
    values = config.to_dict()
    for name, value in overrides.items():
        if name not in values:
            raise ConfigError(
                f"model.overrides.{name}: {config.model_type} has no such "
                f"field{nearest(name, list(values))}"
            )
        merges = isinstance(value, dict) and isinstance(values[name], dict)
        values[name] = {**values[name], **value} if merges else value
    if "num_hidden_layers" in overrides and "layer_types" not in overrides:
        values.pop("layer_types", None)
    try:
        changed = type(config).from_dict(values)
        changed.validate()
    except Exception as error:  # the config class belongs to somebody else, and so do its errors
        raise ConfigError(
            f"model.overrides: {config.model_type} refuses them: {_last_line(error)}"
        ) from None
    kind = (getattr(changed, "rope_parameters", None) or {}).get("rope_type", "default")
    if kind in ("dynamic", "longrope"):
        raise ModelError(
            f"model.overrides.rope_parameters: rope_type {kind!r} depends on what else is in the "
            "batch, so scores would not be reproducible; use linear, yarn or llama3"
        )
    return changed


def _build(
    path: str, hf_config: PretrainedConfig, config: ModelConfig, seed: int
) -> PreTrainedModel:
    dtype = DTYPES[config.dtype]
    if config.random_init:
        torch.manual_seed(seed)
        # Drawn in fp32 and then rounded, so that every dtype starts from the same weights.
        return AutoModelForCausalLM.from_config(hf_config, dtype=torch.float32).to(dtype)
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            path, config=hf_config, dtype=dtype, output_loading_info=True
        )
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        fresh = "; model.random_init=true starts from fresh weights" if Path(path).exists() else ""
        raise ModelError(
            f"model.path: cannot load weights of {path!r}{fresh}: {_first_line(error)}"
        ) from None
    model, found = loaded
    for kind in ("missing", "mismatched", "unexpected"):
        names = sorted(map(str, found[f"{kind}_keys"]))
        if names:
            # Hugging Face would go on with random values where weights are missing.
            raise ModelError(
                f"model.path: the weights of {path!r} do not fit their config: "
                f"{len(names)} {kind}, such as {names[0]}"
            )
    return model


def _device(name: str) -> torch.device:
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("model.device: cuda is not available here; set model.device=cpu or auto")
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)


def _check_vocabulary(policy: Policy) -> None:
    rows = policy.vocabulary
    largest = max(policy.tokenizer.get_vocab().values())
    if largest >= rows:
        raise ModelError(
            f"model.path: the tokenizer has ids up to {largest}, but the model knows {rows} "
            "tokens; they do not belong together"
        )


@torch.no_grad()
def store_by_column(model: PreTrainedModel) -> None:
    """Lay linear weights out by column: CPU matrix products of a few dozen rows, which is what
    decoding is, get a third faster.

    Shapes and values stay; exports are written the usual way round.
    """
    embedding = model.get_input_embeddings().weight
    for layer in model.modules():
        if isinstance(layer, nn.Linear) and layer.weight is not embedding:
            layer.weight.data = layer.weight.data.t().contiguous().t()


def install_attention(policy: Policy) -> None:
    """Switch to fledge's attention and compare it with the stock one on a few ragged tokens."""
    model = policy.model
    vocabulary = policy.vocabulary
    generator = torch.Generator().manual_seed(0)
    lengths = [5, 2]
    ids = torch.randint(0, vocabulary, (sum(lengths),), generator=generator).to(policy.device)
    model.eval()
    with torch.no_grad():
        model.set_attn_implementation("eager")
        stock = torch.cat(
            [model(input_ids=row[None], use_cache=False).logits[0] for row in ids.split(lengths)]
        )
        try:
            model.set_attn_implementation(attention.NAME)
            places = torch.cat([torch.arange(n) for n in lengths]).to(policy.device)
            ours = policy.head(
                policy.hidden(ids, places, PackedLayout.of_lengths(lengths, policy.device))
            )
        except (ValueError, TypeError, AttributeError) as error:
            raise ModelError(
                f"model.path: {type(model).__name__} does not run through the attention interface: "
                f"{_first_line(error)}"
            ) from None
    if not stock.isfinite().all():
        raise ModelError(
            f"model.path: the weights of {policy.source!r} give NaN or infinite logits"
        )
    gap = (stock.float() - ours.float()).abs().max().item()
    if not gap <= PROBE_GAP[policy.dtype]:
        raise ModelError(
            f"model.path: {type(model).__name__} gives other logits with fledge's attention than "
            f"on its own (by up to {gap:.2g}); it uses something that is not supported"
        )


def export(policy: Policy, directory: Path, *, merge: bool = True) -> None:
    """Write what plain `transformers` (merged) or `peft` (adapter) loads, with the tokenizer."""
    save_weights(policy, directory, merge=merge)
    policy.tokenizer.save_pretrained(str(directory))


def save_weights(policy: Policy, directory: Path, *, merge: bool) -> None:
    """Weights and their config only: safetensors and JSON."""
    directory.mkdir(parents=True, exist_ok=True)
    if policy.has_adapter and not merge:
        adapter: Any = policy.module
        adapter.save_pretrained(str(directory))
        (directory / "README.md").unlink(missing_ok=True)  # a model card with nothing in it
    else:
        _export_full(policy, directory)
    for file in directory.glob("*.safetensors"):
        file.chmod(_default_mode())


def _default_mode() -> int:
    """What a new file gets here: safetensors makes its files readable by their owner alone."""
    mask = os.umask(0)
    os.umask(mask)
    return 0o666 & ~mask


def _export_full(policy: Policy, directory: Path) -> None:
    model = policy.model
    implementation = model.config._attn_implementation
    try:
        model.config._attn_implementation = "sdpa"
        model.save_pretrained(str(directory), state_dict=merged_state(model))
    finally:
        model.config._attn_implementation = implementation


def merged_state(model: Any) -> dict[str, Tensor]:
    """A copy of the weights under their plain names, adapters merged in; the model itself stays as
    it is, bit for bit.
    """
    merged = {}
    layer: Any
    for name, layer in model.named_modules():
        if isinstance(layer, LoraLayer):
            weight: Any = layer.get_base_layer().weight
            live, before = weight.data, weight.detach().clone()
            layer.merge()
            merged[f"{name}.weight"] = weight.detach().clone()
            layer.unmerge()
            live.copy_(before)  # subtracting the update again would leave rounding behind
            weight.data = live  # DoRA puts a new tensor in its place, which no engine knows of
    state = {}
    for name, tensor in model.state_dict().items():
        plain = name.replace(".base_layer.", ".")
        if ".lora_" not in name:
            state[plain] = merged.get(plain, tensor.detach().clone()).contiguous()
    if model.config.tie_word_embeddings:
        for tied in getattr(model, "_tied_weights_keys", None) or {}:
            state.pop(tied, None)
    return state


def restore_weights(policy: Policy, directory: Path) -> None:
    """Copy saved weights (or a saved adapter) into the live parameters, in place. Every tensor must
    be there and fit.
    """
    live: dict[str, Tensor]
    found: dict[str, Tensor] = {}
    for file in sorted(directory.glob("*.safetensors")):
        found.update(load_file(file))
    if isinstance(policy.module, PeftModel):
        found = {_adapter_name(name): tensor for name, tensor in found.items()}
        live = {n: p for n, p in policy.module.named_parameters() if p.requires_grad}
    else:
        live = dict(policy.model.named_parameters())
        live |= {n: b for n, b in policy.model.named_buffers() if n in found}
    if live.keys() != found.keys():
        odd = sorted(live.keys() ^ found.keys())
        raise ValueError(f"tensors do not match the model: {', '.join(odd[:3])}")
    with torch.no_grad():
        for name, tensor in live.items():
            if tensor.shape != found[name].shape or tensor.dtype != found[name].dtype:
                raise ValueError(
                    f"{name} is {found[name].dtype}{tuple(found[name].shape)} in the checkpoint"
                )
            tensor.copy_(found[name])


def _adapter_name(saved: str) -> str:
    """PEFT saves adapters without their name; in the model they are called `default`."""
    for part in ("lora_A", "lora_B", "lora_embedding_A", "lora_embedding_B"):
        saved = saved.replace(f".{part}.", f".{part}.default.")
    return (
        saved.replace(".lora_magnitude_vector", ".lora_magnitude_vector.default.weight")
        if saved.endswith(".lora_magnitude_vector")
        else saved
    )


def _last_line(error: Exception) -> str:
    return (
        str(error).strip().splitlines()[-1].strip() if str(error).strip() else type(error).__name__
    )


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__


os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
hf_logging.disable_progress_bar()
