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

from fledge.algorithms.losses import k3
from fledge.algorithms.tokens import Stats, Tokens
from fledge.config.schema import OptimConfig
from fledge.data.batch import Batch
from fledge.errors import CheckpointError, TrainingError
from fledge.interfaces import Loss
from fledge.metrics import Ledger
from fledge.models.fingerprint import hashes, module_tensors
from fledge.models.load import Policy, restore_weights, save_weights
from fledge.models.lora import adapters_off
from fledge.models.value import ValueHead
from fledge.trainer.forward import Plan, head_scores
from fledge.trainer.optim import Optimizer


class LocalTrainer:
    """Trains a policy (or, with `value_head`, a critic) with packed batches.

    `temperature` is that of the rollouts: log-probs are scored under the distribution that was
    sampled from.
    """

    def __init__(
        self,
        policy: Policy,
        optim: OptimConfig,
        *,
        temperature: float = 1.0,
        plus_ratio: float = 1.0,
        gradient_checkpointing: bool = False,
        keep_reference: bool = False,
        value_head: bool = False,
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
        self._reference = (
            _frozen_copy(policy) if keep_reference and not policy.has_adapter else None
        )
        self._ledger = Ledger()

    async def score(self, batch: Batch, needs: Collection[str]) -> Batch:
        """Add the columns that an algorithm needs: `old_logp`, `ref_logp`, `value`."""
        unknown = set(needs) - {"old_logp", "ref_logp", "value"}
        assert not unknown, f"cannot score {unknown}"
        columns: dict[str, list[Tensor]] = {name: [] for name in needs}
        with torch.no_grad():
            for micro in batch.micros(self.micro_tokens):
                plan = Plan.of(micro.rows, self.policy.device)
                for name in columns:
                    columns[name].append(self._score_one(name, plan))
        return batch.with_columns(**{name: torch.cat(parts) for name, parts in columns.items()})

    def _score_one(self, name: str, plan: Plan) -> Tensor:
        if name == "ref_logp":
            if self.policy.has_adapter:
                with adapters_off(self.policy.module):
                    return self._logp(self.policy, plan)
            assert self._reference is not None, "this trainer was made without a reference"
            return self._logp(self._reference, plan)
        if name == "value":
            assert self.value_head is not None, "this trainer has no value head"
            value: Tensor = self.value_head(_hidden(self.policy, plan))
            return value
        return self._logp(self.policy, plan)

    def _logp(self, policy: Policy, plan: Plan) -> Tensor:
        return head_scores(policy.head, _hidden(policy, plan), plan.targets, self.temperature)[0]

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
        self._record(micro, tokens, total, stats)

    def _tokens(self, micro: Batch, plan: Plan) -> Tokens:
        hidden = _hidden(self.policy, plan)
        logp, entropy = head_scores(self.policy.head, hidden, plan.targets, self.temperature)
        value = self.value_head(hidden) if self.value_head is not None else None

        def column(name: str, default: Tensor) -> Tensor:
            found = micro.columns.get(name)
            return default if found is None else found.to(logp)

        zero, one = torch.zeros_like(logp), torch.ones_like(logp)
        engine_logp = column("engine_logp", logp.detach())
        reference = micro.columns.get("ref_logp")
        return Tokens(
            logp=logp,
            entropy=entropy,
            engine_logp=engine_logp,
            old_logp=column("old_logp", engine_logp),
            advantage=column("advantage", zero),
            weight=column("weight", one),
            sequence=plan.sequence,
            sequences=plan.sequences,
            ref_logp=None if reference is None else reference.to(logp),
            value=value,
        )

    def _record(self, micro: Batch, x: Tokens, total: Tensor, stats: Mapping[str, Tensor]) -> None:
        logp = x.logp.detach()
        everything: Stats = {"policy/entropy": x.entropy.detach(), **stats}
        if "old_logp" in micro.columns:
            everything["policy/kl_old"] = k3(x.old_logp, logp)  # the tokens are samples of old
        if micro.first and "engine_logp" in micro.columns:
            gap = logp - x.engine_logp
            ratio = gap.clamp(-20, 20).exp()
            everything |= {
                "mismatch/kl": k3(x.engine_logp, logp),
                "mismatch/abs_logp_mean": gap.abs(),
                "mismatch/abs_logp_max": gap.abs(),
                "_ratio": ratio,
                "_ratio_squared": ratio.square(),
            }
        for name, values in everything.items():
            if name.endswith(("_max", "_min")):
                self._ledger.extreme(
                    name, (values.max() if name.endswith("_max") else values.min()).item()
                )
            else:
                self._ledger.add(name, values.sum(dtype=torch.float64).item(), len(values))
        self._ledger.add("policy/loss", total.item(), 0)

    async def optim_step(self, learning_rate: float) -> None:
        self._ledger.add("policy/loss", 0.0, 1)  # micro-batches of one update add up
        for name, value in self.optimizer.step(learning_rate).items():
            self._ledger.add(name, value, 1)

    def metrics(self) -> dict[str, float]:
        """Means over all trained tokens since the last call."""
        found = self._ledger.drain()
        ratio, squared = found.pop("_ratio", None), found.pop("_ratio_squared", None)
        if ratio is not None and squared is not None:
            found["mismatch/ess"] = ratio**2 / squared
        return found

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
            save_file(self.value_head.state_dict(), directory / "value_head.safetensors")
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
                self.value_head.load_state_dict(load_file(directory / "value_head.safetensors"))
            self.optimizer.load_scaler_state(
                json.loads((directory / "trainer.json").read_text())["scaler"]
            )
        except (OSError, ValueError, KeyError, RuntimeError) as error:
            raise CheckpointError(f"checkpoint {directory} cannot be loaded: {error}") from error
        self.optimizer.clear()


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
    return (
        f"the loss is not finite at episode {micro.rows[row].sequence} of this batch{what}; "
        "lower optim.lr, or check algorithm.loss"
    )


def _hidden(policy: Policy, plan: Plan) -> Tensor:
    return policy.hidden(plan.tokens, plan.places, plan.layout).index_select(0, plan.predictors)


def _frozen_copy(policy: Policy) -> Policy:
    """The policy as it is now. It is the model that the run began from, so a resumed run makes the
    same copy again.
    """
    model = copy.deepcopy(policy.model).requires_grad_(False)
    return Policy(model, model, policy.tokenizer, policy.source)
