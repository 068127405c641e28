"""A canary as the API key: it goes to the service in a header, and nowhere else."""

from __future__ import annotations

import base64
import contextlib
import copy
import http.server
import io
import itertools
import json
import logging
import pickle
import threading
import traceback
import urllib.parse

import pytest

import rlkit
from rlkit.backends.tinker import guard
from rlkit.testing import FakeTinker, Fault
from tests.each import for_each

tinker = pytest.importorskip("tinker", reason="needs the extra tinker")
httpx = pytest.importorskip("httpx")

KEY = "tml-cAnArY/9f8e7d6c+5b4a=Zq"  # characters that look different in a URL
STEP = rlkit.Adam(learning_rate=0.05)
PARAMS = rlkit.SamplingParams(max_tokens=4, stop=())
DATA = [rlkit.Datum([65, 66, 67, 68], [0, 0, 1, 1], inputs={"weights": 1.0})]


def written(key):
    """The ways in which a key may be written."""
    found = {key, urllib.parse.quote(key), urllib.parse.quote(key, safe=""), urllib.parse.quote_plus(key)}
    found |= {key[4:], json.dumps(key)[1:-1], repr(key)[1:-1], key.encode().hex()}
    for before, after in itertools.product(range(3), range(3)):  # every place in a longer text
        raw = b"\0" * before + key.encode() + b"\0" * after
        for text in (base64.b64encode(raw), base64.urlsafe_b64encode(raw)):
            found.add(text.decode()[(before * 8 + 5) // 6 : (before + len(key)) * 8 // 6])
    return found


FORMS = written(KEY)


def hits(text):
    """The canaries in it."""
    text = text.decode("utf-8", "replace") if isinstance(text, bytes) else str(text)
    return sorted(form for form in FORMS if form in text)


class Echo(FakeTinker):
    """Its key is the canary, and it puts the request's headers into every error that it answers with."""

    def __init__(self, **options):
        super().__init__(**options)
        self.api_key = KEY
        self.service._keys = [KEY.encode()]
        self.sent = []

    async def respond(self, request):
        self.sent.append((request.url.path, request.content))
        answer = await super().respond(request)
        if answer.status_code < 400 or answer.status_code == 408:
            return answer
        key = request.headers.get("x-api-key", "")
        said = f"{key} {base64.b64encode(key.encode()).decode()} {urllib.parse.quote(key, safe='')}"
        detail = {"detail": f"refused with {said}", "headers": [[k, v] for k, v in request.headers.items()]}
        return httpx.Response(answer.status_code, json=detail, request=request)


@pytest.fixture
def fake():
    with Echo(seed=0) as fake:
        yield fake


def connect(fake, **options):
    where = {"base_url": fake.base_url, "api_key": KEY}
    return rlkit.connect("tinker", **{**where, "model": "toy", "seed": 0, "deadline": 30.0, **options})


class Kept(logging.Handler):
    """Everything of every record, as text."""

    def __init__(self):
        super().__init__(logging.DEBUG)
        self.texts = []

    def emit(self, record):
        with contextlib.suppress(TypeError, ValueError):
            self.texts.append(self.format(record))
        self.texts.append(repr({k: v for k, v in vars(record).items() if k != "exc_info"}))
        if record.exc_info:
            self.texts.append("".join(traceback.format_exception(*record.exc_info)))


@pytest.fixture
def debug():
    """Logging of everything, at DEBUG, by a handler of the root's."""
    handler, root = Kept(), logging.getLogger()
    level, levels = root.level, {name: logging.getLogger(name).level for name in ("tinker", "httpx", "httpcore")}
    root.addHandler(handler)
    root.setLevel(logging.DEBUG)
    for name in levels:
        logging.getLogger(name).setLevel(logging.DEBUG)
    yield handler
    root.removeHandler(handler)
    root.setLevel(level)
    for name, value in levels.items():
        logging.getLogger(name).setLevel(value)


def used(fake):
    """A run of everything; what it gave, and the objects that it left."""
    policy = connect(fake, metadata={"note": "hello"})
    sampler = policy.sampler().result()
    given = [sampler.sample([65], PARAMS, n=2).result(), policy.forward_backward(DATA, "cross_entropy").result()]
    given.append(policy.optim_step(STEP).result())
    path = policy.save("x", sampler=True).result()
    given += [path, policy.saved().result(), policy.capabilities(), policy.route(DATA, "cross_entropy")]
    connect(fake, resume_from=path).close()
    return policy, sampler, given


def chain(error):
    """An error and all that are attached to it."""
    found, left = [], [error]
    while left:
        current = left.pop()
        if current is not None and current not in found:
            found.append(current)
            left += [current.__cause__, current.__context__]
    return found


def check(error):
    """Nothing of the key is in the error, in any form that it may be shown or kept in."""
    assert not hits("".join(traceback.format_exception(error)))
    for each in chain(error):
        texts = [str(each), repr(each), repr(each.args), str(getattr(each, "message", "")), repr(vars(each))]
        texts.append(repr(getattr(each, "body", "")))
        with contextlib.suppress(Exception):
            texts.append(pickle.dumps(each))
        assert not [hit for text in texts for hit in hits(text)], type(each)


# What is shown and kept.


def test_the_canary_is_found():
    """In each form, so that finding none means something."""
    for text in (
        KEY,
        base64.b64encode(b"x-api-key: " + KEY.encode()),
        urllib.parse.quote(KEY),
        [KEY],
        KEY.encode().hex(),
    ):
        assert hits(text)
    assert hits(base64.urlsafe_b64encode(b"ab" + KEY.encode() + b"cd"))
    assert not hits("tml-another")


def test_objects_and_results(fake):
    policy, sampler, given = used(fake)
    objects = [policy, sampler, policy.service_client, policy.training_client, policy._session, policy._queue]
    for each in [*objects, *given, policy._session.link, policy._sending]:
        assert not hits(repr(each))
        assert not hits(str(each))
        assert not hits(f"{each}")
    policy.close()


def test_pickles_and_copies(fake):
    """Are refused, or hold nothing."""
    policy, sampler, given = used(fake)
    for each in (policy, sampler):
        with pytest.raises(TypeError, match="can ?not be pickled"):
            pickle.dumps(each)
        with pytest.raises(TypeError, match="can ?not be pickled"):
            copy.deepcopy(each)
    for each in (policy._session, policy._queue, policy._session.link, policy._sending, *given):
        kept = b""
        with contextlib.suppress(TypeError, AttributeError, pickle.PicklingError):
            kept = pickle.dumps(each)
        assert not hits(kept)
    policy.close()


def test_saved_states(fake):
    """What is kept beside a saved state, and sent with it."""
    policy, _, _ = used(fake)
    listed = fake.rest_client().list_checkpoints(policy.training_client.model_id).result()
    assert [c.user_metadata["note"] for c in listed.checkpoints if c.user_metadata and "note" in c.user_metadata]
    assert not hits(listed.model_dump_json())
    policy.close()
    bodies = [body for _, body in fake.sent]
    assert len(bodies) > 20
    assert not [hit for body in bodies for hit in hits(body)]


def test_telemetry(monkeypatch):
    """The SDK reports fatal errors with the headers of the request."""
    monkeypatch.setenv("TINKER_TELEMETRY", "1")
    with Echo(seed=0, telemetry=True) as fake:
        policy = connect(fake)
        fake.inject(Fault("401", "retrieve_future", operation="forward_backward"))
        with pytest.raises(rlkit.BackendError):
            policy.forward_backward(DATA, "cross_entropy").result()
        fake.heal()
        policy.close()
    reports = [body for path, body in fake.sent if path.endswith("/telemetry")]
    assert any(b"api_status_error" in body for body in reports)
    assert not [hit for body in reports for hit in hits(body)]


# Errors, from a service that says the key back.


@pytest.mark.parametrize("kind", ["400", "401", "403", "404", "410", "503", "reset", "bad_json"])
def test_errors(fake, kind):
    """Of training, sampling, saving and resuming."""
    with connect(fake, deadline=5.0, resend=False) as policy:
        sampler = policy.sampler().result()
        path = policy.save("x").result()
        for endpoint, call in (
            ("asample", lambda: sampler.sample([65], PARAMS)),
            ("save_weights", lambda: policy.save("y")),
            ("optim_step", lambda: (policy.forward_backward(DATA, "cross_entropy"), policy.optim_step(STEP))[1]),
            ("forward_backward", lambda: policy.forward(DATA)),
        ):
            if kind in ("503", "reset") and endpoint != "optim_step":
                continue  # they pass, or end by the deadline as the last one does
            fake.inject(Fault(kind, endpoint, times=None))
            with pytest.raises(rlkit.RlkitError) as caught:
                call().result()
            check(caught.value)
            fake.heal()
        fake.inject(Fault(kind, "create_session" if kind in ("503", "reset") else "load_weights", times=None))
        with pytest.raises(rlkit.RlkitError) as caught:
            connect(fake, deadline=2.0, resume_from=path)
        check(caught.value)
        fake.heal()


def test_an_error_of_a_wrong_key(fake):
    wrong = KEY.replace("cAnArY", "wRoNg0")
    with pytest.raises(rlkit.BackendError, match="401") as caught:
        connect(fake, api_key=wrong)
    shown = "".join(traceback.format_exception(caught.value)) + repr([vars(e) for e in chain(caught.value)])
    assert not [form for form in written(wrong) if form in shown]


def test_a_key_that_looks_like_none_is_hidden_as_well(monkeypatch):
    """From the environment, whatever it is."""
    monkeypatch.setenv("TINKER_API_KEY", "pa55word-of-another-kind")
    with pytest.raises(rlkit.ConfigError) as caught:
        rlkit.connect("tinker", model="toy", base_url="https://x.invalid")
    assert "pa55word" not in "".join(traceback.format_exception(caught.value))


# Logs.


def test_logs(fake, debug):
    policy, _, _ = used(fake)
    fake.inject(Fault("503", "forward_backward"), Fault("401", "forward_backward"))
    with pytest.raises(rlkit.BackendError):
        policy.forward_backward(DATA, "cross_entropy").result()
    policy.close()
    assert any("api/v1/optim_step" in text for text in debug.texts)
    assert any("refused with" in text for text in debug.texts)
    assert not [hit for text in debug.texts for hit in hits(text)]


@pytest.mark.parametrize("name", ["tinker.made.later", "httpx.later", "httpcore.later"])
def test_loggers_that_are_made_later(fake, debug, name):
    """And whatever way a record is given its text."""
    connect(fake).close()
    logger = logging.getLogger(name)
    logger.debug("plain %s", KEY)
    logger.debug("%(a)s", {"a": [KEY]})
    logger.debug(KEY)
    logger.debug("bytes %r in base64 %s", [(b"X-API-Key", KEY.encode())], base64.b64encode(KEY.encode()).decode())
    logger.debug("badly formatted %d", KEY)
    try:
        raise ValueError(f"with {KEY}")
    except ValueError:
        logger.exception("an error")
    assert len(debug.texts) > 6
    assert not [hit for text in debug.texts for hit in hits(text)]


def test_other_loggers_are_left_alone(fake, debug):
    connect(fake).close()
    logging.getLogger("mine").debug("kept %s", "as it is")
    assert "kept as it is" in debug.texts
    assert any("'args': ('as it is',)" in text for text in debug.texts)


def test_a_handler_of_a_logger_s_own(fake):
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    logger = logging.getLogger("httpcore.http11")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    try:
        connect(fake).close()
        logger.debug("send_request_headers.started request=%r", [(b"x-api-key", KEY.encode())])
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
    assert "***" in stream.getvalue()
    assert not hits(stream.getvalue())


# Over sockets: where the key goes.


class Server(http.server.ThreadingHTTPServer):
    """Answers on loopback with what ``answer(path)`` gives: (status, headers, body); remembers all that it got."""

    daemon_threads = True

    def __init__(self, answer):
        self.got = []
        server = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self):
                body = self.rfile.read(int(self.headers.get("content-length") or 0))
                server.got.append((self.path, dict(self.headers), body))
                status, headers, content = answer(self.path)
                self.send_response(status)
                for name, value in {**headers, "content-length": str(len(content))}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(content)

            do_GET = do_PUT = do_DELETE = do_POST  # names of the library's

            def log_message(self, *args):
                """Not on the screen."""

        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self._thread = threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        self._thread.start()

    def __exit__(self, *exc):
        self.shutdown()
        self._thread.join()
        super().__exit__(*exc)


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
@pytest.mark.parametrize("pyqwest", [False, True])
@pytest.mark.parametrize("first", ["client/config", "create_session"])
def test_redirects_are_not_followed(status, pyqwest, first):
    """Neither by httpx nor by the SDK's other transport, from the first request or a later one."""
    config = {"pjwt_auth_enabled": False, "use_pyqwest_transport": pyqwest}

    with Server(lambda path: (200, {"content-type": "application/json"}, b"{}")) as other:

        def answer(path):
            if first != "client/config" and not path.endswith(first):
                return 200, {"content-type": "application/json"}, json.dumps(config).encode()
            return status, {"location": other.url + path}, b""

        with Server(answer) as server:
            with pytest.raises(rlkit.BackendError, match=rf"redirects \({status}\)") as caught:
                rlkit.connect("tinker", model="toy", base_url=server.url, api_key=KEY, deadline=10.0)
            check(caught.value)
            assert any(KEY in headers.values() for _, headers, _ in server.got)
        assert not [path for path, headers, _ in other.got if "/api/" in path or KEY in headers.values()]


def test_logs_of_real_requests(debug):
    """httpcore writes headers, httpx addresses, the SDK whole requests."""
    with Server(
        lambda path: (401, {"content-type": "application/json"}, json.dumps({"detail": KEY}).encode())
    ) as server:
        with pytest.raises(rlkit.BackendError, match=r"\(401\)") as caught:
            rlkit.connect("tinker", model="toy", base_url=server.url, api_key=KEY, deadline=10.0)
        check(caught.value)
        assert server.got[0][1]["X-API-Key"] == KEY
    assert any("send_request_headers" in text for text in debug.texts)
    assert not [hit for text in debug.texts for hit in hits(text)]


@for_each(
    "url",
    [
        "http://example.com",
        "http://10.0.0.1:8000",
        "http://127.0.0.1.example.com",
        "http://localhost.example.com",
        "http://[2001:db8::1]",
        "https://user:pa55word@example.com",
        "https://user@example.com",
        "http://user:pa55word@127.0.0.1:8000",
        "ftp://user:pa55word@example.com",
        "//user:pa55word@example.com",
        "user:pa55word@example.com",
        "ftp://example.com",
        "example.com",
        "https://",
        "http://[::1",
    ],
)
@for_each("way", ["option", "environment"])
def test_addresses_that_would_show_the_key(url, way, monkeypatch):
    monkeypatch.setenv("TINKER_BASE_URL", url)
    options = {"base_url": url} if way == "option" else {}
    with pytest.raises(rlkit.ConfigError, match="base_url") as caught:
        rlkit.connect("tinker", model="toy", api_key=KEY, deadline=2.0, **options)
    assert "pa55word" not in "".join(traceback.format_exception(caught.value))
    check(caught.value)


@pytest.mark.parametrize(
    "url", ["http://127.0.0.1:9", "http://localhost:9", "http://[::1]:9", "https://example.com/a/b"]
)
def test_addresses_that_may_be_used(url):
    from rlkit.backends.tinker.connection import _checked_address

    assert _checked_address(url) is url.startswith("http:")


# After closing.


def test_nothing_runs_on(fake):
    """But the SDK's loop, and one clock for the process."""
    connect(fake).close()
    before = set(threading.enumerate())
    for _ in range(3):
        policy, sampler, _ = used(fake)
        sampler.close()
        policy.close()
        policy.close()
        with pytest.raises(rlkit.BackendError, match="closed"):
            policy.forward(DATA)
    connected = [t for t in set(threading.enumerate()) - before if t.name.startswith("rlkit-tinker")]
    for thread in connected:
        thread.join(60)
    left = {t.name for t in set(threading.enumerate()) - before if t.is_alive()}
    of_server = ("rlkit-serve", "rlkit-toy", "asyncio")  # itself, its models, its pool
    assert not [name for name in left if not name.startswith(of_server) and name != "rlkit-tinker-clock"]


def test_redacting():
    """Known keys in any form, and what looks like one."""
    guard.add_secret(KEY)
    for form in FORMS - {KEY[4:], KEY.encode().hex()}:
        assert not hits(guard.redact(f"a {form} b")), form
    assert guard.redact("x tml-abc_123.def-4 y") == "x *** y"
    assert guard.redact("Bearer abcdefgh1234") == "Bearer ***"
    assert guard.redact("nothing here") == "nothing here"
