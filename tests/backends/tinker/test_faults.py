"""The Tinker backend over a service in trouble: no step twice, none lost, and errors that say what to do."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import itertools
import logging
import os
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest

import rlkit
from benchmarks import faults as matrix
from rlkit.backends.tinker import _failures
from rlkit.testing import FakeTinker, Fault
from tests.each import for_each

tinker = pytest.importorskip("tinker", reason="needs the extra tinker")
httpx = pytest.importorskip("httpx")

STEP = rlkit.Adam(learning_rate=0.05)
PARAMS = rlkit.SamplingParams(max_tokens=4, stop=())
DATA = [rlkit.Datum([65, 66, 67, 68], [0, 0, 1, 1], inputs={"weights": 1.0})]
SHORT = 5.0  # seconds, where the end of the deadline is what is tested
LONG = 60.0  # where no call waits for that end, however busy the machine is


@pytest.fixture(autouse=True, scope="module")
def _quiet():
    """The SDK warns of everything that is tested here."""
    logger = logging.getLogger("tinker")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    yield
    logger.setLevel(level)


@pytest.fixture
def fake():
    with FakeTinker(seed=0) as fake:
        yield fake


def connect(fake, **options):
    where = {"base_url": fake.base_url, "api_key": fake.api_key}
    return rlkit.connect("tinker", **{**where, "model": "toy", "seed": 0, "deadline": 30.0, **options})


def count_steps(fake, expected):
    """How many steps were applied, once as many as expected were or some time has passed."""
    until = time.monotonic() + 5.0
    while time.monotonic() < until and fake.count("optim_step") < expected:
        time.sleep(0.01)
    return fake.count("optim_step")


def stepping(policy):
    policy.forward_backward(DATA, "cross_entropy").result()
    return policy.optim_step(STEP)


# The matrix.

TRAINING = (
    ("optim_step", None, 1),
    ("retrieve_future", "optim_step", 1),
    ("forward_backward", None, 2),
    ("retrieve_future", "forward_backward", 1),
)
OTHERS = (
    ("create_session", None, 0),
    ("create_model", None, 0),
    ("save_weights", None, 0),
    ("save_weights_for_sampler", None, 1),
    ("asample", None, 1),
    ("load_weights", None, 0),
)
PASSES = ("429", "500", "503", "lost", "502", "slow")  # what the SDK gets over


@pytest.fixture(scope="module")
def curve(_quiet):
    return matrix.undisturbed()


def outcomes(curve, cells):
    """What became of the cells; none broke the promise or came to no end. A busy machine may make one late."""
    cells = list(cells)  # all at once, since each waits for the SDK's pauses
    with concurrent.futures.ThreadPoolExecutor(min(len(cells), 24)) as pool:
        found = list(pool.map(matrix.run, cells))
    for outcome in found:
        problems = [x for x in outcome.problems(curve) if x != "late"]
        assert not problems, (outcome.cell, problems, outcome.error, outcome.text)
        assert outcome.late < 60, outcome.cell
    return found


def test_faults_that_pass(curve):
    """Once, before and after, anywhere: the run completes, and its curve is bit for bit the undisturbed one."""
    cells = [matrix.Cell("slow", "after", *place, 1, deadline=LONG) for place in TRAINING]
    cells += [matrix.Cell(kind, "after", *place, 1, deadline=LONG) for kind, place in zip(PASSES, OTHERS, strict=True)]
    for outcome in outcomes(curve, cells):
        assert not outcome.error, (outcome.cell, outcome.text)


def test_a_service_that_stays_dead(curve):
    """The call that met it ends at its deadline, and so does closing."""
    kinds = zip(("503", "lost", "429", "500"), TRAINING, strict=True)
    cells = [matrix.Cell(kind, "after", *place, None) for kind, place in kinds]
    cells.append(matrix.Cell("lost", "before", "*", None, 14, None))
    for outcome in outcomes(curve, cells):
        assert outcome.error in ("StepOutcomeUnknown", "BackendTimeout"), outcome.cell


def test_no_fault_of_a_training_call_is_a_double_or_a_lost_step(curve):
    """A request is sent again only where that does no harm: to fetch a result, or to a server that recognises it."""
    passing = ("429", "503", "lost")  # the SDK repeats after them; it does not after the others
    cells = [
        matrix.Cell(kind, when, *place, 1, dedupe=dedupe, deadline=LONG)
        for kind, when, place, dedupe in itertools.product(
            (*passing, "401", "410", "422", "bad_json"), ("before", "after"), TRAINING, (True, False)
        )
    ]
    wrong = []
    for outcome in outcomes(curve, cells):
        cell = outcome.cell
        repeated = cell.kind in passing and (cell.dedupe or cell.endpoint == "retrieve_future")
        refused = cell.kind in passing and not repeated
        failed = "StepOutcomeUnknown" if "optim_step" in (cell.endpoint, cell.operation) else "BackendError"
        if outcome.error != ("" if repeated else failed) or refused > ("not sent again" in outcome.text):
            wrong.append((cell, outcome.error, outcome.text))
        if not repeated and failed == "BackendError" and outcome.step_error != "TrainerFailed":
            wrong.append((cell, outcome.step_error))
    assert not wrong


def test_an_operation_that_failed_on_the_service(curve):
    """Is the service's own word: the step was not applied, and the error does not say that this is unknown."""
    cells = [matrix.Cell("opfail", "before", *place, 1, deadline=LONG) for place in TRAINING[::2]]
    for outcome in outcomes(curve, cells):
        assert outcome.error == "BackendError", outcome.cell
        assert "the operation failed" in outcome.text
        sent_after = outcome.cell.endpoint == "forward_backward"  # a step, which was carried out
        assert outcome.applied == outcome.steps + sent_after == 1 + sent_after


def test_what_the_matrix_calls_a_problem():
    """Each is found where it is, so that a clean table means something."""
    cell = matrix.Cell("503", "after", "optim_step", None, 0, None)
    cases = {
        "lost step": {"steps": 3, "applied": 2},
        "double step": {"steps": 2, "applied": 4, "unknown": True},
        "double gradient": {"doubled": ("forward_backward",)},
        "another curve": {"curve": [1.5]},
        "untyped error": {"error": "ValueError"},
        "late": {"late": 3.0},
        "rate": {"rate": 5.5},
    }
    good = {"curve": [1.0], "error": "BackendTimeout"}
    assert matrix.Outcome(cell, **good).problems([1.0, 2.0]) == []
    for problem, fields in cases.items():
        assert matrix.Outcome(cell, **{**good, **fields}).problems([1.0, 2.0]) == [problem]
    assert matrix.Outcome(cell, curve=[1.0]).problems([1.0, 2.0]) == ["another curve"]  # ended early, without an error


# Nothing is sent again that may have been applied.


class Losing:
    """A transport that loses the answer of the first optimizer step: an error, or a status instead of it."""

    def __init__(self, inner, left):
        self.inner, self.left = inner, left

    async def handle_async_request(self, request):
        response = await self.inner.handle_async_request(request)
        if not request.url.path.endswith("/optim_step") or not self.left:
            return response
        lost = self.left.pop()
        if isinstance(lost, Exception):
            raise lost
        return httpx.Response(lost, json={"detail": "busy"}, request=request)

    async def aclose(self):
        await self.inner.aclose()


LOST = [503, httpx.ReadError("reset"), httpx.RemoteProtocolError("closed"), httpx.ReadTimeout("no answer")]


@for_each("lost", LOST)
@for_each("dedupe", [False, True])
def test_a_step_whose_answer_is_lost(lost, dedupe):
    """Is applied once: the SDK alone sends it again, to a server that carries it out again; rlkit does not."""
    made = _failures.NoResend
    for guarded in (False, True):
        with pytest.MonkeyPatch.context() as patch, FakeTinker(dedupe=dedupe) as fake:

            def transport(inner, event, guarded=guarded, left=[lost]):  # noqa: B006  # lost once, whichever client
                return made(Losing(inner, left), event) if guarded else Losing(inner, left)

            patch.setattr(_failures, "NoResend", transport)
            with connect(fake) as policy:
                step = stepping(policy)
                if guarded and not dedupe:
                    with pytest.raises(rlkit.StepOutcomeUnknown, match="not sent again.*resume_from="):
                        step.result()
                else:
                    step.result()
            assert count_steps(fake, 1 if guarded or dedupe else 2) == (1 if guarded or dedupe else 2)


def guard(inner=None):
    return _failures.NoResend(inner, threading.Event())


def sent(transport, *answers, path="optim_step"):
    """The last answer, or its exception, of as many requests as there are answers."""
    left = list(answers)

    class Inner:
        async def handle_async_request(self, request):
            answer = left.pop(0)
            if isinstance(answer, Exception):
                raise answer
            return httpx.Response(request=request, **answer)

    transport._inner = Inner()

    async def send():
        for _ in answers:
            try:
                last = await transport.handle_async_request(httpx.Request("POST", f"https://x.invalid/api/v1/{path}"))
            except Exception as error:
                last = error
        return last

    return asyncio.run(send())


@for_each("path", ["optim_step", "forward_backward"])
def test_answers_after_which_the_sdk_sends_again(path):
    """Become one after which it does not, with what the server said; others are left alone."""
    asking = {"status_code": 422, "headers": {"x-should-retry": "true"}}
    for lost in (
        *({"status_code": x, "text": "busy"} for x in (402, 408, 409, 429, 500, 503)),
        {"status_code": 400},
        asking,
    ):
        answer = sent(guard(), lost, path=path)
        assert (answer.status_code, answer.headers["x-should-retry"]) == (424, "false"), lost
        assert f"{lost['status_code']}: {lost.get('text', '')}" in answer.json()["detail"]
        assert sent(guard(), lost, path="asample").status_code == lost["status_code"]
    for status in (200, 307, 400, 401, 404, 422):
        said = {"status_code": status, "json": {"detail": "no"}}
        assert sent(guard(), said, path=path).status_code == status
    for error in (httpx.ReadError("reset"), httpx.ReadTimeout("late"), ValueError("anything")):
        answer = sent(guard(), error, path=path)
        assert f"lost ({type(error).__name__}: {error})" in answer.json()["detail"]
    for error in (httpx.ConnectError("refused"), httpx.ConnectTimeout("late"), httpx.PoolTimeout("full")):
        assert sent(guard(), error, path=path) is error  # it never arrived


def test_a_server_says_that_it_recognises_repeats():
    transport = guard()
    assert sent(transport, {"status_code": 200, "headers": {"X-Rlkit-Deduplicates": "1"}}, path="client/config")
    assert sent(transport, {"status_code": 200}, {"status_code": 503}).status_code == 503
    error = httpx.ReadError("reset")
    assert sent(transport, error) is error


def test_a_connection_that_breaks_in_the_middle_of_an_answer():
    """Over a socket; a whole answer comes through as it is."""

    async def serve(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        body = b'{"request_id": "x"}'
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 19\r\n\r\n" + (body if whole else body[:5]))
        writer.close()

    async def ask():
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        async with server:
            http = httpx.AsyncClient(transport=guard(httpx.AsyncHTTPTransport()))
            return await http.post(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/optim_step")

    whole = True
    assert asyncio.run(ask()).json() == {"request_id": "x"}
    whole = False
    assert asyncio.run(ask()).status_code == 424


def test_an_sdk_whose_clients_are_others():
    """Is refused, where resending has to be forbidden."""
    holder = SimpleNamespace(
        aclient=lambda _: contextlib.nullcontext(object()),
        run_coroutine_threadsafe=lambda coroutine: SimpleNamespace(result=lambda: asyncio.run(coroutine)),
    )
    with pytest.raises(rlkit.UnsupportedError, match=r"needs tinker 0\.38.*'_client'"):
        _failures.forbid_resending(holder)


def test_logprobs_are_asked_for_again_where_repeats_are_recognised(fake):
    """And so is what does not train, anywhere."""
    lost = [Fault("lost", "forward_backward", when="after"), Fault("503", "asample", when="after")]
    fake.inject(*lost)
    with connect(fake) as policy:
        assert policy.forward(DATA).result().logprobs[0].shape == (4,)
    with FakeTinker(dedupe=False, faults=lost) as other, connect(other) as policy:
        policy.sampler().result().sample([65], PARAMS).result()
        with pytest.raises(rlkit.BackendError, match="not sent again"):
            policy.forward(DATA).result()


# What is known of a step.


@for_each(
    ("error", "known"),
    [
        (("RequestFailedError", "Request failed: no such optimizer for self.request_id='x'"), True),
        (("UnprocessableEntityError", 422), False),  # a proxy may say so, whatever the server did
        (("APIStatusError", 307), False),
        (("BadRequestError", 400), False),
        (("AuthenticationError", 401), False),
        (("NotFoundError", 404), False),
        (("APIStatusError", 410), False),
        (("InternalServerError", 503), False),
        (("APIConnectionError", None), False),
    ],
)
def test_whether_a_step_s_outcome_is_known(error, known):
    name, status = error
    kind = getattr(tinker, name)
    asked = httpx.Request("POST", "https://x.invalid/api/v1/optim_step")
    if isinstance(status, int):
        made = kind("refused", response=httpx.Response(status, request=asked), body={"detail": "refused"})
    elif status is None:
        made = kind(request=asked)
    else:
        made = kind(status, request_id="x", category=tinker.types.RequestErrorCategory.User)
    found = _failures.translate_error("optim_step", made)
    assert type(found) is (rlkit.BackendError if known else rlkit.StepOutcomeUnknown)
    assert found.__cause__ is made
    assert ("resume_from=" in str(found)) is not known
    assert type(_failures.translate_error("forward_backward", made)) is rlkit.BackendError


def test_a_step_is_asked_for_once(fake):
    """However often its future is read, and whatever is called after it."""
    fake.inject(Fault("401", "retrieve_future", operation="optim_step"))
    with connect(fake) as policy:
        step = stepping(policy)
        for _ in range(3):
            with pytest.raises(rlkit.StepOutcomeUnknown):
                step.result()
        for call in (lambda: policy.save("x"), lambda: policy.forward_backward(DATA, "cross_entropy")):
            with pytest.raises(rlkit.TrainerFailed, match="resume_from="):
                call().result()
        assert (policy.version, count_steps(fake, 1)) == (0, 1)
    assert sum(x.endpoint == "optim_step" for x in fake.requests) == 1


def test_saving_after_a_failed_gradient_says_that_it_failed(fake):
    """Not that a gradient is pending, which no step can take any more."""
    fake.inject(Fault("401", "retrieve_future", operation="forward_backward"))
    with connect(fake) as policy:
        with pytest.raises(rlkit.BackendError):
            policy.forward_backward(DATA, "cross_entropy").result()
        with pytest.raises(rlkit.TrainerFailed, match="resume_from="):
            policy.save("x").result()


def test_a_run_goes_on_from_its_last_saved_state(fake):
    """After StepOutcomeUnknown the resumed run repeats the step, and is where the undisturbed one is."""
    with FakeTinker(seed=0) as other, connect(other) as policy:
        stepping(policy).result()
        expected = policy.forward(DATA).result().logprobs[0].tolist()
    with connect(fake) as policy:
        first = policy.save("first").result()
        fake.inject(Fault("410", "retrieve_future", when="after", operation="optim_step"))
        with pytest.raises(rlkit.StepOutcomeUnknown):
            stepping(policy).result()
    with connect(fake, resume_from=first) as policy:
        stepping(policy).result()
        assert policy.forward(DATA).result().logprobs[0].tolist() == expected


# What each trouble says.


def test_no_key(monkeypatch, tmp_path):
    for name in ("TINKER_API_KEY", "TINKER_CREDENTIAL_CMD", "TINKER_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(rlkit.ConfigError, match=r"no API key; set TINKER_API_KEY"):
        rlkit.connect("tinker", model="toy", base_url="https://x.invalid", deadline=SHORT)


def test_an_expired_session(fake):
    with connect(fake) as policy:
        sampler = policy.sampler().result()
        policy.forward_backward(DATA, "cross_entropy").result()
        fake.expire()
        with pytest.raises(rlkit.BackendError, match=r"expired \(410\); connect anew"):
            sampler.sample([65], PARAMS).result()
        with pytest.raises(rlkit.StepOutcomeUnknown, match=r"expired \(410\).*resume_from="):
            policy.optim_step(STEP).result()


def test_a_poisoned_client(fake):
    """By a loss of the user's own, given to the SDK itself."""
    datum = tinker.types.Datum(tinker.types.ModelInput.from_ints([1]), {"target_tokens": np.array([2])})
    with connect(fake) as policy:
        with pytest.raises(ZeroDivisionError):
            policy.training_client.forward_backward_custom([datum], lambda data, logprobs: 1 / 0).result()
        with pytest.raises(rlkit.BackendError, match=r"earlier call of this client failed.*resume_from="):
            policy.forward_backward(DATA, "cross_entropy").result()


def test_the_sdk_s_last_warning_is_told(fake, monkeypatch):
    """Where a call ends by its deadline, such as a pause for billing."""
    monkeypatch.setattr(logging.getLogger("tinker"), "level", logging.WARNING)
    logging.getLogger("tinker.lib").manager._clear_cache()
    with connect(fake, deadline=2.0) as policy:
        fake.inject(Fault("402", "forward_backward", times=None))
        with pytest.raises(rlkit.BackendTimeout, match="last warning: .*paused due to billing"):
            policy.forward(DATA).result()
        fake.heal()


def test_a_service_that_does_not_answer_at_first(fake):
    """Connecting ends by its deadline, and what the SDK still tries ends once the service answers."""
    fake.inject(Fault("503", times=None))
    with pytest.raises(rlkit.BackendTimeout, match="connect to https.*no answer within 1 s"):
        connect(fake, deadline=1.0)
    fake.heal()
    for thread in threading.enumerate():
        if thread.name == "rlkit-tinker-connect":
            thread.join(30)
            assert not thread.is_alive()


@pytest.mark.parametrize("endpoint", ["*", "create_model"])
def test_billing_while_connecting(fake, endpoint):
    fake.inject(Fault("402", endpoint, times=None))
    with pytest.raises(rlkit.BackendError, match=r"billing is not settled \(402\)"):
        connect(fake, deadline=SHORT)


def test_what_a_service_in_trouble_would_have_said_is_not_guessed(fake):
    """A resumed run without its stream of seeds, or a model of another length, would go wrong without a word."""
    with connect(fake) as policy:
        path = policy.save("x").result()
    for endpoint, options in (("capabilities", {}), ("list_run_checkpoints", {"resume_from": path})):
        fake.inject(Fault("403", endpoint, times=None))
        with pytest.raises(rlkit.BackendError, match=r"\(403\)"):
            connect(fake, **options)
        fake.heal()


def test_saved_states_are_asked_for_with_a_deadline(fake):
    with connect(fake, deadline=2.0) as policy:
        path = policy.save("x").result()
        fake.inject(Fault("503", times=None))
        for call in [policy.saved(), policy.delete(path), policy.expire(path, 3600)]:
            assert not call.cancel()  # nobody knows whether it was carried out
            with pytest.raises(rlkit.BackendTimeout, match="no answer within 2 s"):
                call.result()
        fake.heal()


# A mistake in a loss that runs here.


def good(logprobs, weights):
    return -(logprobs.square() * weights).sum()


class Late:
    """A loss that does ``then`` where it gets what the model gave, after the trial inside the call."""

    def __init__(self, then):
        self.calls, self.then = 0, then

    def __call__(self, logprobs, weights):
        self.calls += 1
        return good(logprobs, weights) if self.calls == 1 else self.then(good(logprobs, weights))


@pytest.mark.parametrize("call", ["forward", "forward_backward"])
def test_a_late_mistake_in_a_loss(fake, call):
    """Passes through unchanged. A gradient that was to come of it ends the policy, and nothing after it is applied."""
    error = ZeroDivisionError("a mistake of the user's")
    error.__cause__ = KeyError("its cause")

    def fail(value):
        raise error

    with connect(fake) as policy:
        failed = getattr(policy, call)(DATA, Late(fail))
        later = [policy.forward_backward(DATA, good), policy.optim_step(STEP), policy.save("x")]
        with pytest.raises(ZeroDivisionError) as read:
            failed.result()
        assert read.value is error
        assert isinstance(read.value.__cause__, KeyError)
        if call == "forward":  # which changes nothing
            for future in later:
                future.result()
            return
        for future in [*later, policy.forward_backward(DATA, good)]:
            with pytest.raises(rlkit.TrainerFailed, match="resume_from=") as caught:
                future.result()
            assert caught.value.__cause__ is error
        assert [fake.count(x) for x in ("forward", "forward_backward", "optim_step", "save_weights")] == [1, 0, 0, 0]


def test_a_loss_that_is_not_finite_on_what_the_model_gave(fake):
    with connect(fake) as policy:
        with pytest.raises(rlkit.BackendError, match=r"non-finite gradient at data\[0\]"):
            policy.forward_backward(DATA, Late(lambda value: value * float("nan"))).result()
        assert fake.count("forward_backward") == 0


def test_a_mistake_that_shows_at_once_raises_in_the_call(fake):
    with connect(fake) as policy:
        with pytest.raises(ZeroDivisionError):
            policy.forward_backward(DATA, lambda logprobs, weights: 1 / 0)
        stepping(policy).result()
        assert fake.count("forward_backward") == fake.count("optim_step") == 1
        assert fake.count("forward") == 0


@pytest.mark.parametrize("call", ["forward", "forward_backward"])
def test_a_slow_loss_holds_up_no_sample(fake, call):
    """Losses run outside of the SDK's loop, which has heartbeats and other calls."""
    began, sampled = threading.Event(), threading.Event()

    def wait(value):
        began.set()
        assert sampled.wait(30)
        return value

    with connect(fake) as policy:
        sampler = policy.sampler().result()
        slow = getattr(policy, call)(DATA, Late(wait))
        assert began.wait(30)
        sampler.sample([65], PARAMS).result()
        assert not slow.done()
        sampled.set()
        slow.result()


# The process and its signals.


def test_a_fork_is_refused(fake, monkeypatch):
    """It has no loop: its calls would wait for ever."""
    with connect(fake) as policy:
        sampler = policy.sampler().result()
        policy.forward(DATA)
        with monkeypatch.context() as patch:
            patch.setattr(os, "getpid", lambda: -1)
            for call in (lambda: policy.forward(DATA), lambda: sampler.sample([65], PARAMS), policy.saved):
                with pytest.raises(rlkit.BackendError, match="a fork does not copy its thread"):
                    call()
            policy._calls._last = concurrent.futures.Future()
            policy._calls.close()
            policy._calls._last = None


def test_an_interrupted_call_ends_the_policy(fake, monkeypatch):
    """Ctrl-C may come when the step was sent."""

    def interrupted(params):
        raise KeyboardInterrupt

    with connect(fake) as policy:
        policy.forward_backward(DATA, "cross_entropy").result()
        monkeypatch.setattr(policy.training_client, "optim_step", interrupted)
        with pytest.raises(KeyboardInterrupt):
            policy.optim_step(STEP)
        with pytest.raises(rlkit.TrainerFailed, match="resume_from="):
            policy.forward_backward(DATA, "cross_entropy").result()
