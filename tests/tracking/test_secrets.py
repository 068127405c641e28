"""Keys stay out of everything that is logged."""

from __future__ import annotations

import base64
import json
import logging
import urllib.parse

import pytest

from rlkit import Sample
from rlkit._secrets import redact, secret_name
from rlkit.report import write
from rlkit.tracking import Jsonl, Several, masked
from rlkit.trajectory import Failure, Group, Trajectory, Turn
from tests.each import for_each
from tests.report.test_page import data

CANARY = "canary+7f3a/91c2=e5d8"
FORMS = [
    CANARY,
    urllib.parse.quote(CANARY, safe=""),
    *(base64.b64encode(b"x" * n + CANARY.encode()).decode().rstrip("=")[4 + 4 * (n > 0) : -4] for n in range(3)),
]


@pytest.fixture(autouse=True)
def _canary(monkeypatch):
    monkeypatch.setenv("SOME_SERVICE_API_KEY", CANARY)


@for_each(
    "name",
    [
        *(
            "api_key",
            "apiKey",
            "API-KEY",
            "WANDB_API_KEY",
            "hf_token",
            "token",
            "TINKER_KEY",
            "password",
            "db_password",
        ),
        *(
            "client_secret",
            "secrets",
            "aws_secret_access_key",
            "Authorization",
            "private_key",
            "credentials",
            "passwd",
            "password",
        ),
    ],
)
def test_names_of_secrets(name):
    assert secret_name(name)
    assert masked({name: "value"}) == {name: "***"}
    assert masked({"deep": [{name: ["a", "b"]}]}) == {"deep": [{name: "***"}]}


@for_each(
    "name",
    [
        *("max_tokens", "tokens", "tokenizer", "eos_token", "pad_token", "sort_key", "key", "monkey", "learning_rate"),
        *("prompt_tokens", "secretary", "author", "authored", "token_count", "keyboard", "n", ""),
    ],
)
def test_names_of_other_things(name):
    assert not secret_name(name)
    assert masked({name: "value"}) == {name: "value"}


@for_each(
    "text",
    [
        *("tml-abcdefghijklmnop", "sk-proj-abcdefghijklmnopqrst", "hf_abcdefghijklmnopqrstuvwx"),
        *("ghp_abcdefghijklmnopqrstuvwxyz0123456789", "AKIAIOSFODNN7EXAMPLE", "Bearer abcdefgh12345678"),
        "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.c2lnbmF0dXJl",
        "https://user:pass@example.org/x",
    ],
)
def test_keys_of_well_known_services_are_seen_anywhere(text):
    hidden = redact(f"before {text} after")
    assert text not in hidden
    assert "***" in hidden
    assert hidden.startswith("before ")


@for_each("text", ["plain text", "loss 0.5", "https://example.org/a:b", "a sk-8 skate", "task-force", ""])
def test_other_texts_stay(text):
    assert redact(text) == text


def test_keys_of_a_tinker_client_are_masked_too():
    from rlkit._secrets import hide

    hide("a-key-that-was-given-in-code")
    assert redact("x a-key-that-was-given-in-code y") == "x *** y"


def test_values_stay_what_they_are():
    value = {"a": 1, "b": [True, None, 0.5], "c": {"d": ()}, "api_key": None}
    assert masked(value) == {"a": 1, "b": [True, None, 0.5], "c": {"d": []}, "api_key": None}


def poisoned():
    """A group that holds the canary wherever text can stand."""
    turn = Turn(Sample([65], [66, 67], [-0.5, -0.5]), 1.0)
    messages = [
        {"role": "user", "content": f"key {CANARY}"},
        {"role": "assistant", "content": FORMS[1], "tool_calls": [{"name": "f", "arguments": {"key": CANARY}}]},
    ]
    trajectory = Trajectory([turn], tags={"note": CANARY, "api_key": "hush-hush-hush"}, messages=messages)
    return Group([trajectory], failures=[Failure("env", "ValueError", f"refused {CANARY}")])


def test_canary(tmp_path, caplog):
    """In metrics' names, messages, tags, failures, settings, errors: 0 hits in files, page and log, in any form."""

    class Talkative:
        inline = True

        def log(self, metrics, step):
            raise ValueError(f"refused by {CANARY}")

        def log_trajectories(self, groups, step):
            raise ValueError(FORMS[1])

        def close(self):
            pass

    with caplog.at_level(logging.DEBUG), Several([Jsonl(tmp_path), Talkative()]) as several:
        several.log({f"env/{CANARY}/reward": 1.0, "bad": CANARY}, 0)
        several.log_trajectories([poisoned()], 0)
    (tmp_path / "config.json").write_text(json.dumps({"token": "hush-hush-hush", "url": f"x?{CANARY}"}))
    page = write(tmp_path, tmp_path / "page.html")
    packed = [str(data(page, name)) for name in ("about", "index", "part-0")]
    seen = [page.read_text(), *packed, caplog.text, repr(several), str(several.metrics)]
    seen += [path.read_text() for path in tmp_path.glob("*.jsonl")]
    assert "refused" in caplog.text  # there was something to leak
    assert "refused ***" in "".join(seen)
    for text in seen:
        for form in [*FORMS, "hush-hush-hush"]:
            assert form not in text
