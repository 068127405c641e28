"""A tokenizer that has the control tokens of several families of models, and templates that behave like theirs."""

from __future__ import annotations

import contextlib
import functools

import rlkit
from rlkit import tools

SPECIAL = [
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
    *("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>", "<|python_tag|>"),
    *("<bos>", "<start_of_turn>", "<end_of_turn>", "[gMASK]", "<|user|>", "<|assistant|>"),
]
ADDED = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

# Thinking is kept behind the user's last question alone; tool results are put together into one user turn.
QWEN3 = """
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
    {{- "# Tools\\n<tools>" }}
    {%- for tool in tools %}{{- "\\n" }}{{- tool | tojson }}{%- endfor %}
    {{- "\\n</tools>\\nAnswer with <tool_call>{...}</tool_call><|im_end|>\\n" }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(last=-1) %}
{%- for m in messages %}
    {%- if m.role == 'user' and not m.content.startswith('<tool_response>') %}
        {%- set ns.last = loop.index0 %}
    {%- endif %}
{%- endfor %}
{%- for m in messages %}
    {%- if m.role == 'user' or (m.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}
    {%- elif m.role == 'assistant' %}
        {%- set content = m.content %}
        {%- set reasoning = '' %}
        {%- if '</think>' in content %}
            {%- set reasoning = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {%- if loop.index0 > ns.last and (loop.last or reasoning) %}
            {{- '<|im_start|>assistant\\n<think>\\n' + reasoning.strip('\\n') + '\\n</think>\\n\\n' + content }}
        {%- else %}
            {{- '<|im_start|>assistant\\n' + content }}
        {%- endif %}
        {{- '<|im_end|>\\n' }}
    {%- elif m.role == 'tool' %}
        {%- if loop.first or loop.previtem.role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}
        {%- if loop.last or loop.nextitem.role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}"""

LLAMA3 = """{{- bos_token }}
{%- for m in messages %}
    {{- '<|start_header_id|>' + m['role'] + '<|end_header_id|>\\n\\n' + m['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}"""

GEMMA = """{{ bos_token }}
{%- if messages[0]['role'] == 'system' %}
    {%- set first = messages[0]['content'] + '\\n\\n' %}{%- set rest = messages[1:] %}
{%- else %}
    {%- set first = '' %}{%- set rest = messages %}
{%- endif %}
{%- for m in rest %}
    {%- if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must take turns') }}{%- endif %}
    {%- set role = 'model' if m['role'] == 'assistant' else m['role'] %}
    {{- '<start_of_turn>' + role + '\\n' + (first if loop.first else '') + m['content'] | trim + '<end_of_turn>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{%- endif %}"""

# Nothing closes a turn: a policy stops at the head of the next one.
GLM = """[gMASK]
{%- for m in messages %}<|{{ m.role }}|>
{{ m.content }}
{%- endfor %}
{%- if add_generation_prompt %}<|assistant|>
{% endif %}"""

APPENDING = {"chatml": CHATML, "llama3": LLAMA3, "gemma": GEMMA}
TEMPLATES = {**APPENDING, "qwen3": QWEN3, "glm": GLM}
END = {
    "chatml": "<|im_end|>",
    "llama3": "<|eot_id|>",
    "gemma": "<end_of_turn>",
    "qwen3": "<|im_end|>",
    "glm": "<|user|>",
}
ENDS = ["<|endoftext|>", "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>", "<|user|>"]
BOS = {"chatml": "<|im_start|>", "llama3": "<|begin_of_text|>", "gemma": "<bos>", "qwen3": None, "glm": None}


def add(x: int, y: int = 0, note: str = "") -> int:
    """Add two numbers."""
    return x + y


SCHEMAS = [tools.schema(add)]


def act(chat, text, stop_reason="stop", **given):
    """An action as it comes from a sampler; control tokens written in ``text`` were sampled."""
    return chat.action(chat.tokenizer.encode(text, special=True), stop_reason, **given)


def played(chat, *turns):
    """The conversation after an observation, what was sampled for it, an observation, what was sampled, ..."""
    conversation = chat.start(turns[0])
    for text, observation in zip(turns[1::2], turns[2::2], strict=True):
        conversation.add(act(chat, text), observation)
    return conversation


def shown(t, ids):
    return t.decode(ids, skip_special=False)


def ask(text):
    """A question as ChatML has it, with the head of the answer."""
    return f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"


@functools.cache
def tokenizer(kind: str = "chatml"):
    """A byte-level BPE tokenizer behind rlkit's protocol, with the template of that kind (None: without one)."""
    hf = trained(SPECIAL, ADDED)
    names = {"eos_token": END.get(kind, "<|im_end|>"), "pad_token": "<|endoftext|>"}
    if BOS.get(kind):
        names["bos_token"] = BOS[kind]
    return wrapped(hf, names, TEMPLATES.get(kind), ENDS)


@functools.cache
def family(kind: str, template: str | None = None):
    """The same with the control tokens that a renderer of the package ``renderers`` asks for, and a template."""
    import renderers

    class Asked:  # gives each text an id, and remembers it
        name_or_path, unk_token_id, eos_token_id, chat_template = "", None, 0, template
        texts: dict[str, int] = {}

        def convert_tokens_to_ids(self, text):
            return self.texts.setdefault(text, len(self.texts))

        def encode(self, text, **_):
            return [self.convert_tokens_to_ids(text)]

    asked = Asked()
    stops = renderers.create_renderer(asked, renderers.config_from_name(kind)).get_stop_token_ids()
    end = next(text for text, token in asked.texts.items() if token in stops)
    thoughts = ("<think>", "</think>") if kind == "qwen3" else ()  # which it does not ask for, and writes
    texts = dict.fromkeys(text for text in (*asked.texts, *thoughts) if not text[:1].isalpha() and text.isprintable())
    plain = [text for text in texts if text.lstrip("</").startswith(("think", "tool", "arg"))]
    special = [text for text in texts if text not in plain]
    return wrapped(trained(special, plain), {"eos_token": end}, template, [end])


def wrapped(hf, names, template, ends):
    import transformers as tf

    from rlkit.backends.tokenizers import LocalTokenizer

    hf = tf.PreTrainedTokenizerFast(tokenizer_object=hf, **names)
    hf.chat_template = template
    return LocalTokenizer(hf, vocab_size=len(hf), eos_ids=[hf.convert_tokens_to_ids(text) for text in ends])


def trained(special, added):
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    inner = Tokenizer(models.BPE())
    words = Regex(r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
    inner.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(words, "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    inner.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=500, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    corpus = ["the user said: what is 1 + 2? the assistant said it is 3. think about the tool, then answer\n\n"] * 5
    inner.train_from_iterator([*corpus, "<|im_ end|> im_end im_start |> <| tool_call end_of_turn eot_id"] * 2, trainer)
    inner.add_tokens([AddedToken(text, normalized=False, special=False) for text in added])
    return inner


@functools.cache
def every_tokenizer():
    """By name: those of all templates, the toy's, and SmolLM2's, where that is installed."""
    import transformers as tf

    from rlkit.backends.local.hub import model_path
    from rlkit.backends.tokenizers import LocalTokenizer

    found = {kind: tokenizer(kind) for kind in TEMPLATES} | {"toy": rlkit.connect("toy").tokenizer}
    with contextlib.suppress(rlkit.RlkitError):
        hf = tf.AutoTokenizer.from_pretrained(model_path("smollm2-135m-instruct"))
        found["smollm2"] = LocalTokenizer(hf, vocab_size=len(hf), eos_ids=[2])
    return found
