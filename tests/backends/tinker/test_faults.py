"""The Tinker backend over a service in trouble: no step twice, none lost, and errors that say what to do."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import itertools
import logging
import os
import threading
from types import SimpleNamespace

import numpy as np
import pytest

import rlkit
from benchmarks import faults as matrix
from rlkit.backends.tinker import _failures
from rlkit.testing import FakeTinker, Fault
from tests.backends.tinker.conftest import STEP, connect
from tests.each import for_each

tinker = pytest.importorskip("tinker", reason="needs the extra tinker")
httpx = pytest.importorskip("httpx")

PARAMS = rlkit.SamplingParams(max_tokens=4, stop=())
DATA = [rlkit.Datum([65, 66, 67, 68], [0, 0, 1, 1], inputs={"weights": 1.0})]
LONG = 60.0  # seconds, where no call waits for the end of its deadline, however busy the machine is


@pytest.fixture(autouse=True)
def _quiet(caplog):
    """The SDK warns of everything that is tested here."""
    caplog.set_level(logging.CRITICAL, "tinker")


def stepping(policy):
    policy.forward_backward(DATA, "cross_entropy").result()
    return policy.optim_step(STEP)


# The matrix.

TRAINING = (
    ("optim_step", None, 1),
    ("retrieve_future", "optim_step", 1),
    ("forward_backward", None, 1),  # logprobs, for a loss that runs here
    ("forward_backward", None, 2),
    ("retrieve_future", "forward_backward", 1),
)
OTHERS = (
    ("429", "create_session", None, 0),
    ("500", "create_model", None, 0),
    ("503", "save_weights", None, 0),
    ("lost", "save_weights_for_sampler", None, 1),
    ("502", "asample", None, 1),
    ("slow", "load_weights", None, 0),
)
DEAD = ("StepOutcomeUnknown", "BackendTimeout")


def cases():
    """Cells, each with the errors that its run may end with ("": none), and what is part of the message."""
    for kind, *place in (*(("slow", *place) for place in TRAINING), *OTHERS):
        dedupe = "asample" not in place  # whatever the server recognises, a sample is asked for again
        yield matrix.Cell(kind, "after", *place, 1, dedupe=dedupe, deadline=LONG), ("",), ""
    # The call that meets a service that stays dead ends at its deadline, and so does closing.
    for kind, place in zip(("503", "lost", "429", "500", "503"), TRAINING, strict=True):
        yield matrix.Cell(kind, "after", *place, None), DEAD, ""
    yield matrix.Cell("lost", "before", "*", None, 14, None), DEAD, ""
    for place in (TRAINING[0], TRAINING[3]):  # the service's own word: the step was not applied
        yield matrix.Cell("opfail", "before", *place, 1, deadline=LONG), ("BackendError",), "the operation failed"
    # A request is sent again only where that does no harm: to fetch a result, or to a server that recognises it.
    repeats = ("429", "503", "lost")  # the SDK sends again after these
    kinds = (*repeats, "401", "410", "422", "bad_json")
    for kind, when, place, dedupe in itertools.product(kinds, ("before", "after"), TRAINING, (True, False)):
        cell = matrix.Cell(kind, when, *place, 1, dedupe=dedupe, deadline=LONG)
        if kind in repeats and (dedupe or cell.endpoint == "retrieve_future"):
            yield cell, ("",), ""
        else:
            failed = "StepOutcomeUnknown" if "optim_step" in place else "BackendError"
            yield cell, (failed,), "not sent again" if kind in repeats else ""


def test_no_step_is_doubled_or_lost():
    """Whatever fails. A run that completes has bit for bit the curve of the undisturbed one."""
    curve, table, wrong = matrix.undisturbed(), list(cases()), []
    with concurrent.futures.ThreadPoolExecutor(24) as pool:  # all at once, since each waits for the SDK's pauses
        found = list(pool.map(matrix.run, [cell for cell, _, _ in table]))
    for outcome, (cell, errors, said) in zip(found, table, strict=True):
        # A busy machine may make a call late.
        right = set(outcome.problems(curve)) <= {"late"} and outcome.late < 60
        right &= outcome.error in errors and said in outcome.text
        if outcome.error == "BackendError" and cell.kind != "opfail":
            right &= outcome.step_error == "TrainerFailed"
        if cell.kind == "opfail":  # a step that was sent after a failed gradient was carried out
            right &= (outcome.steps, outcome.applied) == (1, 1 + (cell.endpoint == "forward_backward"))
        if not right:
            wrong.append((cell, outcome.error, outcome.step_error, outcome.text, outcome.problems(curve)))
    assert len(found) > 120
    assert not wrong


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


@for_each("kind", ["503", "lost"])
@for_each("dedupe", [False, True])
def test_the_sdk_alone_takes_a_step_twice(kind, dedupe, monkeypatch):
    """Where its answer is lost, and the server carries it out again; with rlkit's transport the matrix finds none."""
    monkeypatch.setattr(_failures, "NoResend", lambda inner, deduplicates: inner)
    fault = Fault(kind, "optim_step", when="after")
    with FakeTinker(dedupe=dedupe, faults=[fault]) as fake, connect(fake) as policy:
        stepping(policy).result()
        assert fake.count("optim_step") == 2 - dedupe


def send(*answers, path="optim_step"):
    """The last answer, or its exception, to as many requests as there are answers, through one ``NoResend``."""
    left = list(answers)

    def answer(request):
        if isinstance(left[0], Exception):
            raise left.pop(0)
        return httpx.Response(**left.pop(0))

    async def ask():
        transport = _failures.NoResend(httpx.MockTransport(answer), threading.Event())
        while left:
            try:
                last = await transport.handle_async_request(httpx.Request("POST", f"https://x.invalid/api/v1/{path}"))
            except Exception as error:
                last = error
        return last

    return asyncio.run(ask())


@for_each("path", ["optim_step", "forward_backward"])
def test_answers_after_which_the_sdk_sends_again(path):
    """Become one after which it does not, with what the server said; others are left alone."""
    lost = [{"status_code": x, "text": "busy"} for x in (402, 408, 409, 429, 500, 503)]
    lost += [{"status_code": 400}, {"status_code": 422, "headers": {"x-should-retry": "true"}}]
    for each in lost:
        answer = send(each, path=path)
        assert (answer.status_code, answer.headers["x-should-retry"]) == (424, "false"), each
        assert f"{each['status_code']}: {each.get('text', '')}" in answer.json()["detail"]
        assert send(each, path="asample").status_code == each["status_code"]
    for status in (200, 307, 400, 401, 404, 422):
        assert send({"status_code": status, "json": {"detail": "no"}}, path=path).status_code == status
    for error in (httpx.ReadError("reset"), httpx.ReadTimeout("late"), ValueError("anything")):
        answer = send(error, path=path)
        assert f"lost ({type(error).__name__}: {error})" in answer.json()["detail"]
    for error in (httpx.ConnectError("refused"), httpx.ConnectTimeout("late"), httpx.PoolTimeout("full")):
        assert send(error, path=path) is error  # it never arrived
    recognises, error = {"status_code": 200, "headers": {"X-Rlkit-Deduplicates": "1"}}, httpx.ReadError("reset")
    assert send(recognises, {"status_code": 200}, {"status_code": 503}, path=path).status_code == 503
    assert send(recognises, error, path=path) is error


def test_a_connection_that_breaks_in_the_middle_of_an_answer():
    async def broken():
        yield b'{"request_id": '
        raise httpx.ReadError("reset")

    assert send({"status_code": 200, "content": broken()}).status_code == 424


def test_an_sdk_whose_clients_are_others():
    """Is refused, where resending has to be forbidden."""
    holder = SimpleNamespace(
        aclient=lambda _: contextlib.nullcontext(object()),
        run_coroutine_threadsafe=lambda coroutine: SimpleNamespace(result=lambda: asyncio.run(coroutine)),
    )
    with pytest.raises(rlkit.UnsupportedError, match=r"needs tinker 0\.38.*'_client'"):
        _failures.forbid_resending(holder)


# What is known of a step.


def test_whether_a_step_s_outcome_is_known():
    """Only where the service itself reports the failure: a proxy may answer anything, whatever the server did."""
    asked = httpx.Request("POST", "https://x.invalid/api/v1/optim_step")
    errors = [
        tinker.RequestFailedError(
            "Request failed: no", request_id="x", category=tinker.types.RequestErrorCategory.User
        ),
        tinker.APIConnectionError(request=asked),
    ]
    for status in (307, 400, 401, 404, 410, 422, 429, 503):
        response, body = httpx.Response(status, request=asked), {"detail": "refused"}
        errors.append(tinker.APIStatusError("refused", response=response, body=body))
    for error in errors:
        found = _failures.translate_error("optim_step", error)
        assert type(found) is (rlkit.BackendError if error is errors[0] else rlkit.StepOutcomeUnknown), error
        assert found.__cause__ is error
        assert ("resume_from=" in str(found)) is (error is not errors[0])
        assert type(_failures.translate_error("forward_backward", error)) is rlkit.BackendError
        assert ("rate limit" in str(found)) is (getattr(error, "status_code", None) == 429)


@pytest.mark.parametrize(
    ("operation", "error"), [("forward_backward", "BackendError"), ("optim_step", "StepOutcomeUnknown")]
)
def test_a_failed_call_is_asked_for_once(fake, operation, error):
    """However often its future is read, and whatever is called after it: saving tells of no pending gradient."""
    fake.inject(Fault("401", "retrieve_future", operation=operation))
    with connect(fake) as policy:
        step = policy.forward_backward(DATA, "cross_entropy")
        if operation == "optim_step":
            step.result()
            step = policy.optim_step(STEP)
        for _ in range(3):
            with pytest.raises(getattr(rlkit, error)):
                step.result()
        for call in (lambda: policy.save("x"), lambda: policy.forward_backward(DATA, "cross_entropy")):
            with pytest.raises(rlkit.TrainerFailed, match="resume_from="):
                call().result()
        assert policy.version == 0
    assert sum(x.endpoint == operation for x in fake.requests) == 1


def test_a_run_goes_on_from_its_last_saved_state(fake):
    """After StepOutcomeUnknown the resumed run repeats the step, and is where the undisturbed one is."""

    def draw(policy):
        return policy.sampler().result().sample([65], PARAMS).result()[0].tokens.tolist()

    with connect(fake) as policy:
        stepping(policy).result()
        expected = policy.forward(DATA).result().logprobs[0].tolist()
    with connect(fake) as policy:
        first, drawn = policy.save("first").result(), draw(policy)
        policy.save("second").result()
        fake.inject(Fault("410", "retrieve_future", when="after", operation="optim_step"))
        with pytest.raises(rlkit.StepOutcomeUnknown):
            stepping(policy).result()
    with connect(fake, resume_from=first, seed=None) as policy:
        assert draw(policy) == drawn  # the stream of seeds is that of this state
        stepping(policy).result()
        assert policy.forward(DATA).result().logprobs[0].tolist() == expected


# What each trouble says.


def test_no_key(monkeypatch, tmp_path):
    for name in ("TINKER_API_KEY", "TINKER_CREDENTIAL_CMD", "TINKER_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(rlkit.ConfigError, match=r"no API key; set TINKER_API_KEY"):
        rlkit.connect("tinker", model="toy", base_url="https://x.invalid", deadline=5.0)


def test_an_expired_session(fake, policy):
    sampler = policy.sampler().result()
    policy.forward_backward(DATA, "cross_entropy").result()
    fake.expire()
    with pytest.raises(rlkit.BackendError, match=r"expired \(410\); connect anew"):
        sampler.sample([65], PARAMS).result()
    with pytest.raises(rlkit.StepOutcomeUnknown, match=r"expired \(410\).*resume_from="):
        policy.optim_step(STEP).result()


def test_a_poisoned_client(policy):
    """By a loss of the user's own, given to the SDK itself."""
    datum = tinker.types.Datum(tinker.types.ModelInput.from_ints([1]), {"target_tokens": np.array([2])})
    with pytest.raises(ZeroDivisionError):
        policy.training_client.forward_backward_custom([datum], lambda data, logprobs: 1 / 0).result()
    with pytest.raises(rlkit.BackendError, match=r"earlier call of this client failed.*resume_from="):
        policy.forward_backward(DATA, "cross_entropy").result()


def test_the_end_of_a_deadline(fake, caplog):
    """Tells the SDK's last warning, such as of a pause for billing; the next call has a deadline of its own."""
    caplog.set_level(logging.WARNING, "tinker")
    with connect(fake, deadline=2.0) as policy:
        path = policy.save("x").result()
        fake.inject(Fault("402", "forward_backward", times=None), Fault("503", times=None))
        forward, others = policy.forward(DATA), [policy.saved(), policy.delete(path), policy.expire(path, 3600)]
        with pytest.raises(rlkit.BackendTimeout, match="last warning: .*paused due to billing"):
            forward.result()
        for call in others:
            assert not call.cancel()  # nobody knows whether it was carried out
            with pytest.raises(rlkit.BackendTimeout, match="no answer within 2 s"):
                call.result()
        fake.heal()


def test_a_service_that_does_not_answer_at_first(fake):
    """Connecting ends by its deadline, and what the SDK still tries ends once the service answers."""
    fake.inject(Fault("503", times=None))
    with pytest.raises(rlkit.BackendTimeout, match="connect to https.*no answer within 1 s"):
        connect(fake, deadline=1.0)
    fake.heal()
    for thread in threading.enumerate():
        if thread.name == "rlkit-tinker-connect":
            assert thread.daemon  # it keeps no program from ending
            thread.join(30)
            assert not thread.is_alive()


def test_what_a_service_in_trouble_would_have_said_is_not_guessed(fake, policy):
    """A resumed run without its stream of seeds, or a model of another length, would go wrong without a word."""
    path = policy.save("x").result()
    for status, endpoint, options, match in (
        ("402", "*", {}, r"billing is not settled \(402\)"),
        ("402", "create_model", {}, r"billing is not settled \(402\)"),
        ("403", "capabilities", {}, r"\(403\)"),
        ("403", "list_run_checkpoints", {"resume_from": path}, r"\(403\)"),
    ):
        fake.inject(Fault(status, endpoint, times=None))
        with pytest.raises(rlkit.BackendError, match=match):
            connect(fake, **{"deadline": 5.0, **options})
        fake.heal()
    for status in ("400", "404", "422"):  # it looked at the request, and found it wrong
        fake.inject(Fault(status, "create_model"))
        with pytest.raises(rlkit.ConfigError, match=rf"\({status}\)"):
            connect(fake)


# A mistake in a loss that runs here.


class Late:
    """A loss that does ``then`` where it gets what the model gave, after the trial inside the call."""

    def __init__(self, then):
        self.calls, self.then = 0, then

    def __call__(self, logprobs, weights):
        self.calls += 1
        value = -(logprobs.square() * weights).sum()
        return value if self.calls == 1 else self.then(value)


@pytest.mark.parametrize("call", ["forward", "forward_backward"])
def test_a_late_mistake_in_a_loss(fake, policy, call):
    """Passes through unchanged. A gradient that was to come of it ends the policy, and nothing after it is applied."""
    error = ZeroDivisionError("a mistake of the user's")
    error.__cause__ = KeyError("its cause")

    def fail(value):
        raise error

    failed = getattr(policy, call)(DATA, Late(fail))
    later = [policy.forward_backward(DATA, "cross_entropy"), policy.optim_step(STEP), policy.save("x")]
    with pytest.raises(ZeroDivisionError) as read:
        failed.result()
    assert read.value is error
    assert isinstance(read.value.__cause__, KeyError)
    if call == "forward":  # which changes nothing
        for future in later:
            future.result()
        return
    for future in [*later, policy.forward_backward(DATA, "cross_entropy")]:
        with pytest.raises(rlkit.TrainerFailed, match="resume_from=") as caught:
            future.result()
        assert caught.value.__cause__ is error
    assert [fake.count(x) for x in ("forward", "forward_backward", "optim_step", "save_weights")] == [1, 0, 0, 0]


def test_mistakes_that_send_no_gradient(fake, policy):
    """One that shows at once raises in the call; one that shows on what the model gave, where it is read."""
    with pytest.raises(ZeroDivisionError):
        policy.forward_backward(DATA, lambda logprobs, weights: 1 / 0)
    stepping(policy).result()
    assert [fake.count(x) for x in ("forward", "forward_backward", "optim_step")] == [0, 1, 1]
    with pytest.raises(rlkit.BackendError, match=r"non-finite gradient at data\[0\]"):
        policy.forward_backward(DATA, Late(lambda value: value * float("nan"))).result()
    assert [fake.count(x) for x in ("forward", "forward_backward", "optim_step")] == [1, 1, 1]


@pytest.mark.parametrize("call", ["forward", "forward_backward"])
def test_a_slow_loss_holds_up_no_sample(policy, call):
    """Losses run outside of the SDK's loop, which has heartbeats and other calls."""
    began, sampled = threading.Event(), threading.Event()

    def wait(value):
        began.set()
        assert sampled.wait(30)
        return value

    sampler = policy.sampler().result()
    slow = getattr(policy, call)(DATA, Late(wait))
    assert began.wait(30)
    sampler.sample([65], PARAMS).result()
    assert not slow.done()
    sampled.set()
    slow.result()


# The process and its signals.


def test_a_fork_is_refused(policy, monkeypatch):
    """It has no loop: its calls would wait for ever."""
    sampler = policy.sampler().result()
    with monkeypatch.context() as patch:
        patch.setattr(os, "getpid", lambda: -1)
        for call in (lambda: policy.forward(DATA), lambda: sampler.sample([65], PARAMS), policy.saved):
            with pytest.raises(rlkit.BackendError, match="a fork does not copy its thread"):
                call()
        patch.setattr(policy._calls, "_last", concurrent.futures.Future())  # as of a call that is not done
        policy._calls.close()


def test_a_call_that_cannot_be_sent(fake, policy, monkeypatch):
    """Changes nothing, and the step after it is not sent either; later calls are accepted."""

    def fail(*args):
        raise OSError("out of files")

    with monkeypatch.context() as patch:
        patch.setattr(policy.training_client, "forward_backward", fail)
        failed, step = policy.forward_backward(DATA, "cross_entropy"), policy.optim_step(STEP)
    for future, error in ((step, rlkit.TrainerFailed), (failed, OSError)):
        with pytest.raises(error, match="out of files"):
            future.result()
    assert fake.count("optim_step") == 0
    stepping(policy).result()
    assert fake.count("optim_step") == policy.version == 1


def test_an_interrupted_call_ends_the_policy(policy, monkeypatch):
    """Ctrl-C may come when the step was sent."""

    def interrupted(params):
        raise KeyboardInterrupt

    policy.forward_backward(DATA, "cross_entropy").result()
    monkeypatch.setattr(policy.training_client, "optim_step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        policy.optim_step(STEP)
    with pytest.raises(rlkit.TrainerFailed, match="resume_from="):
        policy.forward_backward(DATA, "cross_entropy").result()
