"""The one loop. Staleness is a number of `experience`; everything else was decided before the loop
began.
"""

from __future__ import annotations

from fledge.orchestration.run import Run


async def train(run: Run) -> int:
    """Train until the last step or until somebody asks to stop; returns the step reached."""
    algo = run.algorithm
    step = await run.begin()
    async with run.experience(version=step) as experience:
        while step < run.steps and not run.books.stopping:
            with run.phase("generate"):
                groups = run.accept(step + 1, await experience.take())  # act
            with run.phase("score"):
                batch = await run.score(run.pack(groups))  # old, reference, teacher, values
                batch, judged = algo.judge(batch, step)  # rewards and KL to advantages
            learners = run.learners(step)  # the policy, and its critic if it has one
            for mini in batch.updates(algo.epochs, algo.minibatches, run.key(step), run.reduce):
                with run.phase("backward"):
                    mini = algo.prepare(await run.policy.score(mini, algo.fresh))
                    for learner in learners:
                        for micro in mini.micros(run.micro_tokens):
                            await learner.trainer.forward_backward(micro, learner.loss)
                with run.phase("step"):
                    for learner in learners:
                        await learner.trainer.optim_step(learner.rate(step))
            step += 1  # one version per publish
            with run.phase("publish"):
                await run.publish(step)  # with proof
            await run.record(step, judged)  # metrics, evaluation, checkpoint
            experience.advance(version=step)
    return step
