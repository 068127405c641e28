"""Rendering: the text is what transformers makes of the same template."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers")

from rlkit.chat.templates import Template
from rlkit.errors import ConfigError, DataError
from tests.chat.build import TEMPLATES, every_tokenizer, tokenizer
from tests.each import for_each

TALKS = [
    [("user", "Hi")],
    [("system", "Be kind."), ("user", "1 + 1?"), ("assistant", "<think>\none and one\n</think>\n\n2"), ("user", "ok")],
    [("user", "  blanks \n"), ("assistant", " 3\n"), ("user", "ümläut 🎈 <b>&amp;'\"</b>")],
]
TOOL = {"type": "function", "function": {"name": "f", "description": "d <x> 'é'", "parameters": {"type": "object"}}}


def messages(talk):
    return [{"role": role, "content": content} for role, content in talk]


@for_each("head", [False, True])
@for_each("talk", TALKS)
@for_each("t", [t for name, t in every_tokenizer().items() if name != "toy"])
def test_same_text_as_transformers(t, talk, head):
    template = Template(t.chat_template, t.named_tokens)
    for variables in ({}, {"enable_thinking": False}, {"tools": [TOOL]}):
        expected = t.hf.apply_chat_template(messages(talk), tokenize=False, add_generation_prompt=head, **variables)
        assert template.render(messages(talk), head=head, **variables) == expected


@for_each(
    "text",
    [
        "{{ messages | tojson(indent=2) }}",
        "{{ messages[0] | tojson(ensure_ascii=true, sort_keys=true) }}",
        "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}{{ m.content }}{% endfor %}",
        "a{% generation %}b{{ messages[0].content }}{% endgeneration %}c",
        "  {% if true %}\n  x\n  {% endif %}\n  y\n",
        "{{ strftime_now('%Y')[:2] }}",
        "{{ missing is defined }} {{ tools is none }} {{ documents is none }}",
    ],
)
def test_what_published_templates_use(text):
    hf = tokenizer().hf
    talk = messages([("user", "é <1>"), ("assistant", "2")])
    assert Template(text).render(talk) == hf.apply_chat_template(talk, chat_template=text, tokenize=False)


@for_each(
    ("template", "talk", "message"),
    [
        (TEMPLATES["gemma"], [("user", "a"), ("user", "b")], "roles user, user: roles must take turns"),
        ("{{ missing.name }}", [], "'missing' is undefined"),
        ("{{ 1 + messages[0].content }}", [("user", "a")], "refuses messages"),
        ("{{ messages.append(1) }}", [], "refuses messages"),  # the sandbox
        ("{{ ''.__class__.__mro__ }}", [], "refuses messages"),
        ("{{ messages.__class__ }}{{ cycler.__init__.__globals__ }}", [], "refuses messages"),
    ],
)
def test_a_template_that_refuses_says_why(template, talk, message):
    with pytest.raises(DataError, match=message):
        Template(template).render(messages(talk))


def test_what_is_no_template():
    with pytest.raises(ConfigError, match="line 2"):
        Template("a\n{% if %}")
    for wrong in ("", None, 3):
        with pytest.raises(ConfigError, match="expected the text of a chat template"):
            Template(wrong)
