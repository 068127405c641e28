"""Critics: values that are right, gradients that are the loss's, PPO that learns, and runs that go on exactly."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import rlkit
from rlkit.backends.tokenizers import same_tokenizer
from rlkit.backends.toy import ByteTokenizer
from rlkit.credit import assign
from rlkit.critics import Critic
from rlkit.errors import CheckpointError, ConfigError, DataError, UnknownNameError, UnsupportedError
from rlkit.trajectory import Group, Trajectory, Turn, datums, token_rewards
from tests.properties import examples

torch = pytest.importorskip("torch")

ADAM = rlkit.Adam(learning_rate=0.05)


def some(lengths=((3, 4), (3, 6), (5, 2)), seed=0):
    """Datums with a gap in their masks, two behind one prefix, with targets for the critic."""
    rng, data = np.random.default_rng(seed), []
    for prompt, n in lengths:
        tokens = np.concatenate([np.arange(65, 65 + prompt), rng.integers(3, 200, n + 1)])
        mask = np.arange(prompt + n + 1) >= prompt
        mask[prompt + 1] = False  # a tool's reply
        inputs = {"returns": rng.normal(size=n), "old_values": 0.3 * rng.normal(size=n)}
        data.append(rlkit.Datum(tokens, mask, inputs))
    return data


@pytest.fixture(params=["toy", "local"])
def make(request, tiny, tmp_path):
    """``make(**options)`` is a critic that has taken two steps, or one from a saved state."""

    def made(**options):
        if request.param == "local":
            pytest.importorskip("peft")
            fresh = not options.keys() & {"resume_from", "init_from"}
            options = ({"model": tiny("llama"), "lora": rlkit.Lora(rank=4), "seed": 3} if fresh else {}) | options
            tokenizer = rlkit.sampler("local", model=tiny("llama")).tokenizer
        else:
            options.pop("micro_batch_tokens", None)
            tokenizer = ByteTokenizer()
        critic = rlkit.critic(request.param, tokenizer=tokenizer, folder=tmp_path / "saves", **options)
        if not options.keys() & {"resume_from", "init_from"}:
            for _ in range(3):
                critic.forward_backward(some())
                critic.optim_step(ADAM).result()
        return critic

    made.kind = request.param
    return made


def parameters(critic):
    """Each array of parameters, for reading and writing, and its gradient."""
    if hasattr(critic, "_trainer"):
        return [(p.data.numpy(), p.grad.numpy()) for p in critic._trainer.parameters.values() if p.grad is not None]
    return [(critic._weights.value, critic._weights.gradient)]


def test_values_stand_at_the_policys_tokens_and_depend_on_those_before(make):
    """One [T] per datum, float32, 0 where masked out; another token i changes no V before it and some V after it."""
    critic, data = make(), some()
    assert isinstance(critic, Critic)
    for datum, v in zip(data, critic.values(data).result(), strict=True):
        assert (v.shape, v.dtype) == (datum.mask.shape, np.float32)
        assert ((v != 0) == datum.mask).all()
    (datum,) = some([(3, 5)])
    base = critic.values([datum]).result()[0]
    for i in range(1, len(datum)):
        tokens = datum.tokens.copy()
        tokens[i] = 90 if tokens[i] != 90 else 91
        other = critic.values([rlkit.Datum(tokens, datum.mask)]).result()[0]
        np.testing.assert_allclose(other[: i + 1], base[: i + 1], atol=1e-5)
        after = datum.mask & (np.arange(len(datum)) > i)
        assert not after.any() or (np.abs(other - base)[after] > 1e-5).any()
    critic.close()
    untrained = rlkit.critic("toy", tokenizer=ByteTokenizer())  # the first advantages are plain returns
    assert not any(v.any() for v in untrained.values(data).result())


@pytest.mark.parametrize("kind", ["llama", "gpt2", "mistral"])
def test_local_values_are_the_head_of_the_last_hidden_state(tiny, kind):
    """Against transformers' own hidden states, one datum at a time, without packing."""
    pytest.importorskip("peft")
    from tests.backends.local import white_box

    critic = rlkit.critic("local", model=tiny(kind), tokenizer=rlkit.sampler("local", model=tiny(kind)).tokenizer)
    for _ in range(2):
        critic.forward_backward(some())
        critic.optim_step(ADAM).result()
    found = critic.values(some()).result()
    model = critic._trainer.model
    for datum, values in zip(some(), found, strict=True):
        with torch.no_grad(), white_box.plain_modules(model):
            tokens = torch.from_numpy(np.array(datum.tokens))[None]
            hidden = model(input_ids=tokens, output_hidden_states=True).hidden_states[-1][0]
            expected = (hidden @ model.value_head.weight[0] + model.value_head.bias).numpy()
        np.testing.assert_allclose(values[datum.mask], expected[np.flatnonzero(datum.mask) - 1], atol=1e-5)


@pytest.mark.parametrize("loss", ["value_clipped", "value_huber"])
def test_gradients_by_finite_differences(make, loss):
    """The gradient is that of the loss that ``forward`` reports, along random directions in parameter space."""
    critic, data, config = make(), some(), {"clip": 0.05} if loss == "value_clipped" else {"delta": 0.5}
    critic.forward_backward(data, loss, config=config).result()
    found = parameters(critic)
    directions = [np.random.default_rng(i).normal(size=p.shape).astype(p.dtype) for i, (p, _) in enumerate(found)]
    directions = [d / np.sqrt(sum(float((x**2).sum()) for x in directions)) for d in directions]
    slope = sum(float((d * g).sum()) for d, (_, g) in zip(directions, found, strict=True))
    eps, losses = 2e-3, []
    for side in (1, -1):
        for (p, _), d in zip(found, directions, strict=True):
            p += side * eps * d
        losses.append(critic.forward(data, loss, config=config).result().metrics["loss:sum"])
        for (p, _), d in zip(found, directions, strict=True):
            p -= side * eps * d
    assert slope != 0
    assert (losses[0] - losses[1]) / (2 * eps) == pytest.approx(slope, rel=0.02, abs=2e-3)


def test_gradients_do_not_depend_on_micro_batches(tiny):
    """The same gradient in micro-batches of one datum and in one of all."""
    pytest.importorskip("peft")
    from tests.float64 import distance

    options, grads = {"model": tiny("llama"), "seed": 3}, []
    options["tokenizer"] = rlkit.sampler("local", model=tiny("llama")).tokenizer
    for budget in (8, 4096):
        critic = rlkit.critic("local", micro_batch_tokens=budget, **options)
        critic.forward_backward(some())
        critic.optim_step(ADAM).result()
        critic.forward_backward(some()).result()
        grads.append([gradient.copy() for _, gradient in parameters(critic)])
    assert distance(*grads) < 2**-18  # 32 float32 epsilons of its length; 5 were seen


@pytest.mark.parametrize("seed", range(3))
def test_it_learns_its_targets(make, seed):
    """The values come to the returns, from any start, at a rate that falls to 0 as convergence asks for.

    At a constant one AdamW goes on to swing around them, as far as the rounding of the day has it.
    """
    critic, data, steps = make(seed=seed), some([(3, 3), (4, 2)], seed=seed), 150
    for step in range(steps):
        fb = critic.forward_backward(data, config={"clip": 10.0})
        critic.optim_step(rlkit.Adam(learning_rate=0.005 * (1 - step / steps))).result()
    assert fb.result().metrics["loss:sum"] < 1e-3
    assert fb.result().logprobs == ()
    np.testing.assert_array_equal(fb.result().outputs["values"][0] != 0, data[0].mask)


def test_saved_states_go_on_exactly(make):
    """Weights, optimizer and version from resume_from; weights alone from init_from."""
    critic = make()
    path = critic.save("half").result()
    resumed, started = make(resume_from=path), make(init_from=path)
    assert (resumed.version, started.version) == (3, 0)
    for other in (critic, resumed, started):
        other.forward_backward(some())
        other.optim_step(ADAM).result()
    whole, again, fresh = (np.concatenate(c.values(some()).result()) for c in (critic, resumed, started))
    assert (whole == again).all()
    assert (whole != fresh).any()
    bare = critic.save("bare", optimizer=False).result()
    with pytest.raises(CheckpointError, match="without its optimizer"):
        make(resume_from=bare)
    make(init_from=bare)


def test_what_is_refused(make, tiny, tmp_path):
    """At the call, with what to do."""
    critic, policy = make(), rlkit.connect("toy", folder=tmp_path)
    model = {"model": tiny("llama")} if make.kind == "local" else {}
    other, tokenizer = policy.save("policy").result(), critic.tokenizer

    def opened(kind=make.kind, tokenizer=tokenizer, **options):
        return lambda: rlkit.critic(kind, tokenizer=tokenizer, **options)

    for call, error, message in (
        (lambda: critic.forward_backward(some(), "cross_entropy"), UnsupportedError, "takes losses of values"),
        (
            lambda: critic.forward_backward([rlkit.Datum([1, 2, 3], [0, 1, 1], {"returns": [1.0, 1.0]})]),
            DataError,
            r"data\[0\].inputs lacks 'old_values'",
        ),
        (lambda: critic.optim_step(ADAM), rlkit.BackendError, "no gradient is accumulated"),
        (lambda: policy.forward_backward(some(), "value_clipped"), UnsupportedError, "use a critic"),
        (opened(modle="x"), ConfigError, "no option 'modle'; did you mean 'model'"),
        (opened(tokenizer=None, **model), ConfigError, r"expected the policy's, policy.tokenizer"),
        (opened(resume_from="a", init_from="b"), ConfigError, "give one of them"),
        (opened("tinker"), UnknownNameError, "no critic named 'tinker'"),
        (opened(init_from=other), CheckpointError, "was saved by the 'toy' backend"),
    ):
        with pytest.raises(error, match=message):
            call()


def played(rng, *, splits=False):
    """A trajectory of a few turns with tool replies in between; later turns may be without tokens."""
    turns, context = [], rng.integers(3, 200, 3)
    for i in range(rng.integers(1, 5)):
        tokens = rng.integers(3, 200, rng.integers(0 if i else 1, 4))
        turns.append(Turn(rlkit.Sample(context, tokens, -np.ones(tokens.size)), reward=float(rng.normal())))
        kept = rng.integers(3, 200, 2) if splits and rng.random() < 0.5 else np.concatenate([context, tokens])
        context = np.concatenate([kept, rng.integers(3, 200, 2)])
    return Trajectory(turns)


def estimate(critic, trajectories, *, weights=None, **options):
    """The datums of PPO with a critic."""
    return assign([Group(trajectories)], "gae", level="token", critic=critic, weights=weights, **options).data


@examples(30)
@given(st.integers(0, 10**6), st.floats(0.0, 1.0), st.floats(0.0, 1.0), st.booleans())
def test_gae_against_plain_loops(seed, gamma, lam, splits):
    """Advantages and returns at the policy's tokens, by the recursion over a trajectory's own tokens alone."""
    rng = np.random.default_rng(seed)
    trajectories = [played(rng, splits=splits) for _ in range(3)]
    critic = rlkit.critic("toy", tokenizer=ByteTokenizer())
    critic._weights.value = rng.normal(size=critic._weights.value.shape)
    config, weights = {"gamma": gamma, "lam": lam}, [1, 2, 3]
    data = estimate(critic, trajectories, config=config, normalize=False, split="allow", weights=weights)
    rest = iter(data)
    for weight, trajectory in zip([1, 2, 3], trajectories, strict=True):
        plain = datums(trajectory, split="allow")
        mine = [next(rest) for _ in plain]
        v = np.concatenate([x[d.mask] for x, d in zip(critic.values(plain).result(), plain, strict=True)])
        rewards, expected, carried, following = [], [], 0.0, 0.0
        for turn in trajectory.turns:
            rewards += [0.0] * turn.tokens.size
            rewards[-1] += turn.reward
        for r, value in zip(rewards[::-1], v[::-1].astype(float), strict=True):
            carried = r + gamma * following - value + gamma * lam * carried
            following = value
            expected.insert(0, carried)
        found = {name: np.concatenate([d.inputs[name][d.mask] for d in mine]) for name in ("advantages", "returns")}
        np.testing.assert_allclose(found["advantages"], expected, atol=1e-4)
        np.testing.assert_allclose(found["returns"], expected + v, atol=1e-4)
        assert all(float(d.inputs["weights"]) == weight for d in mine)
        assert all((d.inputs["old_values"][~d.mask] == 0).all() for d in mine)
    assert next(rest, None) is None


def test_gae_normalises_over_all_tokens():
    """Mean 0 and deviation 1 over the batch; what is unscored or empty gives nothing; mistakes are named."""
    rng, critic = np.random.default_rng(1), rlkit.critic("toy", tokenizer=ByteTokenizer())
    trajectories = [played(rng) for _ in range(4)]
    unscored = Trajectory([Turn(rlkit.Sample([1], [2], [-1.0]), reward=float("nan"))])
    empty = Trajectory([Turn(rlkit.Sample([1], [], []))])
    data = estimate(critic, [unscored, *trajectories, empty])
    flat = np.concatenate([d.inputs["advantages"][d.mask] for d in data])
    assert len(data) == 4
    assert (flat.mean(), flat.std(ddof=1)) == (pytest.approx(0, abs=1e-6), pytest.approx(1, abs=1e-6))
    assert estimate(critic, [unscored, empty]) == []
    with pytest.raises(DataError, match=r"rewards\[1\]: has shape \(1,\)"):
        estimate(critic, [unscored, Trajectory([Turn(rlkit.Sample([1], [2, 3], [-1, -1]))])], rewards=[[1.0], [1.0]])


def test_token_rewards():
    """At the last token of each turn; a single one where the turns' do not add up to the episode's."""
    first = Turn(rlkit.Sample([1], [], []), reward=1.0)
    second, third = (Turn(rlkit.Sample([1], [2, 3], [-1, -1]), reward=r) for r in (2.0, 4.0))
    assert token_rewards(Trajectory([first, second, third])).tolist() == [1, 2, 0, 4]
    assert token_rewards(Trajectory([second, third], reduction="mean")).tolist() == [0, 0, 0, 3]
    for end, expected in (("reward", [0, 2, 0, 3]), ("override", [0, 0, 0, -1])):
        cut = {f"nonterminal_{end}": -1.0, "truncated": True}
        assert token_rewards(Trajectory([second, third], **cut)).tolist() == expected
        assert token_rewards(Trajectory([second, third], **cut)).sum() == Trajectory([second, third], **cut).reward
    assert token_rewards(Trajectory([first])).size == 0


def play(policy, steps, critic, *, cut=None, run=None, seen=None):
    """PPO with GAE on a task that pays for digits; (mean reward, value loss, policy loss) of each step, by step."""
    seen = {} if seen is None else seen
    for step in run.steps(steps) if run else range(steps):
        sampler = policy.sampler().result()
        prompt = policy.tokenizer.encode("Count:")
        samples = sampler.sample(prompt, rlkit.SamplingParams(max_tokens=6, stop=()), n=16, seed=step).result()
        digits = [len([c for c in policy.tokenizer.decode(s.tokens) if c.isdigit()]) / 6 for s in samples]
        trajectories = [Trajectory([Turn(s, reward=r)]) for s, r in zip(samples, digits, strict=True)]
        data = estimate(critic, trajectories, config={"lam": 0.9}, weights=np.full(16, 1 / 96))
        rate = rlkit.Adam(learning_rate=0.05)
        for _ in range(2):  # epochs: the old values and logprobs stay
            loss = policy.forward_backward(data, "ppo")
            fit = critic.forward_backward(data, config={"clip": 0.5})
            policy.optim_step(rate)
            critic.optim_step(rate).result()
            if cut == step:
                raise KeyboardInterrupt
        seen[step] = (float(np.mean(digits)), fit.result().metrics["loss:sum"], loss.result().metrics["loss:sum"])
        if run:
            run.checkpoint(policy)
    return [seen[step] for step in sorted(seen)]


@pytest.mark.parametrize("backend", ["toy", "local"])
def test_runs_go_on_exactly(backend, tiny, tmp_path):
    """A run with a critic that is cut off between two of a step's epochs is the run that was not, bit for bit."""
    options = {}
    if backend == "local":
        pytest.importorskip("peft")
        options = {"model": tiny("llama"), "lora": rlkit.Lora(rank=4)}
    found = []
    for cuts in ((None,), (1, 3, None)):
        seen, folder = {}, tmp_path / f"{len(cuts)}"
        for cut in cuts:
            with rlkit.Run(folder, seed=5, trackers=()) as run, contextlib.suppress(KeyboardInterrupt):
                policy = run.connect(backend, **options)
                critic = run.critic(backend, tokenizer=policy.tokenizer, **options)
                play(policy, 5, critic, cut=cut, run=run, seen=seen)
                values = np.concatenate(critic.values(some()).result()).tobytes()
        assert rlkit.runs.records(folder)[-1].policies.keys() == {"policy", "critic"}
        found.append((seen, values))
    assert sorted(seen) == list(range(5))
    assert found[0] == found[1]


def test_tokenizers_are_told_apart(tiny):
    """By how they encode, by their end tokens where these count, and by what an id stands for.

    A critic takes its policy's alone: values of other texts would train nothing.
    """
    pytest.importorskip("peft")
    with pytest.raises(ConfigError, match="tokenizer differs from the policy's"):
        rlkit.critic("local", model=tiny("llama"), tokenizer=ByteTokenizer())
    one, two = rlkit.sampler("local", model=tiny("llama")).tokenizer, ByteTokenizer()
    assert same_tokenizer(one, one) == same_tokenizer(two, ByteTokenizer()) == ""
    assert same_tokenizer(one, two) == "encodes texts differently"

    class OtherEnd(ByteTokenizer):
        eos_ids = (7,)

    class OtherText(ByteTokenizer):
        def decode(self, tokens, skip_special=True):
            return "?" if list(tokens) == [0] else super().decode(tokens, skip_special)

    assert same_tokenizer(two, OtherEnd()) == f"has the end tokens [7], not {sorted(two.eos_ids)}"
    assert same_tokenizer(two, OtherEnd(), ends=False) == ""
    assert same_tokenizer(two, OtherText()) == "decodes token 0 to another text"
