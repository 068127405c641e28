"""What clients post, as models: each gives the requests to sample, in one form for all APIs.

Nothing is coerced: "1" and true are no numbers. null counts as absent. Fields that are not known are let through,
except those of ``UNSUPPORTED``, which would change the samples or the answer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final, Literal, TypeAlias

import attrs
import numpy as np
import pydantic
from pydantic import AliasChoices, BeforeValidator, ConfigDict, Field, model_validator

from rlkit import _check
from rlkit._interaction import Message
from rlkit.chat.messages import read_call, read_messages
from rlkit.errors import ConfigError, DataError
from rlkit.gateway._types import GatewayError, Request, Sampling
from rlkit.types import SAMPLING_OPTIONS, SamplingParams

if TYPE_CHECKING:
    from rlkit.gateway._session import Session

__all__ = [
    "UNSUPPORTED",
    "Call",
    "ChatRequest",
    "CompletionsRequest",
    "CountRequest",
    "MessagesRequest",
    "Posted",
    "ResponsesRequest",
    "read_posted",
]

_CONSTRAINTS: Final = "guided_json guided_regex guided_choice guided_grammar structured_outputs structural_tag"
_ON_TOKENS: Final = "logit_bias bad_words allowed_token_ids logits_processors min_tokens use_beam_search prompt_embeds"
_ON_TEXT: Final = "suffix echo include_stop_str_in_output truncate_prompt_tokens chat_template continue_final_message"
_ON_ANSWERS: Final = "return_tokens_as_token_ids functions function_call thinking_token_budget audio"
_OF_PROVIDERS: Final = "documents web_search_options conversation background container mcp_servers repetition_detection"
UNSUPPORTED: Final[Mapping[str, object]] = {
    **dict.fromkeys(f"{_CONSTRAINTS} {_ON_TOKENS} {_ON_TEXT} {_ON_ANSWERS} {_OF_PROVIDERS}".split(), False),
    **dict.fromkeys(("add_generation_prompt", "skip_special_tokens"), True),
    **dict.fromkeys(("best_of", "length_penalty"), 1),
    "modalities": ["text"],
    "prompt_logprobs": None,  # 0 asks for those of the prompt's own tokens
}
"""The fields that are refused by name where an API has no such field, each with a value that changes nothing, as null,
"", [] and {} do."""

_MOST_PROMPTS: Final = 4096
_NO_VARIABLES: Final = frozenset({"messages", "tools", "head", "add_generation_prompt", "self"})
NO_THREADS: Final = "thread_unsupported_request"  # tells Anthropic's SDK that it has to send all messages


def _drop_nulls(value: Any) -> Any:
    return {name: each for name, each in value.items() if each is not None} if isinstance(value, dict) else value


class Wire(pydantic.BaseModel):
    """A JSON object of a client."""

    model_config = ConfigDict(strict=True, frozen=True)
    _absent = model_validator(mode="before")(_drop_nulls)


def _read_arguments(value: Any) -> Any:
    return read_call({"name": "", "arguments": value}, "")["arguments"]


class Part(Wire):
    """A part of a content."""

    type: Literal["text", "input_text", "output_text", "reasoning_text", "summary_text", "refusal"]
    text: str = Field(validation_alias=AliasChoices("text", "refusal"))


def _of_text(make: Callable[[str], Any]) -> BeforeValidator:
    """Return a validator that reads a text as a list of what it makes."""
    return BeforeValidator(lambda value: [make(value)] if isinstance(value, str) else value)


_whole: Final = BeforeValidator(lambda value: int(value) if isinstance(value, float) and value.is_integer() else value)
Int: TypeAlias = Annotated[int, _whole]
Count: TypeAlias = Annotated[Int, Field(ge=1)]
Top: TypeAlias = Annotated[Int, Field(ge=0, le=20)]
TokenId: TypeAlias = Annotated[int, Field(ge=0, lt=2**63)]
Parts: TypeAlias = Annotated[list[Part], _of_text(lambda text: {"type": "text", "text": text})]
Arguments: TypeAlias = Annotated[dict[str, Any], BeforeValidator(_read_arguments)]
Stop: TypeAlias = Annotated[list[Annotated[str, Field(min_length=1)]], _of_text(str), Field(max_length=128)]


def _join(parts: Sequence[Part], between: str = "\n") -> str:
    return between.join(part.text for part in parts)


class Function(Wire):
    """A function that may be called; Anthropic names its parameters ``input_schema``."""

    type: str = "function"
    name: str = Field(pattern=r"^[A-Za-z0-9_.:-]{1,128}$")
    description: str = ""
    parameters: dict[str, Any] = Field(
        {"type": "object", "properties": {}}, validation_alias=AliasChoices("parameters", "input_schema")
    )

    @property
    def tool(self) -> Message:
        """The function in the chat form."""
        about = {"description": self.description} if self.description else {}
        return {"type": "function", "function": {"name": self.name, **about, "parameters": self.parameters}}


class ChatTool(Wire):
    """A tool of chat completions."""

    type: Literal["function"] = "function"
    function: Function


class ResponsesTool(Function):
    """A tool of responses; those of a provider are not supported."""

    type: Literal["function"]


class ClaudeTool(Function):
    """A tool of Anthropic's; those with a type of their own are not supported."""

    type: Literal["custom"] = "custom"


class Format(Wire):
    """A wish for JSON, which is not enforced."""

    type: Literal["text", "json_object", "json_schema"]


AnyFormat: TypeAlias = Annotated[Format | None, BeforeValidator(lambda value: value or None)]


class FormatHolder(Wire):
    """An object that may wish for JSON: ``text`` of responses, ``output_config`` of Anthropic's."""

    format: AnyFormat = None


class Posted(Wire):
    """The fields that the requests of all APIs share."""

    model: str = ""
    stream: bool = False
    temperature: float | None = None
    top_p: float | None = None
    top_k: Int | None = Field(None, lt=2**31)
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    stop: Stop = []
    stop_token_ids: Annotated[list[TokenId], Field(max_length=128)] = []
    ignore_eos: bool = False
    seed: Int | None = Field(None, ge=-(2**63), lt=2**64)

    @model_validator(mode="before")
    @classmethod
    def _refuse(cls, value: Any) -> Any:
        for name, neutral in UNSUPPORTED.items() if isinstance(value, dict) else ():
            given = value.get(name)
            if name not in cls.model_fields and given not in (None, "", [], {}) and given != neutral:
                what = f"{name}: is not supported, and ignoring it would change the answer"
                raise GatewayError(400, what, param=name)
        return value

    def requests(self, session: Session) -> list[Request]:
        """Return the requests to sample. Raises GatewayError, or DataError whose message begins with the field."""
        raise NotImplementedError

    def sampling(self, session: Session, max_tokens: int | None, **formats: Format | None) -> Sampling:
        """Return the sampling settings; ``formats`` are the fields that may ask for JSON.

        Samplers take stops of one kind. So stop ids next to stop texts are spelled as texts, without the model's end
        tokens, which end a completion anyway.
        """
        given = {name: value for name in SAMPLING_OPTIONS if (value := getattr(self, name)) is not None}
        if given.get("top_k") == 0:  # as vLLM turns it off
            given["top_k"] = -1
        SamplingParams(**given)  # checks the ranges
        tokenizer = session.tokenizer
        ids = list(dict.fromkeys(self.stop_token_ids))
        if max(ids, default=0) >= tokenizer.vocab_size:
            raise DataError("stop_token_ids", f"has {max(ids)}", f"ids below {tokenizer.vocab_size}")
        if self.stop and not self.ignore_eos:
            ids = [token for token in ids if token not in tokenizer.eos_ids]
        spelled = [tokenizer.decode([token], skip_special=False) for token in ids]
        return Sampling(
            max_tokens=max_tokens,
            stop=tuple(dict.fromkeys([*self.stop, *spelled])) if self.stop else tuple(ids),
            ignore_eos=self.ignore_eos,
            seed=None if self.seed is None else self.seed % 2**64,
            json_field=next((name for name, form in formats.items() if form and form.type != "text"), ""),
            **given,
        )


class _Conversation(Posted):
    """What the requests of the APIs have that take messages and tools."""

    tools: Sequence[Any] = []
    tool_choice: Any = "auto"

    def request(self, messages: Sequence[Message], where: str, sampling: Sampling, **more: Any) -> list[Request]:
        """Return the request; ``where`` is the field of the messages, the last of which must not be the assistant's."""
        if messages[-1]["role"] == "assistant":
            expected = "a last message of the user, the system or a tool"
            raise DataError(f"{where}[-1].role", "is 'assistant'", expected, "the gateway does not continue an answer")
        tools = [getattr(each, "function", each).tool for each in self.tools]
        names = [tool["function"]["name"] for tool in tools]
        if len(set(names)) < len(names):
            raise DataError("tools", f"has the names {', '.join(names)}", "distinct ones")
        choice = _choose_tool(self.tool_choice, names)
        request = Request(messages, tools=tuple(tools), tool_choice=choice, sampling=sampling, model=self.model, **more)
        return [request]


class StreamOptions(Wire):
    """Options of a stream."""

    include_usage: bool = False


class _Completions(Posted):
    """What the two older APIs of OpenAI share."""

    n: Count = Field(1, le=1024)
    response_format: AnyFormat = None
    stream_options: StreamOptions = StreamOptions()
    return_token_ids: bool = False


class ChatRequest(_Completions, _Conversation):
    """``POST /v1/chat/completions``."""

    messages: list[Any] = Field(min_length=1)
    tools: list[ChatTool] = []
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    logprobs: bool = False
    top_logprobs: Top = 0
    chat_template_kwargs: dict[str, Any] = {}

    def requests(self, session: Session) -> list[Request]:
        if self.top_logprobs and not self.logprobs:
            raise DataError("top_logprobs", f"got {self.top_logprobs}", "logprobs=true together with it")
        if wrong := sorted(_NO_VARIABLES & self.chat_template_kwargs.keys()):
            raise DataError("chat_template_kwargs", f"has {wrong[0]!r}", "only variables of the template")
        limits = [limit for limit in (self.max_tokens, self.max_completion_tokens) if limit is not None]
        return self.request(
            read_messages(self.messages),
            "messages",
            self.sampling(session, min(limits, default=None), response_format=self.response_format),
            template=self.chat_template_kwargs,
            n=self.n,
            top_logprobs=self.top_logprobs if self.logprobs else None,
        )


class CompletionsRequest(_Completions):
    """``POST /v1/completions``: a request for each prompt."""

    prompt: Any
    max_tokens: Annotated[Int, Field(ge=0)] = 16
    logprobs: Top | None = None
    prompt_logprobs: Top | None = None
    echo: bool = False
    skip_special_tokens: bool = True

    def requests(self, session: Session) -> list[Request]:
        of_prompt = self.logprobs if self.echo and self.prompt_logprobs is None else self.prompt_logprobs
        shared = Request(
            sampling=self.sampling(session, self.max_tokens, response_format=self.response_format),
            n=self.n,
            top_logprobs=self.logprobs,
            prompt_logprobs=of_prompt,
            model=self.model,
        )
        return [
            attrs.evolve(shared, text=each) if isinstance(each, str) else attrs.evolve(shared, prompt=each)
            for each in _read_prompts(self.prompt)
        ]


class _Typed(Wire):
    """An object whose type says which fields it must have."""

    required: ClassVar[Mapping[str, str]] = {}
    type: str

    @model_validator(mode="after")
    def _check_complete(self) -> _Typed:
        for name in self.required.get(self.type, "").split():
            if getattr(self, name) is None:
                raise ValueError(f"has no {name}; {self.type} requires it")
        return self


class Item(_Typed):
    """An item of the responses API: a message, reasoning, a call, or the output of one."""

    required: ClassVar = {"message": "role content", "function_call": "name", "function_call_output": "call_id output"}
    type: Literal["message", "reasoning", "function_call", "function_call_output"] = "message"
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: Parts | None = None
    summary: Parts = []
    call_id: str | None = Field(None, validation_alias=AliasChoices("call_id", "id"))
    name: str | None = None
    arguments: Arguments = {}
    output: Parts | None = None


def _add_item(item: Item, said: list[dict[str, Any]]) -> None:
    """Add an item to a conversation: reasoning, text and calls that follow each other in this order are one turn."""

    def turn(*new: str) -> dict[str, Any]:
        """Return the policy's turn at the end; another one if there is none, or if it already has one of ``new``."""
        if not said or said[-1]["role"] != "assistant" or any(name in said[-1] for name in new):
            said.append({"role": "assistant"})
        return said[-1]

    content = item.content or []
    if item.type == "reasoning":
        thoughts = _join(content, "") or _join(item.summary, "")
        turn("content", "tool_calls", "reasoning_content").update({"reasoning_content": thoughts} if thoughts else {})
    elif item.type == "function_call":
        turn().setdefault("tool_calls", []).append(_call(item.call_id, item.name, item.arguments))
    elif item.type == "function_call_output":
        said.append({"role": "tool", "tool_call_id": item.call_id, "content": _join(item.output or [])})
    elif item.role == "assistant":
        turn("content", "tool_calls")["content"] = _join(content, "")
    else:
        said.append({"role": "user" if item.role == "user" else "system", "content": _join(content)})


class ResponsesRequest(_Conversation):
    """``POST /v1/responses``."""

    input: Annotated[list[Item], _of_text(lambda text: {"role": "user", "content": text}), Field(min_length=1)]
    instructions: str = ""
    previous_response_id: str | None = None
    store: bool = True
    tools: list[ResponsesTool] = []
    max_output_tokens: Count | None = None
    include: list[str] = []
    top_logprobs: Top = 0
    text: FormatHolder = FormatHolder()
    prompt: None = None  # a template that the API's provider stores
    reasoning: dict[str, Any] | None = None

    @property
    def logprobs(self) -> bool:
        """Whether logprobs are asked for."""
        return "message.output_text.logprobs" in self.include or self.top_logprobs > 0

    def requests(self, session: Session) -> list[Request]:
        said: list[dict[str, Any]] = []
        for item in self.input:
            _add_item(item, said)
        instructions = [{"role": "system", "content": self.instructions}] if self.instructions else []
        return self.request(
            [*instructions, *self._previous(session), *({"content": "", **message} for message in said)],
            "input",
            self.sampling(session, self.max_output_tokens, **{"text.format": self.text.format}),
            top_logprobs=self.top_logprobs if self.logprobs else None,
            fails_when_cut=True,
        )

    def _previous(self, session: Session) -> Sequence[Message]:
        name = self.previous_response_id
        if name is None:
            return ()
        if session.responses is None or name not in session.responses:
            what = f"previous_response_id: {name[:80]!r} is not known in this session"
            raise GatewayError(400, what, param="previous_response_id", code="previous_response_not_found")
        return session.responses[name]


class ClaudeBlock(_Typed):
    """A block of Anthropic's messages."""

    required: ClassVar = {"text": "text", "tool_use": "name", "tool_result": "tool_use_id"}
    type: Literal["text", "thinking", "redacted_thinking", "tool_use", "tool_result"]
    text: str | None = None
    thinking: str = ""
    id: str | None = None
    name: str | None = None
    input: Arguments = {}
    tool_use_id: str | None = None
    content: Parts = []


class ClaudeMessage(Wire):
    """One of Anthropic's messages."""

    role: Literal["user", "assistant", "system"]
    content: Annotated[list[ClaudeBlock], _of_text(lambda text: {"type": "text", "text": text})]

    @model_validator(mode="after")
    def _check_types(self) -> ClaudeMessage:
        foreign = {"tool_result"} if self.role == "assistant" else {"thinking", "redacted_thinking", "tool_use"}
        for i, block in enumerate(self.content):
            if block.type in foreign:
                raise ValueError(f"has content[{i}] of type {block.type!r}, which the role {self.role!r} cannot have")
        return self

    @property
    def messages(self) -> list[Message]:
        """The message in the chat form: results of tools become messages of their own, in their order."""
        if self.role == "assistant":
            thoughts = "".join(block.thinking for block in self.content)
            calls = [_call(each.id, each.name, each.input) for each in self.content if each.type == "tool_use"]
            more = {name: value for name, value in (("reasoning_content", thoughts), ("tool_calls", calls)) if value}
            return [{"role": "assistant", "content": "".join(each.text or "" for each in self.content), **more}]
        made: list[dict[str, Any]] = []
        for block in self.content:
            if block.type == "tool_result":
                made.append({"role": "tool", "tool_call_id": block.tool_use_id, "content": _join(block.content)})
            elif made and made[-1]["role"] == self.role:
                made[-1]["content"] += f"\n{block.text}"
            else:
                made.append({"role": self.role, "content": block.text})
        return [*made] or [{"role": self.role, "content": ""}]


class MessagesRequest(_Conversation):
    """``POST /v1/messages``."""

    messages: list[ClaudeMessage] = Field(min_length=1)
    system: Parts = []
    tools: list[ClaudeTool] = []
    stop: Stop = Field([], validation_alias="stop_sequences")
    thread: Any = None
    max_tokens: Count | None
    output_config: FormatHolder = FormatHolder()
    output_format: AnyFormat = None  # as it was called before

    def requests(self, session: Session) -> list[Request]:
        if self.thread is not None:
            what = "thread: the gateway does not store conversations; send all messages"
            raise GatewayError(400, what, param="thread", code=NO_THREADS)
        system = [{"role": "system", "content": _join(self.system)}] if _join(self.system) else []
        messages = [each for message in self.messages for each in message.messages]
        formats = {"output_config.format": self.output_config.format, "output_format": self.output_format}
        sampling = self.sampling(session, self.max_tokens, **formats)
        return self.request([*system, *messages], "messages", sampling)


class CountRequest(MessagesRequest):
    """``POST /v1/messages/count_tokens``."""

    max_tokens: Count | None = None


def _call(identifier: str | None, name: str | None, arguments: Mapping[str, Any]) -> dict[str, Any]:
    return {"id": identifier or "", "type": "function", "function": {"name": name, "arguments": arguments}}


def _choose_tool(value: object, names: Sequence[str]) -> str:
    """Return "auto", "none", "required", or one of the tools' names, from the form of any of the APIs."""
    choice = value
    if isinstance(value, Mapping):
        inner = value.get("function")
        about = inner if isinstance(inner, Mapping) else value
        choice = about.get("name") or {"any": "required"}.get(str(value.get("type")), value.get("type"))
    known = ["auto", "none", *(["required", *names] if names else [])]
    if choice not in known or not isinstance(choice, str):
        raise DataError("tool_choice", f"got {_check.describe(value)}", f"one of: {', '.join(known)}")
    return choice


def _read_prompts(value: Any) -> list[str] | list[np.ndarray]:
    """Return ``prompt``, which is a text, token ids, or a list of either."""
    if isinstance(value, list) and value and isinstance(value[0], (int, float)):
        return [_read_ids(value, "prompt")]
    prompts = [value] if isinstance(value, str) else value
    if isinstance(prompts, list) and 0 < len(prompts) <= _MOST_PROMPTS and all(prompts):
        if all(isinstance(each, str) for each in prompts):
            return prompts
        if all(isinstance(each, list) for each in prompts):
            return [_read_ids(each, f"prompt[{i}]") for i, each in enumerate(prompts)]
    expected = "a text, a list of token ids, or a list of either, none of them empty"
    raise DataError("prompt", f"got {_check.describe(value)}", expected)


def _read_ids(ids: list[Any], where: str) -> np.ndarray:
    for i, token in enumerate(ids):
        if type(token) is not int or not 0 <= token < 2**63:
            raise DataError(f"{where}[{i}]", f"got {_check.describe(token)}", "a token id, an integer >= 0")
    return np.array(ids, np.int64)


@attrs.frozen(eq=False)
class Call:
    """One call of an endpoint.

    Attributes:
        session: the session or gateway that answers.
        posted: what the client posted, as the model of its API.
        body: the same as it came.
        requests: to sample; several where a call has several prompts.
    """

    session: Session
    posted: Any
    body: Mapping[str, object]
    requests: Sequence[Request]


def read_posted(model: type[Posted], body: Mapping[str, object], session: Session) -> Call:
    """Read what a client posted.

    Raises:
        GatewayError: 400, a field is missing, has another form, or is not supported.
    """
    try:
        posted = model.model_validate(body)
        return Call(session, posted, body, posted.requests(session))
    except pydantic.ValidationError as error:
        text = _describe_error(error)
    except (DataError, ConfigError) as error:
        text = str(error).removeprefix("SamplingParams.")
    raise GatewayError(400, text, param=text.partition(": ")[0])


def _describe_error(error: pydantic.ValidationError) -> str:
    """Return the first problem: the field, what was expected, and what was found."""
    first = error.errors(include_url=False)[0]
    where = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in first["loc"]).lstrip(".")
    if first["type"] == "value_error":
        reason = str(first["ctx"]["error"])
        return f"{where}: {reason.removeprefix('.arguments').removeprefix(': ')}"
    if first["type"] == "missing":
        return f"{where}: is missing"
    return f"{where}: got {_check.describe(first['input'])}; {first['msg']}"
