"""Chat templates: Jinja text in a sandbox, with the filters and functions that published templates use."""

from __future__ import annotations

import datetime as dt
import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from rlkit import _check, _install
from rlkit.errors import ConfigError, DataError

if TYPE_CHECKING:
    from jinja2 import Environment
    from jinja2.nodes import Node
    from jinja2.parser import Parser

__all__ = ["Template"]


class Template:
    r"""A chat template that turns messages into text.

    Args:
        text: Jinja, as models publish it.
        tokens: what the names of tokens stand for: ``{"bos_token": "<s>", ...}``.

    Attributes:
        names: the variables that the template reads.

    The clock that a template may ask for (``strftime_now``) stands still at the time when the object was made, so that
    one text cannot come out in two ways.

    Raises:
        ConfigError: jinja2 is missing, or the text is no valid template.

    >>> Template("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}").render(
    ...     [{"role": "user", "content": "Hi"}])
    'user: Hi\n'
    """

    def __init__(self, text: str, tokens: Mapping[str, str] | None = None) -> None:
        _check.require(isinstance(text, str) and text, "template", text, "the text of a chat template")
        try:
            import jinja2
            import jinja2.meta
        except ImportError as error:
            raise ConfigError(f"chat templates need jinja2; run: {_install.command('chat')}") from error
        environment = _environment(dt.datetime.now().astimezone())
        try:
            self._compiled = environment.from_string(text)
            self.names = frozenset(jinja2.meta.find_undeclared_variables(environment.parse(text)))
        except jinja2.TemplateSyntaxError as error:
            raise ConfigError(f"template: line {error.lineno}: {error.message}; expected a Jinja template") from error
        self.text = text
        self._tokens = dict(tokens or {})
        self._failures = (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError)

    def render(self, messages: Sequence[Mapping[str, object]], *, head: bool = False, **variables: object) -> str:
        """Render ``messages`` as text.

        Args:
            messages: with ``role`` and ``content``, or what else the template reads.
            head: whether the head of the assistant's next turn follows ("generation prompt").
            variables: what else the template is to see, ``tools`` and ``enable_thinking`` for example.

        Raises:
            DataError: the template refuses the messages.
        """
        names = {"tools": None, "documents": None} | self._tokens | variables
        try:
            text: str = self._compiled.render(names, messages=list(messages), add_generation_prompt=head)
        except (*self._failures, RecursionError) as error:
            roles = [str(message.get("role")) for message in messages]
            shown = ", ".join(roles if len(roles) <= 8 else [*roles[:4], "...", *roles[-3:]])
            raise DataError(f"the chat template refuses messages with the roles {shown}: {error}") from error
        return text


def _environment(now: dt.datetime) -> Environment:
    from jinja2 import TemplateError
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """``{% generation %}`` marks what the model wrote; as text it is nothing."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Parser) -> Node | list[Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def refuse(message: str) -> None:
        raise TemplateError(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = _json
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = now.strftime
    return environment


def _json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """As transformers has it: plain JSON, where Jinja's own filter would write escapes for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
