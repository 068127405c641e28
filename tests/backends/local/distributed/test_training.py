"""What two processes compute is what one does."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from unittest.mock import Mock

import numpy as np
import pytest
import torch

import rlkit
from rlkit.testing import BackendConformance

pytest.importorskip("peft")

from rlkit.backends.local.distributed.leader import take_turns

PLAIN = rlkit.Adam(learning_rate=1e5, beta1=0.0, beta2=0.0, eps=1e8)  # gradient descent: the gradient is what is seen


def rows(lengths, *, seed=0, **inputs):
    """Datums of unequal lengths, whose tokens from the second on are the policy's; the third is nobody's."""
    draw = np.random.default_rng(seed)
    data = []
    for i, n in enumerate(lengths):
        mask = np.arange(n) >= (n if i == 2 else 1 + n // 3)
        values = {name: draw.normal(size=n) for name in inputs.get("each", ())}
        data.append(rlkit.Datum(draw.integers(3, 250, n), mask, values, temperature=0.7 if i % 2 else 1.0))
    return data


def group(prompt, count, *, seed=0):
    """Completions behind one prompt, of 2 to 9 tokens."""
    draw = np.random.default_rng(seed)
    begin = draw.integers(3, 250, prompt)
    return [rlkit.Datum.supervised(begin, draw.integers(3, 250, 2 + i % 8)) for i in range(count)]


def weights(policy, tmp_path):
    """The adapter [all of it in one row], as it is saved."""
    from safetensors.torch import load_file

    tensors = load_file(f"{policy.save('w').result()}/adapter_model.safetensors")
    return torch.cat([tensors[name].reshape(-1) for name in sorted(tensors)])


@pytest.fixture
def pair(connect):
    """A backend on one process and one on two, which start alike."""
    return connect(1), connect(2)


CASES = {
    "unequal rows": (rows([3, 60, 9, 5, 33, 17, 4], each=["advantages"]), "reinforce"),
    "a group that is cut": (group(40, 9), "cross_entropy"),
    "fewer datums than ranks": (rows([12]), "cross_entropy"),
}


@pytest.mark.parametrize("case", CASES)
def test_gradients_are_those_of_one_process(pair, tmp_path, case):
    """Accumulated over two calls, to 1e-6 of its largest number; outputs in the user's order."""
    data, loss = CASES[case]
    found = []
    for policy in pair:
        before = weights(policy, tmp_path)
        first = policy.forward_backward(data, loss, want=("entropy",))
        policy.forward_backward(data[:1], "cross_entropy").result()
        policy.optim_step(PLAIN).result()
        found.append((first.result(), weights(policy, tmp_path) - before))
    (one, one_moved), (two, two_moved) = found
    assert (one_moved - two_moved).abs().max() <= 1e-6 * one_moved.abs().max() + 2e-9
    assert one_moved.abs().max() > 1e-4
    assert one.metrics.keys() == two.metrics.keys()
    for name, value in one.metrics.items():
        assert two.metrics[name] == pytest.approx(value, rel=1e-5)
    for a, b in zip(one.outputs["entropy"] + one.logprobs, two.outputs["entropy"] + two.logprobs, strict=True):
        assert np.abs(a - b).max() < 1e-5


def mean_of_batch(logprobs, *, power=2):
    flat = torch.cat(list(logprobs))
    return ((flat - flat.mean()) ** power).sum(), {"spread:sum": flat.std()}


def preference(logprobs, *, scale=0.5):
    chosen, rejected = logprobs
    return -torch.nn.functional.logsigmoid(scale * (chosen.sum() - rejected.sum())), {"margin": chosen.sum()}


def with_entropy(logprobs, entropy, *, bonus=0.5):
    return -(logprobs * logprobs + bonus * entropy).sum(), {"bonus:mean": entropy.mean()}


OWN = {
    "batch": rlkit.losses.loss(level="batch")(mean_of_batch),
    "pair": rlkit.losses.loss(level="pair")(preference),
    "datum": with_entropy,
}


@pytest.mark.parametrize("level", OWN)
def test_own_losses(pair, tmp_path, level):
    """A user's function of the whole batch, of pairs, or of a datum and its entropies, as on one process.

    After a step: others have to read the adapter that it made.
    """
    data = [d for d in rows([3, 60, 9, 5, 33, 17, 4]) if d.mask.any()]
    found = []
    for policy in pair:
        policy.forward_backward(data, "cross_entropy")
        policy.optim_step(PLAIN)
        before = weights(policy, tmp_path)
        output = policy.forward_backward(data, OWN[level]).result()
        policy.optim_step(PLAIN).result()
        found.append((output.metrics, weights(policy, tmp_path) - before))
    (one, one_moved), (two, two_moved) = found
    assert (one_moved - two_moved).abs().max() <= 3e-6 * one_moved.abs().max() + 2e-9
    for name, value in one.items():
        assert two[name] == pytest.approx(value, rel=1e-4)


def test_targets_and_forward(pair):
    """Losses over given targets, and values of a loss without a gradient."""
    data = []
    for datum in rows([8, 20, 5, 30]):
        draw = np.random.default_rng(datum.tokens.size)
        shape = (datum.tokens.size, 3)
        data.append(
            datum.with_inputs(target_tokens=draw.integers(0, 250, shape), teacher_logprobs=np.full(shape, -1.5))
        )
    data = [d for d in data if d.mask.any()]
    one, two = (policy.forward(data, "topk_forward_kl").result() for policy in pair)
    assert two.metrics["loss:sum"] == pytest.approx(one.metrics["loss:sum"], rel=1e-5)
    with pytest.raises(rlkit.BackendError, match="accumulated"):
        pair[1].optim_step(PLAIN)


def test_ten_steps(pair):
    """The curve of ten steps with moments is the same."""
    data = rows([3, 60, 9, 5, 33, 17, 4])
    curves = []
    for policy in pair:
        futures = []
        for _ in range(10):
            futures.append(policy.forward_backward(data, "cross_entropy"))
            policy.optim_step(rlkit.Adam(learning_rate=0.003))
        curves.append([future.result().metrics["loss:sum"] for future in futures])
    assert curves[1] == pytest.approx(curves[0], rel=2e-4)
    assert curves[0][-1] < 0.95 * curves[0][0]


def test_samples_are_spread_and_the_same_to_the_bit(connect):
    """Sixteen requests are drawn by both processes; tokens and logprobs are those of one process, to the bit."""
    one = connect(1)
    one.forward_backward(rows([9, 20]), "cross_entropy")
    one.optim_step(rlkit.Adam(learning_rate=0.02)).result()
    two = connect(2, seed=None, resume_from=one.save("x").result())
    params = rlkit.SamplingParams(max_tokens=np.int64(12), temperature=np.float32(0.5), stop=())  # which JSON lacks
    prompts = [[5 + k, 6, 7] for k in range(16)]
    drawn = []
    for policy in (one, two):
        with policy.sampler().result() as sampler, policy.base_sampler().result() as base:
            futures = [sampler.sample(p, params, n=np.int64(2), seed=np.int64(k)) for k, p in enumerate(prompts)]
            futures += [base.sample(p, params) for p in prompts]
            scores = [sampler.logprobs(p * 5) for p in prompts]
            tops = [sampler.top_logprobs(p, 3) for p in prompts]
            drawn.append(([s for f in futures for s in f.result()], [x.result() for x in scores + tops]))
    for a, b in zip(drawn[0][0], drawn[1][0], strict=True):
        assert a.tokens.tolist() == b.tokens.tolist()
        assert a.version == b.version
        assert a.logprobs.tobytes() == b.logprobs.tobytes()
    for a, b in zip(drawn[0][1], drawn[1][1], strict=True):
        assert np.allclose(np.asarray(a), np.asarray(b), atol=1e-5)


def test_samples_are_drawn_while_it_trains(connect):
    """Between the rounds of one call, by both processes; also of a second policy, trained by another thread."""
    params = rlkit.SamplingParams(max_tokens=60, stop=())
    data = rows([30] * 31, seed=1)  # an odd number of micro-batches
    policies, losses = [connect(2, micro_batch_tokens=30) for _ in range(2)], {}

    def train(policy, sampler):
        drawn = [sampler.sample([5, k], params, n=4, seed=k) for k in range(4)]
        for _ in range(3):
            policy.forward_backward(data, "cross_entropy")
            policy.optim_step(rlkit.Adam(learning_rate=0.003))
        losses[policy] = policy.forward(data, "cross_entropy").result().metrics["loss:sum"]
        return [x.tokens.tolist() for future in drawn for x in future.result()]

    with ThreadPoolExecutor(2) as pool:
        samplers = [policy.sampler().result() for policy in policies]
        running = [pool.submit(train, *both) for both in zip(policies, samplers, strict=True)]
        found = [future.result(120) for future in running]
    assert found[0] == found[1]
    assert losses[policies[0]] == losses[policies[1]]


def test_no_answer_is_newer_than_its_sampler(connect):
    """Nor older than the sampler was when it was asked for, while updates go on."""
    policy, few = connect(), rlkit.SamplingParams(max_tokens=4, stop=())
    live = policy.live_sampler().result()
    ended, answers = threading.Event(), []

    def ask():
        while not ended.is_set():
            oldest = live.version
            (sample,) = live.sample([65, 66, 67], few).result(60)
            answers.append((oldest, sample.version, int(sample.token_versions.max()), live.version))

    with ThreadPoolExecutor(8) as pool:
        asking = [pool.submit(ask) for _ in range(8)]
        try:
            for _ in range(15):
                policy.forward_backward([rlkit.Datum.supervised([65, 66], [67, 68])], "cross_entropy")
                policy.optim_step(rlkit.Adam(learning_rate=1e-3))
                live.update().result(60)
        finally:
            ended.set()
        for future in asking:
            future.result(60)
    assert {newest for *_, newest in answers} > {0}
    assert [x for x in answers if not x[0] <= x[1] <= x[2] <= x[3]] == []


def test_a_loss_may_ask_another_policy(connect):
    """Such as a teacher on the same processes."""
    student, teacher = connect(2), connect(2)
    with teacher.sampler().result() as sampler:

        def distil(logprobs):
            asked = [sampler.logprobs([5, 6, 7]) for _ in range(4)]
            return -logprobs.sum() * float(sum(future.result(60).sum() for future in asked))

        assert student.forward_backward(rows([9, 20, 8]), distil).result().metrics["tokens:sum"] > 0


def test_other_ranks_forget_what_nobody_samples_from(connect):
    """With the next snapshot at the latest: whoever samples little would fill their memory."""
    policy, told = connect(2), []
    exchange = policy._leader._exchange

    def listen(kind, *parts, **fields):
        told.append((kind, fields.get("forgotten")))
        return exchange(kind, *parts, **fields)

    policy._leader._exchange = listen
    for _ in range(3):
        with policy.sampler().result():
            pass
        policy.forward_backward(rows([9]), "cross_entropy")
        policy.optim_step(PLAIN).result()
    assert [forgotten for kind, forgotten in told if kind == "snapshot"] == [[], [1], [2]]


def test_turns_are_shared(connect):
    """A policy that decodes keeps another one neither from its next turn, nor for longer than that one had them."""
    world, taken = connect(2)._leader._world, []

    def train():
        with world._turn(99):
            taken.append("trains")
            time.sleep(0.01)

    thread, before = threading.Thread(target=train), world.spent_by_others(98)
    with world._turn(98):
        thread.start()
        while not world._next.locked():  # it waits
            time.sleep(0.001)
    with world._turn(98):
        taken.append("decodes")
    thread.join()
    assert taken == ["trains", "decodes"]
    assert world.spent_by_others(98) - before >= 0.01
    for seconds, turns in ((None, 8), (60.0, 8), (0.0, 1)):
        scheduler = Mock()
        take_turns(scheduler, seconds)
        assert scheduler.turn.call_count == turns


def test_a_request_that_comes_while_it_closes_is_refused(connect):
    """Nobody would answer it."""
    policy = connect(2)
    with policy.sampler().result() as sampler:
        policy._leader.stop()
        with pytest.raises(rlkit.BackendError, match="closed"):
            sampler.sample([5], rlkit.SamplingParams(max_tokens=2)).result(20)


def test_a_cancelled_request_makes_room(connect):
    """A request that another process draws is given up there, and its future says so."""
    policy = connect(2)
    with policy.sampler().result() as sampler:
        params = rlkit.SamplingParams(max_tokens=100, stop=())
        futures = [sampler.sample([5], params, n=30, seed=k) for k in range(4)]
        assert all(future.cancel() for future in futures)
        for future in futures:
            with pytest.raises(rlkit.RequestCancelled):
                future.result()
        assert len(sampler.sample([5], rlkit.SamplingParams(max_tokens=2), n=2).result()) == 2


def test_a_call_that_failed_is_taken_back(connect):
    """A loss that raises at the last datum leaves the gradient of both processes as it was."""
    one, two = connect(2), connect(2)
    data = rows([3, 60, 9, 5, 33, 17, 4])
    calls = []

    def raises_late(logprobs):
        calls.append(logprobs)
        if len(calls) == 5:
            raise KeyError("a mistake")
        return -logprobs.sum()

    one.forward_backward(data, "cross_entropy")
    with pytest.raises(KeyError, match="a mistake"):
        one.forward_backward(data, raises_late).result()
    two.forward_backward(data, "cross_entropy")
    for policy in (one, two):
        policy.optim_step(PLAIN).result()
    a, b = (policy.forward(data).result().logprobs for policy in (one, two))
    assert all(x.tobytes() == y.tobytes() for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("culprit", [0, 1, 3, 4, 5])
def test_a_loss_that_is_not_finite_names_the_datum(connect, culprit):
    """By its place in the user's list, whichever rank and micro-batch has it."""
    policy = connect(2, micro_batch_tokens=16)
    signs = np.where(np.arange(6) == culprit, -1.0, 1.0)
    made = rows([9, 20, 8, 13, 11, 9])
    data = [rlkit.Datum(x.tokens, x.mask, {"advantages": a}) for x, a in zip(made, signs, strict=True)]

    def rooted(logprobs, advantages):
        return -(logprobs * advantages**0.5).sum()

    with pytest.raises(rlkit.BackendError, match=rf"non-finite gradient at data\[{culprit}\]"):
        policy.forward_backward(data, rooted).result()


def test_a_gradient_that_is_not_finite_is_dropped(connect):
    """Whichever rank computed it; nothing is added anywhere, and both go on."""
    policy = connect(2)
    data = rows([9, 20])
    policy.forward_backward(data, "cross_entropy").result()
    before = policy.forward(data).result().logprobs
    for n in (int(datum.mask.sum()) for datum in data):

        def overflows(logprobs, n=n):
            return (logprobs - logprobs.detach()).sum() * (3e38 if logprobs.numel() == n else 1.0)

        with pytest.raises(rlkit.BackendError, match="not finite"):
            policy.forward_backward(data, overflows).result()
    policy.optim_step(PLAIN).result()
    other = connect(2)
    other.forward_backward(data, "cross_entropy")
    other.optim_step(PLAIN).result()
    a, b = (x.forward(data).result().logprobs for x in (policy, other))
    assert all(x.tobytes() == y.tobytes() for x, y in zip(a, b, strict=True))
    assert any((x != y).any() for x, y in zip(a, before, strict=True))


class TestTwoProcesses(BackendConformance):
    """It conforms, with several micro-batches on each."""

    @pytest.fixture(autouse=True)
    def _connect(self, connect):
        self.connect = connect

    def make(self, folder, **options):
        return self.connect(folder=folder, micro_batch_tokens=16, **options)
