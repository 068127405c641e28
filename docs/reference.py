"""Writes docs/reference.md, and the table of docs/backends.md, from the registries and docstrings.

python docs/reference.py (``--check``: only compare).
"""

from __future__ import annotations

import importlib
import inspect
import re
import sys
import textwrap
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import attrs

import rlkit
from rlkit.backends.options import LocalOptions, describe
from rlkit.losses.prepare import marks

PAGE, BACKENDS = Path(__file__).with_name("reference.md"), Path(__file__).with_name("backends.md")
# Of docs/backends.md: where an option of the local backend is explained.
ANCHORS = {
    "lora": "saved-adapters",
    "micro_batch_tokens": "long-datums",
    "offload_folder": "long-datums",
    "sampler": "another-sampling-engine",
    "processes": "several-processes",
    "shard": "weights-that-do-not-fit",
}
HEAD = """# Reference

Written by `docs/reference.py` from the docstrings; a test holds it to them. Core, rollouts and runs are told in full.
Of the many estimators, losses, corrections and metrics there is what they are and take; the docstring of each has its
arguments, what it raises, and an example too (`help(rlkit.advantages.grpo)`).
"""


def paragraphs(function: Any) -> list[str]:
    """The docstring's paragraphs, each on one line, without examples and argument lists."""
    found = [part.strip() for part in (inspect.getdoc(function) or "").split("\n\n")]
    kept = [part for part in found if not part.startswith((">>>", "Args:", "Returns:", "Raises:", "Attributes:"))]
    return [" ".join(part.split()) for part in kept]


def settings(function: Callable[..., Any]) -> str:
    """The keyword-only arguments with their defaults."""
    named = inspect.signature(function).parameters.values()
    shown = [p.name if p.default is p.empty else f"{p.name}={p.default!r}" for p in named if p.kind is p.KEYWORD_ONLY]
    return ", ".join(shown)


def inputs(function: Callable[..., Any]) -> str:
    """The positional arguments, optional ones in brackets."""
    named = inspect.signature(function).parameters.values()
    shown = [p.name if p.default is p.empty else f"[{p.name}]" for p in named if p.kind is p.POSITIONAL_OR_KEYWORD]
    return ", ".join(shown)


LEVELS = (
    'A loss of level "datum" is called once per datum, of level "pair" once per two consecutive datums (`data` is '
    'chosen, rejected, chosen, rejected, ...; both answer the same prompt), of level "batch" once for all. An '
    "elementwise loss is called once on the tokens of many datums, those of weight 0 left out."
)


def entry(name: str, function: Any, *, loss: bool = False) -> str:
    """One function's entry."""
    first, *rest = paragraphs(function)
    lines = [f"### {name}", first, *rest]
    call = [f"inputs: `{inputs(function)}`"]
    if settings(function):
        call.append(f"settings: `{settings(function)}`")
    if loss:
        found = marks(function)
        call.append(f"level: {found.level}" + (", elementwise" if found.elementwise else ""))
    return "\n\n".join([lines[0], lines[1], " · ".join(call), *lines[2:]])


def family(title: str, functions: Iterable[tuple[str, Any]], *, loss: bool = False) -> str:
    """A section of entries, sorted by name."""
    note = [LEVELS] if loss else []
    return "\n\n".join([f"## {title}", *note, *(entry(name, f, loss=loss) for name, f in sorted(functions))])


def module(of: Any) -> list[tuple[str, Any]]:
    """The public functions of a module."""
    return [(name, getattr(of, name)) for name in of.__all__ if inspect.isfunction(getattr(of, name))]


# Sections of objects, told in full: the module that a user imports from, and the names.
OBJECTS = {
    "Core": {
        "rlkit": "connect sampler Datum Sample SamplingParams Adam Lora Future ForwardBackwardOutput",
        "rlkit.backends": "TrainerBackend Sampler Tokenizer",
        "rlkit.backends.protocol": "Critic TopK TargetLogprobs PromptLogprobs LiveSampler LiveSampling",
        "rlkit.backends.samplers": "SamplingEngine LiveEngine LoraAdapter",
        "rlkit.backends.local.distributed": "Processes",
        "rlkit.backends.vllm": "Vllm open_sampler VllmSampler VllmClient",
    },
    "Rollouts": {
        "rlkit.rollouts": "rollout rollout_sync stream async_rollouts Plan Rollouts Replay",
        "rlkit.envs": "Env StepResult Action Task Tasks Settings "
        "function reasoning_gym gem textarena openreward openenv verifiers harbor mcp gymnasium mixture",
        "rlkit.trajectory": "Turn Trajectory Group Failure datums",
    },
    "Credit": {"rlkit.credit": "assign Batch Item weigh minibatches"},
    "Runs": {
        "rlkit": "Run",
        "rlkit.runs": "Record Retention records sampler",
        "rlkit.evaluation": "evaluate evaluate_sync Evaluation Score interval",
        "rlkit.harnesses": "evaluate installed results Result Score",
        "rlkit.report": "write",
    },
}
HEADINGS = ("Args", "Attributes", "Returns", "Raises", "Yields")


def told(docstring: str) -> str:
    """The docstring as Markdown: sections as lists, examples as code."""
    found, before = [], ""
    for part in docstring.split("\n\n"):
        heading, _, rest = part.partition("\n")
        dedented = textwrap.dedent(part)
        if heading.rstrip(":") in HEADINGS and heading.endswith(":"):
            found.append(f"**{heading}**\n\n{listed(textwrap.dedent(rest), named=True)}")
        elif dedented.startswith(">>>"):
            found.append(f"```pycon\n{dedented}\n```")
        elif part.startswith("    ") and before.endswith("::"):
            found.append(f"```text\n{dedented}\n```")
        elif part.strip() != "::":
            found.append(listed(dedented.removesuffix("::")))
        before = part.rstrip()
    return "\n\n".join(found)


def listed(text: str, *, named: bool = False) -> str:
    """Lines as Markdown: "- what", and in a section "name: what", are entries of a list, the rest is text."""
    entries: list[str] = []
    for line in text.splitlines():
        name, colon, rest = line.partition(":")
        if line.startswith("- "):
            entries.append(line)
        elif named and colon and re.fullmatch(r"[\w.*]+(, [\w.*]+)*", name):
            entries.append(f"- `{name}`:{rest}")
        elif entries:
            entries[-1] += f" {line.strip()}"
        else:
            entries.append(line)
    return "\n".join(entries).replace("``", "`")


def called(name: str, thing: Any) -> str:
    """How it is called, a parameter to a line where one line would be long."""
    signature = inspect.signature(thing)
    found, before = [], None
    for p in signature.parameters.values():
        if p.kind is p.KEYWORD_ONLY and before not in (p.KEYWORD_ONLY, p.VAR_POSITIONAL):
            found.append("*")
        mark = {p.VAR_POSITIONAL: "*", p.VAR_KEYWORD: "**"}.get(p.kind, "")
        kind = "" if p.annotation is p.empty else f": {annotated(p.annotation)}"
        plain = p.default is None or isinstance(p.default, (str, int, float, tuple))
        value = "" if p.default is p.empty else f" = {p.default!r}" if plain else " = ..."
        found.append(f"{mark}{p.name}{kind}{value}")
        before = p.kind
    none = inspect.isclass(thing) or signature.return_annotation is signature.empty
    back = "" if none else f" -> {annotated(signature.return_annotation)}"
    shown = f"{name}({', '.join(found)}){back}"
    if len(shown) > 100:
        shown = f"{name}(\n    " + ",\n    ".join(found) + f",\n){back}"
    return f"```text\n{shown}\n```"


def annotated(kind: Any) -> str:
    """An annotation as it is written."""
    return kind if isinstance(kind, str) else getattr(kind, "__name__", str(kind))


def methods(name: str, thing: type) -> list[str]:
    """Its public methods and properties that say what they do."""
    found = []
    for key, value in vars(thing).items():
        inner = (
            value.fget if isinstance(value, property) else value.__func__ if isinstance(value, classmethod) else value
        )
        if key.startswith("_") or not inspect.isfunction(inner) or not inspect.getdoc(inner):
            continue
        head = f"`{name}.{key}`" if isinstance(value, property) else called(f"{name}.{key}", inner)
        found.append(f"{head}\n\n{told(inspect.getdoc(inner) or '')}")
    return found


def objects(title: str, of: dict[str, str]) -> str:
    """A section of classes and functions, told in full."""
    found = [f"## {title}"]
    for where, names in of.items():
        for name in names.split():
            thing = getattr(importlib.import_module(where), name)
            found += [f"### {where}.{name}"]
            if callable(thing) and not getattr(thing, "_is_protocol", False):
                found.append(called(name, thing))
            found.append(told(inspect.getdoc(thing) or ""))
            found += methods(name, thing) if inspect.isclass(thing) else []
    return "\n\n".join(part for part in found if part)


def page() -> str:
    """The whole page."""
    losses = [(name, getattr(rlkit.losses, name)) for name in ("with_kl", "with_entropy", "prepare", "traceable")]
    sections = [
        *(objects(title, of) for title, of in OBJECTS.items()),
        family("Advantages: rlkit.advantages", rlkit.advantages.registry.items()),
        family("Losses: rlkit.losses", rlkit.losses.registry.items(), loss=True),
        family("Around losses", losses),
        family("KL estimators: rlkit.losses.kl", rlkit.losses.kl.registry.items()),
        family("Corrections: rlkit.corrections", module(rlkit.corrections)),
        family("Filters: rlkit.filters", module(rlkit.filters)),
        family("Rewards: rlkit.rewards", module(rlkit.rewards)),
        family("Schedules: rlkit.schedules", module(rlkit.schedules)),
        family("Metrics: rlkit.metrics", module(rlkit.metrics)),
    ]
    errors = "\n".join(f"- `{name}`: {paragraphs(getattr(rlkit, name))[0]}" for name in rlkit.errors.__all__)
    return "\n\n".join([HEAD.strip(), *sections, f"## Errors\n\n{errors}"]) + "\n"


def backends_page() -> str:
    """docs/backends.md with the table of the local backend's options."""
    lines = ["| option | default | |", "|---|---|---|"]
    fields = attrs.fields_dict(LocalOptions)
    for name, text in describe(LocalOptions).items():
        shown = f"[`{name}`](#{ANCHORS[name]})" if name in ANCHORS else f"`{name}`"
        lines.append(f"| {shown} | `{fields[name].default!r}` | {text.replace('``', '`')} |")
    begin, end = "<!-- options, by docs/reference.py -->\n", "<!-- end of options -->\n"
    before, _, rest = BACKENDS.read_text().partition(begin)
    return before + begin + "\n".join(lines) + "\n" + end + rest.partition(end)[2]


if __name__ == "__main__":
    for path, text in ((PAGE, page()), (BACKENDS, backends_page())):
        if "--check" not in sys.argv:
            path.write_text(text)
        elif not path.exists() or path.read_text() != text:
            sys.exit(f"docs/{path.name} is not what the docstrings say")
