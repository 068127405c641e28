"""The training loop: play or read the data of each step, train, evaluate, log and save."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import attrs
import numpy as np

from rlkit.backends import reference_logprobs
from rlkit.backends.protocol import Sampler, TrainerBackend
from rlkit.chat import Chat
from rlkit.credit import Batch, Item, minibatches
from rlkit.critics import Critic
from rlkit.envs import Task, TaskSource
from rlkit.evaluation import evaluate_sync
from rlkit.filters import zero_variance
from rlkit.recipes._hints import peer_hints
from rlkit.recipes.data import fit
from rlkit.recipes.method import Method, assign_credit, correct, experts, was_cut, weigh
from rlkit.rollouts import AsyncRollouts, Plan, Rollouts, async_rollouts, rollout
from rlkit.runs import Run
from rlkit.tracking import mismatch_metrics, train_metrics
from rlkit.trajectory import Group
from rlkit.types import Datum, ForwardBackwardOutput

if TYPE_CHECKING:
    from rlkit.recipes.job import Job

__all__ = ["evaluate", "play", "train"]

_ROUNDS = 4


async def play(
    method: Method, source: TaskSource, plan: Plan, sampler: Sampler, tasks: Sequence[Task], step: int
) -> Rollouts:
    """Play the groups of a step, one for each of ``tasks``.

    Groups whose rewards do not differ by more than the method's threshold are left out. With ``select="informative"``
    further tasks of ``source`` are then played in their place, in four rounds at most; groups that are still missing
    then stay missing. The metrics are those of the first round, and how many groups were left out in all.
    """
    refill = method.recipe.select == "informative"
    threshold = method.threshold if method.threshold is not None or not refill else 0.0
    size, groups_of_step, dropped = len(tasks), list[Group](), 0
    metrics: dict[str, float] = {}
    for turn in range(_ROUNDS if refill else 1):
        seed = plan.seed + turn  # another order of the tasks, and other samples
        batch = source.batch(step, size - len(groups_of_step), seed=seed) if turn else tasks
        groups = await rollout(sampler, batch, step=step, plan=attrs.evolve(plan, seed=seed))
        metrics = metrics or groups.metrics
        played = await _with_baseline(sampler, batch, groups, step, plan) if "greedy" in method.recipe.needs else groups
        if threshold is not None:
            keep = zero_variance([group.rewards for group in played], threshold=threshold).keep
            dropped += int((~keep).sum())
            played = [group for group, good in zip(played, keep, strict=True) if good]
        groups_of_step += played
        if len(groups_of_step) >= size:
            break
    if threshold is not None:
        metrics["filter/zero_variance"] = float(dropped)
    return Rollouts([attrs.evolve(group, number=i) for i, group in enumerate(groups_of_step)], metrics)


async def _with_baseline(
    sampler: Sampler, batch: Sequence[Task], groups: Sequence[Group], step: int, plan: Plan
) -> list[Group]:
    """Tag each trajectory with the reward of its task's greedy episode; leave out groups whose baseline failed."""
    greedy = [attrs.evolve(t, settings=attrs.evolve(t.settings, n=1, min_n=1, temperature=0.0)) for t in batch]
    baselines = {group.number: group.rewards[0] for group in await rollout(sampler, greedy, step=step, plan=plan)}
    tagged = []
    for group in groups:
        if group.number in baselines:
            tag = {"greedy": float(baselines[group.number])}
            members = [attrs.evolve(t, tags={**t.tags, **tag}) for t in group.trajectories]
            tagged.append(attrs.evolve(group, trajectories=members))
    return tagged


def train(
    job: Job,
    run: Run,
    policy: TrainerBackend,
    *,
    reference: Sampler | None = None,
    teacher: Sampler | None = None,
    critic: Critic | None = None,
) -> None:
    """Run a job to its end; an interrupted run resumes where it was.

    Args:
        job: the job.
        run: the run on disk.
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
            if batches is not None and (job.settings.monitor.trajectories or job.mode == "explore"):
                whole = len(batch.advantages) == sum(map(len, groups))  # an operator may have dropped some
                run.log_trajectories(groups, advantages=batch.advantages if whole else None)
            if step + 1 == job.total:
                if job.held_out:
                    run.log(loop.evaluate(job.total), step=job.total)
                final[str(job.total)] = policy.save("final", optimizer=False, sampler=True).result()
            run.checkpoint(every=job.settings.trainer.save_interval or job.total)


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
    """Yield the batches that are played for the remaining steps; None if the method plays none."""
    left = job.total - run.step
    if job.tasks is None or left < 1:
        yield None
        return
    plan = attrs.evolve(job.plan, chat=chat, seed=run.seed)
    step = functools.partial(play, job.method, job.tasks, plan)
    with async_rollouts(
        policy,
        job.tasks,
        size=job.settings.buffer.batch_size,
        steps=left,
        start=run.step,
        max_lag=job.settings.synchronizer.sync_offset,
        interval=job.settings.synchronizer.sync_interval,
        play=step,
        plan=plan,
    ) as batches:
        yield run.keep("ahead", batches)


@attrs.define(eq=False)
class _Loop:
    """The parts of one run, and its steps."""

    job: Job
    run: Run
    policy: TrainerBackend
    reference: Sampler | None
    teacher: Sampler | None
    critic: Critic | None
    chat: Chat = attrs.field(init=False)
    rows: list[list[Datum]] = attrs.field(init=False)  # to imitate or prefer

    def __attrs_post_init__(self) -> None:
        learnt = self.job.learnt
        self.chat = self.job.chat.chat(self.policy.tokenizer)
        more = (self.chat, self.policy.max_length, learnt.leave_out, learnt.setting)
        self.rows = fit(learnt.rows, *more) if learnt.rows else []
        if self.rows and self.reference is not None:  # computed once
            flat = [datum for row in self.rows for datum in row]
            self.rows = _with_input(self.rows, "reference_logprobs", reference_logprobs(self.reference, flat).result())

    @property
    def method(self) -> Method:
        return self.job.method

    def evaluate(self, step: int) -> dict[str, float]:
        """Score the policy after ``step`` steps, if an evaluation is due."""
        explorer = self.job.settings.explorer
        due = step % explorer.eval_interval == 0 and (step > 0 or explorer.eval_on_startup)
        if not self.job.held_out or not (due or step == self.job.total):
            return {}
        started = time.monotonic()
        with self.policy.sampler().result() as sampler:
            metrics = evaluate(self.job, sampler, self.chat)
        return {**metrics, "time/eval": time.monotonic() - started}

    def groups(self, batches: AsyncRollouts | None) -> Rollouts:
        """Return the groups that were played, or stored, for this step."""
        if batches is None:
            stored, size = self.job.stored, self.job.settings.buffer.batch_size
            return Rollouts([] if stored is None else self.run.batch(stored, size, name="stored"))
        started = time.monotonic()
        groups = next(batches)
        groups.metrics["time/rollout"] = time.monotonic() - started
        return groups

    def credit(self, step: int, groups: Sequence[Group]) -> Batch:
        """Return the data of this step: played groups, demonstrations, or both."""
        recipe = self.method.recipe
        if not recipe.rolls_out:
            rows = self.run.batch(list(enumerate(self.rows)), self.job.settings.buffer.batch_size, name="rows")
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
        """Assign credit to the played groups; a policy that is its own teacher teaches with its current weights."""
        teacher, prefixes = self.teacher, None
        with contextlib.ExitStack() as stack:
            if "itself" in self.method.recipe.needs:
                teacher = stack.enter_context(self.policy.sampler().result())
                prefixes = peer_hints(groups, chat=self.chat, text=self.job.settings.algorithm.hint, teacher=teacher)
            models, seed = (self.reference, teacher, self.critic), (self.run.seed, step)
            return assign_credit(self.method, groups, *models, prefixes=prefixes, seed=seed)

    def _is_masked(self, item: Item) -> bool:
        trajectory = item.trajectory
        if trajectory is None or not (self.job.operators.masks or trajectory.env in self.job.masked):
            return False
        return was_cut(trajectory)

    def update(self, step: int, items: Sequence[Item]) -> dict[str, float]:
        """Train, in as many optimizer steps as minibatches and epochs say; return means over these."""
        version, mismatch = self.policy.version, {}
        if items and (self.method.old_logprobs is not None or self.job.correction is not None):
            found = self.policy.forward([datum for item in items for datum in item.data]).result()
            mismatch = _mismatch(items, found.selected, version)
            items, more = self._corrected(items, found.selected)
            mismatch |= more
        size, epochs = self.job.settings.buffer.train_batch_size, self.job.settings.trainer.epochs
        parts, updates = minibatches(items, size, epochs=epochs, seed=(self.run.seed, step)), list[dict[str, float]]()
        for part in parts:
            output, metrics = self._step(step, part)
            updates.append(metrics)
            if output is not None and not mismatch and len(updates) == 1:  # before the first update
                mismatch = _mismatch(part, output.selected, version)
        names = sorted({name for each in updates for name in each})
        means = {name: float(np.mean([each[name] for each in updates if name in each])) for name in names}
        means |= {**mismatch, "train/learning_rate": self.job.schedule.rate(step)}
        return {**means, "train/updates": float(len(updates))}

    def _corrected(self, items: Sequence[Item], now: Sequence[np.ndarray]) -> tuple[Sequence[Item], dict[str, float]]:
        """Return the items with the job's correction weights and older logprobs, and the weights' metrics."""
        metrics: dict[str, float] = {}
        if self.job.correction is not None:
            items, metrics = correct(self.job.correction, items, now)
        if self.method.old_logprobs is not None:  # those of the policy before the first update
            rows = _with_input([item.data for item in items], self.method.old_logprobs, now)
            items = [attrs.evolve(item, data=row) for item, row in zip(items, rows, strict=True)]
        return items, metrics

    def _step(self, step: int, items: Sequence[Item]) -> tuple[ForwardBackwardOutput | None, dict[str, float]]:
        """Take one optimizer step; return the output before it, unless only the critic was trained."""
        mu = None if self.method.mu is None else self.method.mu(step)
        data = weigh(self.method, items, constant=float(self.job.settings.model.max_response_tokens), mu=mu)
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
    """Return the distance between sampler and trainer on samples of the current policy."""
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
