"""Which texts hold a key and which only look so: a corpus of each, in the environments that programs run in."""

from __future__ import annotations

import json
import os
import time

import pytest

from rlkit import Sample, _secrets
from rlkit._secrets import is_path, redact
from rlkit.runs import Run
from rlkit.storage import read
from rlkit.tracking import masked
from rlkit.trajectory import Failure, Group, Trajectory, Turn
from tests.each import for_each

HEX = "9f8e7d6c5b4a39281706f5e4d3c2b1a0"
WORD = "aB3dE5fG7hJ9kL1mN2pQ4rS6"  # 24 letters and digits

# What a text holds, and the part of it that nobody may see.
KEYS = [
    *(f"sk-proj-{WORD}", f"sk-ant-api03-{WORD}-{WORD}", f"sk-or-v1-{HEX}{HEX}", f"sk_live_{WORD}"),
    *(f"hf_{'aBcDe' * 7}", f"ghp_{WORD}aBcDeFgHiJkL", f"github_pat_11{WORD}_{WORD}", f"glpat-{WORD[:20]}"),
    *(f"xoxb-123456789012-{WORD}", "AKIAIOSFODNN7EXAMPLE", f"AIza{'aB3' * 11}dE", f"ya29.a0{WORD}_{WORD}"),
    *(f"GOCSPX-{WORD}", f"SG.{WORD}.{WORD}{WORD}", f"dop_v1_{HEX}{HEX}", f"nvapi-{WORD}{WORD}"),
    *(f"lin_api_{WORD}{WORD[:16]}", f"fw_{WORD[:22]}", f"csk-{WORD}{WORD}", f"tgp_v1_{WORD}{WORD[:19]}"),
    *(f"gsk_{WORD}{WORD}", f"r8_{WORD}aBcDeFgHiJkLm", f"npm_{WORD}aBcDeFgHiJkL", f"xai-{WORD}"),
    *(f"pypi-AgEIcHlwaS5vcmc{WORD}", f"hvs.{WORD}", f"dapi{HEX}", f"wandb_v1_{WORD}", "tml-abc123", f"pplx-{WORD}"),
    *("eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.c2lnbmF0dXJl",),
]
CARRIERS = [
    ("https://example.org/v1?api_key=%s&n=3", "hush"),
    ("https://example.org/v1?n=3&token=%s", "qwertyuiop123456"),
    ("https://me:%s@example.org/x", "hush"),
    ("postgres://app:%s@db:5432/x", "hunter2"),
    ("serve --api-key %s --port 80", "abc123def"),
    ("serve --token=%s", "letmein"),
    ("api_key=%s", "abcdefgh"),
    ("export OPENAI_API_KEY='%s'", "it is hush"),
    ("OPENAI_API_KEY=%s python main.py", "abcd-efgh-ijkl"),
    ("password: %s", "hunter2"),
    ("password: %s\nuser: me", "swordfish"),
    ("the API key: %s.", "9x8y7z6w"),
    ('{"api_key": "%s", "n": 3}', "hush"),
    ('{"password": "%s"}', "it's, well, hush"),
    ('{"body": "{\\"client_secret\\": \\"%s\\"}"}', "hush"),
    ("{'hf_token': '%s'}", "hush"),
    ('os.environ["WANDB_API_KEY"] = "%s"', "hush"),
    ("Authorization: Bearer %s", "abcdefghijkl"),
    ("Authorization: Basic %s", "bWU6aHVzaA"),
    ('{"Authorization": "Bearer %s"}', "abcdefghijkl"),
    ("curl -H 'x-api-key: %s' example.org", "abcdefghijkl"),
    ("Cookie: session=%s", "a1b2c3d4e5f6"),
    ("config: auth_token: %s", WORD),
    ("https://hooks.slack.com/services/%s", "T0000/B0000/XXXXXXXXXXXX"),
    ("-----BEGIN OPENSSH PRIVATE KEY-----\n%s\n-----END OPENSSH PRIVATE KEY-----", "AAAA"),
    ("123456789:AA%s", "aB3dE5fG7hJ9kL1mN2pQ4rS6tU8vW0xYz"),
]
OTHERS = [
    *("key=settings.api_key",),
    *('headers["authorization"] = f"Bearer {token}"', "`api_key=None` — cleared"),
    *(
        "client_secret_create_params.ClientSecretCreateParams",
        "[hf_api.CommitOperationDelete]",
        "token = self._get_v2(x)",
    ),
    *(
        'MARKER = "-----BEGIN PRIVATE KEY-----", "-----END PRIVATE KEY-----"',
        "Credentials: https://example.org/docs/auth",
    ),
    *("pk_identifier_name_long_enough", "hf_transfer_enabled_setting", "sk_learn_pipeline_classifier", "task-force"),
    *("sk-toggleable__label-arrow", "npm_config_registry_url_setting", "key-value-store-of-the-run"),
    *("fw_forward_backward", "the secret_santa_assignment_list", "secret_word_of_the_day"),
    *("SG. is short for Singapore", "r8_rotation_matrix_8x8", "commit 9f8e7d6c5b4a39281706f5e4d3c2b1a09f8e7d6c"),
    *(f"sha256:{HEX}{HEX}", "6fa459ea-ee8a-3ca4-894e-db77e160355e", "max_tokens=512, n=8", "eos_token: <|im_end|>"),
    *("tokenizer=AutoTokenizer", "sort_key=score", "primary key: id_12345678"),
    *("api_key = os.environ['OPENAI_API_KEY']", "client(api_key=None, token=None)"),
    *("password: required", "The password must be long."),
    *("password = input('> ')", "--api-key KEY", "pass --api-key to the program", "the bearer transformation"),
    *("https://example.org/a:b@c", "git@github.com:me/x.git", "ssh://git@github.com/me/x", "token: the"),
    *('{"token": " information", "logprob": -0.5}', "auth: basic", "key: 5", "Auth token expired"),
    *("You are in /workspace/src. List its files.", "/testbed/tests/test_x.py::test_y", "loss 0.5"),
    *("password=$PASSWORD", "password=${PASSWORD}", "api_key: <your key>", "api_key={key}"),
    *("", "SKILLS: python", "AKIA is a prefix", "eyJ is one too", "https://example.org/?page=3&q=a+key"),
    *("x = 3 if token else 4",),
]


def test_there_is_enough_of_each():
    assert min(len(KEYS), len(CARRIERS) + 3, len(OTHERS)) >= 29


@for_each("key", KEYS)
def test_keys_of_services(key):
    """Wherever they stand: in prose, in quotes, behind other letters and signs."""
    for text in (key, f"my key is {key}, ok", f'"{key}"', f"x={key};", f"({key})", f"https://example.org/{key}/x"):
        assert key[-12:] not in redact(text), text
        assert "***" in redact(text)


@for_each(("text", "value"), CARRIERS)
def test_values_behind_telling_names(text, value):
    """In URLs, commands, JSON, settings, headers, and as a part of a longer text."""
    for before, after in (("", ""), ("first, ", ""), ("line\n", "\nline")):
        found = redact(before + text % value + after)
        assert value not in found
        assert found == before + text.replace("%s", "***") + after or "***" in found


@for_each("text", OTHERS)
def test_what_only_looks_so(text):
    assert redact(text) == text
    assert redact(f"line\n{text}\nline") == f"line\n{text}\nline"


CODE = {  # nobody guesses whether prose or code follows a name
    "api_key = value": "api_key = ***",
    "def f(api_key: SecretStr, n: int):": "def f(api_key: ***, n: int):",
    'ENV_API_KEY = "OPENAI_API_KEY"': 'ENV_API_KEY = "***"',
    "Password: incorrect": "Password: ***",
}


@for_each("text", CODE)
def test_any_value_behind_a_telling_name(text):
    """It is masked, also where a reader sees that it is code or a message."""
    assert redact(text) == CODE[text]


def test_lists_of_arguments():
    assert masked(["serve", "--api-key", "hush", "--port", "80", "--token=hush", "--password", "--verbose", "x"]) == [
        *("serve", "--api-key", "***", "--port", "80", "--token=***", "--password", "--verbose", "x"),
    ]
    assert masked({"argv": ("--max-tokens", "512", "--tokenizer", "gpt2", "--sort-key", "score")})["argv"] == [
        *("--max-tokens", "512", "--tokenizer", "gpt2", "--sort-key", "score"),
    ]


PATHS = ["/workspace", "/testbed", "/home/someone/project-2", "/mnt/data/run 3", "C:\\Users\\me\\run", "~/runs/first"]


class TestEnvironment:
    """Its variables are secrets by their names, unless they hold what stands in every text."""

    @for_each("name", ["PWD", "OLDPWD", "BUILD_PWD", "SSH_AUTH", "GOOGLE_APPLICATION_CREDENTIALS", "MY_KEY"])
    @for_each("path", PATHS)
    def test_paths_are_none(self, monkeypatch, name, path):
        with monkeypatch.context() as patch:
            patch.setenv(name, path)
            assert redact(f"You are in {path}/src.") == f"You are in {path}/src."
            assert is_path(path)

    def test_an_existing_path_is_none(self, monkeypatch, tmp_path):
        """Whatever it is called, such as by a test's own temporary folder."""
        folder = tmp_path / "aB3dE5fG7hJ9kL1mN2pQ4rS6"
        folder.mkdir()
        monkeypatch.setenv("SERVICE_KEY", str(folder))
        assert redact(f"in {folder}") == f"in {folder}"

    @for_each("value", ["localhost", "disabled", "kerberos", "anonymous", "12345678", "TRUE", "someone-else"])
    @for_each("name", ["SOME_AUTH", "X_COOKIE", "MY_TOKEN"])
    def test_ordinary_values_are_none(self, monkeypatch, name, value):
        with monkeypatch.context() as patch:
            patch.setenv(name, value)
            assert redact(f"on {value} now") == f"on {value} now"

    def test_names_of_users_and_machines_are_none(self, monkeypatch):
        monkeypatch.setenv("USER", "someone42")
        monkeypatch.setenv("DB_PASSWORD", "someone42")
        assert redact("by someone42") == "by someone42"

    @for_each("name", ["DB_PASSWORD", "DB_PWD", "OPENAI_API_KEY", "HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "X_SECRET"])
    @for_each("value", ["hunter22", "kJ8/x+Qp2=zzR4", "correct-horse-9", "/aB3dE5fG7hJ9kL1mN2pQ4+rS6"])
    def test_secrets_are(self, monkeypatch, name, value):
        with monkeypatch.context() as patch:
            patch.setenv(name, value)
            assert redact(f"it is {value}, no?") == "it is ***, no?"

    @pytest.mark.parametrize("name", ["DB_PASSWORD", "OPENAI_API_KEY", "CLIENT_SECRET"])
    def test_words_are_where_the_name_leaves_no_doubt(self, monkeypatch, name):
        monkeypatch.setenv(name, "swordfish")
        assert redact("it is swordfish") == "it is ***"

    @for_each(("name", "value"), [("MY_KEY", "production"), ("DB_PASSWORD", "password"), ("APP_SECRET", "undefined")])
    def test_words_that_say_nothing_are_none(self, monkeypatch, name, value):
        with monkeypatch.context() as patch:
            patch.setenv(name, value)
            assert redact(f"in {value}") == f"in {value}"

    def test_a_run_in_a_folder(self, monkeypatch, tmp_path):
        """Messages, failures, tags and settings keep the working directory, as a shell sets it, and other paths."""
        monkeypatch.chdir(tmp_path)
        for name in ("PWD", "OLDPWD"):
            monkeypatch.setenv(name, str(tmp_path))
        text = f"You are in {tmp_path}, not in /workspace or /testbed."
        messages = [{"role": "user", "content": text}]
        turn = Turn(Sample([65], [66], [-0.5]), 1.0)
        group = Group(
            [Trajectory([turn], messages=messages, tags={"cwd": str(tmp_path)})],
            failures=[Failure("env", "ValueError", f'File "{tmp_path}/main.py"')],
        )
        config = {"data": f"{tmp_path}/train.jsonl", "pwd": str(tmp_path), "credentials": "/workspace/key.json"}
        with Run(tmp_path / "run", config=config, trackers=("jsonl",)) as run:
            run.log_trajectories([group], 0)
        assert json.loads((tmp_path / "run/config.json").read_text()) == config
        (found,) = read(tmp_path / "run/trajectories.jsonl")
        assert found.trajectories[0].messages[0]["content"] == text
        assert found.trajectories[0].tags["cwd"] == str(tmp_path)
        assert found.failures[0].message == f'File "{tmp_path}/main.py"'


def test_the_real_environment_masks_no_folder():
    """The variables that this test itself runs with."""
    folder = os.getcwd()  # noqa: PTH109
    assert redact(f"in {folder}") == f"in {folder}"


@pytest.mark.parametrize(
    "piece",
    ["a", "password=", 'token: "', "sk-", "a-", "Bearer ", "://a", "-----BEGIN ", "--key ", "a=b ", "\\", "'"],
)
def test_time_is_linear(piece):
    """A million characters of whatever comes close take less than some seconds."""
    started = time.process_time()
    redact(piece * (1_000_000 // len(piece)))
    assert time.process_time() - started < 15.0


def test_there_is_one_list():
    """What a Tinker client masks in logs and errors is what is masked everywhere."""
    from rlkit.backends.tinker import guard

    assert guard.redact is _secrets.redact is redact
    assert guard.hide is _secrets.hide
