"""Whole runs: one stage or several, training, exploring or evaluating, from settings alone."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

import attrs

import rlkit
from rlkit import tracking
from rlkit.errors import ConfigError
from rlkit.recipes import models
from rlkit.recipes.job import Job, build_job
from rlkit.recipes.loop import evaluate, train
from rlkit.recipes.settings import Monitor, Settings
from rlkit.runs import Record, Retention, Run, beginning, records
from rlkit.tracking import Tracker

__all__ = ["Outcome", "check", "run"]

Named: TypeAlias = str | Tracker
logger = logging.getLogger("rlkit.recipes")


@attrs.frozen
class Outcome:
    """What a stage ended with.

    Attributes:
        stage: its name; "" for a run without stages.
        folder: of the run: metrics.jsonl, trajectories.jsonl, checkpoints.
        path: the weights at the end, for ``init_from`` and for ``rlkit.sampler(path=)``; None in mode bench.
        metrics: the scores of mode bench, of its last checkpoint.
    """

    stage: str
    folder: Path
    path: str | None
    metrics: Mapping[str, float] = attrs.field(factory=dict)


def run(settings: Settings, *, trackers: Sequence[Named] = ()) -> list[Outcome]:
    """Do what the settings say: each stage in turn, or the one that there is.

    Every stage's settings are checked before the first begins. A run that was cut off goes on where it was, a stage
    that is done is passed over.

    Args:
        settings: see ``load``.
        trackers: beside metrics.jsonl and the one that ``monitor`` names; names or objects, as for ``rlkit.Run``.

    Raises:
        ConfigError, UnknownNameError, DataError: something in the settings, or in what they name; nothing was done.
        BackendError: while connecting, sampling or training.

    >>> import tempfile
    >>> from rlkit.recipes import load
    >>> from rlkit.tracking import read_metrics
    >>> settings = load(overrides=[
    ...     f"checkpoint_root_dir={tempfile.mkdtemp()}", "backend=toy", "seed=0", "algorithm.algorithm_type=grpo",
    ...     "buffer.batch_size=2", "buffer.total_steps=2", "buffer.explorer_input.taskset.path=chain_sum",
    ...     "model.max_response_tokens=4"])
    >>> (outcome,) = run(settings)
    >>> [row["step"] for row in read_metrics(outcome.folder)]
    [0, 1]
    """
    paths: dict[str, str] = {}
    outcomes: list[Outcome] = []
    for (name, stage), job in zip(_stages(settings), check(settings), strict=True):
        if settings.stages:
            logger.info("stage %s: %s", name, stage.algorithm.algorithm_type)
        start = models.stage_path("init_from", stage.init_from, paths)
        if start is None and outcomes:
            start = outcomes[-1].path
        outcome = _bench(name, job, start) if job.mode == "bench" else _stage(name, job, start, paths, trackers)
        outcomes.append(outcome)
        if outcome.path is not None:
            paths[name] = outcome.path
    return outcomes


def check(settings: Settings) -> list[Job]:
    """Return the jobs of all stages, checked; files are read, nothing is connected or written.

    Raises:
        ConfigError, UnknownNameError, DataError: as for ``run``.
    """
    return [build_job(each) for _, each in _stages(settings)]


def _stages(settings: Settings) -> list[tuple[str, Settings]]:
    """Return (name, settings) of each stage: a section that it has takes the place of the run's."""
    if not settings.stages:
        _check_paths("", settings, {})
        return [("", settings)]
    stages: list[tuple[str, Settings]] = []
    for i, stage in enumerate(settings.stages):
        if not stage.stage_name or stage.stage_name in [name for name, _ in stages]:
            raise ConfigError(f"stages[{i}].stage_name", f"is {stage.stage_name!r}", "a name that no other stage has")
        sections = ("mode", "algorithm", "buffer", "explorer", "trainer", "init_from", "data_processor")
        changed = {name: getattr(stage, name) for name in sections if getattr(stage, name) is not None}
        if i and "init_from" not in changed:
            changed["init_from"] = None
        name = f"{settings.name}/{stage.stage_name}"
        stages.append((stage.stage_name, attrs.evolve(settings, stages=(), name=name, **changed)))
        _check_paths(f"stages[{i}].", stages[-1][1], dict.fromkeys([earlier for earlier, _ in stages[:-1]], ""))
    return stages


def _check_paths(where: str, settings: Settings, earlier: Mapping[str, str]) -> None:
    """Raise where a path names a stage that there is not."""
    models.stage_path(f"{where}init_from", settings.init_from, earlier)
    for i, each in enumerate(settings.explorer.auxiliary_models):
        models.stage_path(f"{where}explorer.auxiliary_models[{i}].path", each.path, earlier)


def _stage(name: str, job: Job, start: str | None, paths: Mapping[str, str], trackers: Sequence[Named]) -> Outcome:
    """Train, or explore."""
    there = records(job.folder, verify=False) if job.folder.exists() else []
    if there and not job.resumes:
        what = f"is false, and {job.folder} holds a run"
        raise ConfigError("continue_from_checkpoint", what, "true, or another name")
    done = [record for record in records(job.folder) if record.step >= job.total] if there else []
    if done:
        changed = beginning.changes(job.folder, job.config)
        if changed:
            raise ConfigError(
                f"{job.folder} has all of its {job.total} steps, which were done with other settings: "
                f"{', '.join(changed)}; give another name= for a run with these"
            )
        logger.info("%s has all of its %d steps", job.folder, job.total)
        return Outcome(name, job.folder, _final(done[-1]))
    last = job.trainer.max_checkpoints_to_keep
    retention = Retention(last=last) if last else Retention(last=1, every=1)
    with contextlib.ExitStack() as stack:
        named = _trackers(job.monitor, trackers)
        run = stack.enter_context(
            Run(job.folder, seed=job.policy.seed, config=job.config, retention=retention, trackers=named)
        )
        begin = {} if start is None else {"init_from": start}
        policy = run.connect(job.policy.backend, **job.policy.options, **begin)
        reference = teacher = critic = None
        if job.mode != "explore" and job.method.wants_reference:
            reference = stack.enter_context(job.policy.reference(policy, start))
        if job.critic is not None:
            critic = run.critic(job.critic.name, tokenizer=policy.tokenizer, **job.critic.options)
        if job.teacher is not None:
            teacher = stack.enter_context(job.teacher.open(policy.tokenizer, paths))
        train(job, run, policy, reference=reference, teacher=teacher, critic=critic)
    return Outcome(name, job.folder, _final(records(job.folder, verify=False)[-1]))


def _final(record: Record) -> str | None:
    """Return the path of the weights that a run ended with, which samplers can be opened from, too."""
    path: str | None = record.kept.get("final", {}).get(str(record.step))
    return path


def _bench(name: str, job: Job, start: str | None) -> Outcome:
    """Evaluate the checkpoints that there are, or what the run would begin with."""
    saved = records(job.folder) if job.folder.exists() else []
    if job.explorer.bench_on_latest_checkpoint:
        saved = saved[-1:]
    scores: dict[str, float] = {}
    for step, path in [(record.step, record.policy("policy")) for record in saved] or [(0, start)]:
        more = {} if path is None else {"init_from": path}
        with (
            rlkit.connect(job.policy.backend, **job.policy.options, **more, seed=job.policy.seed) as policy,
            policy.sampler().result() as sampler,
        ):
            scores = evaluate(job, sampler, job.chat.chat(policy.tokenizer))
        tracker = tracking.Jsonl(job.folder / "bench")
        tracker.log(scores, step)
        tracker.close()
        logger.info("step %d: %s", step, ", ".join(f"{k} {v:.3g}" for k, v in sorted(scores.items())))
    return Outcome(name, job.folder, None, scores)


def _trackers(monitor: Monitor, more: Sequence[Named]) -> list[Named]:
    """Return metrics.jsonl always, then what ``monitor`` names, then what the program gives."""
    trackers: list[Named] = ["jsonl"]
    if monitor.monitor_type not in (None, "jsonl"):
        kind = str(monitor.monitor_type)
        trackers.append(
            kind if monitor.monitor_args is None else tracking.registry.resolve(kind)(**monitor.monitor_args)
        )
    return [*trackers, *more]
