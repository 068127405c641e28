"""Whole runs: one stage or several, training, exploring or evaluating, from settings alone."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

import rlkit
from rlkit import _check, tracking
from rlkit.config import dump
from rlkit.errors import ConfigError
from rlkit.recipes import models
from rlkit.recipes.job import Job, prepared
from rlkit.recipes.loop import evaluated, trained
from rlkit.recipes.settings import Settings
from rlkit.runs import Retention, Run, beginning, records

__all__ = ["Outcome", "check", "run"]

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


def run(settings: Settings, *, trackers: Sequence[Any] = ()) -> list[Outcome]:
    """Does what the settings say: each stage in turn, or the one that there is.

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
    stages = _stages(settings)
    jobs = check(settings)
    paths: dict[str, str] = {}
    found: list[Outcome] = []
    for (name, own), job in zip(stages, jobs, strict=True):
        if settings.stages:
            logger.info("stage %s: %s", name, own.algorithm.algorithm_type)
        start = models.stage_path("init_from", own.init_from, paths)
        if start is None and found:
            start = found[-1].path
        outcome = _bench(name, job, start) if job.mode == "bench" else _stage(name, job, start, paths, trackers)
        found.append(outcome)
        if outcome.path is not None:
            paths[name] = outcome.path
    return found


def check(settings: Settings) -> list[Job]:
    """The jobs of all stages, checked; files are read, nothing is connected or written.

    Raises:
        ConfigError, UnknownNameError, DataError: as for ``run``.
    """
    return [prepared(each) for _, each in _stages(settings)]


def _stages(settings: Settings) -> list[tuple[str, Settings]]:
    """(name, settings) of each stage: a section that it has takes the place of the run's."""
    if not settings.stages:
        _check_paths("", settings, {})
        return [("", settings)]
    found: list[tuple[str, Settings]] = []
    for i, stage in enumerate(settings.stages):
        if not stage.stage_name or stage.stage_name in [name for name, _ in found]:
            what = f"is {stage.stage_name!r}"
            raise ConfigError(_check.problem(f"stages[{i}].stage_name", what, "a name that no other stage has"))
        sections = ("mode", "algorithm", "buffer", "explorer", "trainer", "init_from", "data_processor")
        own = {name: getattr(stage, name) for name in sections if getattr(stage, name) is not None}
        if i and "init_from" not in own:
            own["init_from"] = None
        name = f"{settings.name}/{stage.stage_name}"
        found.append((stage.stage_name, attrs.evolve(settings, stages=(), name=name, **own)))
        _check_paths(f"stages[{i}].", found[-1][1], dict.fromkeys([earlier for earlier, _ in found[:-1]], ""))
    return found


def _check_paths(where: str, settings: Settings, earlier: Mapping[str, str]) -> None:
    """Raises where a path names a stage that there is not."""
    models.stage_path(f"{where}init_from", settings.init_from, earlier)
    for i, each in enumerate(settings.explorer.auxiliary_models):
        models.stage_path(f"{where}explorer.auxiliary_models[{i}].path", each.path, earlier)


def _stage(name: str, job: Job, start: str | None, paths: Mapping[str, str], trackers: Sequence[Any]) -> Outcome:
    """Trains, or explores."""
    settings = job.settings
    _check_folder(settings)
    done = (
        [record for record in records(settings.folder) if record.step >= job.total] if settings.folder.exists() else []
    )
    if done:
        changed = beginning.changes(settings.folder, dump(settings))
        if changed:
            raise ConfigError(
                f"{settings.folder} has all of its {job.total} steps, which were done with other settings: "
                f"{', '.join(changed)}; give another name= for a run with these"
            )
        logger.info("%s has all of its %d steps", settings.folder, job.total)
        return Outcome(name, settings.folder, _final(done[-1]))
    options = models.options_of(settings)
    with contextlib.ExitStack() as stack:
        kept = settings.trainer.max_checkpoints_to_keep
        retention = Retention(last=kept) if kept else Retention(last=1, every=1)
        named = _trackers(settings, trackers)
        own = Run(
            settings.folder, seed=models.seed_of(settings), config=dump(settings), retention=retention, trackers=named
        )
        current = stack.enter_context(own)
        policy = current.connect(
            models.backend_of(settings), **options, **({} if start is None else {"init_from": start})
        )
        beside: dict[str, Any] = {}
        if job.mode != "explore":
            if job.method.wants_reference:
                beside["reference"] = stack.enter_context(models.reference_of(settings, policy, start))
            if "critic" in job.method.recipe.needs:
                kind, more = models.critic_of(settings)
                beside["critic"] = current.critic(kind, tokenizer=policy.tokenizer, **more)
            if "teacher" in job.method.recipe.needs:
                beside["teacher"] = stack.enter_context(models.teacher_of(settings, policy.tokenizer, paths))
        trained(job, current, policy, **beside)
    return Outcome(name, settings.folder, _final(records(settings.folder, verify=False)[-1]))


def _final(record: Any) -> str | None:
    """The path of the weights that a run ended with, which samplers can be opened from, too."""
    found: str | None = record.kept.get("final", {}).get(str(record.step))
    return found


def _bench(name: str, job: Job, start: str | None) -> Outcome:
    """Evaluates the checkpoints that there are, or what the run would begin with."""
    settings, scores = job.settings, {}
    found = records(settings.folder) if settings.folder.exists() else []
    if settings.explorer.bench_on_latest_checkpoint:
        found = found[-1:]
    options = models.options_of(settings)
    seed = models.seed_of(settings)
    for step, path in [(record.step, record.policy("policy")) for record in found] or [(0, start)]:
        more = {} if path is None else {"init_from": path}
        with rlkit.connect(models.backend_of(settings), **options, **more, seed=seed) as policy:
            chat = models.chat_of(settings, policy.tokenizer, job.form)
            with policy.sampler().result() as sampler:
                scores = evaluated(job, sampler, chat)
        tracker = tracking.Jsonl(settings.folder / "bench")
        tracker.log(scores, step)
        tracker.close()
        logger.info("step %d: %s", step, ", ".join(f"{k} {v:.3g}" for k, v in sorted(scores.items())))
    return Outcome(name, settings.folder, None, scores)


def _trackers(settings: Settings, more: Sequence[Any]) -> list[Any]:
    """metrics.jsonl always, then what ``monitor`` names, then what the program gives."""
    monitor = settings.monitor
    found: list[Any] = ["jsonl"]
    if monitor.monitor_type not in (None, "jsonl"):
        kind = str(monitor.monitor_type)
        if monitor.monitor_args is None:
            found.append(kind)
        else:
            try:
                found.append(tracking.registry.resolve(kind)(**monitor.monitor_args))
            except TypeError as error:
                raise ConfigError(f"monitor.monitor_args: {error}") from error
    return [*found, *more]


def _check_folder(settings: Settings) -> None:
    """Raises where there is a run, and it is not to be gone on with."""
    if not settings.continue_from_checkpoint and settings.folder.exists() and records(settings.folder, verify=False):
        what = f"is false, and {settings.folder} holds a run"
        raise ConfigError(_check.problem("continue_from_checkpoint", what, "true, or another name"))
