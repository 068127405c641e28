"""The Tinker backend over a service in trouble: no step twice, none lost, and errors that say what to do."""

from __future__ import annotations

import asyncio
import concurrent.futures
import itertools
import logging
import os
import re
import threading
import time

import numpy as np
import pytest

import rlkit
from benchmarks import faults as matrix
from rlkit.backends.tinker import _requests, connection, guard
from rlkit.testing import FakeTinker, Fault
from tests.each import for_each

tinker = pytest.importorskip("tinker", reason="needs the extra tinker")
httpx = pytest.importorskip("httpx")

STEP = rlkit.Adam(learning_rate=0.05)
PARAMS = rlkit.SamplingParams(max_tokens=4, stop=())
DATA = [rlkit.Datum([65, 66, 67, 68], [0, 0, 1, 1], inputs={"weights": 1.0})]
SHORT = 5.0  # seconds, where the end of the deadline is what is tested
LONG = 60.0  # where no call waits for that end, however busy the machine is


@pytest.fixture(autouse=True)
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


def side_by_side(work, items):
    """``work(item)`` for all items at once, since each waits for the SDK's pauses."""
    items = list(items)
    with concurrent.futures.ThreadPoolExecutor(min(len(items), 24)) as pool:
        return list(pool.map(work, items))


def steps(fake, expected):
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
PASSES = ("429", "500", "503", "reset", "timeout", "slow")  # what the SDK gets over


@pytest.fixture(scope="module")
def curve():
    log = logging.getLogger("tinker")
    level = log.level
    log.setLevel(logging.CRITICAL)
    yield matrix.undisturbed()
    log.setLevel(level)


def outcomes(curve, cells):
    """What became of the cells; none broke the promise or came to no end. A busy machine may make one late."""
    found = side_by_side(matrix.run, cells)
    for outcome in found:
        problems = [x for x in outcome.problems(curve) if x != "late"]
        assert not problems, (outcome.cell, problems, outcome.error, outcome.text)
        assert outcome.late < 30, outcome.cell
    return found


def test_faults_that_pass(curve):
    """Once, before and after, anywhere: the run completes, and its curve is bit for bit the undisturbed one."""
    cells = [matrix.Cell("slow", "after", *place, 1, deadline=LONG) for place in TRAINING]
    cells += [matrix.Cell(kind, "after", *place, 1, deadline=LONG) for kind, place in zip(PASSES, OTHERS, strict=True)]
    for outcome in outcomes(curve, cells):
        assert not outcome.error, (outcome.cell, outcome.text)


def test_faults_that_do_not_pass(curve):
    """The run ends with an error that says whether the step's outcome is known."""
    kinds = ("401", "410", "bad_json")
    cells = [
        matrix.Cell(kind, when, *place, 1, deadline=LONG)
        for kind, when, place in itertools.product(kinds, ("before", "after"), TRAINING)
    ]
    for outcome in outcomes(curve, cells):
        cell = outcome.cell
        expected = "StepOutcomeUnknown" if "optim_step" in (cell.endpoint, cell.operation) else "TrainerFailed"
        assert outcome.step_error == expected, (cell, outcome.text)


def test_a_service_that_stays_dead(curve):
    """The call that met it ends at its deadline, and so does closing."""
    kinds = zip(("503", "reset", "429", "timeout"), TRAINING, strict=True)
    cells = [matrix.Cell(kind, "after", *place, None) for kind, place in kinds]
    cells.append(matrix.Cell("reset", "before", "*", None, 14, None))
    for outcome in outcomes(curve, cells):
        assert outcome.error in ("StepOutcomeUnknown", "BackendTimeout"), outcome.cell


def test_a_service_that_takes_repeated_calls_for_new_ones(curve):
    """A training call whose answer is lost again and again is not sent again, so nothing is done twice there either."""
    cells = [
        matrix.Cell(kind, "after", *place, None, dedupe=False, deadline=LONG)
        for kind, place in itertools.product(("429", "503", "reset", "lost"), TRAINING[::2])
    ]
    for outcome in outcomes(curve, cells):
        expected = "StepOutcomeUnknown" if outcome.cell.endpoint == "optim_step" else "BackendError"
        assert outcome.error == expected, outcome.cell
        assert "not sent again" in outcome.text
        assert not outcome.doubled


def test_no_fault_of_a_training_call_is_a_double_or_a_lost_step(curve):
    """A request is sent again only where that does no harm: to fetch a result, or to a server that recognises it."""
    passing = ("429", "503", "reset")  # the SDK repeats after them; it does not after the others
    cells = [
        matrix.Cell(kind, when, *place, 1, dedupe=dedupe, deadline=LONG)
        for kind, when, place, dedupe in itertools.product(
            (*passing, "422", "redirect", "empty"), ("before", "after"), TRAINING, (True, False)
        )
    ]
    wrong = []
    for outcome in outcomes(curve, cells):
        cell = outcome.cell
        fetching = cell.endpoint == "retrieve_future"
        failed = "StepOutcomeUnknown" if "optim_step" in (cell.endpoint, cell.operation) else "BackendError"
        repeated = cell.kind in passing and (cell.dedupe or fetching)
        refused = cell.kind in passing and not repeated
        if outcome.error != ("" if repeated else failed) or refused > ("not sent again" in outcome.text):
            wrong.append((cell, outcome.error, outcome.text))
    assert not wrong


def test_an_operation_that_failed_on_the_service(curve):
    """Is the service's own word: the step was not applied, and the error does not say that this is unknown."""
    for outcome in outcomes(
        curve, [matrix.Cell("opfail", "before", *place, 1, deadline=LONG) for place in TRAINING[::2]]
    ):
        assert outcome.error == "BackendError", outcome.cell
        assert "the operation failed" in outcome.text
        sent_behind = outcome.cell.endpoint == "forward_backward"  # a step, which was carried out
        assert outcome.applied == outcome.steps + sent_behind == 1 + sent_behind


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


# Sending again.


def test_the_word_of_the_user_is_taken():
    """With resend=True the SDK sends a lost step again; a server that was praised too much takes it twice."""
    with FakeTinker(dedupe=False, faults=[Fault("reset", "optim_step", when="after")]) as fake:
        with connect(fake, resend=True) as policy:
            stepping(policy).result()
        assert [x.operation for x in fake.doubled()] == ["optim_step"]


def test_a_server_that_recognises_repeats_is_not_trusted_with_resend_false():
    with FakeTinker(faults=[Fault("reset", "optim_step", when="after")]) as fake, connect(fake, resend=False) as policy:
        with pytest.raises(rlkit.StepOutcomeUnknown, match=r"lost.*resend=True"):
            stepping(policy).result()
        assert steps(fake, 1) == 1
        assert sum(x.endpoint == "optim_step" for x in fake.requests) == 1


def test_logprobs_are_asked_for_again_anywhere():
    """A forward pass changes nothing, so it is repeated on any server; and so is what is not training."""
    lost = [Fault("reset", "forward_backward", when="after"), Fault("503", "asample", when="after")]
    with FakeTinker(dedupe=False, faults=lost) as fake, connect(fake) as policy:
        assert policy.forward(DATA).result().logprobs[0].shape == (4,)
        policy.sampler().result().sample([65], PARAMS).result()
        assert fake.count("forward") == 2


@pytest.mark.parametrize("value", [1, "yes"])
def test_resend_is_a_flag(fake, value):
    with pytest.raises(rlkit.ConfigError, match=r"resend.*True or False"):
        connect(fake, resend=value)


def test_resend_goes_with_a_connection_of_rlkit_s_own(fake):
    with pytest.raises(rlkit.ConfigError, match=r"resend.*client="):
        rlkit.connect("tinker", model="toy", client=fake.service_client(), resend=False)


# The guard, on its own.


def request(path, body=b"{}", **headers):
    return httpx.Request("POST", f"https://x.invalid/api/v1/{path}", content=body, headers=headers)


def sent(link, *answers, path="optim_step", body=b"{}", **headers):
    """(the last answer or its exception, how many requests were sent) of as many sends as there are answers."""
    left, count = list(answers), itertools.count()

    async def send(asked):
        next(count)
        answer = left.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return httpx.Response(request=asked, **answer)

    async def all_of_them():
        for _ in answers:
            try:
                last = await link.send(send, request(path, body, **headers))
            except Exception as error:
                last = error
        return last

    return asyncio.run(all_of_them()), next(count)


@for_each("status", [402, 408, 409, 429, 500, 503])
def test_an_answer_that_the_sdk_would_repeat_after(status):
    """Becomes one that it does not, with what the server said."""
    answer, _ = sent(guard.Link(resend=False), {"status_code": status, "json": {"detail": "busy"}})
    assert answer.status_code == guard.LOST
    assert f"{status}: busy" in answer.json()["detail"]
    again, _ = sent(guard.Link(resend=True), {"status_code": status, "json": {"detail": "busy"}})
    assert again.status_code == status


@for_each("status", [200, 307, 400, 401, 404, 422])
def test_an_answer_that_it_would_not_repeat_after_is_left_alone(status):
    answer, _ = sent(guard.Link(resend=False), {"status_code": status, "json": {"detail": "no"}})
    assert answer.status_code == status


def test_a_call_that_never_arrived_is_tried_again():
    for error in (httpx.ConnectError("refused"), httpx.ConnectTimeout("late"), httpx.PoolTimeout("full")):
        assert sent(guard.Link(resend=False), error)[0] is error


def test_a_call_that_may_have_arrived_is_not():
    for error in (httpx.ReadError("reset"), httpx.ReadTimeout("late"), httpx.RemoteProtocolError("gone")):
        answer, _ = sent(guard.Link(resend=False), error)
        assert answer.status_code == guard.LOST
        assert type(error).__name__ in answer.json()["detail"]


@pytest.mark.parametrize("compressed", [False, True])
@pytest.mark.parametrize("forward_only", [False, True])
def test_forward_passes_are_told_from_gradients(forward_only, compressed):
    import zstandard
    from tinker.proto import tinker_public_pb2 as messages

    body = messages.ForwardBackwardRequest(model_id="m", forward_only=forward_only).SerializeToString()
    headers = {"content-encoding": "zstd"} if compressed else {}
    body = zstandard.ZstdCompressor().compress(body) if compressed else body
    answer, _ = sent(guard.Link(resend=False), {"status_code": 503}, path="forward_backward", body=body, **headers)
    assert answer.status_code == (503 if forward_only else guard.LOST)


def test_a_server_says_that_it_recognises_repeats():
    link = guard.Link(resend=None)
    sent(link, {"status_code": 200, "headers": {guard.DEDUPLICATES: "1"}}, path="client/config")
    assert sent(link, {"status_code": 503})[0].status_code == 503
    strict = guard.Link(resend=False)
    sent(strict, {"status_code": 200, "headers": {guard.DEDUPLICATES: "1"}}, path="client/config")
    assert sent(strict, {"status_code": 503})[0].status_code == guard.LOST


def test_a_closed_connection_sends_nothing():
    link = guard.Link(resend=True)
    link.closed = True
    answer, count = sent(link, {"status_code": 200})
    assert (answer.status_code, count) == (guard.LOST, 0)


@pytest.mark.parametrize("failure", [{"status_code": 503}, {"status_code": 429}, httpx.ConnectError("refused")])
def test_a_server_in_trouble_is_asked_slowly(failure):
    start = time.monotonic()
    sent(guard.Link(resend=True), *[failure] * 6)
    assert time.monotonic() - start >= 3 * 0.3


def test_a_server_that_is_well_again_is_asked_at_once():
    """However many requests were waiting for their turn."""

    async def run():
        link, answers = guard.Link(resend=True), itertools.chain([503, 503, 503], itertools.repeat(200))

        async def send(asked):
            return httpx.Response(next(answers), request=asked)

        for _ in range(2):
            await link.send(send, request("asample"))
        start = time.monotonic()
        await asyncio.gather(*(link.send(send, request("asample")) for _ in range(100)))
        return time.monotonic() - start

    assert asyncio.run(run()) < 100 * 0.3 / 2


def test_requests_to_a_dead_server(fake):
    """Under five per second, whatever is in flight; and none once it is closed."""
    policy = connect(fake, deadline=SHORT)
    sampler = policy.sampler().result()
    first = len(fake.requests)
    fake.inject(Fault("503", times=None))
    calls = [policy.forward_backward(DATA, "cross_entropy"), policy.optim_step(STEP), policy.save("x")]
    calls += [sampler.sample([65], PARAMS) for _ in range(4)]
    for call in calls:
        with pytest.raises(rlkit.RlkitError):
            call.result()
    times = [x.time for x in fake.requests[first:]]
    assert (len(times) - 5) / (times[-1] - times[0]) < 5  # five were sent before the first of them failed
    policy.close()
    count = len(fake.requests)
    time.sleep(1.0)
    assert len(fake.requests) == count


def test_a_connection_that_was_given_up_is_not_tried_for_ever(fake):
    before = threading.active_count()
    fake.inject(Fault("503", times=None))
    with pytest.raises(rlkit.BackendTimeout, match=r"connect to https.*\(503\)"):
        connect(fake, deadline=2.0)
    until = time.monotonic() + 20.0
    while threading.active_count() > before and time.monotonic() < until:
        time.sleep(0.1)
    assert not [t for t in threading.enumerate() if t.name == "rlkit-tinker-connect"]


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
    asked = request("optim_step")
    if isinstance(status, int):
        made = kind("refused", response=httpx.Response(status, request=asked), body={"detail": "refused"})
    elif status is None:
        made = kind(request=asked)
    else:
        made = kind(status, request_id="x", category=tinker.types.RequestErrorCategory.User)
    found = connection.translate("optim_step", made, step=True)
    assert type(found) is (rlkit.BackendError if known else rlkit.StepOutcomeUnknown)
    assert found.__cause__ is made
    assert ("resume_from=" in str(found)) is not known
    assert type(connection.translate("forward_backward", made)) is rlkit.BackendError


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
        assert (policy.version, steps(fake, 1)) == (0, 1)
    assert sum(x.endpoint == "optim_step" for x in fake.requests) == 1


def test_saving_behind_a_failed_gradient_says_that_it_failed(fake):
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


def test_nobody_there():
    with pytest.raises(rlkit.BackendError, match=r"no answer from http://127\.0\.0\.1:9\b.*is the server running"):
        rlkit.connect("tinker", model="toy", base_url="http://127.0.0.1:9", api_key="tml-x", deadline=3.0)


def test_no_key(monkeypatch, tmp_path):
    for name in ("TINKER_API_KEY", "TINKER_CREDENTIAL_CMD", "TINKER_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(rlkit.ConfigError, match=r"no API key; set TINKER_API_KEY"):
        rlkit.connect("tinker", model="toy", base_url="https://x.invalid", deadline=SHORT)


@pytest.mark.parametrize("key", ["sk-0123456789", "TML-0123456789", " tml-0123456789"])
def test_a_key_of_another_form(key):
    with pytest.raises(rlkit.ConfigError, match=r"api_key.*starts with 'tml-'") as caught:
        rlkit.connect("tinker", model="toy", base_url="https://x.invalid", api_key=key)
    assert key.strip() not in str(caught.value)


def test_a_wrong_key(fake):
    with pytest.raises(rlkit.BackendError, match=r"API key \(401\).*TINKER_API_KEY"):
        connect(fake, api_key="tml-wrong-key")


def test_an_unknown_model(fake):
    with pytest.raises(rlkit.ConfigError, match=r"no 'tyo'; did you mean 'toy'"):
        connect(fake, model="tyo")


def test_a_rank_too_large(fake):
    with pytest.raises(rlkit.ConfigError, match=r"rank is 1000.*limit is 128"):
        connect(fake, lora=rlkit.Lora(rank=1000))


@pytest.mark.parametrize("option", ["resume_from", "init_from"])
def test_an_unknown_path(fake, option):
    with pytest.raises(rlkit.CheckpointError, match=rf"{option}: tinker://nobody/weights/a: .*\(404\)"):
        connect(fake, **{option: "tinker://nobody/weights/a"})
    with pytest.raises(rlkit.CheckpointError, match=rf"{option}: 'elsewhere' is not a saved state"):
        connect(fake, **{option: "elsewhere"})


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
    """By a loss of the user's own, given to the SDK behind rlkit's back."""
    datum = tinker.types.Datum(tinker.types.ModelInput.from_ints([1]), {"target_tokens": np.array([2])})
    with connect(fake) as policy:
        with pytest.raises(ZeroDivisionError):
            policy.training_client.forward_backward_custom([datum], lambda data, logprobs: 1 / 0).result()
        with pytest.raises(rlkit.BackendError, match=r"earlier call of this client failed.*resume_from="):
            policy.forward_backward(DATA, "cross_entropy").result()


WAITING = {
    "paused_capacity": ("retrieve_future", "paused_capacity"),
    "paused_rate_limit": ("retrieve_future", "paused_rate_limit"),
    "429": ("*", r"has no capacity, or the rate limit is reached \(429\)"),
    "402": ("*", r"billing is not settled \(402\)"),
    "503": ("*", r"the service failed \(503\)"),
    "reset": ("*", r"cannot be reached: ReadError"),
    "409": ("save_weights", r"one of the same name \(409\)"),
}


def test_what_was_waited_for():
    """A call that ended by its deadline says what the SDK was trying to get over."""

    def told(kind, endpoint, deadline):
        with FakeTinker() as fake, connect(fake, deadline=deadline) as policy:
            try:
                sampler = policy.sampler().result()
                fake.inject(Fault(kind, endpoint, times=None, seconds=0.2))
                (policy.save("x") if kind == "409" else sampler.sample([65], PARAMS)).result()
            except rlkit.BackendTimeout as error:
                return str(error)
            finally:
                fake.heal()
        return "no deadline ended it"

    def work(kind):
        endpoint, words = WAITING[kind]
        answers = [told(kind, endpoint, SHORT)]
        while not re.search(words, answers[-1]) and len(answers) < 4:  # a slow machine may not have asked yet
            answers.append(told(kind, endpoint, SHORT * 2 ** len(answers)))
        assert re.search(words, answers[-1]), answers

    side_by_side(work, WAITING)


@pytest.mark.parametrize("endpoint", ["*", "create_model"])
def test_billing_while_connecting(fake, endpoint):
    fake.inject(Fault("402", endpoint, times=None))
    with pytest.raises(rlkit.BackendError, match=r"billing is not settled \(402\)"):
        connect(fake)


@pytest.mark.parametrize(("endpoint", "option"), [("capabilities", {}), ("list_run_checkpoints", {"resume_from": ...})])
def test_what_a_service_in_trouble_would_have_said_is_not_guessed(fake, endpoint, option):
    """A resumed run without its stream of seeds, or a model of another length, would go wrong without a word."""
    with connect(fake) as policy:
        path = policy.save("x").result()
    fake.inject(Fault("403", endpoint, times=None))
    with pytest.raises(rlkit.BackendError, match=r"\(403\)"):
        connect(fake, **dict.fromkeys(option, path))
    fake.heal()
    fake.inject(Fault("404", endpoint, times=None))  # a server that has no such thing
    connect(fake, **dict.fromkeys(option, path)).close()


def test_saved_states_are_asked_for_with_a_deadline(fake):
    with connect(fake, deadline=SHORT) as policy:
        path = policy.save("x").result()
        fake.inject(Fault("503", times=None))
        calls = [policy.saved(), policy.delete(path), policy.expire(path, 3600)]
        for call in calls:
            with pytest.raises(rlkit.BackendTimeout, match=r"\(503\)"):
                call.result()
        fake.heal()


def test_deadlines_that_were_not_needed_leave_nothing(fake):
    """A run of days makes millions of requests, each with a deadline of half an hour."""
    before = len(_requests._clock(os.getpid())._scheduled)  # asyncio clears cancelled ones away from 100 on
    with connect(fake, deadline=1800.0) as policy:
        sampler = policy.sampler().result()
        for _ in range(5):
            for call in [sampler.logprobs([65, 66]) for _ in range(30)]:
                call.result()
    assert len(_requests._clock(os.getpid())._scheduled) <= before + 2 * 100 + 30


def test_timers():
    """They come in order, a cancelled one never does."""
    came, done = [], threading.Event()
    _requests.after(0.2, done.set)
    cancels = [_requests.after(0.1, lambda i=i: came.append(i)) for i in range(300)]
    for cancel in cancels[::2]:
        cancel()
        cancel()
    assert done.wait(60)
    assert came == list(range(1, 300, 2))
    cancels[1]()  # it has been


# A mistake in a loss that runs here.


def good(logprobs, weights):
    return -(logprobs.square() * weights).sum()


def raising(logprobs, weights):
    """Passes the trial inside the call, and fails on what the model gave."""
    if threading.current_thread() is not threading.main_thread():
        raise ZeroDivisionError("a mistake of the user's")
    return good(logprobs, weights)


def not_finite(logprobs, weights):
    """The same, without a word."""
    return good(logprobs, weights) * (1.0 if threading.current_thread() is threading.main_thread() else float("nan"))


@pytest.mark.parametrize(("bad", "error"), [(raising, ZeroDivisionError), (not_finite, rlkit.BackendError)])
def test_a_mistake_in_a_loss_leaves_everything_unsent(bad, error):
    """Read, and the run goes on: what was accumulated is there, and all that follows is bit for bit the same."""

    def run(mistake):
        with FakeTinker(seed=0) as fake, connect(fake) as policy:
            found = [policy.forward_backward(DATA, "cross_entropy").result().metrics["loss:sum"]]
            if mistake is not None:
                failed = policy.forward_backward(DATA, mistake)
                behind = [policy.forward_backward(DATA, good), policy.optim_step(STEP), policy.save("x")]
                for future in behind:
                    with pytest.raises(rlkit.TrainerFailed) as caught:
                        future.result()
                with pytest.raises(error) as read:
                    failed.result()
                assert caught.value.__cause__ is read.value
            found.append(policy.forward_backward(DATA, good).result().metrics["loss:sum"])
            for _ in range(2):
                found.append(policy.optim_step(STEP).result()["grad_norm:mean"])
                found.append(policy.forward_backward(DATA, "cross_entropy").result().logprobs[0].tolist())
            counts = [fake.count(x) for x in ("forward_backward", "optim_step", "save_weights")]
            return found, counts

    assert run(bad) == run(None)


def test_a_mistake_that_shows_at_once_raises_in_the_call(fake):
    with connect(fake) as policy:
        with pytest.raises(ZeroDivisionError):
            policy.forward_backward(DATA, lambda logprobs, weights: 1 / 0)
        stepping(policy).result()
        assert fake.count("forward_backward") == fake.count("optim_step") == 1
        assert fake.count("forward") == 0
