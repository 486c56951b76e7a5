"""The one loop. Staleness is a number of `experience`; everything else was decided before the loop
began.
"""

from __future__ import annotations

from fledge.data.batch import pack, with_advantages
from fledge.orchestration.run import Run


async def train(run: Run) -> int:
    """Train until the last step or until somebody asks to stop; returns the step reached."""
    policy, algo = run.policy, run.algorithm
    step = await run.begin()
    async with run.experience(version=step) as experience:
        while step < run.steps and not run.books.stopping:
            with run.phase("generate"):
                groups = run.accept(step + 1, await experience.take())  # act
            with run.phase("score"):
                batch = await policy.score(pack(groups), algo.needs)  # old and reference log-probs
                batch = with_advantages(batch, algo.judge(groups))  # rewards to advantages
            for mini in batch.updates(algo.epochs, algo.minibatches, step, run.reduce):  # learn
                with run.phase("backward"):
                    for micro in mini.micros(run.micro_tokens):
                        await policy.forward_backward(micro, algo.loss)
                with run.phase("step"):
                    await policy.optim_step(run.learning_rate(step))
            step += 1  # one version per publish
            with run.phase("publish"):
                await run.publish(step)  # with proof
            await run.record(step, groups, policy.metrics())  # metrics, evaluation, checkpoint
            experience.advance(version=step)
    return step
