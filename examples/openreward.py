"""Train an agent that calls tools in OpenReward's environments, over several turns, on any backend.

    python examples/openreward.py --config_path examples/openreward.yaml
    python examples/openreward.py --config_path examples/openreward.yaml --overrides batch_size=64 loss_fn=cispo

Run it again to resume. Keys come from the environment, or from a file .env in the working directory or next to the
settings: TINKER_API_KEY, OPENREWARD_API_KEY, WANDB_API_KEY, and those of the environments' tools. --help lists the
settings. One step of the loop is the function ``step``.
"""

from __future__ import annotations

import argparse
import functools
import os
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import attrs
import numpy as np
from dotenv import load_dotenv

import rlkit
from rlkit import advantages, config, credit, envs, losses, rewards, tracking
from rlkit.chat import Chat
from rlkit.filters import zero_variance
from rlkit.rollouts import Plan, rollout_sync
from rlkit.uploads import OpenRewardUpload

ESTIMATORS: dict[str, Any] = {
    "direct": advantages.reinforce,
    "centered": advantages.dr_grpo,
    "centered_normalized": advantages.grpo,
}


@attrs.frozen
class Split:
    """Tasks of a split: shuffled by the seed or in their own order, and how many of them (None: all)."""

    shuffle: bool = True
    num_samples: int | None = None


@attrs.frozen
class Environment:
    """An environment's settings; ``secrets``: name -> hosts that may receive it, null for those that the SDK knows.

    A secret's value comes from the environment variable of its name.
    """

    splits: dict[str, Split]
    num_rollouts: int
    max_failing_rollouts: int = 0
    temperature: float = 1.0
    reward_reduction: Literal["sum", "mean", "max", "min"] = "sum"
    nonterminal_reward: float | None = None
    min_reward: float | None = None
    max_reward: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    secrets: dict[str, Any] | None = None
    base_url: str | None = None
    variant: str | None = None

    def __attrs_post_init__(self) -> None:
        if self.num_rollouts - self.max_failing_rollouts < 2 or self.max_failing_rollouts < 0:
            got = f"{self.num_rollouts} less {self.max_failing_rollouts}"
            raise rlkit.ConfigError(f"num_rollouts less max_failing_rollouts: is {got}; expected 2 or more to compare")
        if (self.top_p or 1.0) != 1.0 or self.top_k:
            raise rlkit.ConfigError("top_p, top_k: a cut distribution has no ratio to train with; leave them out")
        if not self.temperature > 0:
            raise rlkit.ConfigError(
                f"temperature: is {self.temperature}; expected more than 0, or all rollouts are alike"
            )
        if not self.splits:
            raise rlkit.ConfigError("splits: there are none")
        if self.min_reward is not None or self.max_reward is not None:
            rewards.clamp([0.0], low=self.min_reward, high=self.max_reward)


@attrs.frozen
class Settings:
    """The settings.

    Args:
        environments: name -> its splits, num_rollouts and so on.
        model_name: the model to train.
        batch_size: tasks per step, each with its environment's num_rollouts.
        backend: tinker, local or toy.
        tokenizer_name: on tinker, if it differs from the model's.
        resume_from: a saved state to begin a new run with, from its step on.
        max_response_tokens: of a turn.
        max_total_tokens: of an episode, with prompts.
        max_turns: of an episode; None: as many as fit into max_total_tokens.
        reminder: the answer to a turn without a call; null: such a turn ends the episode.
        max_rollout_retries: further attempts at a failed episode, whatever the reason.
        max_active_tasks: episodes played at a time.
        max_rollout_concurrency: the same; overrides max_active_tasks.
        rollout_timeout: seconds of an episode, without the wait in the queue; then it is truncated.
        loss_fn, loss_fn_config: the loss, and its settings.
        advantage_calculation: how a group's rewards become advantages.
        num_epochs: passes over all tasks, of whole batches only; None: until max_steps.
        max_steps: None: until num_epochs, or forever.
        save_every: steps between checkpoints.
        system_prompt_template: the system prompt; the template adds the tools.
        thinking: for models whose template has a switch.
        tool_format: the form of calls, a name in rlkit.tools.formats.
        log_path: the run's folder.
        openreward_run_name: of the uploaded trajectories, if OPENREWARD_API_KEY is set; None: no upload.
        wandb_project_name, wandb_run_name: used if WANDB_API_KEY or WANDB_MODE is set.
        secrets: for all environments, in the same form as in one.
    """

    environments: dict[str, Environment]
    model_name: str
    batch_size: int
    backend: Literal["tinker", "local", "toy"] = "tinker"
    tokenizer_name: str | None = None
    lora_rank: int = 32
    resume_from: str | None = None
    seed: int = 42
    max_response_tokens: int = 4096
    max_total_tokens: int = 32768
    max_turns: int | None = None
    reminder: str | None = "That was no tool call. Go on with the task by calling one of the tools."
    max_rollout_retries: int = 3
    max_active_tasks: int = 32
    max_rollout_concurrency: int | None = None
    rollout_timeout: float = 300.0
    loss_fn: Literal["importance_sampling", "ppo", "cispo", "dro"] = "ppo"
    loss_fn_config: dict[str, float] = attrs.field(factory=dict)
    advantage_calculation: Literal["direct", "centered", "centered_normalized"] = "centered_normalized"
    learning_rate: float = 4e-5
    weight_decay: float = 0.0
    num_epochs: int | None = None
    max_steps: int | None = None
    save_every: int = 10
    system_prompt_template: str | None = None
    thinking: bool = False
    tool_format: str = "hermes"
    log_path: str = "runs/openreward"
    openreward_run_name: str | None = None
    wandb_project_name: str | None = None
    wandb_run_name: str | None = None
    secrets: dict[str, Any] | None = None

    def __attrs_post_init__(self) -> None:
        if not self.environments:
            raise rlkit.ConfigError("environments: there are none")
        for name in ("batch_size", "save_every", "max_active_tasks", "num_epochs", "max_steps", "max_turns"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise rlkit.ConfigError(f"{name}: is {getattr(self, name)}; expected at least 1")
        if "{tools}" in (self.system_prompt_template or ""):
            raise rlkit.ConfigError("system_prompt_template: leave {tools} out; the model's own template puts them in")
        losses.prepare(self.loss_fn, self.loss_fn_config)
        self.adam()

    def adam(self) -> rlkit.Adam:
        """Return the settings of the optimizer step."""
        return rlkit.Adam(learning_rate=self.learning_rate, weight_decay=self.weight_decay, eps=1e-12)


class InOrder(envs.Tasks):
    """Tasks in their own order, repeated."""

    def at(self, position: int, *, seed: int = 0) -> envs.Task:  # noqa: ARG002
        """Return the task at that index."""
        return self[position % len(self)]


def tasks_of(s: Settings) -> envs.Mixture:
    """Get the tasks of all environments and splits from the servers, each in proportion to its number of tasks."""
    parts: dict[str, Any] = {}
    for name, e in s.environments.items():
        settings = envs.TaskSettings(
            n=e.num_rollouts,
            min_n=e.num_rollouts - e.max_failing_rollouts,
            temperature=e.temperature,
            reduction=e.reward_reduction,
            nonterminal_reward=e.nonterminal_reward,
        )
        secrets = {key: secret(key, hosts) for key, hosts in {**(s.secrets or {}), **(e.secrets or {})}.items()}
        for split, chosen in e.splits.items():
            where = {"base_url": e.base_url, "variant": e.variant, "format": s.tool_format, "reminder": s.reminder}
            tasks = envs.openreward(name, split=split, secrets=secrets or None, settings=settings, **where)
            order = np.random.default_rng(s.seed).permutation(len(tasks)) if chosen.shuffle else np.arange(len(tasks))
            kind = envs.Tasks if chosen.shuffle else InOrder
            make = functools.partial(lambda tasks, i: tasks[i].make(), tasks)
            own = {"name": tasks.name, "split": split, "settings": settings}
            parts[label(name, split, s)] = kind(make, order[: chosen.num_samples].tolist(), **own)
    return envs.mixture(parts, weights={name: len(part) for name, part in parts.items()})


def label(name: str, split: str, s: Settings) -> str:
    """Return the label of a split in metrics, where a slash would be another level."""
    return (name if len(s.environments[name].splits) == 1 else f"{name}:{split}").replace("/", ":")


def names_of(s: Settings) -> dict[str, str]:
    """Map labels to names of environments."""
    return {label(name, split, s): name for name, e in s.environments.items() for split in e.splits}


def secret(key: str, hosts: Any) -> Any:
    """Read a secret from the variable of its name, never from the settings; return it with its permitted hosts."""
    if hosts is not None and not (isinstance(hosts, list) and all(isinstance(host, str) for host in hosts)):
        text = f"expected null or a list of hosts; its value is that of the variable {key.upper()}, a key is no setting"
        raise rlkit.ConfigError(f"secrets.{key}: {text}")
    found = os.environ.get(key) or os.environ.get(key.upper())
    if not found:
        raise rlkit.ConfigError(f"secrets.{key}: the variable {key.upper()} is not set, nor is it in .env")
    return found if hosts is None else (found, hosts)


def step(policy: Any, tasks: envs.Mixture, plan: Plan, s: Settings, number: int) -> tuple[Any, dict[str, float]]:
    """Play, compare, train; return the groups and the step's metrics."""
    began = time.monotonic()
    with policy.sampler().result() as sampler:
        groups = rollout_sync(sampler, tasks.batch(number, s.batch_size, seed=s.seed), plan=plan, step=number)
    sampled = time.monotonic()
    clamped = [bounded(group, s) for group in groups]
    kept = zero_variance(clamped)
    metrics = dict(groups.metrics) | {"time/sample": sampled - began}
    metrics["train/groups_without_signal"] = float(sum(kept.dropped.values()))
    metrics["train/reward"] = float(np.nanmean(np.concatenate(clamped)))  # within its bounds
    if kept.keep.any():  # else there is nothing to learn, so the step is skipped
        informative = [group for group, keep in zip(groups, kept.keep, strict=True) if keep]
        rewards_of = np.concatenate([r for r, keep in zip(clamped, kept.keep, strict=True) if keep])
        estimator = ESTIMATORS[s.advantage_calculation]
        data = credit.assign(informative, estimator, rewards=rewards_of, weights=None, split="allow").data
        fb = policy.forward_backward(data, s.loss_fn, config=s.loss_fn_config)
        update = policy.optim_step(s.adam())
        metrics |= tracking.train_metrics(data, fb.result(), update.result())
    ended = time.monotonic()
    metrics |= {"train/learning_rate": s.learning_rate, "time/train": ended - sampled, "time/step": ended - began}
    return groups, metrics


def bounded(group: Any, s: Settings) -> np.ndarray:
    """Clamp the group's rewards to the bounds of its environment."""
    e = s.environments[names_of(s)[group.env]]
    if e.min_reward is None and e.max_reward is None:
        return group.rewards
    return rewards.clamp(group.rewards, low=e.min_reward, high=e.max_reward)


def train(s: Settings) -> None:
    """Run the whole training."""
    tasks = tasks_of(s)
    total = s.max_steps or sys.maxsize
    if s.num_epochs is not None:
        total = min(total, s.num_epochs * (len(tasks) // s.batch_size))
        if not total:
            raise rlkit.ConfigError(
                f"batch_size: is {s.batch_size}; expected at most the {len(tasks)} tasks of an epoch"
            )
    options: dict[str, Any] = {"resume_from": s.resume_from} if s.resume_from else {}
    if s.backend == "toy":
        options["max_length"] = s.max_total_tokens
    if s.backend == "tinker":
        warm = any(e.temperature != 1.0 for e in s.environments.values())
        options |= {"off_temperature": "rescore" if warm else "raise", "tokenizer": s.tokenizer_name}
    with rlkit.Run(s.log_path, seed=s.seed, config=config.dump(s), trackers=trackers_of(s)) as run:
        policy = run.connect(s.backend, model=s.model_name, lora=rlkit.Lora(rank=s.lora_rank), **options)
        if s.resume_from and run.record is None:
            digits = re.search(r"\d+", s.resume_from.rpartition("/")[2])  # checkpoint_000050, step-00000050-1f2e3d4c
            run.step = policy.version if digits is None else int(digits[0])
        switch = "enable_thinking" in (policy.tokenizer.chat_template or "") or s.thinking
        plan = Plan(
            params=rlkit.SamplingParams(max_tokens=s.max_response_tokens),
            chat=Chat(
                policy.tokenizer,
                system=s.system_prompt_template,
                thinking=s.thinking if switch else None,
                tool_format=s.tool_format,
            ),
            seed=s.seed,
            max_turns=s.max_turns,
            max_length=s.max_total_tokens,
            deadline=s.rollout_timeout,
            call_timeout=s.rollout_timeout,
            attempts=s.max_rollout_retries + 1,
            retry=(Exception,),
            concurrency=s.max_rollout_concurrency or s.max_active_tasks,
        )
        upload = None
        if s.openreward_run_name and os.environ.get("OPENREWARD_API_KEY"):
            upload = OpenRewardUpload(s.openreward_run_name)
        try:
            for number in run.steps(total):
                groups, metrics = step(policy, tasks, plan, s, number)
                if upload is not None:
                    upload.submit(named(groups, s))
                    metrics |= upload.metrics
                run.log(metrics)
                run.log_trajectories(groups)
                run.checkpoint(policy, every=s.save_every)
        finally:
            if upload is not None:
                upload.close()
                print(f"uploaded: {upload.metrics}")


def named(groups: Any, s: Settings) -> list[Any]:
    """Return the groups with OpenReward's names of their environments."""
    names = names_of(s)
    own = [[attrs.evolve(t, env=names[t.env]) for t in group.trajectories] for group in groups]
    return [attrs.evolve(g, trajectories=played, env=names[g.env]) for g, played in zip(groups, own, strict=True)]


def trackers_of(s: Settings) -> list[Any]:
    """Return the trackers: files and the terminal, and Weights & Biases if it has a key."""
    trackers: list[Any] = ["jsonl", "console"]
    if s.wandb_project_name and (os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_MODE")):
        wandb = tracking.registry["wandb"]
        options = {"name": s.wandb_run_name, "folder": s.log_path, "config": config.dump(s)}
        trackers.append(wandb(s.wandb_project_name, **options))
    return trackers


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command line."""
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, epilog=config.describe(Settings), formatter_class=form)
    parser.add_argument("--config_path", required=True, help="a YAML file such as examples/openreward.yaml")
    parser.add_argument("--overrides", nargs="*", default=[], metavar="KEY=VALUE", help="settings above the file's")
    args = parser.parse_args(arguments)
    try:
        for folder in (Path(), Path(args.config_path).parent):
            load_dotenv(folder / ".env", override=False, interpolate=False)
        train(config.load(Settings, args.config_path, args.overrides))
    except rlkit.RlkitError as error:
        sys.exit(f"openreward.py: {error}")
    except KeyboardInterrupt as stop:
        print(f"openreward.py: {stop}", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    main()
