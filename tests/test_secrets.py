"""Keys stay out of everything that is logged, and ordinary texts stay as they are."""

from __future__ import annotations

import base64
import gzip
import json
import logging
import os
import re
import time
import urllib.parse

import numpy as np

from rlkit import Sample
from rlkit._secrets import add_secret, is_secret_name, redact
from rlkit.report import write
from rlkit.tracking import Jsonl, MultiTracker, mask
from rlkit.trajectory import Failure, Group, Trajectory, Turn
from tests.each import for_each

CANARY = "canary+7f3a/91c2=e5d8"
FORMS = [
    *(CANARY, urllib.parse.quote(CANARY, safe=""), json.dumps(CANARY)[1:-1], CANARY.encode().hex()),
    *(base64.b64encode(b"x" * n + CANARY.encode()).decode().rstrip("=")[4 + 4 * (n > 0) : -4] for n in range(3)),
]
HEX = "9f8e7d6c5b4a39281706f5e4d3c2b1a0"
WORD = "aB3dE5fG7hJ9kL1mN2pQ4rS6"  # 24 letters and digits


def test_names():
    telling = """api_key apiKey API-KEY WANDB_API_KEY hf_token token TINKER_KEY judge_key password db_password passwd
        secrets client_secret aws_secret_access_key Authorization private_key credentials accessToken SOME_AUTH"""
    other = """max_tokens tokens tokenizer eos_token pad_token sort_key prompt_key key monkey learning_rate secretary
        author authored token_count keyboard loss_per_token OLDPWD n"""
    assert [name for name in telling.split() if not is_secret_name(name)] == []
    assert [name for name in other.split() if is_secret_name(name)] == []


def test_settings():
    """Under a telling name whatever may be a secret is masked, also in lists and mappings; the rest keeps its type."""
    nested = {"deep": [{"secrets": ["a", {"x": "b"}]}], "password": 12345, "api_key": b"abc", "token": np.array(["x"])}
    masked = {"deep": [{"secrets": ["***", {"x": "***"}]}], "password": "***", "api_key": "***", "token": ["***"]}
    assert mask(nested) == masked
    plain = {"a": 1, "b": [True, None, 0.5], "api_key": None, "password": "", "my_token": 0.5, "secret": "/a/b.json"}
    assert mask(plain) == plain
    assert mask({f"sk-{WORD}": (1, 2)}) == {"***": [1, 2]}, "names may hold keys, too"


def test_lists_of_arguments():
    given = ["serve", "--api-key", "hush", "--port", "80", "--token=hush", "--password", "--verbose", "x"]
    assert mask(given) == ["serve", "--api-key", "***", "--port", "80", "--token=***", "--password", "--verbose", "x"]
    harmless = ["--max-tokens", "512", "--tokenizer", "gpt2", "--sort-key", "score"]
    assert mask({"argv": tuple(harmless)})["argv"] == harmless


KEYS = f"""sk-proj-{WORD} sk-ant-api03-{WORD}-{WORD} sk-or-v1-{HEX}{HEX} hf_{"aBcDe" * 7} ghp_{WORD}aBcDeF
    github_pat_11{WORD}_{WORD} xoxb-123456789012-{WORD} AKIAIOSFODNN7EXAMPLE AIza{"aB3" * 11}dE glpat-{WORD[:20]}
    npm_{WORD}aBcDeFgHiJkL pypi-AgEIcHlwaS5vcmc{WORD} eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.c2lnbmF0dXJl tml-abc123"""


@for_each("key", KEYS.split())
def test_keys_of_services(key):
    for text in (key, f"my key is {key}, ok", f'"{key}"', f"x={key};", f"({key})", f"https://example.org/{key}/x"):
        assert redact(text) == text.replace(key, "***")


# The part in angle brackets is the secret.
CARRIERS = r"""https://example.org/v1?api_key=<hush>&n=3
https://example.org/v1?n=3&token=<qwertyuiop123456>
https://bucket.example.org/key?X-Amz-Date=1&X-Amz-Signature=<0f3c9a>&n=3
https://account.example.org/key?sv=2&sig=<aB3%2Fx>&se=4
https://<me:hush>@example.org/x and redis://me@db
redis://<:hunter2>@db:5432/x
serve --api-key <abc123def> --port 80
serve --token=<letmein>
export OPENAI_API_KEY='<it is hush>'
OPENAI_API_KEY=<abcd-efgh-ijkl> python main.py
password: <hunter2>
the API key: <9x8y7z6w>
{"api_key": "<hush>", "n": 3}
{"password": "<it's, well, hush>"}
{"body": "{\\"client_secret\\": \\"<hush>\\"}"}
{'hf_token': '<hush>'}
os.environ["WANDB_API_KEY"] = "<hush>"
Authorization: Bearer <abcdefghijkl>
{"Authorization": "<Basic bWU6aHVzaA>"}
curl -H 'x-api-key: <abcdefghijkl>' example.org
config: auth_token: <x7y8z9>
got Bearer <abcdefgh1234>""".splitlines()
CARRIERS.append("<-----BEGIN OPENSSH PRIVATE KEY-----\nAAAA\n-----END OPENSSH PRIVATE KEY----->")


@for_each("text", CARRIERS)
def test_values_after_telling_names(text):
    start, secret, end = text.replace("<", "\0").replace(">", "\0").split("\0")
    for before, after in (("", ""), ("first, ", ""), ("line\n", "\nline")):
        assert redact(f"{before}{start}{secret}{end}{after}") == f"{before}{start}***{end}{after}"


OTHERS = """key=settings.api_key
headers["authorization"] = f"Bearer {token}"
api_key = os.environ['OPENAI_API_KEY']; client(api_key=None, token=None)
`api_key=None` is the default
client_secret_create_params.ClientSecretCreateParams
[hf_api.CommitOperationDelete]
MARKER = "-----BEGIN PRIVATE KEY-----", "-----END PRIVATE KEY-----"
Credentials: https://example.org/docs/auth
hf_transfer_enabled_setting sk-toggleable__label-arrow npm_config_registry_url_setting sk_learn_pipeline task-force
6fa459ea-ee8a-3ca4-894e-db77e160355e 9f8e7d6c5b4a39281706f5e4d3c2b1a0
max_tokens=512, sort_key=score, best_key = 'name', eos_token: <|im_end|>
password = input('> ')
pass --api-key to the program; --api-key KEY
the bearer transformation; token: the; auth: basic
PWD=/a/b; cd /a/b
https://example.org/a:b@c git@github.com:me/x.git ssh://git@github.com/me/x
{"token": " information", "logprob": -0.5}
password=$PASSWORD api_key: <your key>, api_key={key}
https://example.org/?page=3&q=a+key AKIA eyJ
x = 3 if token else tokenizer""".splitlines()


@for_each("text", OTHERS)
def test_what_only_looks_so(text):
    assert redact(f"line\n{text}\nline") == f"line\n{text}\nline"


def test_variables_of_the_environment(monkeypatch):
    """Values of telling variables are masked in any text, but not paths, users' names and ordinary words."""
    folder = os.getcwd()  # noqa: PTH109
    assert redact(f"in {folder}") == f"in {folder}", "the variables that this test itself runs with"
    secrets = ["hunter22", "kJ8/x+Qp2=zzR4", "correct-horse-9", "/aB3dE5fG7hJ9kL1mN2pQ4+rS6"]
    paths = ["/workspace", "/home/someone/project-2", "/mnt/data/run 3", "C:\\Users\\me\\run", "~/runs/first"]
    monkeypatch.setenv("USER", "someone42")
    cases = [(name, value, True) for name in ("DB_PWD", "HF_TOKEN", "X_SECRET", "MY_KEY") for value in secrets]
    cases += [(name, "swordfish", True) for name in ("DB_PASSWORD", "OPENAI_API_KEY", "CLIENT_SECRET")]
    cases += [(name, path, False) for name in ("PWD", "GOOGLE_APPLICATION_CREDENTIALS", "MY_KEY") for path in paths]
    cases += [(name, word, False) for name in ("X_AUTH", "X_TOKEN") for word in ("localhost", "12345678", "some-one")]
    cases += [
        ("DB_PASSWORD", "password", False),
        ("DB_PASSWORD", "someone42", False),
        ("OPENAI_API_KEY", "EMPTY", False),
    ]
    for name, value, hidden in cases:
        with monkeypatch.context() as patch:
            patch.setenv(name, value)
            assert redact(f"it is {value}, no?") == f"it is {'***' if hidden else value}, no?", name


@for_each("piece", ["a", "a-", "--", "password=", "sk-", "Bearer ", "://a", "-----BEGIN ", "--key ", "\\", "'"])
def test_time_is_linear(piece):
    started = time.process_time()
    redact(piece * (200_000 // len(piece)))
    assert time.process_time() - started < 5.0


def test_added_secrets():
    """Such as the key of a Tinker client."""
    add_secret("a-key-that-was-given-in-code")
    assert redact("x a-key-that-was-given-in-code y") == "x *** y"


def test_canary(monkeypatch, tmp_path, caplog):
    """In metrics' names, messages, tags, failures, settings, errors: 0 hits in files, page and log, in any form."""
    monkeypatch.setenv("SOME_SERVICE_API_KEY", CANARY)

    class Talkative:
        inline = True

        def log(self, metrics, step):
            raise ValueError(f"refused by {CANARY}")

        def log_trajectories(self, groups, step):
            raise ValueError(FORMS[1])

        def close(self):
            pass

    encoded = [base64.b64encode(b"x" * n + CANARY.encode() + b"xx") for n in range(3)]
    messages = [
        {"role": "user", "content": f"key {CANARY.encode().hex()} {encoded}"},
        {"role": "assistant", "content": FORMS[1], "tool_calls": [{"name": "f", "arguments": {"key": CANARY}}]},
    ]
    turn = Turn(Sample([65], [66, 67], [-0.5, -0.5]), 1.0)
    trajectory = Trajectory([turn], tags={"note": CANARY, "api_key": "hush-hush-hush"}, messages=messages)
    poisoned = Group([trajectory], failures=[Failure("env", "ValueError", f"refused {CANARY}")])
    with caplog.at_level(logging.DEBUG), MultiTracker([Jsonl(tmp_path), Talkative()]) as trackers:
        trackers.log({f"env/{CANARY}/reward": 1.0, "bad": CANARY}, 0)
        trackers.log_trajectories([poisoned], 0)
    (tmp_path / "config.json").write_text(json.dumps({"token": "hush-hush-hush", "url": f"x?{CANARY}"}))
    page = write(tmp_path, tmp_path / "page.html").read_text()
    packed = re.findall(r'<script type="text/plain" id="(?:index|part-\d+)">([^<]+)<', page)
    parts = [gzip.decompress(base64.b64decode(part)).decode() for part in packed]
    assert len(parts) > 1
    seen = [page, str(parts), caplog.text, repr(trackers), str(trackers.metrics)]
    seen += [path.read_text() for path in tmp_path.glob("*.jsonl")]
    assert "refused ***" in "".join(seen), "there was something to leak"
    for text in seen:
        for form in [*FORMS, "hush-hush-hush"]:
            assert form not in text
