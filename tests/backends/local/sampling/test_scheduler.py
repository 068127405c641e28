"""The scheduler when things go otherwise: nobody waits any more, memory ends, the process is another one."""

from __future__ import annotations

import asyncio
import copy
import gc
import multiprocessing
import os
import pickle
import signal
import threading
import time

import numpy as np
import pytest

import rlkit
from rlkit.errors import BackendError
from tests.backends.local import white_box

torch = pytest.importorskip("torch")
pytest.importorskip("peft")
from rlkit.backends.local.sampling.sampler import SampleRequest, SampleRow, Snapshot  # noqa: E402
from rlkit.backends.local.sampling.scheduler import Decoder, Scheduler  # noqa: E402

LONG = rlkit.SamplingParams(max_tokens=10**6, stop=())
ONE = rlkit.SamplingParams(max_tokens=1, stop=())


@pytest.fixture(scope="module")
def big(tmp_path_factory):
    """A folder of a model with so long a context that no request ends by itself while a test runs."""
    from tests.models.build import build

    return str(build("llama", tmp_path_factory.mktemp("long"), max_length=10**5))


@pytest.fixture(params=["slots", "cache"])
def policy(request, big, tiny, tmp_path):
    """A backend with both ways of decoding, on a model whose steps are slowed down where its context is short."""
    kind = big if request.param == "slots" else tiny("bloom")
    with rlkit.connect(
        "local", model=kind, lora=rlkit.Lora(rank=4, train_unembed=True), seed=0, device="cpu", folder=tmp_path
    ) as policy:
        policy.sampler().result().sample([5], ONE).result()
        decoder = white_box.decoder(policy)
        step = decoder.step
        if request.param == "cache":
            decoder.step = lambda: time.sleep(0.3) or step()
        yield policy


def rows(policy):
    return len(white_box.decoder(policy).rows)


def soon(condition):
    """Whether it comes to be within a minute, however busy the machine is."""
    deadline = time.monotonic() + 60
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.005)
    return condition()


def begun(policy, n=3):
    """A future of ``n`` completions that are being decoded."""
    future = policy.sampler().result().sample([5, 6, 7], LONG, n=n, seed=0)
    assert soon(lambda: rows(policy) == n)
    return future


def test_a_forgotten_future_makes_room(policy):
    """Its rows go between two tokens, what waits behind them is served; the others go on."""
    future = begun(policy)
    waiting = policy.sampler().result().sample([5], LONG, n=100)
    del future
    gc.collect()
    assert soon(lambda: rows(policy) not in (0, 3))
    del waiting
    gc.collect()
    assert soon(lambda: rows(policy) == 0)
    assert policy.sampler().result().sample([5, 6], ONE).result()
    assert not white_box.waiting(policy)


def test_a_cancelled_request_makes_room(policy):
    """Between two tokens, and before it has begun; the others go on as without it."""
    sampler = policy.sampler().result()
    params = rlkit.SamplingParams(max_tokens=12, stop=())
    expected = sampler.sample([5, 6, 7], params, seed=3).result()[0]
    future, beside = begun(policy), sampler.sample([5, 6, 7], params, seed=3)
    waiting, scored = sampler.sample([5], LONG, n=100), sampler.logprobs([5, 6])
    for request in (waiting, future):
        assert request.cancel()
        assert not request.cancel()
        with pytest.raises(rlkit.RequestCancelled):
            request.result()
    found = beside.result()[0]
    np.testing.assert_array_equal(found.tokens, expected.tokens)
    assert soon(lambda: rows(policy) == 0)
    assert not white_box.waiting(policy)
    assert scored.cancel() or scored.done()
    assert not beside.cancel()
    assert sampler.sample([5, 6], ONE).result()


def test_a_request_that_is_cancelled_while_it_ends(policy):
    """Its last token is drawn all the same, and disturbs nobody."""
    sampler = policy.sampler().result()
    decoder = white_box.decoder(policy)
    step, cancelled, futures = decoder.step, [], []

    def cancelling():  # when what it is about has been looked at for this turn
        cancelled.extend(future.cancel() for future in futures[:1])
        step()

    decoder.step = cancelling
    params = rlkit.SamplingParams(max_tokens=2, stop=())
    futures += [sampler.sample([5, 6, 7], params, seed=i) for i in (0, 1)]
    assert futures[1].result()[0].tokens.size == 2
    assert cancelled[0]
    with pytest.raises(rlkit.RequestCancelled):
        futures[0].result()


def test_a_future_that_is_kept_goes_on(policy):
    """A timeout, a cancelled await and the garbage collector change nothing while it can be read."""
    sampler = policy.sampler().result()
    params = rlkit.SamplingParams(max_tokens=12, stop=())
    expected = sampler.sample([5, 6, 7], params, seed=3).result()[0]
    future = sampler.sample([5, 6, 7], params, seed=3)
    with pytest.raises(rlkit.BackendTimeout):
        future.result(timeout=0)

    async def impatient():
        await asyncio.wait_for(future, 0.0)

    with pytest.raises(TimeoutError):
        asyncio.run(impatient())
    gc.collect()
    found = future.result()[0]
    np.testing.assert_array_equal(found.tokens, expected.tokens)


def test_a_cancelled_task_makes_room(policy):
    """A task that is cancelled forgets its future; so does one whose time is up."""

    async def given_up():
        sampler = await policy.sampler()
        task = asyncio.ensure_future(sampler.sample([5, 6, 7], LONG, n=2, seed=0))
        while rows(policy) < 2:
            await asyncio.sleep(0.005)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        del task
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(sampler.sample([5, 6, 7], LONG, seed=0), 0.2)
        return await sampler.sample([5, 6], ONE)

    assert asyncio.run(given_up())
    gc.collect()
    assert soon(lambda: rows(policy) == 0)


def test_ctrl_c_makes_room_also_while_the_future_is_held(policy):
    """As a notebook holds it; reading it later says what happened. Another who waits keeps it going."""
    future = begun(policy)

    def interrupt():
        deadline = time.monotonic() + 60
        while not future._waiting and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.1)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # in a background job it is ignored
    try:
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            future.result()
        thread.join()
    finally:
        signal.signal(signal.SIGINT, before)
    assert soon(lambda: rows(policy) == 0)
    with pytest.raises(BackendError, match="no caller waits for this request any more, so it was cancelled"):
        future.result()
    assert policy.sampler().result().sample([5, 6], ONE).result()


def test_another_reader_keeps_it_going():
    """Ctrl-C ends one waiting of two: nothing is dropped; of one: it is."""
    import concurrent.futures

    dropped = []
    future = rlkit.Future.wrap(concurrent.futures.Future(), on_drop=lambda: dropped.append(1))

    def interrupted(*_):
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupted)
    try:
        for others, expected in ((1, []), (0, [1])):
            future._waiting.extend([None] * others)
            signal.setitimer(signal.ITIMER_REAL, 0.05)
            with pytest.raises(KeyboardInterrupt):
                future.result()
            del future._waiting[:others]
            assert dropped == expected
    finally:
        signal.signal(signal.SIGALRM, before)


def test_training_calls_are_never_dropped(policy):
    """Their futures may be forgotten: the gradient is there, and the step is made."""
    datum = rlkit.Datum.supervised([5, 6], [7, 8])
    policy.forward_backward([datum], "cross_entropy")
    policy.optim_step(rlkit.Adam())
    gc.collect()
    assert policy.sampler().result().version == 1


def test_dropped_scores_are_not_computed(policy):
    """Logprobs that wait behind others and are forgotten; those behind them are."""
    sampler = policy.sampler().result()
    decoder = white_box.decoder(policy)
    score, seen, going_on = decoder.score, [], threading.Event()

    def slow(requests):
        seen.extend(request.tokens.size for request in requests)
        going_on.wait(60)
        return score(requests)

    decoder.score = slow
    first = sampler.logprobs(np.arange(3, 60))
    assert soon(lambda: seen)
    other, last = sampler.logprobs(np.arange(3, 59)), sampler.logprobs(np.arange(3, 58))
    del other
    gc.collect()
    going_on.set()
    assert last.result().size == first.result().size - 2
    assert seen == [57, 55]


def test_companions_of_dropped_rows_are_as_without_them(big):
    """To the bit: rows change their places when others go."""
    with rlkit.connect("local", model=big, seed=0, device="cpu") as policy:
        sampler = policy.sampler().result()
        params = rlkit.SamplingParams(max_tokens=40, stop=())
        expected = sampler.sample([9, 8, 7], params, n=3, seed=5).result()
        futures = [sampler.sample([5, 6, k], LONG, n=2, seed=k) for k in range(3, 9)]
        mine = sampler.sample([9, 8, 7], params, n=3, seed=5)
        while futures:
            futures.pop(len(futures) // 2)
            time.sleep(0.02)
        for sample, other in zip(mine.result(), expected, strict=True):
            assert sample.tokens.tolist() == other.tokens.tolist()
            assert sample.logprobs.tobytes() == other.logprobs.tobytes()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the system has no fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_after_a_fork_calls_are_refused(policy):
    """At once, in words, for every call; what needs no thread works, and the parent's backend goes on."""
    sampler = policy.sampler().result()
    datum = rlkit.Datum.supervised([5, 6], [7, 8])
    calls = {
        "sample": lambda: sampler.sample([5], ONE),
        "logprobs": lambda: sampler.logprobs([5, 6]),
        "forward": lambda: policy.forward([datum]),
        "forward_backward": lambda: policy.forward_backward([datum], "cross_entropy"),
        "sampler": policy.sampler,
        "save": lambda: policy.save("here"),
    }
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        said = []
        try:
            for name, call in calls.items():
                try:
                    call()
                except BackendError as error:
                    said.append(f"{name}: {error}")
            said.append(policy.tokenizer.decode(policy.tokenizer.encode("hello")))
            policy.close()
        finally:
            os.write(write, "\n".join(said).encode())
            os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        said = pipe.read().split("\n")
    os.waitpid(child, 0)
    assert said[-1] == "hello"
    assert len(said) == len(calls) + 1
    for name, line in zip(calls, said, strict=False):
        assert line.startswith(f"{name}: the local backend was opened in process {os.getpid()}")
    assert sampler.sample([5], ONE).result()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the system has no fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_future_from_before_a_fork(policy):
    """Not done by then, it raises in the child, where nobody will ever set it, by every way to read it."""
    sampler = policy.sampler().result()
    done, pending = sampler.sample([5, 6], ONE), begun(policy)
    several = rlkit.Future.all([pending, pending])
    assert done.result()
    child = multiprocessing.get_context("fork").Process(target=_read_in_child, args=(done, [pending, several]))
    child.start()
    child.join(60)
    hung = child.exitcode is None
    if hung:
        child.kill()
        child.join()
    assert not hung
    assert child.exitcode == 0
    assert rows(policy) == 3  # the child's end forgot nothing here


def _read_in_child(done, futures):
    async def awaited(future):
        return await future

    assert done.result()[0].tokens.size == 1
    for future in futures:
        for read in (future.result, lambda future=future: asyncio.run(awaited(future))):
            with pytest.raises(BackendError, match="was not done at the fork"):
                read()


def test_ctrl_c_in_many_at_once_makes_room(policy):
    """What waits for several futures lets all of them go, as ``rlkit.reference_logprobs`` waits for its scores."""
    sampler = policy.sampler().result()
    futures = [sampler.sample([5, 6, k], LONG, seed=k) for k in (7, 8)]
    whole = rlkit.Future.all(futures)
    assert soon(lambda: rows(policy) >= 1)

    def interrupted(*_):
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupted)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        with pytest.raises(KeyboardInterrupt):
            whole.result()
    finally:
        signal.signal(signal.SIGALRM, before)
    assert soon(lambda: rows(policy) == 0 and not white_box.waiting(policy))
    with pytest.raises(BackendError, match="no caller waits for this request any more, so it was cancelled"):
        whole.result()


def torchs(*_, **__):
    raise RuntimeError("[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory: you tried to")


@pytest.mark.parametrize("part", ["outputs", "_backward"])
def test_training_without_memory_says_which_batch(big, part, monkeypatch):
    """How much it was and what to lower; the gradient before it is kept and the backend goes on."""
    data = [rlkit.Datum.supervised([k, 5, 6], [7, 8]) for k in (3, 4, 5)]
    for budget, told in ((5, r"1 of 3, .* of datum \d alone; .* lower .* \(5\)"), (64, r"1 of 1, .* \(64\)")):
        options = {
            "micro_batch_tokens": budget,
            "lora": rlkit.Lora(rank=4, train_unembed=True),
            "device": "cpu",
            "seed": 0,
        }
        with rlkit.connect("local", model=big, **options) as policy:
            policy.forward_backward(data[:1], "cross_entropy").result()
            parameters = white_box.parameters(policy).values()
            before = [p.grad.clone() for p in parameters]
            with monkeypatch.context() as patch:
                patch.setattr(policy._trainer, part, torchs)
                with pytest.raises(BackendError, match=f"^out of memory: micro-batch {told}") as error:
                    policy.forward_backward(data, "cross_entropy").result()
            assert "can't allocate memory" in str(error.value.__cause__)
            assert all(torch.equal(p.grad, g) for p, g in zip(parameters, before, strict=True))
            assert policy.optim_step(rlkit.Adam()).result()


def test_sampling_without_memory_says_how_many_rows(policy, monkeypatch):
    """For prompts, steps and scores; afterwards the same request is served."""
    sampler = policy.sampler().result()
    decoder = white_box.decoder(policy)
    params = rlkit.SamplingParams(max_tokens=4, stop=())
    for name, call, told in (
        (
            "start",
            lambda: sampler.sample([5, 6], params, n=3),
            "3 completions of up to 3 tokens; lower",
        ),
        ("step", lambda: sampler.sample([5, 6], params, n=2), "2 completions of up to 3 tokens; lower"),
        ("score", lambda: sampler.logprobs([5, 6, 7, 8]), "logprobs of texts of up to 4 tokens"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(decoder, name, torchs)
            with pytest.raises(BackendError, match=f"^out of memory: {told}"):
                call().result()
        assert call().result() is not None


def test_other_errors_stay_what_they_are(big, monkeypatch):
    """A RuntimeError of another kind is no lack of memory."""

    def broken(*_, **__):
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    with rlkit.connect("local", model=big, seed=0, device="cpu") as policy:
        monkeypatch.setattr(policy._trainer, "outputs", broken)
        with pytest.raises(RuntimeError, match="mat1") as error:
            policy.forward_backward([rlkit.Datum.supervised([5], [7])], "cross_entropy").result()
        assert not isinstance(error.value, BackendError)


def test_tokenizers_travel(policy):
    """Pickled, for the workers of a loader, and copied: the same ids, and a lock of their own."""
    tokenizer = policy.tokenizer
    for other in (pickle.loads(pickle.dumps(tokenizer)), copy.deepcopy(tokenizer)):
        assert other.encode("the fox").tolist() == tokenizer.encode("the fox").tolist()
        assert other.decode(tokenizer.encode("hello")) == "hello"
        assert (other.eos_ids, other.vocab_size) == (tokenizer.eos_ids, tokenizer.vocab_size)
        assert other.chat_template == tokenizer.chat_template
        assert other._turn is not tokenizer._turn


@pytest.mark.filterwarnings("ignore:the mixtral model")
@pytest.mark.parametrize("kind", ["llama", "qwen3", "gpt2", "mistral", "gemma2", "mixtral", "bloom"])
def test_what_is_said_of_companions_is_so(tiny, kind, tmp_path):
    """``batch_invariant`` where a request finds the same alone and in company: dense models with plain attention."""
    with rlkit.connect("local", model=tiny(kind), seed=0, device="cpu", folder=tmp_path) as policy:
        said = policy.capabilities()
        assert isinstance(policy, rlkit.backends.protocol.Capabilities)
        assert said["models"] == {tiny(kind): policy.max_length}
        sampler = policy.sampler().result()
        params = rlkit.SamplingParams(max_tokens=9, stop=())
        found = []
        for others in (0, 7):
            futures = [sampler.sample(np.arange(3, 8 + 5 * k), params, n=2) for k in range(others)]
            mine = sampler.sample(np.arange(3, 30), params, n=1 + others, seed=1).result()[0]
            found.append(mine.logprobs.tobytes())
            assert all(future.result() for future in futures)
        assert said["batch_invariant"] is (kind not in ("mixtral", "bloom") and white_box.is_invariant(policy))
        if said["batch_invariant"]:
            assert found[0] == found[1]
        assert policy.capabilities() == said  # after sampling, and again


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_a_difference_in_the_last_bit_is_seen(tiny, kind, monkeypatch):
    """Where rows do hang on their company; while others are being decoded, which it does not disturb."""
    with rlkit.connect("local", model=tiny(kind), seed=0, device="cpu") as policy:
        expected = policy.sampler().result().sample([5, 6], ONE, seed=0).result()[0]
        decoder = white_box.decoder(policy)
        forward = decoder._logits

        def other(tokens, *args):
            logits = forward(tokens, *args)
            return logits if len(tokens) == 1 else torch.nextafter(logits, torch.tensor(9.0))

        monkeypatch.setattr(decoder, "_logits", other)
        assert policy.capabilities()["batch_invariant"] is False
        found = policy.sampler().result().sample([5, 6], ONE, seed=0).result()[0]
        assert found.logprobs.tobytes() == expected.logprobs.tobytes()


class Scripted(Decoder):
    """Draws token 7 for every row; weights with ``scale`` 0 cannot be loaded."""

    reserved = 0

    def __init__(self):
        super().__init__(self, merge=False)  # it is its own model

    def load(self, adapter, scale, *, merge):
        if scale == 0:
            raise RuntimeError("damaged weights")

    def start(self, admitted):
        self.rows += [SampleRow(request, i) for request, count in admitted for i in range(count)]

    def step(self):
        self.rows = [row for row in self.rows if not row.add(7, -1.0)]

    def abandon(self):
        rows, self.rows = self.rows, []
        return rows

    forget = leave = invariant = score = _recompute = None


def test_weights_that_cannot_be_loaded_fail_their_own_requests():
    """Two snapshots asked for in one turn, of which the second is damaged: the first one's requests are answered."""
    good, damaged = Snapshot(3, 1.0, {}), Snapshot(4, 0.0, {})
    scheduler = Scheduler(Scripted, max_rows=8, max_decoders=2)
    requests = [
        SampleRequest(snapshot, np.array([5]), ONE, lambda tokens: False, [np.random.default_rng(0)], limit=1, seed=0)
        for snapshot in (good, damaged)
    ]
    for request in requests:
        scheduler.submit(request)
    for _ in range(2):
        scheduler.turn()
    with pytest.raises(RuntimeError, match="damaged weights"):
        requests[1].future.result(0)
    (sample,) = requests[0].future.result(0)
    assert (sample.tokens.tolist(), sample.version) == ([7], 3)
