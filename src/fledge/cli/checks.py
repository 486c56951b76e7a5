"""The proofs that `fledge doctor` asks a model for: functions from a `Subject` to a `Check`.

`stock_agreement`     engine and trainer give the log-probs of plain transformers
`cut_invariance`      the gradient does not depend on how a batch was cut, packed or ordered
`zero_rate`           a whole training step at learning rate 0 changes no bit
`seeds`               a request draws the same tokens alone and in a crowd
`overfit_one_prompt`  a few steps teach one answer, and the engine then gives it

They work on weights in memory and never write to the user's files. `overfit_one_prompt` changes
the weights in memory, so it comes last.
"""

from __future__ import annotations

import asyncio
import random
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from fledge.algorithms import make_algorithm, supervised, token_weights
from fledge.config.schema import AlgorithmConfig, OptimConfig
from fledge.data.batch import Batch, Row, pack_samples
from fledge.data.demos import encode_demo
from fledge.data.render import FamilyRenderer, TemplateRenderer, audit, make_renderer
from fledge.inference import NativeEngine
from fledge.models.load import Policy, export
from fledge.trainer import LocalTrainer
from fledge.types import Completion, Sampling, assistant, user
from fledge.weights import SharedMemoryTransport

SHARED = 20
"""Tokens that prompts have in common: more than one cache page, and not a whole number of them."""

TAILS = (1, 1, 5, 13, 30)
ALONE = (1, 16, 17, 47)
NEW_TOKENS = 8
CACHE_MB = 512
SMALL_MODEL = 20_000_000
OVERFIT_STEPS = 80
PROMPT, ANSWER = user("What is 2+3?"), assistant("It is 5.")

LOGP_GAP = {torch.float32: 1e-5, torch.bfloat16: 0.1, torch.float16: 0.02}
"""Log-prob difference that rounding explains in a small model; see `stock_agreement`."""

GRADIENT_GAP = {torch.float32: 1e-5, torch.bfloat16: 0.05, torch.float16: 0.01}
"""Relative gradient difference that the order of additions explains."""

STOCK = "log-probs equal plain transformers"
CUT = "gradient does not depend on the cut"
RATE = "learning rate 0 changes nothing"
SEED = "a seed draws the same tokens in any batch"
LEARN = "one prompt can be learned and is then served"

Sampled = list[tuple[tuple[int, ...], Completion]]


@dataclass(frozen=True, slots=True)
class Check:
    """One line of the doctor's table. `advice` says what to do; a check that passes with it warns.

    >>> Check("stop token", True, "<|im_end|> is id 2").advice
    ''
    """

    name: str
    ok: bool
    detail: str
    advice: str = ""


@dataclass(frozen=True)
class Subject:
    """A model with the parts that a run would put around it."""

    policy: Policy
    renderer: FamilyRenderer | TemplateRenderer
    engine: NativeEngine
    trainer: LocalTrainer

    @classmethod
    def of(cls, policy: Policy) -> Subject:
        # Weight decay is on so that a step that should change nothing would show it.
        trainer = LocalTrainer(policy, OptimConfig(weight_decay=0.1))
        renderer = make_renderer(policy.tokenizer)
        return cls(policy, renderer, NativeEngine(policy, CACHE_MB), trainer)

    @property
    def vocabulary(self) -> int:
        weight = self.policy.head.weight
        assert isinstance(weight, Tensor)
        return weight.shape[0]


def guarded(name: str, look: Callable[[], Check]) -> Check:
    """A check that raises has failed; the ones after it still run."""
    try:
        return look()
    except Exception as error:
        text = " ".join(str(error).split())
        return Check(name, False, f"{type(error).__name__}: {text}", "see the message")


def template(subject: Subject) -> list[Check]:
    """How messages become tokens, against the tokenizer's own chat template."""
    findings = audit(subject.policy.tokenizer, subject.renderer, subject.vocabulary)
    advice = (
        "train and serve through fledge, which appends to the sampled tokens; for serving "
        "elsewhere give the tokenizer a plain ChatML template"
    )
    return [Check(f.check, f.ok, f.detail, "" if f.ok else advice) for f in findings]


def stock_agreement(subject: Subject, name: str = STOCK) -> Check:
    """Ragged requests that share beginnings and join late, against an export in plain transformers.

    Two stock attention paths of a large model differ among themselves; ours may differ from one of
    them by three times as much. Run again after training it covers adapters and stale weights, too.
    """
    sampled = asyncio.run(_sample_in_turns(subject))
    rows = [_row((*prompt, *done.token_ids), len(prompt)) for prompt, done in sampled]
    engine = torch.tensor([x for _, done in sampled for x in done.plain_logps])
    scored = asyncio.run(subject.trainer.score(Batch(tuple(rows), {}), {"old_logp"}))
    trainer = scored.columns["old_logp"].float().cpu()
    stock, noise = _stock_logps(subject.policy, rows)
    gaps = {"engine": _gap(engine, stock), "trainer": _gap(trainer, stock)}
    allowed = max(LOGP_GAP[subject.policy.dtype], 3 * noise)
    shown = ", ".join(f"{part} {gap:.1e}" for part, gap in gaps.items())
    detail = f"{shown} apart over {len(stock)} tokens (allowed {allowed:.0e})"
    if all(gap <= allowed for gap in gaps.values()):
        return Check(name, True, detail)
    return Check(name, False, detail, "do not train this model with fledge; please report it")


async def _sample_in_turns(subject: Subject) -> Sampled:
    """Some requests, others that join while they run, then a second turn on top of the first."""
    prompts = _prompts(subject)
    early, late = prompts[::2], prompts[1::2]
    running = [asyncio.ensure_future(_sample(subject, p, i)) for i, p in enumerate(early)]
    for _ in range(3):
        await asyncio.sleep(0)
    first = await asyncio.gather(*running, *(_sample(subject, p, -i) for i, p in enumerate(late)))
    room = subject.policy.context - NEW_TOKENS
    longer = [(*p, *done.token_ids, p[0]) for p, done in first]
    second = [_sample(subject, p, i) for i, p in enumerate(longer) if len(p) <= room]
    return [*first, *await asyncio.gather(*second)]


async def _sample(
    subject: Subject, prompt: tuple[int, ...], seed: int
) -> tuple[tuple[int, ...], Completion]:
    sampling = Sampling(max_new_tokens=NEW_TOKENS, seed=seed)
    return prompt, await subject.engine.generate(prompt, sampling)


def _prompts(subject: Subject) -> list[tuple[int, ...]]:
    draw = random.Random(0)
    room = subject.policy.context - NEW_TOKENS

    def ids(count: int) -> tuple[int, ...]:
        return tuple(draw.randrange(subject.vocabulary) for _ in range(count))

    shared = ids(SHARED)
    prompts = [(*shared, *ids(n)) for n in TAILS] + [ids(n) for n in ALONE]
    return [p[:room] for p in [*prompts, prompts[2]]]


def _row(token_ids: Sequence[int], prefix: int, sequence: int = 0, prompt: int = 0) -> Row:
    return Row(tuple(token_ids), tuple(range(prefix, len(token_ids))), sequence, prompt)


@torch.no_grad()
def _stock_logps(policy: Policy, rows: Sequence[Row]) -> tuple[Tensor, float]:
    """One row at a time through the exported model, and how far its own two attentions differ."""
    with tempfile.TemporaryDirectory() as folder:
        export(policy, Path(folder))
        stock: Any = AutoModelForCausalLM.from_pretrained(
            folder, attn_implementation="eager", dtype=policy.dtype
        )
    stock.to(policy.device).eval()
    eager = torch.cat([_plain_logps(stock, row) for row in rows])
    stock.set_attn_implementation("sdpa")
    return eager, _gap(torch.cat([_plain_logps(stock, row) for row in rows]), eager)


def _plain_logps(model: Any, row: Row) -> Tensor:
    ids = torch.tensor(row.token_ids, device=model.device)
    logits = model(input_ids=ids[None], use_cache=False).logits[0].float()
    logps = logits[row.prefix - 1 : -1].log_softmax(-1)
    return logps.gather(1, ids[row.prefix :, None])[:, 0].cpu()


def _gap(ours: Tensor, stock: Tensor) -> float:
    return (ours - stock).abs().max().item()


def cut_invariance(subject: Subject) -> Check:
    """The policy gradient of one batch, whole, row by row, and in random packings and orders."""
    batch = asyncio.run(_judged_batch(subject))
    reduce = partial(token_weights, "token_mean", max_length=NEW_TOKENS)
    (mini,) = batch.updates(1, 1, 0, reduce)
    whole = asyncio.run(_gradient(subject, mini.micros(10**9)))
    size = torch.linalg.vector_norm(whole).item()
    worst = 0.0
    for micros in _other_cuts(batch, mini, reduce):
        other = asyncio.run(_gradient(subject, micros))
        worst = max(worst, torch.linalg.vector_norm(other - whole).item() / size)
    allowed = GRADIENT_GAP[subject.policy.dtype]
    detail = f"relative difference {worst:.1e} (allowed {allowed:.0e}), gradient norm {size:.2g}"
    ok = size > 0 and worst <= allowed
    advice = "" if ok else "results would depend on optim.micro_tokens; check algorithm.loss"
    return Check(CUT, ok, detail, advice)


def _other_cuts(batch: Batch, mini: Batch, reduce: Any) -> Iterator[list[Batch]]:
    draw = random.Random(1)
    count = len(mini.rows)
    yield mini.micros(1)
    for _ in range(2):
        order = draw.sample(range(count), count)
        cuts = sorted(draw.sample(range(1, count), 3))
        edges = zip([0, *cuts], [*cuts, count], strict=True)
        yield [mini.select(order[a:b]) for a, b in edges]
        (shuffled,) = batch.select(order).updates(1, 1, 0, reduce)
        yield shuffled.micros(2 * SHARED)


async def _judged_batch(subject: Subject) -> Batch:
    """Ragged rows of three prompts, one with a gap as a second turn leaves it, and off-policy
    enough for the clipping to matter.
    """
    draw = random.Random(2)
    rows: list[Row] = []
    for prompt, ids in enumerate(_prompts(subject)[:3]):
        for _ in range(4):
            tail = [draw.randrange(subject.vocabulary) for _ in range(draw.randint(2, NEW_TOKENS))]
            rows.append(_row((*ids, *tail), len(ids), len(rows), prompt))
    gapped = max(rows, key=lambda row: len(row.trained))
    places = (gapped.trained[0], *gapped.trained[2:])
    rows[gapped.sequence] = Row(gapped.token_ids, places, gapped.sequence, gapped.prompt)
    batch = Batch(tuple(rows), {})
    scored = await subject.trainer.score(batch, {"old_logp"})
    logps = scored.columns["old_logp"].cpu()
    noise = torch.randn(len(logps), generator=torch.Generator().manual_seed(0))
    advantage = batch.per_row([draw.uniform(-1, 1) for _ in rows])
    return batch.with_columns(engine_logp=logps + 0.2 * noise, advantage=advantage)


async def _gradient(subject: Subject, micros: Sequence[Batch]) -> Tensor:
    optimizer = subject.trainer.optimizer
    algorithm = make_algorithm(AlgorithmConfig())
    optimizer.clear()
    for micro in micros:
        await subject.trainer.forward_backward(micro, algorithm.loss)
    found = optimizer.gradients()
    flat = torch.cat([found[name].flatten() for name in sorted(found)])
    optimizer.clear()
    subject.trainer.metrics()
    return flat


def zero_rate(subject: Subject) -> Check:
    """A whole step with a real gradient at learning rate 0: every tensor stays, bit for bit."""
    trainer = subject.trainer
    before = trainer.fingerprint()
    metrics = asyncio.run(_steps(subject, [0.0]))
    changed = sorted(n for n, found in trainer.fingerprint().items() if found != before[n])
    norm = metrics["optim/grad_norm"]
    if changed:
        some = ", ".join(changed[:3])
        detail = f"{len(changed)} of {len(before)} tensors changed: {some}"
        return Check(RATE, False, detail, "something besides the optimiser writes to the weights")
    if not norm > 0:
        return Check(RATE, False, "the gradient is 0", "the loss does not reach the weights")
    return Check(RATE, True, f"{len(before)} tensors, gradient norm {norm:.2g}")


async def _steps(subject: Subject, rates: Sequence[float]) -> dict[str, float]:
    """Supervised steps on the one demonstration; returns the metrics of the last."""
    sample = encode_demo(subject.renderer, [PROMPT, ANSWER])
    reduce = partial(token_weights, "token_mean", max_length=NEW_TOKENS)
    (mini,) = pack_samples([sample]).updates(1, 1, 0, reduce)
    loss = supervised().loss
    metrics: dict[str, float] = {}
    for rate in rates:
        await subject.trainer.forward_backward(mini, loss)
        await subject.trainer.optim_step(rate)
        metrics = subject.trainer.metrics()
        if metrics["sft/loss"] < 0.01:
            break
    return metrics


def seeds(subject: Subject) -> Check:
    """Each request by itself, then all at once in another order: same seed, same tokens.

    Below fp32 the size of the batch changes rounding enough to move a token, so half must agree.
    """
    prompts = _prompts(subject)

    async def alone() -> Sampled:
        return [await _sample(subject, p, i) for i, p in enumerate(prompts)]

    async def crowd() -> Sampled:
        drawn = [_sample(subject, p, i) for i, p in enumerate(prompts)]
        return list(await asyncio.gather(*reversed(drawn)))[::-1]

    pairs = list(zip(asyncio.run(alone()), asyncio.run(crowd()), strict=True))
    same = sum(a.token_ids == b.token_ids for (_, a), (_, b) in pairs)
    needed = len(pairs) if subject.policy.dtype == torch.float32 else len(pairs) // 2
    detail = f"{same} of {len(pairs)} requests draw the same tokens (needed {needed})"
    ok = same >= needed
    advice = "" if ok else "results are not reproducible from seeds here; please report it"
    return Check(SEED, ok, detail, advice)


def overfit_one_prompt(subject: Subject) -> Check:
    """Train on one demonstration, publish with proof, and ask the engine. Changes the weights."""
    rate = _overfit_rate(subject.policy)
    before = -asyncio.run(_first_logp(subject))
    metrics = asyncio.run(_steps(subject, [rate] * OVERFIT_STEPS))
    reply = asyncio.run(_publish_and_ask(subject))
    detail = f"loss {before:.2f} -> {metrics['sft/loss']:.3f}, greedy reply {reply!r}"
    if reply == ANSWER.content:
        return Check(LEARN, True, detail)
    return Check(LEARN, False, detail, "training does not reach what the engine serves")


def _overfit_rate(policy: Policy) -> float:
    if policy.has_adapter:
        return 5e-3
    return 3e-3 if sum(p.numel() for p in policy.model.parameters()) < SMALL_MODEL else 1e-4


async def _first_logp(subject: Subject) -> float:
    sample = encode_demo(subject.renderer, [PROMPT, ANSWER])
    scored = await subject.trainer.score(pack_samples([sample]), {"old_logp"})
    return scored.columns["old_logp"].float().mean().item()


async def _publish_and_ask(subject: Subject) -> str:
    engine, renderer = subject.engine, subject.renderer
    prompt = renderer.start([PROMPT])
    transport = SharedMemoryTransport(prompt, 1.0, subject.policy.dtype)
    await transport.publish(subject.trainer, engine, engine.version + 1)
    limit = len(renderer.encode([PROMPT, ANSWER])[0]) - len(prompt) + 4
    sampling = Sampling(max_new_tokens=limit, temperature=0.0, stop_ids=renderer.stop_ids)
    done = await engine.generate(prompt, sampling)
    return renderer.parse(done.token_ids).content
