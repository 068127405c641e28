"""Prompts and replies by the package ``renderers``, which knows how families of models write turns and tool calls."""

from __future__ import annotations

import contextlib
import copy
import inspect
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from rlkit import _check
from rlkit._interaction import Action, Message
from rlkit._runtime import missing
from rlkit.backends.protocol import Tokenizer
from rlkit.chat.templates import CUT, ControlText, end_answer, find_answer, without_prefill
from rlkit.errors import ConfigError, DataError
from rlkit.tools.types import Malformed, Parsed, ToolCall

if TYPE_CHECKING:
    from renderers.base import ParsedToolCall, Renderer

    from rlkit.chat._core import Chat

__all__ = ["ModelRenderer", "RendererPrompts", "make_renderer"]

_MOST = 128  # calls in one turn
_PLACE = "THE-TURN-OF-THE-POLICY"  # in ASCII, so that no token holds a part of a character
_CANNOT = {
    "invalid_json": "its JSON is not valid",
    "unclosed_block": "it is not closed",
    "missing_name": "it does not name a tool",
    "malformed_structure": "it does not follow the model's format",
}


class RendererTokenizer:
    """rlkit's tokenizer as renderers want one. Marked texts stay text; what a renderer writes itself is control."""

    unk_token_id = None

    def __init__(self, tokenizer: Tokenizer, name: str) -> None:
        self._tokenizer = tokenizer
        self._asked: set[str] = set()
        self.control: ControlText | None = None
        self.name_or_path = name
        self.chat_template = tokenizer.chat_template
        self.eos_token_id = next(iter(tokenizer.eos_ids), None)

    def guard(self, renderer: Renderer) -> ControlText:
        """Keep tokens that the renderer asked for, or that are in its source, out of marked texts from now on."""
        sources = {inspect.getmodule(kind) for kind in type(renderer).__mro__ if kind is not object}
        texts = [inspect.getsource(module) for module in sources if module is not None]
        self.control = ControlText(self._tokenizer, "\n".join([*texts, *self._asked, self.chat_template or ""]))
        return self.control

    def encode(self, text: str, **_: object) -> list[int]:
        """Return the ids of a text that a renderer put together of its own and of marked ones."""
        if self.control is None:
            self._asked.add(text)
            ids: list[int] = self._tokenizer.encode(text, special=True).tolist()
        else:
            ids = self.control.encode(text.replace(json.dumps(CUT)[1:-1], CUT)).tolist()
        return ids

    def decode(self, token_ids: Sequence[int] | int, skip_special_tokens: bool = False, **_: object) -> str:
        """Return the text of ids."""
        return self._tokenizer.decode(np.atleast_1d(np.array(token_ids, np.int64)), skip_special=skip_special_tokens)

    def convert_tokens_to_ids(self, tokens: str) -> int | None:
        """Return the id of a text that is one token; None if it is several."""
        self._asked.add(tokens)
        ids = self._tokenizer.encode(tokens, special=True)
        return int(ids[0]) if ids.size == 1 else None


class ModelRenderer:
    """A renderer with rlkit's types and errors; ``ends`` are the ids that end a turn, ``control`` marks texts."""

    def __init__(self, renderer: Renderer, control: ControlText) -> None:
        self._renderer, self.control = renderer, control
        self._keeping = copy.copy(renderer)  # the same, which never drops what was thought in earlier turns
        vars(self._keeping)["effective_thinking_retention"] = "all"
        self._ordinary = type(renderer).__name__ == "GptOssRenderer"  # Harmony reads no control tokens in texts
        self.ends = frozenset(map(int, renderer.get_stop_token_ids()))

    def render(self, messages: Sequence[Message], tools: Sequence[Message], *, head: bool = True) -> np.ndarray:
        """Render marked messages: int64 [T]. Raises DataError: the renderer refuses them."""
        said, schemas = self._prepare(messages), self._prepare(tools) or None
        with _explain_refusal(messages):
            return np.array(self._renderer.render_ids(said, tools=schemas, add_generation_prompt=head), np.int64)

    def extend(
        self, prompt: np.ndarray, sampled: np.ndarray, new: Sequence[Message], tools: Sequence[Message], *, keep: bool
    ) -> np.ndarray | None:
        """Return ``prompt``, ``sampled``, and the rendered ``new``: int64 [T]; None where that is impossible.

        Raises:
            DataError: the renderer refuses the messages.
        """
        renderer, start = self._keeping if keep else self._renderer, np.concatenate([prompt, sampled])
        said, schemas = self._prepare(new), self._prepare(tools) or None
        with _explain_refusal(new):
            bridged = renderer.bridge_to_next_turn(prompt.tolist(), sampled.tolist(), said, tools=schemas)
        ids = np.array([] if bridged is None else bridged.token_ids, np.int64)
        return ids if np.array_equal(ids[: start.size], start) and ids.size > start.size else None

    def parse(self, ids: np.ndarray, prompt: np.ndarray, tools: Sequence[Message], text: str) -> Parsed:
        """Parse the turn ``ids`` [n] after ``prompt`` [P]; what cannot be read becomes an error in it."""
        try:
            message = self._renderer.parse_response(
                ids.tolist(), tools=[dict(tool) for tool in tools] or None, prompt_ids=prompt.tolist()
            )
        except Exception as error:  # noqa: BLE001  # the policy chose the tokens, and is to be told
            what = f"the turn cannot be read ({type(error).__name__}: {str(error)[:80]})"
            return Parsed("", errors=(Malformed(what, "text, or calls in the model's own format"),))
        attempts, start = list[ToolCall | Malformed](), 0
        for call in message.tool_calls[:_MOST]:
            position = max(text.find(call.raw, start), start)
            attempts.append(_read_call(call, len(attempts), position))
            start = position + 1
        return Parsed(
            message.content,
            tuple(item for item in attempts if isinstance(item, ToolCall)),
            tuple(item for item in attempts if isinstance(item, Malformed)),
            message.reasoning_content,
        )

    def _prepare(self, messages: Sequence[Message]) -> list[Message]:
        if self._ordinary:
            messages = json.loads(json.dumps(messages, ensure_ascii=False).replace(CUT, ""))
        return list(messages)


class RendererPrompts:
    """Prompts of marked messages by a renderer: the same methods as ``TemplatePrompts``, where they are explained."""

    renders_tools = writes_calls = True

    def __init__(self, chat: Chat, renderer: ModelRenderer, tools: Sequence[Message]) -> None:
        self._chat, self._renderer = chat, renderer
        self._tools = chat.control.mark(list(tools), where="tools")

    def write_turn(self, action: Action) -> Message:
        """Return the policy's turn with its reasoning and its calls; those that cannot be read stay text."""
        mark, parsed = self._chat.control.mark, action.parsed
        if parsed is None:
            return {"role": "assistant", "content": mark(str(action), foreign=False)}
        unread = [error.raw for error in parsed.errors if error.raw]
        content = "\n".join([parsed.text_outside, *unread]).strip("\n")
        turn: dict[str, object] = {"role": "assistant", "content": content}
        if parsed.reasoning is not None:
            turn["reasoning_content"] = parsed.reasoning
        if parsed.calls:
            functions = [(c.id, {"name": c.name, "arguments": dict(c.arguments)}) for c in parsed.calls]
            turn["tool_calls"] = [{"type": "function", "id": i, "function": f} for i, f in functions]
        return mark(turn, foreign=False)

    def write(self, messages: Sequence[Message], *, head: bool = False) -> str:
        """Return messages as text."""
        return self._decode(self._renderer.render(messages, self._tools, head=head))

    def first_prompt(self, messages: Sequence[Message]) -> np.ndarray:
        """Render all messages and the head of the policy's turn."""
        return self._add_prefill(self._renderer.render(messages, self._tools))

    def write_answer(self, messages: Sequence[Message], following: Sequence[Message]) -> tuple[np.ndarray, np.ndarray]:
        """Return the last message, the assistant's, as it is written after the others."""
        chat, message = self._chat, {**messages[-1], "content": messages[-1]["content"].replace(CUT, "")}
        start, written = find_answer(self.write, messages, message)
        whole = self._renderer.render(messages, self._tools, head=False)
        ids = self._cut(whole, start) if start >= 0 else self._encode(written)
        if chat.prefill:
            text = self._decode(ids)
            rest = without_prefill(text, message, chat.prefill)
            ids = self._cut(ids, len(text) - len(rest)) if text.endswith(rest) else self._encode(rest)
        (ends,) = np.nonzero(np.isin(ids, list(chat.ends)))
        if ends.size:
            return end_answer(chat, message, ids[: ends[0]], ids[ends[0] :][:1])
        after = self._renderer.render([*messages, *following], self._tools, head=False)[whole.size :]
        return end_answer(chat, message, ids, after[:1])

    def next_prompt(
        self, prompt: np.ndarray, action: Action, messages: Sequence[Message], turn: int, *, keep: bool
    ) -> np.ndarray:
        """Append to ``prompt``, or render all where the renderer writes earlier turns differently now."""
        ids = self._renderer.extend(prompt, action.tokens, messages[turn + 1 :], self._tools, keep=keep)
        if ids is not None:
            return self._add_prefill(ids)
        if keep:
            return self._after_placeholder(prompt, action, messages, turn)
        anew = self.first_prompt(messages)  # renderers drop reasoning before each question; where there was none,
        ids = self._renderer.extend(prompt, action.tokens, messages[turn + 1 :], self._tools, keep=True)
        appended = None if ids is None else self._add_prefill(ids)  # nothing is rewritten
        return anew if appended is None or self._decode(appended) != self._decode(anew) else appended

    def _after_placeholder(
        self, prompt: np.ndarray, action: Action, messages: Sequence[Message], turn: int
    ) -> np.ndarray:
        """Append what is written after the policy's turn, whatever the renderer makes of the turn itself."""
        shown: Message = {"role": "assistant", "content": _PLACE}
        whole = self._renderer.render([*messages[:turn], shown, *messages[turn + 1 :]], self._tools)
        parts = self._decode(whole).split(_PLACE)
        if len(parts) != 2:
            what = f"the renderer shows the policy's turn {len(parts) - 1} times"
            raise DataError("conversation", what, "once", "tokens cannot be appended to it")
        ids = self._cut(whole, len(parts[0]) + len(_PLACE))
        if np.isin(action.tokens[-1:], list(self._chat.ends)).any() and ids.size and int(ids[0]) in self._chat.ends:
            ids = ids[1:]
        return self._add_prefill(np.concatenate([prompt, action.tokens, ids]))

    def _cut(self, ids: np.ndarray, start: int) -> np.ndarray:
        """Return the tokens after ``start`` characters; one that holds the end of these and more is encoded anew."""
        cut = next(k for k in range(ids.size + 1) if len(self._decode(ids[:k])) >= start)
        return np.concatenate([self._chat.control.encode(self._decode(ids[:cut])[start:], first=False), ids[cut:]])

    def _encode(self, text: str) -> np.ndarray:
        return self._chat.control.encode(self._chat.control.mark(text, foreign=False), first=False)

    def _decode(self, ids: np.ndarray) -> str:
        return self._chat.tokenizer.decode(ids, skip_special=False)

    def _add_prefill(self, ids: np.ndarray) -> np.ndarray:
        return np.concatenate([ids, self._chat.control.encode(self._chat.prefill, first=False)])


def make_renderer(name: str, tokenizer: Tokenizer, variables: Mapping[str, object]) -> ModelRenderer:
    """Return the renderer of a name.

    Args:
        name: as in ``Chat``.
        tokenizer: the policy's.
        variables: of the chat template; the renderer must know them.

    Raises:
        ConfigError: it is not a name, or there is no such renderer, or it does not fit the tokenizer.
        MissingPackageError: the package is not installed.
    """
    if not isinstance(name, str) or name in ("auto", "default"):
        own = "a renderer of your own is named 'my_module:MyRenderer'; variables= has the options of any"
        expected = "None (the model's chat template) or the name of a family or a model, such as 'qwen3'"
        raise ConfigError("Chat.renderer", f"got {_check.describe(name)}", expected, own)
    try:
        import renderers
        from renderers.base import MODEL_RENDERER_MAP
    except ImportError as error:
        raise missing("Chat.renderer", "renderers", "renderers") from error
    try:
        if ":" in name:  # a class outside of the package
            config = renderers.CustomRendererConfig(import_path=name)
        else:
            config = renderers.config_from_name(MODEL_RENDERER_MAP.get(name, name))
        adapter = RendererTokenizer(tokenizer, name)
        renderer = renderers.create_renderer(adapter, config, chat_template_kwargs=variables)
        return ModelRenderer(renderer, adapter.guard(renderer))
    except Exception as error:
        what = f"{name!r} cannot be used ({type(error).__name__}: {' '.join(str(error).split())[:200]})"
        instead = "renderer=None uses the model's chat template"
        raise ConfigError("Chat.renderer", what, "a renderer for this model", instead) from error


def _read_call(call: ParsedToolCall, index: int, position: int) -> ToolCall | Malformed:
    """Return what a renderer read as rlkit's type; arguments are checked against schemas later."""
    id_, name, arguments, status = call.id or f"call{index:05d}", call.name or "", call.arguments, str(call.status)
    problem = _CANNOT.get(status, status)
    if name and isinstance(arguments, dict) and status in ("ok", "invalid_json", "unknown_tool"):
        try:
            json.dumps(arguments, allow_nan=False)
            _check.depth("arguments", arguments, most=_check.DEEPEST_CALL)
            return ToolCall(name, arguments, id_, position)
        except (ValueError, RecursionError) as error:
            problem = f"the JSON is not valid: {error}"
    elif status == "ok":
        problem = "its arguments are not a JSON object"
    expected = "a call in the model's own format, with the tool's name and its arguments"
    return Malformed(problem, expected, position, call.raw[:40], name[:64], id_, call.raw)


@contextlib.contextmanager
def _explain_refusal(messages: Sequence[Message]) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        what = f"the renderer refuses messages with the roles {_check.roles(messages)}"
        raise DataError(f"{what}: {type(error).__name__}: {error}") from error
