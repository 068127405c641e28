"""What rollouts of every kind of environment give, as JSON: the same on every machine, whoever rewrites the loop."""

from __future__ import annotations

import asyncio
import hashlib

import attrs
import numpy as np

import rlkit
from rlkit import SamplingParams
from rlkit.chat import Chat
from rlkit.envs import StepResult, Tasks, TaskSettings, agent, function, gem, mixture, reasoning_gym
from rlkit.gateway import Request
from rlkit.rollouts import _plan, async_rollouts, rollout_sync
from rlkit.tools import ToolEnv, schema
from rlkit.trajectory import datums
from tests.chat.build import END, TEMPLATES, tokenizer
from tests.rollouts.parts import RandomSampler

CALL = '<tool_call>\n{"name": "add", "arguments": {"x": 3, "y": %d}}\n</tool_call>'
TEXTS = (
    "\\boxed{%d}",
    "The answer is %d.",
    "<answer>%d</answer>",
    CALL,
    CALL + CALL,
    "<tool_call>{%d",
    "%d",
    "\x00é %d",
)
OPTIONS = {"n": 3, "params": SamplingParams(max_tokens=200), "seed": 7, "max_turns": 4}


class Texts(RandomSampler):
    """Says one of the texts, and sometimes nothing; the seed and the number of the completion decide alone."""

    def __init__(self, texts=TEXTS):
        super().__init__()
        self._texts = texts

    def sample(self, prompt, params, *, n=1, seed=None):
        (drawn,) = (super().sample(prompt, params, n=n, seed=seed).result(),)
        made = []
        for i, each in enumerate(drawn):
            rng = np.random.default_rng([seed, i, 1])
            text = self._texts[rng.integers(len(self._texts))]
            tokens = self.tokenizer.encode(text.replace("%d", str(rng.integers(12)), 2).replace("%d", "4"))
            if each.tokens.size:
                tokens = np.append(tokens, self.tokenizer.eos_ids[0])[: params.max_tokens]
                each = attrs.evolve(
                    each, tokens=tokens, logprobs=-rng.exponential(size=tokens.size), stop_reason="stop"
                )
            made.append(each)
        return rlkit.Future.of(made)


def add(x: int, y: int = 2) -> int:
    """Adds two numbers.

    Args:
        x: the first.
    """
    return x + y


def best(actions):
    """The longest of a group's answers."""
    return [float(len(each) == max(map(len, actions))) for each in actions]


async def ask_twice(task, session):
    """An agent with two questions, the second without the first."""
    for text in (task["prompt"], "And now?"):
        await session.answer(Request(messages=[{"role": "user", "content": text}], n=1))
    return len(session.turns)


class Count:
    """An environment in messages, with info; it stops the third member's episode after two turns."""

    def reset(self, seed):
        self.turns = 0
        return [{"role": "system", "content": "Count."}, {"role": "user", "content": f"From {seed % 10}"}]

    async def step(self, action):
        self.turns += 1
        await asyncio.sleep(0.001 * (len(action) % 3))
        rewards = [0.5, None, 0.25 * self.turns]
        return StepResult(f"{len(action)}?", None, False, "4" in action, {"turns": self.turns}, rewards=rewards)

    def close(self):
        pass


def tasks():
    """One set of each kind."""
    rows = [{"prompt": f"{i} + 1 =", "answer": i + 1} for i in range(5)]
    return {
        "function": function(rows, lambda text, answer: float(str(answer) in text)),
        "group": function(rows, lambda actions, **_: best(actions), group=True),
        "gem": gem("game:GuessTheNumber-v0-easy", size=8, name="guess"),
        "reasoning_gym": reasoning_gym("chain_sum", size=20, settings=TaskSettings(n=2, max_turns=1)),
        "tools": Tasks(lambda i: ToolEnv(f"{i} + 3?", [add], lambda text: float("4" in text)), 6, name="tools"),
        "messages": Tasks(lambda i: Count(), 3, name="count", settings=TaskSettings(nonterminal_reward=-1.0)),
        "agent": agent(ask_twice, lambda result, task: float(result), rows),
    }


def digest(*arrays):
    whole = hashlib.blake2b(digest_size=6)
    for array in arrays:
        whole.update(repr((array.dtype.str, array.shape)).encode() + np.ascontiguousarray(array).tobytes())
    return whole.hexdigest()


def describe(group):
    """What is in a group; prompts, draws and datums by their digests."""
    found = []
    for each in group.trajectories:
        made = datums(each, 1.0, split="allow")
        arrays = [
            x for datum in made for x in (datum.tokens, datum.mask, *(v for _, v in sorted(datum.inputs.items())))
        ]
        found.append(
            {
                "prompts": digest(*(turn.prompt for turn in each.turns)),
                "drawn": digest(*(x for turn in each.turns for x in (turn.tokens, turn.logprobs))),
                "rewards": each.all_rewards.tolist(),
                "ended": [each.ended, each.terminated, each.truncated, each.reward],
                "datums": [len(made), digest(*arrays)],
            }
        )
    failures = [[failure.kind, failure.where, failure.member] for failure in group.failures]
    return {"place": [group.env, group.index, group.number, group.step], "episodes": found, "failures": failures}


def play(concurrency):
    """Two tasks of each kind."""
    found = {}
    for name, each in tasks().items():
        sampler = Texts(TEXTS[:1] if name == "gem" else TEXTS)
        groups = rollout_sync(sampler, each.batch(0, 2), step=3, concurrency=concurrency, **OPTIONS)
        found[name] = [describe(group) for group in groups]
    return found


def ahead():
    """Batches sampled up to two steps ahead of a policy that stays as it is: all at once, and resumed after two."""
    source = mixture({name: tasks()[name] for name in ("function", "tools")}, weights={"tools": 2.0})
    options = {**OPTIONS, "params": SamplingParams(max_tokens=8), "size": 3, "max_lag": 2}

    def run(made, until, state=None):
        with rlkit.connect("toy", seed=0) as policy:
            batches = async_rollouts(policy, source, start=len(made), steps=5 - len(made), **options)
            with batches:
                if state is not None:
                    batches.restore(state)
                while len(made) < until:
                    groups = next(batches)
                    made.append(
                        [[describe(x)["place"], [t.turns[0].tokens.tolist() for t in x.trajectories]] for x in groups]
                    )
                return batches.state()

    whole, parts = [], []
    run(whole, 5)
    run(parts, 5, run(parts, 2))
    return whole, parts


def seeds():
    """Of all kinds, at places small and large."""
    places = [
        (seed, step, group, member)
        for seed in (0, 7, 2**40)
        for step in (0, 3, 999)
        for group, member in ((0, 0), (5, 2), (63, 17))
    ]
    return {
        "env": [_plan.env_seed(*place[:3]) for place in places],
        "start": [_plan.start_seed(*place[:3]) for place in places],
        "turn": [_plan.sampling_seed(*place, turn) for place in places for turn in (0, 4)],
        "pause": [float(_plan.pauses(*place).random()) for place in places],
    }


def order():
    """Of sets and of mixtures of them, over the end of a pass."""
    every = tasks()
    inner = mixture({"c": every["gem"], "d": every["messages"]})
    every["mixture"] = mixture({"a": every["tools"], "b": inner}, weights={"a": 0.7})
    return {
        f"{name} {seed} {step}": [[x.name, x.index, x.seed] for x in source.batch(step, 5, seed=seed)]
        for name, source in every.items()
        for seed in (0, 1, 2**33)
        for step in (0, 7)
    }


SYSTEM, USER = {"role": "system", "content": "Be brief."}, {"role": "user", "content": " 1 + <|im_end|> 2?\n"}
THOUGHT = "<think>\nhm\n</think>\n\n3"
TALKS = [
    ([USER], {"thinking": False}, ["3"]),  # in the only template that can
    ("Hi", {}, ["3"]),
    ([SYSTEM, USER], {}, [THOUGHT, "ok"]),
    ([USER], {"history": "none"}, [THOUGHT]),
    ([SYSTEM, USER], {"history": "template"}, [THOUGHT, THOUGHT]),
    ([USER], {"prefill": "So "}, ["4", "5"]),
]


def prompts():
    """Texts of whole conversations in templates of several families."""
    found = {}
    for kind in sorted(TEMPLATES):
        t, one = tokenizer(kind), kind == "qwen3"  # the others have no tools
        for number, (first, options, turns) in enumerate(TALKS if one else TALKS[1:]):
            chat = Chat(t, **options)
            conversation = chat.start(first, [schema(add)] if one and number % 2 else ())
            for turn in turns:
                answer = [{"role": "tool", "content": "7"}] * 2 if one else "And <b>?"
                conversation.add(chat.action(t.encode(turn + END[kind], special=True), "stop"), answer)
            found[f"{kind} {number}"] = t.decode(conversation.prompt, skip_special=False)
    return found
