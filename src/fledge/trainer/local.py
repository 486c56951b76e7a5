"""The Trainer in one process: score, forward_backward, optim_step, save, load.

It owns the parameters of a `Policy` and knows nothing of rewards or algorithms: a loss is a
function it is handed. It never reduces a loss by itself: each trained token carries its weight
(`scale`), fixed before the batch was cut.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Collection, Mapping
from contextlib import nullcontext
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from fledge.algorithms.kl import k3
from fledge.algorithms.tokens import Stats, Tokens, safe_ratio
from fledge.config.schema import OptimConfig
from fledge.data.batch import Batch, after_the_end
from fledge.errors import CheckpointError, TrainingError
from fledge.interfaces import Loss
from fledge.metrics import Ledger
from fledge.models.fingerprint import hashes, module_tensors
from fledge.models.load import Policy, restore_weights, save_weights
from fledge.models.lora import adapters_off
from fledge.models.value import ValueHead
from fledge.trainer.forward import Plan, head_scores
from fledge.trainer.optim import Optimizer

SCORES = {"old_logp", "fresh_logp", "ref_logp", "teacher_logp", "value"}
VALUE_HEAD = "value_head.safetensors"
REFERENCE = "reference.safetensors"


class LocalTrainer:
    """Trains a policy with packed batches.

    `temperature` is that of the rollouts: log-probs are scored under the distribution that was
    sampled from. `frozen` are other models that score the same tokens (`ref_logp`, `teacher_logp`);
    one that is not given is the policy with its adapters off.
    """

    prefix = "policy"

    def __init__(
        self,
        policy: Policy,
        optim: OptimConfig,
        *,
        temperature: float = 1.0,
        plus_ratio: float = 1.0,
        gradient_checkpointing: bool = False,
        frozen: Mapping[str, Policy] | None = None,
        value_head: bool = False,
        save_reference: bool = False,
    ) -> None:
        self.policy = policy
        self.temperature = temperature
        self.micro_tokens = optim.micro_tokens
        self.value_head = (
            ValueHead(policy.config.hidden_size).to(policy.device) if value_head else None
        )
        if gradient_checkpointing:
            policy.model.gradient_checkpointing_enable({"use_reentrant": False})
        self._checkpointing = gradient_checkpointing
        trainable = {n: p for n, p in policy.module.named_parameters() if p.requires_grad}
        if self.value_head is not None:
            trainable |= {f"value_head.{n}": p for n, p in self.value_head.named_parameters()}
        self.optimizer = Optimizer(trainable, optim, plus_ratio)
        self.frozen = dict(frozen or {})
        self._save_reference = save_reference
        self._ledger = Ledger()

    async def score(self, batch: Batch, needs: Collection[str]) -> Batch:
        """Add the columns that are asked for: `old_logp` and `fresh_logp` (the policy as it is
        now), `ref_logp`, `teacher_logp`, and `value` with `bootstrap`, the value after each row.
        """
        wanted = set(needs)
        assert wanted <= SCORES, f"cannot score {wanted - SCORES}"
        known: dict[str, Tensor] = {}
        if "fresh_logp" in wanted and batch.first and "old_logp" in batch.columns:
            known["fresh_logp"] = batch.columns["old_logp"]  # nothing has been trained since
            wanted.remove("fresh_logp")
        if not wanted or not batch.rows:
            return batch.with_columns(**known) if known else batch
        parts: dict[str, list[Tensor]] = {}
        with torch.no_grad():
            for micro in batch.micros(self.micro_tokens):
                for name, column in self._score_micro(micro, wanted).items():
                    parts.setdefault(name, []).append(column)
        return batch.with_columns(**known, **{n: torch.cat(found) for n, found in parts.items()})

    def _score_micro(self, micro: Batch, names: Collection[str]) -> dict[str, Tensor]:
        plan = Plan.of(micro.rows, self.policy.device)
        found = {}
        for name in names:
            if name == "value":
                found["value"], found["bootstrap"] = self._values(micro)
            elif name in ("old_logp", "fresh_logp"):
                found[name] = self._logp(self.policy, plan)
            elif name in self.frozen:
                found[name] = self._logp(self.frozen[name], plan)
            else:
                assert self.policy.has_adapter, f"this trainer was made without a model for {name}"
                with adapters_off(self.policy.module):
                    found[name] = self._logp(self.policy, plan)
        return found

    def _logp(self, policy: Policy, plan: Plan) -> Tensor:
        return head_scores(
            policy.head, hidden_states(policy, plan), plan.targets, self.temperature
        )[0]

    def _values(self, micro: Batch) -> tuple[Tensor, Tensor]:
        """The value before each trained token, and at each row's last one that of what follows."""
        assert self.value_head is not None, "this trainer has no value head"
        plan = Plan.of(after_the_end(micro.rows), self.policy.device)
        values = self.value_head(hidden_states(self.policy, plan))
        counts = torch.tensor([len(row.trained) for row in micro.rows])
        ends = (counts + 1).cumsum(0) - 1
        inside = torch.ones(len(values), dtype=torch.bool)
        inside[ends] = False
        value = values[inside.to(values.device)]
        bootstrap = torch.zeros_like(value)
        bootstrap[(counts.cumsum(0) - 1).to(value.device)] = values[ends.to(values.device)]
        return value, bootstrap

    async def forward_backward(self, micro: Batch, loss: Loss) -> None:
        """Add the gradient of `sum(scale * loss)` over the micro-batch's trained tokens."""
        plan = Plan.of(micro.rows, self.policy.device)
        # Hugging Face checkpoints activations only in training mode.
        with _training_mode(self.policy.model) if self._checkpointing else nullcontext():
            tokens = self._tokens(micro, plan)
            loss_N, stats = loss(tokens)
            total = (micro.columns["scale"].to(loss_N) * loss_N).sum()
            if not total.isfinite():
                raise TrainingError(_where_not_finite(micro, tokens, loss_N))
            self.optimizer.scale(total).backward()
        self._record(micro, tokens, stats)
        self._ledger.add(f"{self.prefix}/loss", total.item(), 0)

    def _tokens(self, micro: Batch, plan: Plan) -> Tokens:
        hidden = hidden_states(self.policy, plan)
        logp, entropy = head_scores(self.policy.head, hidden, plan.targets, self.temperature)
        value = self.value_head(hidden) if self.value_head is not None else None
        return Tokens.of(micro.columns, logp, entropy, micro.lengths.to(logp.device), value)

    def _record(self, micro: Batch, x: Tokens, stats: Mapping[str, Tensor]) -> None:
        logp = x.logp.detach()
        everything: Stats = {"policy/entropy": x.entropy.detach(), **stats}
        if "old_logp" in micro.columns:
            everything["policy/kl_old"] = k3(x.old_logp, logp)  # the tokens are samples of old
        if micro.first and "engine_logp" in micro.columns:
            gap = logp - x.engine_logp
            ratio = safe_ratio(logp, x.engine_logp)
            everything |= {
                "mismatch/kl": k3(x.engine_logp, logp),
                "mismatch/abs_logp_mean": gap.abs(),
                "mismatch/abs_logp_max": gap.abs(),
                "_ratio": ratio,
                "_ratio_squared": ratio.square(),
            }
        self._write_down(everything)

    def _write_down(self, stats: Mapping[str, Tensor]) -> None:
        for name, values in stats.items():
            # NaN marks tokens that a statistic does not apply to.
            applies = len(values) - int(values.isnan().sum())
            if not applies:
                continue
            if name.endswith("_max"):
                self._ledger.extreme(name, values.nan_to_num(-torch.inf).max().item())
            elif name.endswith("_min"):
                self._ledger.extreme(name, values.nan_to_num(torch.inf).min().item())
            else:
                self._ledger.add(name, values.nansum(dtype=torch.float64).item(), applies)

    async def optim_step(self, learning_rate: float) -> None:
        self._ledger.add(f"{self.prefix}/loss", 0.0, 1)  # micro-batches of one update add up
        for name, value in self.optimizer.step(learning_rate).items():
            self._ledger.add(name, value, 1)

    def metrics(self) -> dict[str, float]:
        """Means over all trained tokens since the last call."""
        found = self._ledger.drain()
        ratio, squared = found.pop("_ratio", None), found.pop("_ratio_squared", None)
        if ratio is not None and squared is not None:
            found["mismatch/ess"] = ratio**2 / squared
            found["mismatch/chi2"] = squared - 1
        return found

    def refresh_reference(self) -> None:
        """The reference becomes what the policy is now."""
        reference = dict(self.frozen["ref_logp"].module.named_parameters())
        with torch.no_grad():
            for name, parameter in self.policy.module.named_parameters():
                if parameter.requires_grad:
                    reference[name].copy_(parameter)

    def fingerprint(self) -> Mapping[str, str]:
        return hashes(module_tensors(self.policy.model))

    def addresses(self) -> Mapping[str, int]:
        return {name: t.data_ptr() for name, t in module_tensors(self.policy.model).items()}

    def save(self, directory: Path) -> None:
        """Weights in Hugging Face format (or the adapter in PEFT's), optimiser state beside them;
        nothing is pickled.
        """
        save_weights(self.policy, directory / "weights", merge=False)
        save_file(self.optimizer.tensors(), directory / "optimizer.safetensors")
        if self.value_head is not None:
            save_file(self.value_head.state_dict(), directory / VALUE_HEAD)
        if self._save_reference:
            save_file(self._reference_tensors(), directory / REFERENCE)
        (directory / "trainer.json").write_text(
            json.dumps({"scaler": self.optimizer.scaler_state()})
        )

    def load(self, directory: Path) -> None:
        """Restore in place: addresses of parameters do not change, so an engine that shares them
        sees the new values.
        """
        try:
            restore_weights(self.policy, directory / "weights")
            self.optimizer.load_tensors(load_file(directory / "optimizer.safetensors"))
            if self.value_head is not None:
                self.value_head.load_state_dict(load_file(directory / VALUE_HEAD))
            if self._save_reference:
                saved = load_file(directory / REFERENCE)
                with torch.no_grad():
                    for name, tensor in self._reference_tensors(live=True).items():
                        tensor.copy_(saved[name])
            self.optimizer.load_scaler_state(
                json.loads((directory / "trainer.json").read_text())["scaler"]
            )
        except (OSError, ValueError, KeyError, RuntimeError) as error:
            raise CheckpointError(f"checkpoint {directory} cannot be loaded: {error}") from error
        self.optimizer.clear()

    def _reference_tensors(self, live: bool = False) -> dict[str, Tensor]:
        """What `refresh_reference` changes, by name."""
        trained = {n for n, p in self.policy.module.named_parameters() if p.requires_grad}
        found = self.frozen["ref_logp"].module.named_parameters()
        return {n: p if live else p.detach().contiguous() for n, p in found if n in trained}


class _training_mode:
    """Training mode for the time of a block, without dropout: the engine has none, either."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def __enter__(self) -> None:
        self._module.train()
        for layer in self._module.modules():
            if isinstance(layer, nn.Dropout):
                layer.eval()

    def __exit__(self, *_: object) -> None:
        self._module.eval()


def _where_not_finite(micro: Batch, x: Tokens, loss_N: Tensor) -> str:
    """Name the episode and the column that made the loss NaN or infinite."""
    bad = int((~loss_N.isfinite()).nonzero()[0, 0]) if (~loss_N.isfinite()).any() else 0
    row = int(
        torch.searchsorted(
            torch.tensor([len(r.trained) for r in micro.rows]).cumsum(0), bad, right=True
        )
    )
    columns = {"log-prob": x.logp, "old log-prob": x.old_logp, "advantage": x.advantage}
    culprits = [name for name, c in columns.items() if not c[bad].isfinite()]
    what = f" (its {' and '.join(culprits)} is not finite)" if culprits else ""
    thing = "episode" if "engine_logp" in micro.columns else "row"
    return (
        f"the loss is not finite at {thing} {micro.rows[row].sequence} of this batch{what}; "
        "lower optim.lr, or check the loss"
    )


def hidden_states(policy: Policy, plan: Plan) -> Tensor:
    return policy.hidden(plan.tokens, plan.places, plan.layout).index_select(0, plan.predictors)


def copy_of(policy: Policy, *, frozen: bool) -> Policy:
    """A second policy like this one now. What is not trained is shared, so that a copy of a model
    with adapters costs only the adapters.
    """
    shared = {id(p): p for p in policy.module.parameters() if not p.requires_grad}
    module = copy.deepcopy(policy.module, dict(shared))
    for parameter in module.parameters():
        parameter.requires_grad_(parameter.requires_grad and not frozen)
    model = module.get_base_model() if policy.has_adapter else module  # type: ignore[operator]
    return Policy(module, model, policy.tokenizer, policy.source)
