"""The loop: what is played or read at each step, trained, evaluated, logged and saved."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Iterator, Sequence

import attrs
import numpy as np

from rlkit.backends import reference_logprobs
from rlkit.backends.protocol import Sampler, TrainerBackend
from rlkit.chat import Chat
from rlkit.credit import Batch, Item, minibatches
from rlkit.critics import Critic
from rlkit.evaluation import evaluate_sync
from rlkit.recipes.batch import assign_credit, experts, weigh
from rlkit.recipes.correction import correct
from rlkit.recipes.demonstrations import demonstrations, preferences, texts
from rlkit.recipes.hints import peer_hints
from rlkit.recipes.job import Job
from rlkit.recipes.operators import was_cut
from rlkit.recipes.play import play
from rlkit.rollouts import AsyncRollouts, Rollouts, async_rollouts
from rlkit.runs import Run
from rlkit.tracking import mismatch_metrics, train_metrics
from rlkit.trajectory import Group
from rlkit.types import Datum, ForwardBackwardOutput

__all__ = ["evaluate", "train"]


def train(
    job: Job,
    run: Run,
    policy: TrainerBackend,
    *,
    reference: Sampler | None = None,
    teacher: Sampler | None = None,
    critic: Critic | None = None,
) -> None:
    """Carry a job to its end; a run that was cut off goes on where it was.

    Args:
        job: what to do.
        run: where it is kept.
        policy: from ``run.connect``.
        reference, teacher, critic: those that the job's method needs.
    """
    final: dict[str, str] = run.keep("final", {})  # steps -> the weights after them
    loop = _Loop(job, run, policy, reference, teacher, critic)
    with _batches(job, run, policy, loop.chat) as batches:
        for step in run.steps(job.total):
            started = time.monotonic()
            metrics = loop.evaluate(step)
            groups = loop.groups(batches)
            batch = Batch([], [], {})
            if job.mode != "explore":
                began = time.monotonic()
                batch = loop.credit(step, groups)
                metrics |= {**batch.metrics, **loop.update(step, batch.items), "time/train": time.monotonic() - began}
            run.log({**groups.metrics, **metrics, "time/step": time.monotonic() - started})
            if batches is not None and (job.monitor.trajectories or job.mode == "explore"):
                whole = len(batch.advantages) == sum(map(len, groups))  # an operator may have left some out
                run.log_trajectories(groups, advantages=batch.advantages if whole else None)
            if step + 1 == job.total:
                if job.held_out:
                    run.log(loop.evaluate(job.total), step=job.total)
                final[str(job.total)] = policy.save("final", optimizer=False, sampler=True).result()
            run.checkpoint(every=job.trainer.save_interval or job.total)


def evaluate(job: Job, sampler: Sampler, chat: Chat) -> dict[str, float]:
    """Return the held-out scores, "eval/<name>/..." and "eval/mean"; every call plays the same episodes."""
    metrics: dict[str, float] = {}
    means: list[float] = []
    for each in job.held_out:
        plan = attrs.evolve(job.plan, params=each.params, chat=chat)
        result = evaluate_sync(sampler, each.tasks, n=each.count, k=sorted({1, each.count}), plan=plan)
        metrics |= result.metrics
        means += [score.mean for score in result.scores.values()]
    return {**metrics, "eval/mean": float(np.mean(means))} if means else {}


@contextlib.contextmanager
def _batches(job: Job, run: Run, policy: TrainerBackend, chat: Chat) -> Iterator[AsyncRollouts | None]:
    """Yield the batches that are played for the steps that are left; None where nothing is played."""
    left = job.total - run.step
    if job.tasks is None or left < 1:
        yield None
        return
    plan = attrs.evolve(job.plan, chat=chat, seed=run.seed)
    step = functools.partial(play, job.method, job.tasks, plan)
    with async_rollouts(
        policy,
        job.tasks,
        size=job.size,
        steps=left,
        start=run.step,
        max_lag=job.sync.sync_offset,
        interval=job.sync.sync_interval,
        play=step,
        plan=plan,
    ) as batches:
        yield run.keep("ahead", batches)


class _Loop:
    """One run's parts, and what each step does with them."""

    def __init__(
        self,
        job: Job,
        run: Run,
        policy: TrainerBackend,
        reference: Sampler | None,
        teacher: Sampler | None,
        critic: Critic | None,
    ) -> None:
        self.job, self.run, self.policy = job, run, policy
        self.reference, self.teacher, self.critic = reference, teacher, critic
        self.method = job.method
        self.chat = job.chat.chat(policy.tokenizer)
        read = {"pairs": preferences, "texts": texts}.get(self.method.recipe.data, demonstrations)
        self.rows = read(job.learnt.rows, job.learnt.form, self.chat, job.learnt.source)
        if self.rows and reference is not None:  # asked once
            flat = [datum for row in self.rows for datum in row]
            self.rows = _with_input(self.rows, "reference_logprobs", reference_logprobs(reference, flat).result())

    def evaluate(self, step: int) -> dict[str, float]:
        """Score the policy after ``step`` steps, if that is due."""
        explorer = self.job.explorer
        due = step % explorer.eval_interval == 0 and (step > 0 or explorer.eval_on_startup)
        if not self.job.held_out or not (due or step == self.job.total):
            return {}
        started = time.monotonic()
        with self.policy.sampler().result() as sampler:
            metrics = evaluate(self.job, sampler, self.chat)
        return {**metrics, "time/eval": time.monotonic() - started}

    def groups(self, batches: AsyncRollouts | None) -> Rollouts:
        """Return what was played, or stored, for this step."""
        if batches is None:
            stored = self.job.stored
            return Rollouts([] if stored is None else self.run.batch(stored, self.job.size, name="stored"))
        started = time.monotonic()
        groups = next(batches)
        groups.metrics["time/rollout"] = time.monotonic() - started
        return groups

    def credit(self, step: int, groups: Sequence[Group]) -> Batch:
        """Return what trains at this step: what was played, demonstrations, or both."""
        recipe = self.method.recipe
        if not recipe.rolls_out:
            rows = self.run.batch(list(enumerate(self.rows)), self.job.size, name="rows")
            return Batch([Item(data, i) for i, data in rows], [], {})
        groups, dropped = self.job.operators.apply(groups)
        batch = self._assign(step, groups)
        items = [item for item in batch.items if not self._is_masked(item)]
        if recipe.data == "mixed":
            ratio = self.method.expert_ratio
            count = max(round(len(items) * ratio / (1 - ratio)), 1)
            items = [attrs.evolve(item, data=[d.with_inputs(expert=0.0) for d in item.data]) for item in items]
            items += experts(self.run.batch(self.rows, count, name="rows"))
        return attrs.evolve(batch, items=items, metrics={**batch.metrics, **dropped})

    def _assign(self, step: int, groups: Sequence[Group]) -> Batch:
        """Give credit to what was played; a policy that is its own teacher teaches as it is now."""
        assign = functools.partial(
            assign_credit, self.method, groups, reference=self.reference, critic=self.critic, seed=(self.run.seed, step)
        )
        if "itself" not in self.method.recipe.needs:
            return assign(teacher=self.teacher)
        with self.policy.sampler().result() as teacher:
            return assign(
                teacher=teacher, prefixes=peer_hints(groups, chat=self.chat, text=self.job.hint, teacher=teacher)
            )

    def _is_masked(self, item: Item) -> bool:
        trajectory = item.trajectory
        masked = trajectory is not None and (self.job.operators.masks or trajectory.env in self.job.masked)
        return masked and trajectory is not None and was_cut(trajectory)

    def update(self, step: int, items: Sequence[Item]) -> dict[str, float]:
        """Train, in as many optimizer steps as minibatches and epochs say; return means over these."""
        version, mismatch = self.policy.version, {}
        if items and (self.method.old_logprobs is not None or self.job.correction is not None):
            found = self.policy.forward([datum for item in items for datum in item.data]).result()
            mismatch = _mismatch(items, found.selected, version)
            items, more = self._corrected(items, found.selected)
            mismatch |= more
        parts = minibatches(items, self.job.minibatch, epochs=self.job.trainer.epochs, seed=(self.run.seed, step))
        updates = []
        for part in parts:
            output, metrics = self._step(step, part)
            updates.append(metrics)
            if output is not None and not mismatch and len(updates) == 1:  # before the first update
                mismatch = _mismatch(part, output.selected, version)
        names = sorted({name for each in updates for name in each})
        means = {name: float(np.mean([each[name] for each in updates if name in each])) for name in names}
        return {
            **means,
            **mismatch,
            "train/learning_rate": self.job.schedule.rate(step),
            "train/updates": float(len(updates)),
        }

    def _corrected(self, items: Sequence[Item], now: Sequence[np.ndarray]) -> tuple[Sequence[Item], dict[str, float]]:
        """Return the items with the weights and older logprobs that the job has, and what is said of the weights."""
        metrics: dict[str, float] = {}
        if self.job.correction is not None:
            items, metrics = correct(self.job.correction, items, now)
        if self.method.old_logprobs is not None:  # those of the policy before the first update
            rows = _with_input([item.data for item in items], self.method.old_logprobs, now)
            items = [attrs.evolve(item, data=row) for item, row in zip(items, rows, strict=True)]
        return items, metrics

    def _step(self, step: int, items: Sequence[Item]) -> tuple[ForwardBackwardOutput | None, dict[str, float]]:
        """Take one optimizer step; return what was found before it, unless the critic alone was trained."""
        mu = None if self.method.mu is None else self.method.mu(step)
        data = weigh(self.method, items, constant=float(self.job.width), mu=mu)
        metrics = {} if mu is None else {"train/mu": mu}
        if self.critic is not None and self.job.critic is not None:
            valued = self.critic.forward_backward(data, config=self.job.critic.loss)
            self.critic.optim_step(self.job.schedule.adam(step, self.job.critic.rate)).result()
            metrics["train/critic_loss"] = valued.result().metrics["loss:sum"]
            if step < self.job.critic.warmup:
                return None, metrics
        output = self.policy.forward_backward(data, self.method.loss, config=self.method.loss_args)
        update = self.policy.optim_step(self.job.schedule.adam(step))  # sent before the other is read
        return output.result(), {**metrics, **train_metrics(data, output.result(), update.result())}


def _mismatch(items: Sequence[Item], now: Sequence[np.ndarray], version: int) -> dict[str, float]:
    """Return how far the sampler is from the trainer on what this very policy sampled."""
    rest = iter(now)
    pairs = [(item, datum, next(rest)) for item in items for datum in item.data]
    fresh = [
        (datum, logprobs)
        for item, datum, logprobs in pairs
        if item.trajectory is not None and item.trajectory.version == version and "sampling_logprobs" in datum.inputs
    ]
    return mismatch_metrics([datum for datum, _ in fresh], [logprobs for _, logprobs in fresh])


def _with_input(rows: Sequence[Sequence[Datum]], name: str, arrays: Sequence[np.ndarray]) -> list[list[Datum]]:
    """Return the datums with one more input each."""
    rest = iter(arrays)
    return [[datum.with_inputs(**{name: next(rest)}) for datum in row] for row in rows]
