"""The loop: what is played or read at each step, trained, evaluated, logged and saved."""

from __future__ import annotations

import functools
import time
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import numpy as np

from rlkit.backends import reference_logprobs
from rlkit.credit import Batch, Item, minibatches
from rlkit.evaluation import Evaluation, evaluate_sync
from rlkit.recipes import models
from rlkit.recipes.ahead import Ahead
from rlkit.recipes.batch import assign_credit, experts, weigh
from rlkit.recipes.demonstrations import demonstrations, preferences, texts
from rlkit.recipes.hints import peer_hints
from rlkit.recipes.job import Job
from rlkit.recipes.operators import was_cut
from rlkit.recipes.play import played
from rlkit.rollouts import Rollouts
from rlkit.runs import Run
from rlkit.tracking import train_metrics
from rlkit.trajectory import Group, Trajectory

__all__ = ["evaluated", "trained"]


def trained(job: Job, run: Run, policy: Any, *, reference: Any = None, teacher: Any = None, critic: Any = None) -> None:
    """Carries a job to its end; a run that was cut off goes on where it was.

    Args:
        job: what to do.
        run: where it is kept.
        policy: from ``run.connect``.
        reference, teacher, critic: those that the job's method needs.
    """
    loop = _Loop(job, run, policy, reference, teacher, critic)
    for step in run.steps(job.total):
        started = time.monotonic()
        metrics = loop.evaluation(step)
        groups = loop.groups(step)
        metrics |= {} if groups is None else groups.metrics
        rolled = time.monotonic()
        if job.mode != "explore":
            items, numbers, advantages = loop.items(step, groups)
            metrics |= numbers | loop.updated(step, items)
        else:
            advantages = []
        metrics |= {"time/train": time.monotonic() - rolled, "time/step": time.monotonic() - started}
        run.log(metrics)
        if groups is not None and job.mode != "train" and (job.settings.monitor.trajectories or job.mode == "explore"):
            beside: dict[str, Any] = {"advantages": advantages} if loop.whole(groups, advantages) else {}
            run.log_trajectories(groups, **beside)
        if step + 1 == job.total:
            if job.held_out:
                run.log(loop.evaluation(job.total), step=job.total)
            loop.final[str(job.total)] = policy.save("final", optimizer=False, sampler=True).result()
        run.checkpoint(every=job.settings.trainer.save_interval or job.total)


def evaluated(job: Job, sampler: Any, chat: Any) -> dict[str, float]:
    """The scores on the held-out tasks, "eval/<name>/..." and "eval/mean"; the same episodes whenever it is called."""
    plan = attrs.evolve(job.plan, chat=chat)
    found: dict[str, float] = {}
    means: list[float] = []
    for each in job.held_out:
        own = attrs.evolve(plan, params=attrs.evolve(plan.params, **each.sampling))
        result: Evaluation = evaluate_sync(sampler, each.tasks, n=each.count, k=sorted({1, each.count}), plan=own)
        found |= result.metrics
        means += [score.mean for score in result.scores.values()]
    return {**found, "eval/mean": float(np.mean(means))} if means else {}


class _Loop:
    """One run's parts, and what each step does with them."""

    def __init__(self, job: Job, run: Run, policy: Any, reference: Any, teacher: Any, critic: Any) -> None:
        self.job, self.run, self.policy = job, run, policy
        self.reference, self.teacher, self.critic = reference, teacher, critic
        self.method = job.method
        self.final: dict[str, str] = run.keep("final", {})  # steps -> the weights after them
        self.chat = models.chat_of(job.settings, policy.tokenizer, job.form)
        params = attrs.evolve(job.plan.params, **models.cut_of(job.settings))
        self.plan = attrs.evolve(job.plan, params=params, chat=self.chat, seed=run.seed)
        made = {"pairs": preferences, "texts": texts}.get(self.method.recipe.data, demonstrations)
        self.rows = made(job.rows, job.form, self.chat, job.source if job.rows else "")
        sync = job.settings.synchronizer
        play = functools.partial(self._play, job.tasks)
        ahead = Ahead(policy, play, end=job.total, offset=sync.sync_offset, interval=sync.sync_interval)
        self.ahead = run.keep("ahead", ahead) if job.tasks is not None else None
        if self.rows and reference is not None:
            self.rows = self._with_reference(self.rows)

    def evaluation(self, step: int) -> dict[str, float]:
        """Scores of the policy after ``step`` steps, if they are due."""
        explorer = self.job.settings.explorer
        due = step % explorer.eval_interval == 0 and (step > 0 or explorer.eval_on_startup)
        if not self.job.held_out or not (due or step == self.job.total):
            return {}
        started = time.monotonic()
        with self.policy.sampler().result() as sampler:
            found = evaluated(self.job, sampler, self.chat)
        return {**found, "time/eval": time.monotonic() - started}

    def groups(self, step: int) -> Rollouts | None:
        """What is played, or was stored, for this step."""
        if self.ahead is not None:
            started = time.monotonic()
            groups = self.ahead.batch(step)
            groups.metrics["time/rollout"] = time.monotonic() - started
            return groups
        if self.job.stored is not None:
            return Rollouts(self.run.batch(self.job.stored, self.job.size, name="stored"))
        return None

    def items(self, step: int, groups: Sequence[Group] | None) -> tuple[list[Item], dict[str, float], list[Any]]:
        """What trains at this step, numbers about it, and advantages."""
        items: list[Item] = []
        numbers: dict[str, float] = {}
        advantages: list[Any] = []
        if groups is not None:
            groups, dropped = self.job.operators.applied(groups)
            batch = self._assign(step, groups)
            items = [item for item in batch.items if not self._skipped(item.trajectory)]
            numbers, advantages = {**batch.metrics, **dropped}, list(batch.advantages)
        if not self.rows:
            return items, numbers, advantages
        if self.method.recipe.data != "mixed":
            rows = self.run.batch(list(enumerate(self.rows)), self.job.size, name="rows")
            return [Item(data, i) for i, data in rows], {}, []
        ratio = self.method.expert_ratio
        count = max(round(len(items) * ratio / (1 - ratio)), 1)
        items = [attrs.evolve(item, data=[d.with_inputs(expert=0.0) for d in item.data]) for item in items]
        return items + experts(self.run.batch(self.rows, count, name="rows")), numbers, advantages

    def _assign(self, step: int, groups: Sequence[Group]) -> Batch:
        """Give credit to what was played; a policy that is its own teacher teaches as it is now."""
        beside: dict[str, Any] = {"reference": self.reference, "critic": self.critic, "seed": (self.run.seed, step)}
        if "itself" not in self.method.recipe.needs:
            return assign_credit(self.method, groups, teacher=self.teacher, **beside)
        with self.policy.sampler().result() as teacher:
            hints = peer_hints(groups, chat=self.chat, text=self.job.settings.algorithm.hint, teacher=teacher)
            return assign_credit(self.method, groups, teacher=teacher, prefixes=hints, **beside)

    def updated(self, step: int, items: Sequence[Item]) -> dict[str, float]:
        """Trains, in as many optimizer steps as minibatches and epochs say; means over these."""
        adam = self.job.adam(step)
        if self.method.old_logprobs is not None and items:
            items = self._with_old(items, self.method.old_logprobs)
        parts = minibatches(
            items, self.job.minibatch, epochs=self.job.settings.trainer.epochs, seed=(self.run.seed, step)
        )
        found: list[Mapping[str, float]] = [self._update(step, part, adam) for part in parts]
        names = sorted({name for each in found for name in each})
        means = {name: float(np.mean([each[name] for each in found if name in each])) for name in names}
        return {**means, "train/learning_rate": adam.learning_rate, "train/updates": float(len(found))}

    def whole(self, groups: Sequence[Group], advantages: Sequence[Any]) -> bool:
        """Whether there is an array of advantages for each trajectory."""
        return bool(advantages) and len(advantages) == sum(len(group) for group in groups)

    def _skipped(self, trajectory: Trajectory | None) -> bool:
        return (
            trajectory is not None
            and (self.job.operators.masks or trajectory.env in self.job.masked)
            and was_cut(trajectory)
        )

    def _play(self, tasks: Any, sampler: Any, step: int) -> Rollouts:
        return played(self.method, tasks, self.job.size, self.plan, sampler, step)

    def _update(self, step: int, items: Sequence[Item], adam: Any) -> dict[str, float]:
        """One optimizer step."""
        constant = float(self.job.settings.model.max_response_tokens)
        mu = None if self.method.mu is None else self.method.mu(step)
        data = weigh(self.method, items, constant=constant, mu=mu)
        found = {} if mu is None else {"train/mu": mu}
        if self.critic is not None:
            valued = self.critic.forward_backward(data, config=self.job.critic[1])
            self.critic.optim_step(self.job.critic_adam(step)).result()
            found["train/critic_loss"] = valued.result().metrics["loss:sum"]
            if step < self.job.settings.trainer.critic_warmup:
                return found
        output = self.policy.forward_backward(data, self.method.loss, config=self.method.loss_args)
        update = self.policy.optim_step(adam)  # sent before the other is read
        return {**found, **train_metrics(data, output.result(), update.result())}

    def _with_old(self, items: Sequence[Item], name: str) -> list[Item]:
        """The items, with the policy's own logprobs before the first update as an input of this name."""
        flat = [datum for item in items for datum in item.data]
        found = iter(self.policy.forward(flat).result().selected)
        return [attrs.evolve(item, data=[d.with_inputs(**{name: next(found)}) for d in item.data]) for item in items]

    def _with_reference(self, rows: Sequence[Sequence[Any]]) -> list[list[Any]]:
        """The rows, with the reference's logprobs, which are asked for once."""
        found = iter(reference_logprobs(self.reference, [datum for row in rows for datum in row]).result())
        return [[datum.with_inputs(reference_logprobs=next(found)) for datum in row] for row in rows]
