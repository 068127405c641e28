"""Read docstrings and classes for the reference: an extension of griffe, which mkdocstrings uses (mkdocs.yml)."""

from __future__ import annotations

import re
from typing import Any

import griffe

ATTRS = ("attrs.frozen", "attrs.define")
DATACLASS, FIELD = (griffe.ExprName(name, griffe.ExprName("dataclasses")) for name in ("dataclass", "field"))


class Docstrings(griffe.Extension):
    """Show examples as code, and the arguments of attrs classes, which griffe knows of dataclasses alone."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Write it as Markdown, in which "> 0", an argument's range, would be a quotation; fence the examples."""
        if obj.docstring:
            text = re.sub(r"(?m)^::$|(?<=\w:):$", "", obj.docstring.value)
            text = re.sub(r"(?m)^( *(?:[\w*, ]+: )?)>(?!>)", r"\1\\>", text)
            obj.docstring.value = re.sub(r"(?m)^>>>.*(?:\n.+)*", r"```pycon\n\g<0>\n```", text)

    def on_class_members(self, *, cls: griffe.Class, **_: Any) -> None:
        """Write an attrs class as a dataclass."""
        for decorator in cls.decorators:
            if decorator.callable_path in ATTRS:
                decorator.value = griffe.ExprCall(DATACLASS, getattr(decorator.value, "arguments", []))
                for field in cls.attributes.values():
                    _write_field(field)


def _write_field(field: griffe.Attribute) -> None:
    """Write ``attrs.field(...)`` and ``checked(default, ...)`` as fields of dataclasses, other calls as "..."."""
    if not isinstance(field.value, griffe.ExprCall):
        return
    keywords = [each for each in field.value.arguments if isinstance(each, griffe.ExprKeyword)]
    match field.value.canonical_path.rpartition(".")[2]:
        case "field":
            for keyword in keywords:
                keyword.name = keyword.name.replace("factory", "default_factory")
        case "checked":
            keywords.append(griffe.ExprKeyword("default", field.value.arguments[0]))
        case _:
            keywords = [griffe.ExprKeyword("default", "...")]
    field.value = griffe.ExprCall(FIELD, keywords)
