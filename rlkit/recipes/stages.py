"""Whole runs: one stage or several, training, exploring or evaluating, from settings alone."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

import attrs

from rlkit import backends, tracking
from rlkit.backends.protocol import Sampler, Tokenizer
from rlkit.backends.tokenizers import same_tokenizer
from rlkit.errors import ConfigError
from rlkit.recipes.job import Job, Policy, build_job, choose_critic
from rlkit.recipes.loop import evaluate, train
from rlkit.recipes.settings import Settings, Teacher
from rlkit.runs import Record, Retention, Run, checkpoints, records
from rlkit.runs import sampler as saved_sampler
from rlkit.tracking import Tracker

__all__ = ["Outcome", "check", "run"]

Named: TypeAlias = str | Tracker
logger = logging.getLogger("rlkit.recipes")


@attrs.frozen
class Outcome:
    """The result of a stage.

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
    """Run the settings: each stage in turn, or the only one.

    Every stage's settings are checked before the first begins. An interrupted run resumes where it was; a finished
    stage is skipped.

    Args:
        settings: see ``load``.
        trackers: besides metrics.jsonl and the one that ``monitor`` names; names or objects, as for ``rlkit.Run``.

    Raises:
        ConfigError, UnknownNameError, DataError: a setting, or a file or name in it, is not valid; nothing was done.
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
        start = _find_stage("init_from", stage.init_from, paths)
        if start is None and outcomes:
            start = outcomes[-1].path
        outcome = _bench(name, job, start) if job.mode == "bench" else _train_stage(name, job, start, paths, trackers)
        outcomes.append(outcome)
        if outcome.path is not None:
            paths[name] = outcome.path
    return outcomes


def check(settings: Settings) -> list[Job]:
    """Return the jobs of all stages, checked; it reads files, but connects and writes nothing.

    Raises:
        ConfigError, UnknownNameError, DataError: as for ``run``.
    """
    return [build_job(each) for _, each in _stages(settings)]


def _stages(settings: Settings) -> list[tuple[str, Settings]]:
    """Return (name, settings) of each stage: its sections replace the run's."""
    stages = {} if settings.stages else {"": settings}
    for i, stage in enumerate(settings.stages):
        if not stage.stage_name or stage.stage_name in stages:
            raise ConfigError(f"stages[{i}].stage_name", f"is {stage.stage_name!r}", "a unique name")
        sections = ("mode", "algorithm", "buffer", "explorer", "trainer", "init_from", "data_processor")
        changed = {name: getattr(stage, name) for name in sections if getattr(stage, name) is not None}
        if i:  # a later stage begins where the one before it ended
            changed.setdefault("init_from", None)
        name = f"{settings.name}/{stage.stage_name}"
        stages[stage.stage_name] = attrs.evolve(settings, stages=(), name=name, **changed)
    earlier: dict[str, str] = {}
    for i, (name, each) in enumerate(stages.items()):
        where = f"stages[{i}]." if settings.stages else ""
        _find_stage(f"{where}init_from", each.init_from, earlier)
        for k, model in enumerate(each.explorer.auxiliary_models):
            _find_stage(f"{where}explorer.auxiliary_models[{k}].path", model.path, earlier)
        earlier[name] = ""
    return list(stages.items())


def _train_stage(
    stage_name: str, job: Job, start: str | None, paths: Mapping[str, str], trackers: Sequence[Named]
) -> Outcome:
    """Train, or explore."""
    folder = job.settings.folder
    there = records(folder, verify=False) if folder.exists() else []
    if there and not job.settings.continue_from_checkpoint:
        raise ConfigError("continue_from_checkpoint", f"is false, but {folder} holds a run", "true, or another name")
    done = [record for record in records(folder) if record.step >= job.total] if there else []
    if done:
        changed = checkpoints.find_changes(folder, job.config)
        if changed:
            what = f"already finished its {job.total} steps with different settings: {', '.join(changed)}"
            raise ConfigError(f"{folder} {what}; set another name= to run these")
        logger.info("%s already finished its %d steps", folder, job.total)
        return Outcome(stage_name, folder, _final(done[-1]))
    last = job.settings.trainer.max_checkpoints_to_keep
    retention = Retention(last=last) if last else Retention(last=1, every=1)
    begin = {} if start is None else {"init_from": start}
    kind, args = job.settings.monitor.monitor_type, job.settings.monitor.monitor_args
    named: list[Named] = ["jsonl", *trackers]
    if kind not in (None, "none", "jsonl"):
        named.insert(1, str(kind) if args is None else tracking.registry.resolve(str(kind))(**args))
    with contextlib.ExitStack() as stack:
        run = Run(folder, seed=job.policy.seed, config=job.config, retention=retention, trackers=named)
        stack.enter_context(run)
        policy = run.connect(job.policy.backend, **job.policy.options, **begin)
        reference = teacher = critic = None
        if job.mode != "explore" and job.method.wants_reference:
            if start is None:
                frozen = policy.base_sampler().result()
            else:
                frozen = backends.sampler(job.policy.backend, **job.policy.of_sampler, path=start)
            reference = stack.enter_context(frozen)
        if "critic" in job.needs:
            name, options = choose_critic(job.settings, job.policy)
            critic = run.critic(name, tokenizer=policy.tokenizer, **options)
        if "teacher" in job.needs:
            section = job.settings.explorer.auxiliary_models[0]
            teacher = stack.enter_context(_open_teacher(section, job.policy, policy.tokenizer, paths))
        train(job, run, policy, reference=reference, teacher=teacher, critic=critic)
    return Outcome(stage_name, folder, _final(records(folder, verify=False)[-1]))


def _open_teacher(section: Teacher, policy: Policy, tokenizer: Tokenizer, stages: Mapping[str, str]) -> Sampler:
    """Open the teacher of a policy with this tokenizer; ``stages`` are earlier ones, for "stage:<name>".

    Raises:
        ConfigError: it has another tokenizer.
    """
    where, name = "explorer.auxiliary_models[0]", section.backend or policy.backend
    options = {**(policy.of_sampler if name == policy.backend else {}), **section.options}
    if section.model_path is not None:
        options["model"] = section.model_path
    path = _find_stage(f"{where}.path", section.path, stages)
    teacher = backends.sampler(name, **options) if path is None else saved_sampler(path, **options)
    if problem := same_tokenizer(tokenizer, teacher.tokenizer):
        teacher.close()
        text = "the teacher scores the policy's tokens, so both need the same tokenizer"
        raise ConfigError(where, problem, "the policy's tokenizer", text)
    return teacher


def _find_stage(where: str, path: str | None, stages: Mapping[str, str]) -> str | None:
    """Return a path; for "stage:<name>" that of an earlier stage. Raises ConfigError: no earlier stage has the name."""
    if path is None or not path.startswith("stage:"):
        return path
    name = path.removeprefix("stage:")
    if name not in stages:
        raise ConfigError(where, f"is {path!r}", "an earlier stage: " + (", ".join(stages) or "none"))
    return stages[name]


def _final(record: Record) -> str | None:
    """Return the path of the weights that a run ended with, which samplers can be opened from, too."""
    path: str | None = record.kept.get("final", {}).get(str(record.step))
    return path


def _bench(name: str, job: Job, start: str | None) -> Outcome:
    """Evaluate the existing checkpoints, or the initial policy of the run."""
    folder, scores = job.settings.folder, dict[str, float]()
    saved = records(folder) if folder.exists() else []
    if job.settings.explorer.bench_on_latest_checkpoint:
        saved = saved[-1:]
    for step, path in [(record.step, record.policy("policy")) for record in saved] or [(0, start)]:
        options = {**job.policy.options, "seed": job.policy.seed, **({} if path is None else {"init_from": path})}
        with backends.connect(job.policy.backend, **options) as policy, policy.sampler().result() as sampler:
            scores = evaluate(job, sampler, job.chat(policy.tokenizer))
        tracker = tracking.Jsonl(folder / "bench")
        tracker.log(scores, step)
        tracker.close()
        logger.info("step %d: %s", step, ", ".join(f"{k} {v:.3g}" for k, v in sorted(scores.items())))
    return Outcome(name, folder, None, scores)
