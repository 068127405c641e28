r"""Train an agent in the games and problems of GEM, over several turns, on any backend.

    python examples/gem.py max_steps=20                             # SmolLM2 on a CPU; run it again to resume
    python examples/gem.py backend=toy max_steps=3                  # a few seconds, to see the loop
    python examples/gem.py credit=gigpo group_size=8                # compares episodes of one game
    python examples/gem.py backend=tinker model_name=Qwen/Qwen3-4B-Instruct-2507 batch_size=128 max_tokens=1024 prefill=

Every setting is ``key=value``; ``python examples/gem.py help`` lists them. One step of the loop is ``step``.
"""

from __future__ import annotations

import sys
import time
from typing import Any, Literal

import attrs
import numpy as np

import rlkit
from rlkit import advantages as adv
from rlkit import config, credit, tracking
from rlkit.chat import Chat
from rlkit.envs import gem
from rlkit.evaluation import evaluate_sync
from rlkit.rollouts import Plan, rollout_sync

SYSTEM = {  # the name of a template -> the instruction before the game's text
    "qwen3_game": "You are playing a game made of words, one valid move per turn, to win.",
    "qwen3_general": "You are asked a question.",
    "no": None,
}
ANSWER = " Think step by step. Your answer is what you write last inside \\boxed{}."
PLAIN = "{% for m in messages %}{{ m.content }}\n{% endfor %}"  # the template "no": only the texts


@attrs.frozen
class Settings:
    """The settings.

    Args:
        backend: toy, local or tinker.
        model_name: for local a directory, a hub id or smollm2-135m-instruct; for tinker a name of the service.
        lora_rank: of the adapter.
        seed: of everything: the model, the games, sampling, selection.
        max_steps: optimizer steps.
        save_every: steps between checkpoints, and one after the last step; 0 for only the last.
        learning_rate: of Adam.
        loss: name of a policy loss.
        batch_size: turns to train on in a step, drawn from those played.
        num_env: episodes played at a time, repeated until they have enough turns.
        group_size: episodes of each game among them.
        credit: how rewards become advantages. returns: discounted over turns. grpo: of an episode among its group.
            step_wise: of its last reward. gigpo: also of each turn among those in the same state.
        gamma: of returns and gigpo.
        use_rebn: normalise returns over the turns that were drawn.
        env_id: the game.
        env_wrappers: GEM's wrappers, separated by commas; with a concat wrapper every turn is a separate prompt.
        template: the instruction added to the game's text, in the model's chat template; no: none.
        prefill: the beginning of each turn of the policy. A small model does not write a box by itself.
        max_tokens: of a turn.
        max_turns: of an episode.
        eval_every: steps between scores on held-out games; 0 for none.
        eval_size: the number of such games.
        log_dir: the run's folder; a run in it is resumed.
        wandb_project, wandb_name: also log to Weights & Biases.
    """

    backend: Literal["toy", "local", "tinker"] = "local"
    model_name: str = "smollm2-135m-instruct"
    lora_rank: int = 16
    seed: int = 0
    max_steps: int = 20
    save_every: int = 5
    learning_rate: float = 2e-4
    loss: str = "importance_sampling"
    batch_size: int = 64
    num_env: int = 32
    group_size: int = 1
    credit: Literal["returns", "grpo", "step_wise", "gigpo"] = "returns"
    gamma: float = 0.9
    use_rebn: bool = True
    env_id: str = "game:GuessTheNumber-v0-easy"
    env_wrappers: str | None = None
    template: Literal["qwen3_general", "qwen3_game", "no"] = "qwen3_game"
    prefill: str | None = "\\boxed{"
    max_tokens: int = 8
    max_turns: int = 16
    eval_every: int = 0
    eval_size: int = 64
    log_dir: str = "runs/gem"
    wandb_project: str | None = None
    wandb_name: str | None = None

    def __attrs_post_init__(self) -> None:
        for name in ("lora_rank", "batch_size", "num_env", "group_size", "max_tokens", "max_turns", "eval_size"):
            if getattr(self, name) < 1:
                raise rlkit.ConfigError(f"{name}: is {getattr(self, name)}; expected at least 1")
        if self.credit != "returns" and self.group_size < 2:
            raise rlkit.ConfigError(
                f"credit={self.credit} compares episodes of a group; group_size is {self.group_size}"
            )
        if self.num_env % self.group_size:
            raise rlkit.ConfigError(f"num_env={self.num_env} is no multiple of group_size={self.group_size}")
        if any(name.startswith("concat_chat") for name in self.wrappers):
            raise rlkit.ConfigError("env_wrappers: leave concat_chat out; without it a conversation is just that")
        rlkit.losses.registry.resolve(self.loss)
        rlkit.Adam(learning_rate=self.learning_rate)

    @property
    def wrappers(self) -> list[str]:
        """Return the wrappers, the innermost first."""
        return [name for name in (self.env_wrappers or "").split(",") if name]


def play(sampler: Any, tasks: Any, plan: Plan, s: Settings, number: int) -> Any:
    """Play groups of episodes with at least ``batch_size`` turns in all; return them and their metrics."""
    waves = -(-s.batch_size // s.num_env)  # enough if each episode has one turn
    groups: Any = None
    for wave in range(number * waves, (number + 1) * waves):
        played = rollout_sync(sampler, tasks.batch(wave, s.num_env // s.group_size, seed=s.seed), plan=plan, step=wave)
        groups = played if groups is None else groups + played
        if sum(len(t.turns) for group in groups for t in group.trajectories) >= s.batch_size:
            break
    return groups


def step(policy: Any, tasks: Any, plan: Plan, s: Settings, number: int) -> tuple[list[Any], dict[str, float]]:
    """Play, assign credit, draw turns, train; return the groups and the step's metrics."""
    began = time.monotonic()
    with policy.sampler().result() as sampler:
        groups = play(sampler, tasks, plan, s, number)
    sampled = time.monotonic()
    episodes = [t for group in groups for t in group.trajectories]
    lengths = [len(t.turns) for t in episodes]
    drawn = np.zeros(sum(lengths), bool)
    order = np.random.default_rng([s.seed, number]).permutation(drawn.size)
    drawn[order[: s.batch_size]] = True
    rows = np.split(drawn, np.cumsum(lengths)[:-1])

    def returns(rewards: list[np.ndarray]) -> list[np.ndarray]:
        found = adv.discounted_returns(rewards, gamma=s.gamma)
        mask = [w for t, w in zip(episodes, rows, strict=True) if t.token_count]
        return adv.rebn(found, mask=mask) if s.use_rebn else found  # over the drawn turns, not over all

    estimator, level, own = {
        "returns": (returns, "turn", {}),
        "grpo": ("grpo", "group", {}),
        "step_wise": ("step_wise_grpo", "turn", {}),
        "gigpo": ("gigpo", "turn", {"gamma": s.gamma}),
    }[s.credit]
    last = [t.rewards[-1] for t in episodes] if s.credit == "step_wise" else None  # replaces earlier rewards
    weights = [np.repeat(w, [turn.tokens.size for turn in t.turns]) for t, w in zip(episodes, rows, strict=True)]
    batch = credit.assign(groups, estimator, level=level, config=own, weights=weights, rewards=last, split="allow")
    data = [d for d in batch.data if d.inputs["weights"].any()]  # one per episode if turns continue each other
    metrics = dict(groups.metrics)
    if any(d.inputs["advantages"].any() for d in data):  # equal returns teach nothing; skip a step of momentum alone
        fb = policy.forward_backward(data, s.loss)
        update = policy.optim_step(rlkit.Adam(learning_rate=s.learning_rate))
        metrics |= tracking.train_metrics(data, fb.result(), update.result())
    ended = time.monotonic()
    metrics |= {
        "train/turns": float(drawn.sum()),
        "train/learning_rate": s.learning_rate,
        "time/sample": sampled - began,
        "time/train": ended - sampled,
        "time/step": ended - began,
    }
    return groups, metrics


def train(s: Settings) -> None:
    """Run the whole training."""
    options = {"name": s.env_id, "wrappers": s.wrappers, "seed": s.seed}
    tasks, held_out = gem(s.env_id, **options), gem(s.env_id, split="test", size=s.eval_size, **options)
    trackers: list[Any] = ["jsonl", "console"]
    if s.wandb_project:
        wandb = tracking.registry["wandb"]
        trackers.append(wandb(s.wandb_project, name=s.wandb_name, folder=s.log_dir, config=config.dump(s)))
    with rlkit.Run(s.log_dir, seed=s.seed, config=config.dump(s), trackers=trackers) as run:
        policy = run.connect(s.backend, model=s.model_name, lora=rlkit.Lora(rank=s.lora_rank))
        chat = Chat(
            policy.tokenizer,
            system=SYSTEM[s.template] and SYSTEM[s.template] + ANSWER,
            template=PLAIN if s.template == "no" else None,
            prefill=s.prefill or "",
            history="none" if any(name.startswith("concat") for name in s.wrappers) else "template",
        )
        params = rlkit.SamplingParams(max_tokens=s.max_tokens)
        plan = Plan(n=s.group_size, min_n=1, params=params, chat=chat, max_turns=s.max_turns, seed=s.seed)

        def score(done: int) -> dict[str, float]:
            found = evaluate_sync(policy.sampler().result(), list(held_out), plan=plan)
            mean = "return {0.mean:.3f} ({0.low:.3f} to {0.high:.3f})".format(found.scores[s.env_id])
            print(f"after {done} steps, {s.eval_size} games that it does not train on: {mean}")
            return found.metrics

        for number in run.steps(s.max_steps):
            scores = score(number) if s.eval_every and number % s.eval_every == 0 else {}
            groups, metrics = step(policy, tasks, plan, s, number)
            run.log(metrics | scores)
            run.log_trajectories(groups)
            run.checkpoint(policy, every=s.save_every or s.max_steps)
        if s.eval_every:
            run.log(score(s.max_steps), s.max_steps)
    print(
        f"{run.folder} holds metrics.jsonl, trajectories.jsonl and the checkpoints; rlkit report {s.log_dir} shows them"
    )


def main(arguments: list[str]) -> None:
    """Run a command line."""
    if arguments in (["help"], ["--help"], ["-h"]):
        print(__doc__, config.describe(Settings), sep="\n")
        return
    try:
        train(config.load(Settings, overrides=arguments))
    except rlkit.RlkitError as error:
        sys.exit(f"gem.py: {error}")
    except KeyboardInterrupt as stop:
        print(f"gem.py: {stop}", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    main(sys.argv[1:])
