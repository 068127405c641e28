"""How a policy is talked to: one setting for all conversations with it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from rlkit import _check
from rlkit._calls import answered
from rlkit._interaction import Action, Observation
from rlkit.backends.protocol import Tokenizer
from rlkit.chat.control import ControlText
from rlkit.chat.templates import Template
from rlkit.errors import ConfigError

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

    Raises:
        ConfigError: an argument of the wrong type, or a template that is not valid or lacks the thinking switch.

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
        variables: Mapping[str, Any] | None = None,
    ) -> None:
        if system is not None and not isinstance(system, str):
            raise ConfigError(_check.problem("Chat.system", f"got {_check.shown(system)}", "a string or None"))
        if not isinstance(prefill, str):
            raise ConfigError(_check.problem("Chat.prefill", f"got {_check.shown(prefill)}", "a string"))
        _check.choice("Chat.history", history, ("template", "append", "none"))
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
        if thinking is not None:
            self.variables |= self._switch(_check.flag("Chat.thinking", thinking))
        self.control = ControlText(tokenizer, "".join(t.text for t in (self.template, self.tool_template) if t))

    def start(self, observation: Observation, tools: Sequence[Mapping[str, Any]] = ()) -> Conversation:
        """A conversation that begins with what an environment said first.

        Args:
            observation: text (a user message), messages, or token ids [T], which are sent as they are.
            tools: function schemas, OpenAI style. The template renders them; where it does not, a description in
                ``tool_format`` is put into the system prompt.

        Raises:
            DataError: an observation of another form, or messages that the template refuses.
        """
        from rlkit.chat.conversation import Conversation

        return Conversation(self, observation, tools)

    def message(self, text: str, role: str = "user") -> np.ndarray:
        """The tokens of one message alone, as the template writes it, without the head of an answer.

        Text that reads like control tokens stays text. Without a template it is the text and an empty line.

        Raises:
            DataError: the template refuses a conversation of this message alone.

        >>> import rlkit
        >>> tokenizer = rlkit.connect("toy").tokenizer
        >>> print(tokenizer.decode(Chat(tokenizer).message("Hi"), skip_special=False).strip())
        <|im_start|>user
        Hi<|im_end|>
        """
        if self.template is None:
            return self.control.encode(f"{self.control.mark(text)}\n\n", first=True)
        marked = self.control.mark([{"role": role, "content": text}])
        rendered = self.template.render(marked, head=False, **{**self.variables, "tools": None})
        return self.control.encode(rendered, first=True)

    def action(self, tokens: Any, stop_reason: Literal["stop", "length"] = "stop") -> Action:
        """What an environment is given for sampled tokens int [n]."""
        ids = _check.token_ids("tokens", tokens, vocab_size=self.tokenizer.vocab_size)
        ended = ids.size > 0 and int(ids[-1]) in self.tokenizer.eos_ids
        text = self.prefill + self.tokenizer.decode(ids[:-1] if ended else ids)
        raw = self.prefill + self.tokenizer.decode(ids, skip_special=False)
        return Action(text, tokens=ids, raw=raw, stop_reason=stop_reason)

    def _switch(self, thinking: bool) -> dict[str, bool]:
        known = [name for name in ("enable_thinking", "thinking") if self.template and name in self.template.names]
        if not known:
            what = "the template reads no enable_thinking" if self.template else "there is no template"
            expected = "a template with such a switch"
            raise ConfigError(_check.problem("Chat.thinking", what, expected, "prefill can begin the turn instead"))
        return dict.fromkeys(known, thinking)
