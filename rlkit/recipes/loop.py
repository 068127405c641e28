"""The training loop: play or read the data of each step, give credit, weigh, correct, update, evaluate, log, save."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Iterator, Mapping, Sequence

import attrs
import numpy as np

from rlkit import corrections, credit, losses
from rlkit.backends import reference_logprobs
from rlkit.backends.protocol import Sampler, TopK, TrainerBackend
from rlkit.chat import Chat
from rlkit.credit import Batch, Item, minibatches, multiply_weights
from rlkit.critics import Critic
from rlkit.envs import Task, TaskSource
from rlkit.errors import UnsupportedError
from rlkit.evaluation import evaluate_sync
from rlkit.filters import zero_variance
from rlkit.losses.prepare import marks
from rlkit.recipes.algorithms import Method
from rlkit.recipes.data import fit
from rlkit.recipes.job import Job, logger, read_critic_loss
from rlkit.rollouts import AsyncRollouts, Plan, Rollouts, async_rollouts, rollout
from rlkit.runs import Run
from rlkit.tracking import mismatch_metrics, train_metrics
from rlkit.trajectory import Group, Trajectory
from rlkit.types import Datum, ForwardBackwardOutput

__all__ = ["assign_credit", "correct", "evaluate", "make_expert_items", "train", "weigh"]

ENTROPY_MASKS = {"clip_b": ("entropy",), "clip_v": ("entropy", "sum_p2", "sum_p2_logp")}
"""Masks of ``rlkit.corrections`` -> what they read of each token's distribution."""
_ROUNDS = 4  # of playing further tasks in the place of groups whose rewards do not differ


@attrs.frozen(eq=False)
class _Parts:
    """What the steps of a run share."""

    job: Job
    run: Run
    policy: TrainerBackend
    reference: Sampler | None
    teacher: Sampler | None
    critic: Critic | None
    chat: Chat
    rows: Sequence[Sequence[Datum]]  # to imitate or prefer


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
    chat = job.chat(policy.tokenizer)
    rows = _make_rows(job, policy, reference, chat)
    parts = _Parts(job, run, policy, reference, teacher, critic, chat, rows)
    with _play_ahead(job, run, policy, chat) as batches:
        for step in run.steps(job.total):
            started = time.monotonic()
            metrics = _evaluate_if_due(parts, step)
            groups = _take_groups(parts, batches)
            batch = Batch([], [], {})
            if job.mode != "explore":
                began = time.monotonic()
                batch = _credit_step(parts, step, groups)
                metrics |= {**batch.metrics, **_update(parts, step, batch.items)}
                metrics["time/train"] = time.monotonic() - began
                if not batch.items:
                    logger.warning("step %d trains nothing, since none of its episodes is left", step)
            run.log({**groups.metrics, **metrics, "time/step": time.monotonic() - started})
            if batches is not None and (job.settings.monitor.trajectories or job.mode == "explore"):
                whole = len(batch.advantages) == sum(map(len, groups))  # an operator may have dropped some
                run.log_trajectories(groups, advantages=batch.advantages if whole else None)
            if step + 1 == job.total:
                if job.held_out:
                    run.log(_evaluate_if_due(parts, job.total), step=job.total)
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


def _evaluate_if_due(parts: _Parts, step: int) -> dict[str, float]:
    """Score the policy after ``step`` steps, if an evaluation is due."""
    job, explorer = parts.job, parts.job.settings.explorer
    due = step % explorer.eval_interval == 0 and (step > 0 or explorer.eval_on_startup)
    if not job.held_out or not (due or step == job.total):
        return {}
    started = time.monotonic()
    with parts.policy.sampler().result() as sampler:
        metrics = evaluate(job, sampler, parts.chat)
    return {**metrics, "time/eval": time.monotonic() - started}


def _make_rows(job: Job, policy: TrainerBackend, reference: Sampler | None, chat: Chat) -> list[list[Datum]]:
    """Return the datums of the rows, with the reference's logprobs, which are computed once."""
    if not job.rows.examples:
        return []
    rows = fit(job.rows.examples, chat, policy.max_length, job.rows.leave_out, job.rows.setting)
    if reference is None:
        return rows
    found = iter(reference_logprobs(reference, [datum for row in rows for datum in row]).result())
    return [[datum.with_inputs(reference_logprobs=next(found)) for datum in row] for row in rows]


@contextlib.contextmanager
def _play_ahead(job: Job, run: Run, policy: TrainerBackend, chat: Chat) -> Iterator[AsyncRollouts | None]:
    """Yield the batches that are played for the remaining steps; None if the method plays none."""
    left = job.total - run.step
    if job.tasks is None or left < 1:
        yield None
        return
    plan = attrs.evolve(job.plan, chat=chat, seed=run.seed)
    with async_rollouts(
        policy,
        job.tasks,
        size=job.settings.buffer.batch_size,
        steps=left,
        start=run.step,
        max_lag=job.settings.synchronizer.sync_offset,
        interval=job.settings.synchronizer.sync_interval,
        play=functools.partial(play_step, job.method, job.tasks, plan),
        plan=plan,
    ) as batches:
        yield run.keep("ahead", batches)


async def play_step(
    method: Method, source: TaskSource, plan: Plan, sampler: Sampler, tasks: Sequence[Task], step: int
) -> Rollouts:
    """Play the groups of a step, one for each of ``tasks``.

    Groups whose rewards do not differ by more than the method's threshold are left out. With ``select="informative"``
    further tasks of ``source`` are then played in their place, in four rounds at most; groups that are still missing
    then stay missing. The metrics are those of the first round, and how many groups were left out in all.
    """
    refill = method.recipe.select == "informative"
    threshold = method.threshold if method.threshold is not None or not refill else 0.0
    kept, dropped, metrics = list[Group](), 0, dict[str, float]()
    for turn in range(_ROUNDS if refill else 1):
        seed = plan.seed + turn  # another order of the tasks, and other samples
        batch = source.batch(step, len(tasks) - len(kept), seed=seed) if turn else tasks
        groups = await rollout(sampler, batch, step=step, plan=attrs.evolve(plan, seed=seed))
        metrics = metrics or groups.metrics
        informative = list(groups)
        if threshold is not None:
            keep = zero_variance([group.rewards for group in groups], threshold=threshold).keep
            informative = [group for group, good in zip(groups, keep, strict=True) if good]
        dropped += len(groups) - len(informative)
        kept += informative
        if len(kept) >= len(tasks):
            break
    if threshold is not None:
        metrics["filter/zero_variance"] = float(dropped)
    return Rollouts([attrs.evolve(group, number=i) for i, group in enumerate(kept)], metrics)


def _take_groups(parts: _Parts, batches: AsyncRollouts | None) -> Rollouts:
    """Return the groups that were played, or stored, for this step."""
    if batches is None:
        stored, size = parts.job.stored, parts.job.settings.buffer.batch_size
        return Rollouts([] if stored is None else parts.run.batch(stored, size, name="stored"))
    started = time.monotonic()
    groups = next(batches)
    groups.metrics["time/rollout"] = time.monotonic() - started
    return groups


def _credit_step(parts: _Parts, step: int, groups: Sequence[Group]) -> Batch:
    """Return the data of this step: played groups, demonstrations, or both."""
    job, method, recipe = parts.job, parts.job.method, parts.job.method.recipe
    if not recipe.rolls_out:
        rows = parts.run.batch(list(enumerate(parts.rows)), job.settings.buffer.batch_size, name="rows")
        return Batch([Item(data, i) for i, data in rows], [], {})
    groups, dropped = job.operators.apply(groups)
    models, seed = (parts.reference, parts.teacher, parts.critic), (parts.run.seed, step)
    batch = assign_credit(method, groups, *models, seed=seed)
    items = [item for item in batch.items if not _is_masked(job, item.trajectory)]
    if recipe.data == "mixed":
        ratio = method.expert_ratio
        count = max(round(len(items) * ratio / (1 - ratio)), 1)
        items = [attrs.evolve(item, data=[d.with_inputs(expert=0.0) for d in item.data]) for item in items]
        items += make_expert_items(parts.run.batch(parts.rows, count, name="rows"))
    return attrs.evolve(batch, items=items, metrics={**batch.metrics, **dropped})


def assign_credit(
    method: Method,
    groups: Sequence[Group],
    reference: Sampler | None = None,
    teacher: Sampler | None = None,
    critic: Critic | None = None,
    *,
    seed: Sequence[int] = (0,),
) -> Batch:
    """Return the items that train these groups, without weights; see ``rlkit.credit.assign``."""
    config = dict(method.recipe.advantage_args)
    if config.get("drop") is not None:
        config["rng"] = np.random.default_rng(np.random.SeedSequence(seed))
    batch = credit.assign(
        groups,
        method.estimator or "grpo",
        level=method.recipe.level,
        config=config,
        weights=None,
        reference=reference,
        kl_coef=method.kl_penalty,
        kl_estimator=method.penalty,
        entropy_coef=method.entropy,
        teacher=teacher,
        critic=critic,
        split="allow" if marks(losses.registry.resolve(method.loss)).elementwise else "raise",
    )
    if method.recipe.select != "best":
        return batch
    return attrs.evolve(batch, items=[i for i in batch.items if any(d.inputs["advantages"].any() for d in i.data)])


def _is_masked(job: Job, trajectory: Trajectory | None) -> bool:
    """Return whether its answer was cut by a limit of tokens, and such answers do not train."""
    if trajectory is None or not is_truncated(trajectory):
        return False
    return job.operators.masks or trajectory.env in job.masked


def is_truncated(trajectory: Trajectory) -> bool:
    """Return whether its last answer was cut by a limit of tokens."""
    return bool(trajectory.turns) and trajectory.turns[-1].sample.stop_reason == "length"


def make_expert_items(rows: Sequence[Sequence[Datum]]) -> list[Item]:
    """Return the items of demonstrations in a mixed batch."""
    items = []
    for group, data in enumerate(rows):
        zeros = [np.zeros(int(datum.mask.sum())) for datum in data]
        pairs = zip(data, zeros, strict=True)
        items.append(Item([d.with_inputs(sampling_logprobs=z, advantages=z, expert=z + 1) for d, z in pairs], group))
    return items


def _update(parts: _Parts, step: int, items: Sequence[Item]) -> dict[str, float]:
    """Train, in as many optimizer steps as minibatches and epochs say; return means over these."""
    job, method, version, before = parts.job, parts.job.method, parts.policy.version, dict[str, float]()
    if items and (method.old_logprobs is not None or job.correction is not None or method.entropy_mask is not None):
        items, before = _prepare_update(parts, items)
    size, epochs = job.settings.buffer.train_batch_size, job.settings.trainer.epochs
    updates: list[dict[str, float]] = []
    for part in minibatches(items, size, epochs=epochs, seed=(parts.run.seed, step)):
        output, metrics = _take_optimizer_step(parts, step, part)
        updates.append(metrics)
        if output is not None and not before and len(updates) == 1:  # before the first update
            before = _measure_mismatch(part, output.selected, version)
    names = sorted({name for each in updates for name in each})
    means = {name: float(np.mean([each[name] for each in updates if name in each])) for name in names}
    means |= {**before, "train/learning_rate": job.rate(step)}
    return {**means, "train/updates": float(len(updates))}


def _prepare_update(parts: _Parts, items: Sequence[Item]) -> tuple[Sequence[Item], dict[str, float]]:
    """Score the items with the policy before its update; return them with corrections, masks and old logprobs."""
    job, method, policy = parts.job, parts.job.method, parts.policy
    data = [datum for item in items for datum in item.data]
    names = () if method.entropy_mask is None else ENTROPY_MASKS[method.entropy_mask]
    hosted = job.policy.backend == "tinker"
    output = policy.forward(data, want=() if hosted else names).result()
    metrics = _measure_mismatch(items, output.selected, policy.version)
    if job.correction is not None:
        items, more = correct(job.correction, items, output.selected)
        metrics |= more
    if method.old_logprobs is not None:
        name, rest = method.old_logprobs, iter(output.selected)
        items = [attrs.evolve(i, data=[d.with_inputs(**{name: next(rest)}) for d in i.data]) for i in items]
    if names:
        if hosted:
            found = _estimate_distributions(policy, data)
        else:
            found = {n: [d.select(row) for d, row in zip(data, output.outputs[n], strict=True)] for n in names}
        items, more = mask_by_entropy(method, items, output.selected, found)
        metrics |= more
    return items, metrics


def _estimate_distributions(policy: TrainerBackend, data: Sequence[Datum]) -> dict[str, list[np.ndarray]]:
    """Return what ``forward(want=)`` would, from the 20 most probable tokens, which is all that a service gives.

    The remaining probability counts as one token, so an entropy is a lower bound.
    """
    with policy.sampler().result() as sampler:
        if not isinstance(sampler, TopK):
            raise UnsupportedError("this sampler does not give the most probable tokens")
        waiting = [sampler.top_logprobs(datum.tokens, 20) for datum in data]
        found: dict[str, list[np.ndarray]] = {name: [] for name in ENTROPY_MASKS["clip_v"]}
        for datum, future in zip(data, waiting, strict=True):
            best = datum.select(future.result()[1]).astype(np.float64)
            p, rest = np.exp(best), np.clip(1 - np.exp(best).sum(-1), 1e-12, None)
            found["entropy"].append(np.clip(-(p * best).sum(-1) - rest * np.log(rest), 0.0, None))
            found["sum_p2"].append(np.clip((p**2).sum(-1), 1e-12, 1.0))
            found["sum_p2_logp"].append((p**2 * best).sum(-1))
    return found


def _take_optimizer_step(
    parts: _Parts, step: int, items: Sequence[Item]
) -> tuple[ForwardBackwardOutput | None, dict[str, float]]:
    """Take one optimizer step; return the output before it, unless only the critic was trained."""
    job, method, policy = parts.job, parts.job.method, parts.policy
    mu = None if method.mu is None else method.mu(step)
    data = weigh(method, items, constant=float(job.settings.model.max_response_tokens), mu=mu)
    metrics = {} if mu is None else {"train/mu": mu}
    if parts.critic is not None:
        rate, config = read_critic_loss(job.settings)
        valued = parts.critic.forward_backward(data, config=config)
        parts.critic.optim_step(job.adam(step, rate)).result()
        metrics["train/critic_loss"] = valued.result().metrics["loss:sum"]
        if step < job.settings.trainer.critic_warmup:
            return None, metrics
    output = policy.forward_backward(data, method.loss, config=method.loss_args)
    update = policy.optim_step(job.adam(step))  # sent before the other is read
    return output.result(), {**metrics, **train_metrics(data, output.result(), update.result())}


def weigh(method: Method, items: Sequence[Item], *, constant: float, mu: float | None) -> list[Datum]:
    """Return the datums of one optimizer step, with the weights that make their sum the wanted mean.

    In a mixed batch the rollouts and the demonstrations are each a mean of their own; the order is that of the items.
    """
    if method.recipe.data == "pairs":
        return [d.with_inputs(weights=1.0 / len(items)) for item in items for d in item.data]
    shown = [method.recipe.data == "mixed" and bool(item.data[0].inputs["expert"].any()) for item in items]
    parts = []
    for expert, mode in ((False, method.recipe.weights), (True, method.expert_weights)):
        part = [item for item, each in zip(items, shown, strict=True) if each == expert]
        parts.append(iter(credit.weigh(part, mode, constant=constant if mode.endswith("-norm") else None)))
    data = [next(parts[expert]) for item, expert in zip(items, shown, strict=True) for _ in item.data]
    return data if mu is None else [datum.with_inputs(mu=mu) for datum in data]


def correct(name: str, items: Sequence[Item], now: Sequence[np.ndarray]) -> tuple[list[Item], dict[str, float]]:
    """Multiply the weights of samples by a correction.

    Args:
        name: of ``rlkit.corrections``.
        items: of a step; demonstrations among them are unchanged.
        now: float32 [n] of each datum, the logprobs of the policy before it is updated.

    Returns:
        the items; "train/correction/mean", "train/correction/min" and "train/correction/max" over the tokens.
    """
    sampled = _pair_samples(items, now)
    then = [datum.select(datum.inputs["sampling_logprobs"]) for datum, _ in sampled]
    weights = getattr(corrections, name)(trainer_logprobs=[logprobs for _, logprobs in sampled], sampling_logprobs=then)
    rest, made = iter(weights), list[Item]()
    for item in items:
        data = item.data if item.trajectory is None else [multiply_weights(d, next(rest)) for d in item.data]
        made.append(attrs.evolve(item, data=data))
    flat = np.concatenate([np.zeros(0), *weights])
    return made, {f"train/correction/{x}": float(getattr(flat, x)()) for x in ("mean", "min", "max") if flat.size}


def mask_by_entropy(
    method: Method, items: Sequence[Item], now: Sequence[np.ndarray], distributions: Mapping[str, Sequence[np.ndarray]]
) -> tuple[list[Item], dict[str, float]]:
    """Drop tokens of samples by ``clip_b`` or ``clip_v``; "train/entropy_mask/mean" is the share that is kept.

    A dropped token leaves the mask, so that means are over the others, as in Trinity-RFT.

    Args:
        method: names the mask and its settings.
        items: of a step; demonstrations among them are unchanged.
        now: float32 [n] of each datum, the logprobs of the policy before it is updated.
        distributions: "entropy", and for ``clip_v`` "sum_p2" and "sum_p2_logp", [n] of each datum.
    """
    kind, sampled = str(method.entropy_mask), _pair_samples(items, now)
    given = {name: [row for _, row in _pair_samples(items, distributions[name])] for name in ENTROPY_MASKS[kind]}
    given["logprobs"] = [np.minimum(row, 0.0) for _, row in sampled]
    given["advantages"] = [datum.select(datum.inputs["advantages"]) for datum, _ in sampled]
    kept = getattr(corrections, kind)(**given, **method.entropy_mask_args)
    rest, made = iter(kept), list[Item]()
    for item in items:
        data = item.data
        if item.trajectory is not None:
            masked = [attrs.evolve(d, mask=d.expand(next(rest)) > 0) for d in data]
            data = [datum for datum in masked if datum.mask.any()]
        made += [attrs.evolve(item, data=data)] if data else []
    flat = np.concatenate([np.zeros(0), *kept])
    return made, {"train/entropy_mask/mean": float(flat.mean())} if flat.size else {}


def _pair_samples(
    items: Sequence[Item], rows: Sequence[np.ndarray], version: int | None = None
) -> list[tuple[Datum, np.ndarray]]:
    """Return the datums that were sampled (by the policy of that version, if given), each with its row of ``rows``."""
    flat = [(item.trajectory, datum) for item in items for datum in item.data]
    pairs = zip(flat, rows, strict=True)
    return [(datum, row) for (t, datum), row in pairs if t is not None and (version is None or t.version == version)]


def _measure_mismatch(items: Sequence[Item], now: Sequence[np.ndarray], version: int) -> dict[str, float]:
    """Return the distance between sampler and trainer on samples of the current policy."""
    pairs = _pair_samples(items, now, version)
    return mismatch_metrics([datum for datum, _ in pairs], [row for _, row in pairs])
