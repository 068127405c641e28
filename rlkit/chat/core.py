"""How a policy is talked to: one setting for all conversations with it."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Literal

import attrs
import numpy as np
from numpy.typing import ArrayLike

from rlkit import _check
from rlkit._calls import answered
from rlkit._interaction import Action, Message, Observation
from rlkit.backends.protocol import Tokenizer
from rlkit.chat.control import ControlText
from rlkit.chat.prompts import TemplatePrompts
from rlkit.chat.rendering import RendererPrompts, find_renderer
from rlkit.chat.templates import Template
from rlkit.errors import ConfigError
from rlkit.types import SamplingParams

if TYPE_CHECKING:
    from rlkit.chat.conversation import Conversation

__all__ = ["Chat"]


@answered
class Chat:
    """Turns what environments say into prompts, and what the policy sampled into actions.

    Args:
        tokenizer: the policy's.
        system: a system prompt of the program's own. An environment's system message is put behind it.
        template: the text of a chat template instead of the model's. A model that has none gets its texts one after
            the other, and nothing between them.
        thinking: switches thinking on or off in templates that know ``enable_thinking`` or ``thinking``; None leaves
            it to the template.
        prefill: how each of the policy's turns begins; control tokens written in it are control tokens. It belongs to
            the prompt, is not trained, and is part of the action's text.
        history: what happens when a template would now write an earlier turn differently from what was sampled (Qwen3
            leaves earlier thinking out). "template" renders everything anew, as in use after training, and the turn
            begins a new datum; "append" keeps all tokens as they are, so that an episode is one datum. "none" forgets:
            every observation is a prompt of its own, for environments that say each time all that is to be known.
        tool_format: how tools are described to a model whose template does not render them; a name in
            ``rlkit.tools.formats``.
        variables: what else the template is to see.
        renderer: how the model's turns and tool calls are written and read. "auto": by the package ``renderers`` where
            it is installed and knows the model by its exact name, and ``template`` is None; otherwise by the chat
            template. None: by the chat template. One of the package's names (``"qwen3"``, ``"Qwen/Qwen3-8B"``), of its
            configs or of its renderers: by that one.

    Attributes:
        ends: the ids that end a turn of the policy.

    Raises:
        ConfigError: an argument of the wrong type, a template that is not valid or lacks the thinking switch, or a
            renderer that does not fit the tokenizer.

    >>> import rlkit
    >>> tokenizer = rlkit.connect("toy").tokenizer
    >>> chat = Chat(tokenizer, system="Be brief.", prefill="= ")
    >>> conversation = chat.start("1 + 1?")
    >>> print(tokenizer.decode(conversation.prompt, skip_special=False))
    <|im_start|>system
    Be brief.<|im_end|>
    <|im_start|>user
    1 + 1?<|im_end|>
    <|im_start|>assistant
    =
    >>> action = chat.action(tokenizer.encode("2<|im_end|>", special=True))  # what the sampler gave
    >>> action
    '= 2'
    >>> conversation.add(action, "And 2 + 2?")
    >>> conversation.extends
    True
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        system: str | None = None,
        template: str | None = None,
        thinking: bool | None = None,
        prefill: str = "",
        history: Literal["template", "append", "none"] = "template",
        tool_format: str = "hermes",
        variables: Mapping[str, object] | None = None,
        renderer: object = "auto",
    ) -> None:
        _check.require(system is None or isinstance(system, str), "Chat.system", system, "a string or None")
        _check.require(isinstance(prefill, str), "Chat.prefill", prefill, "a string")
        _check.choice("Chat.history", history, ("template", "append", "none"))
        lacking = [name for name in ("encode", "decode", "eos_ids", "chat_template") if not hasattr(tokenizer, name)]
        if lacking:
            what = f"got {_check.shown(tokenizer)}, which lacks {lacking[0]}"
            raise ConfigError("Chat(tokenizer)", what, "the policy's: policy.tokenizer")
        self._options = {
            "system": system,
            "template": template,
            "thinking": thinking,
            "prefill": prefill,
            "history": history,
            "tool_format": tool_format,
            "variables": variables,
            "renderer": renderer,
        }
        self.tokenizer = tokenizer
        self.system = system
        self.prefill = prefill
        self.history = history
        self.tool_format = tool_format
        self.variables = dict(variables or {})
        names = dict(getattr(tokenizer, "named_tokens", {}))
        text = tokenizer.chat_template if template is None else template
        if isinstance(text, Mapping):  # some models have one for tools beside the usual one
            self.template: Template | None = Template(text.get("default", ""), names)
            self.tool_template: Template | None = Template(text["tool_use"], names) if "tool_use" in text else None
            self.tool_template = self.tool_template or self.template
        else:
            self.template = self.tool_template = None if text is None else Template(text, names)
        switch = {} if thinking is None else {"enable_thinking": _check.flag("Chat.thinking", thinking)}
        choice = None if renderer == "auto" and template is not None else renderer
        self.renderer = find_renderer(choice, tokenizer, self.variables | switch)
        texts = "".join(t.text for t in (self.template, self.tool_template) if t)
        self.control = self.renderer.control if self.renderer else ControlText(tokenizer, texts)
        if thinking is not None and self.renderer is None:
            self.variables |= self._switch(thinking)
        self.ends = frozenset(tokenizer.eos_ids) | (self.renderer.ends if self.renderer else frozenset())

    def with_options(self, **changes: object) -> Chat:
        """Return a chat with the same tokenizer and these arguments of ``Chat`` replaced.

        Raises:
            ConfigError: as for ``Chat``; an argument that there is not.

        >>> import rlkit
        >>> Chat(rlkit.connect("toy").tokenizer, system="Be brief.").with_options(history="append").history
        'append'
        """
        if changes.keys() != {"prefill"}:
            return Chat(self.tokenizer, **{**self._options, **changes})  # type: ignore[arg-type]
        chat = copy.copy(self)  # nothing is compiled again
        chat.prefill = str(changes["prefill"])
        chat._options = self._options | changes  # noqa: SLF001
        return chat

    def start(self, observation: Observation, tools: Sequence[Message] = ()) -> Conversation:
        """Begin a conversation with what an environment said first.

        Args:
            observation: text (a user message), messages, or token ids [T], which are sent as they are.
            tools: function schemas, OpenAI style. The renderer or the template renders them; where it does not, a
                description in ``tool_format`` is put into the system prompt.

        Raises:
            DataError: an observation of another form, or messages that the template refuses.
        """
        from rlkit.chat.conversation import Conversation

        return Conversation(self, observation, tools)

    def message(self, text: str, role: str = "user") -> np.ndarray:
        """Return the tokens of one message alone, without the head of an answer.

        Text that reads like control tokens stays text. Without a template it is the text and an empty line.

        Raises:
            DataError: the template refuses a conversation of this message alone.

        >>> import rlkit
        >>> tokenizer = rlkit.connect("toy").tokenizer
        >>> print(tokenizer.decode(Chat(tokenizer).message("Hi"), skip_special=False).strip())
        <|im_start|>user
        Hi<|im_end|>
        """
        marked = self.control.mark({"role": role, "content": text})
        if self.renderer is not None:
            return self.renderer.render([marked], (), head=False)
        if self.template is None:
            return self.control.encode(f"{marked['content']}\n\n", first=True)
        rendered = self.template.render([marked], head=False, **{**self.variables, "tools": None})
        return self.control.encode(rendered, first=True)

    def action(
        self,
        tokens: ArrayLike,
        stop_reason: Literal["stop", "length"] = "stop",
        *,
        prompt: ArrayLike = (),
        tools: Sequence[Message] = (),
    ) -> Action:
        """Return what an environment is given for sampled tokens.

        Args:
            tokens: int [n].
            stop_reason: whether the policy ended its turn or was cut.
            prompt: int [P], what they were sampled for; a renderer sees there whether reasoning had begun.
            tools: the schemas of the conversation; a renderer reads arguments by them.
        """
        ids = _check.token_ids("tokens", tokens, vocab_size=self.tokenizer.vocab_size)
        ended = ids.size > 0 and int(ids[-1]) in self.ends
        text = self.prefill + self.tokenizer.decode(ids[:-1] if ended else ids)
        raw = self.prefill + self.tokenizer.decode(ids, skip_special=False)
        parsed = None
        if self.renderer is not None:
            before = _check.token_ids("prompt", prompt, vocab_size=self.tokenizer.vocab_size)
            head = self.control.encode(self.prefill, first=False)
            said = np.concatenate([head, ids])  # the prefill is part of the turn
            parsed = self.renderer.parse(said, before[: max(before.size - head.size, 0)], tools, raw)
        return Action(text, tokens=ids, raw=raw, stop_reason=stop_reason, parsed=parsed)

    def params(self, params: SamplingParams) -> SamplingParams:
        """Return ``params`` that stop at the renderer's end tokens too, where the tokenizer does not name them."""
        more: list[int] = sorted(self.ends.difference(self.tokenizer.eos_ids))
        if not more or params.stop == ():
            return params
        if params.stop and isinstance(params.stop[0], str):
            texts = [self.tokenizer.decode([token], skip_special=False) for token in more]
            return attrs.evolve(params, stop=tuple(dict.fromkeys([*params.stop, *texts])))
        return attrs.evolve(params, stop=tuple(dict.fromkeys([*(params.stop or ()), *more])))

    def prompts(self, tools: Sequence[Message]) -> TemplatePrompts | RendererPrompts:
        """Return what writes the prompts of one conversation."""
        return RendererPrompts(self, self.renderer, tools) if self.renderer else TemplatePrompts(self, tools)

    def _switch(self, thinking: bool) -> dict[str, bool]:
        known = [name for name in ("enable_thinking", "thinking") if self.template and name in self.template.names]
        if not known:
            what = "the template reads no enable_thinking" if self.template else "there is no template"
            expected = "a template with such a switch"
            raise ConfigError("Chat.thinking", what, expected, "prefill can begin the turn instead")
        return dict.fromkeys(known, thinking)
