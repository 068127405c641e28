"""Calls in a policy's text: what is read, and what is said of what cannot be read."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlkit.errors import ConfigError, UnknownNameError
from rlkit.tools import Malformed, Parsed, ToolCall, error_message, formats, parse, tool_message
from tests.each import for_each
from tests.properties import examples

ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "parameters": {
            "type": "object",
            "properties": {"x": {"type": "integer"}, "y": {"type": "integer"}, "note": {"type": "string"}},
            "required": ["x"],
            "additionalProperties": False,
        },
    },
}


def read(text, kind, tools=None):
    """(text outside, [(name, arguments)], [problem])"""
    parsed = parse(text, kind, tools)
    return parsed.text_outside, [(c.name, c.arguments) for c in parsed.calls], [e.problem for e in parsed.errors]


CALL = '{"name": "add", "arguments": {"x": 1}}'
PYTHON = r"""[in(class=true, true=null, x='\d' '''\n''')]"""  # words that are JSON's, or Python's own
ONE = [("add", {"x": 1})]


@for_each(
    ("kind", "text", "outside", "calls"),
    [
        ("hermes", "no call", "no call", []),
        ("hermes", f"a <tool_call>{CALL}</tool_call> b", "a  b", ONE),
        ("hermes", f"<tool_call>\n{CALL}\n</tool_call>\n<tool_call>\n{CALL}\n</tool_call>", "", ONE * 2),
        ("hermes", f"<tool_call>\n{CALL}\n", "", ONE),  # the closing tag was a stop string
        (
            "hermes",
            '<tool_call>{"name": "f", "arguments": {"s": "</tool_call>"}}</tool_call>',
            "",
            [("f", {"s": "</tool_call>"})],
        ),
        ("hermes", '<tool_call>{"name": "f", "parameters": {}}</tool_call>', "", [("f", {})]),
        ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"x\\": 1}"}</tool_call>', "", [("f", {"x": 1})]),
        (
            "hermes",
            '<tool_call>{"type": "function", "function": {"name": "f", "arguments": {}}}</tool_call>',
            "",
            [("f", {})],
        ),
        ("hermes", '<tool_call>{"name": "é", "arguments": {"s": "\\u00e9🎈"}}</tool_call>', "", [("é", {"s": "é🎈"})]),
        ("json", CALL, "", ONE),
        ("json", f"[{CALL}, {CALL}]", "", ONE * 2),
        ("json", f"Let me see: {CALL} so", "Let me see:  so", ONE),
        ("json", f"```json\n{CALL}\n```", "", ONE),
        ("json", 'The set {1, 2} and [3] and {"a": 1}.', 'The set {1, 2} and [3] and {"a": 1}.', []),
        ("llama", "It is 3.", "It is 3.", []),
        ("llama", "[1] is a source", "[1] is a source", []),
        ("llama", '{"answer": 3}', '{"answer": 3}', []),
        ("llama", '{"name": "add", "parameters": {"x": 1}}', "", ONE),
        ("llama", '<|python_tag|>{"name": "add", "parameters": {"x": 1}}<|eom_id|>', "", ONE),
        ("llama", f"{CALL}; {CALL}", "", ONE * 2),
        ("llama", f"{CALL}\n{CALL}", "", ONE * 2),
        ("llama", "[add(x=1), add(x=1)]", "", ONE * 2),
        ("llama", "hm <|python_tag|>[add(x=1)]<|eot_id|>", "hm", ONE),
        ("llama", '<|python_tag|>search.call(query="a b")', "", [("search", {"query": "a b"})]),
        ("llama", PYTHON, "", [("in", {"class": True, "true": None, "x": "\\d\n"})]),
        (
            "llama",
            "[f(a=-1.5e3, b='it\\'s\\n', c=[1, (2,), {'k': None}], d=True, e=\"\"\"two\nlines\"\"\", g='\\d')]",
            "",
            [
                (
                    "f",
                    {"a": -1500.0, "b": "it's\n", "c": [1, [2], {"k": None}], "d": True, "e": "two\nlines", "g": "\\d"},
                )
            ],
        ),
        ("python", "a\n```python\nprint(1)\n```\nb", "a\n\nb", [("python", {"code": "print(1)\n"})]),
        ("python", "```py\n1\n```\n```python\n2\n```", "", [("python", {"code": "1\n"}), ("python", {"code": "2\n"})]),
        ("python", "```\nno language\n```", "```\nno language\n```", []),
        (
            "qwen3_coder",
            "<tool_call>\n<function=add>\n<parameter=x>\n1\n</parameter>\n</function>\n</tool_call>",
            "",
            [("add", {"x": "1"})],
        ),
        ("qwen3_coder", "a<tool_call><function=now></function></tool_call>b", "ab", [("now", {})]),
        (
            "qwen3_coder",
            "<tool_call><function=f><parameter=s>\na\n\nb\n</parameter></function>",
            "",
            [("f", {"s": "a\n\nb"})],
        ),
    ],
)
def test_calls(kind, text, outside, calls):
    assert read(text, kind) == (outside, calls, [])


@for_each(
    ("kind", "text", "problem"),
    [
        ("hermes", "<tool_call>", "the JSON is not valid: Expecting value"),
        ("hermes", "<tool_call></tool_call>", "the JSON is not valid: Expecting value"),
        ("hermes", '<tool_call>{"name": "f", "arguments": {</tool_call>', "the JSON is not valid: Expecting property"),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call>', "NaN is not a finite number"),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1e999}}</tool_call>', "1e999 is not a finite number"),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "b\nc"}}</tool_call>', "Invalid control character"),
        ("hermes", "<tool_call>" + "[" * 10**5 + "</tool_call>", "nested too deeply"),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": ' + "9" * 5000 + "}}</tool_call>", "not valid"),
        ("hermes", "<tool_call>[1]</tool_call>", "a call is an object, but this is a list"),
        ("hermes", '<tool_call>{"arguments": {}}</tool_call>', 'the object has no "name" with the name of a tool'),
        ("hermes", '<tool_call>{"name": 3, "arguments": {}}</tool_call>', 'no "name"'),
        ("hermes", '<tool_call>{"name": "f"}</tool_call>', 'the object has no "arguments"'),
        ("hermes", '<tool_call>{"name": "f", "arguments": [1]}</tool_call>', '"arguments" is a list, not an object'),
        ("hermes", '<tool_call>{"name": "f", "arguments": "x"}</tool_call>', '"arguments" is a string, not an object'),
        ("hermes", f"<tool_call>{CALL} and more", "</tool_call> is missing"),
        ("hermes", '<tool_call>{"name": "f", "arguments": ' + '{"x": ' * 70 + "1" + "}" * 71, "nested too deeply"),
        ("hermes", f"<tool_call>{CALL}, {CALL}</tool_call>", "</tool_call> is missing"),
        ("json", '{"name": "add", "arguments": {"x": }}', "the JSON is not valid: Expecting value"),
        ("json", '{"tool": "add"}', 'no "name"'),
        ("json", '[{"name": "add"}]', 'no "arguments"'),
        ("llama", "<|python_tag|>", "no call follows <|python_tag|>"),
        ("llama", '{"name": "add", "parameters": {"x": }}', "the JSON is not valid"),
        ("llama", f"{CALL} and that is it", "text follows the calls"),
        ("llama", "[add(1)]", "arguments need names: tool(argument=value)"),
        ("llama", "[add(x=1, x=2)]", "the argument x comes twice"),
        ("llama", "[add(x=y)]", "'y' is not a literal value"),
        ("llama", "[add(x=__import__('os'))]", "'__import__' is not a literal value"),
        ("llama", "[add(x=1+1)]", "'1' is not a literal value"),
        ("llama", "[add(x=1)", "the calls are not closed"),
        ("llama", "[add(x=1) add(x=1)]", "the calls are not Python: invalid syntax"),
        ("llama", "[add(x=1)(x=2)]", "the name of a tool is missing"),
        ("llama", "[add(x=b'1')]", "is not a literal value"),
        ("llama", "[add(x=1e999)]", "is not a literal value"),
        ("llama", "[add(x=" + "[" * 100, "the value is nested too deeply"),
        ("llama", "[add(x='abc", "what is no literal value"),
        ("llama", "[add(x={1: 2})]", "a key of a dictionary is not a string"),
        ("llama", "<|python_tag|>print(1)", "arguments need names"),
        ("python", "```python\nprint(1)", "the block of code is not closed"),
        ("qwen3_coder", "<tool_call>{}</tool_call>", "<function=NAME> is missing"),
        (
            "qwen3_coder",
            "<tool_call><function=f><parameter=x>1</function></tool_call>",
            "the parameter x is not closed",
        ),
        ("qwen3_coder", "<tool_call><function=f><parameter=x>1</parameter></tool_call>", "</function> is missing"),
        (
            "qwen3_coder",
            "<tool_call><function=f>text</function></tool_call>",
            "</function> is missing, or there is text",
        ),
        ("qwen3_coder", "<tool_call><function=f></function> more", "</tool_call> is missing"),
        (
            "qwen3_coder",
            "<tool_call><function=f><parameter=x>1</parameter><parameter=x>2</parameter></function></tool_call>",
            "the parameter x comes twice",
        ),
    ],
)
def test_malformed_calls(kind, text, problem):
    """One error, which says what is wrong, where, and what was expected."""
    parsed = parse(text, kind)
    assert parsed.calls == () or problem == "text follows the calls"
    (error,) = parsed.errors
    assert problem in error.problem
    assert 0 <= error.position <= len(text)
    assert error.message.startswith(("The tool call was not made: ", "The call of "))
    assert "Expected: " in error.message
    assert len(error.message) < 500


def test_a_good_call_behind_a_bad_one_is_made():
    broken = "<tool_call>{oops}</tool_call>"
    outside, calls, errors = read(
        f"{broken}<tool_call>{CALL}</tool_call>{broken}<tool_call>{{<tool_call>{CALL}", "hermes"
    )
    assert (outside, calls, len(errors)) == ("", ONE * 2, 3)
    text = f"<tool_call>{{oops}}</tool_call><tool_call>{CALL}</tool_call>"
    found = parse(text).in_order
    assert [type(item) for item in found] == [Malformed, ToolCall]
    assert [item.id for item in found] == ["call00000", "call00001"]
    bad = "<tool_call><function=</tool_call>"
    good = "<tool_call><function=now></function></tool_call>"
    assert read(f"{bad}{good}{bad}", "qwen3_coder")[1] == [("now", {})]


def test_the_place_of_an_error():
    text = 'Well: <tool_call>{"name": "add", "arguments": {x: 1}}</tool_call>'
    (error,) = parse(text).errors
    assert text[error.position :].startswith("x: 1")
    assert error.excerpt in text


@for_each(
    ("call", "problem"),
    [
        ('{"name": "add", "arguments": {"x": 1}}', None),
        ('{"name": "ad", "arguments": {"x": 1}}', "the tool does not exist"),
        ('{"name": "add", "arguments": {}}', "arguments: 'x' is a required property"),
        ('{"name": "add", "arguments": {"x": "1"}}', "arguments.x: '1' is not of type 'integer'"),
        (
            '{"name": "add", "arguments": {"x": 1, "z": 2}}',
            "arguments: Additional properties are not allowed ('z' was unexpected); the schema has x, y, note",
        ),
    ],
)
def test_arguments_are_checked(call, problem):
    parsed = parse(f"<tool_call>{call}</tool_call>", "hermes", [ADD])
    if problem is None:
        assert parsed.errors == ()
    else:
        assert (parsed.calls, parsed.errors[0].problem) == ((), problem)
    assert parse(f"<tool_call>{call}</tool_call>").errors == ()  # without schemas there is nothing to check by


def test_an_unknown_tool_is_answered_with_the_ones_there_are():
    (error,) = parse('{"name": "ad", "arguments": {}}', "json", [ADD]).errors
    assert error.message == (
        "The call of ad was not made: the tool does not exist.\n"
        'Where: character 0, at \'{"name": "ad", "arguments": {}}\'.\nExpected: one of: add.'
    )


def test_values_of_qwen3_coder_get_the_types_of_the_schema():
    properties = {
        "n": {"type": "integer"},
        "s": {"type": "string"},
        "b": {"type": "boolean"},
        "l": {"type": "array"},
        "o": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "u": {},
        "i": {"type": ["integer", "null"]},
    }
    tool = {"name": "f", "parameters": {"type": "object", "properties": properties}}
    written = {"n": "3", "s": "3", "b": "True", "l": "[1, 2]", "o": "null", "u": "3", "i": "null"}
    body = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in written.items())
    (call,) = parse(f"<tool_call><function=f>{body}</function></tool_call>", "qwen3_coder", [tool]).calls
    assert call.arguments == {"n": 3, "s": "3", "b": True, "l": [1, 2], "o": None, "u": "3", "i": None}
    wrong = parse("<tool_call><function=f><parameter=n>three</parameter></function></tool_call>", "qwen3_coder", [tool])
    assert wrong.errors[0].problem == "arguments.n: 'three' is not of type 'integer'"


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**9), 10**9)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
names = st.from_regex(r"[a-z_][a-z0-9_]{0,10}", fullmatch=True)
calls = st.lists(st.tuples(names, st.dictionaries(names, json_values, max_size=3)), min_size=1, max_size=3)


@given(calls)
@examples(150)
def test_what_is_written_is_read(wanted):
    """Every format gives back the calls that were written in it."""
    objects = [{"name": name, "arguments": arguments} for name, arguments in wanted]
    parameters = [{"name": name, "parameters": arguments} for name, arguments in wanted]
    dumped = [json.dumps(item) for item in objects]
    texts = {
        "hermes": "\n".join(f"<tool_call>\n{item}\n</tool_call>" for item in dumped),
        "json": json.dumps(objects),
        "llama": "; ".join(json.dumps(item) for item in parameters),
    }
    for kind, text in texts.items():
        assert read(text, kind) == ("", wanted, []), kind


literals = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**9), 10**9)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(st.lists(st.tuples(names, st.dictionaries(names, literals, max_size=3)), min_size=1, max_size=3))
@examples(150)
def test_python_like_calls_are_read_as_python_writes_them(wanted):
    wanted = [(name + "_", arguments) for name, arguments in wanted]
    written = [f"{name}({', '.join(f'{k}={v!r}' for k, v in arguments.items())})" for name, arguments in wanted]
    assert read(f"[{', '.join(written)}]", "llama") == ("", wanted, [])


FRAGMENTS = [
    *("<tool_call>", "</tool_call>", "<function=f>", "</function>", "<parameter=x>", "</parameter>", "<|python_tag|>"),
    *('{"name": "f", "arguments": {', "{", "}", "[", "]", '"', "'", "'''", '"""', "\\", ":", ",", ";", "=", "(", ")"),
    *(
        "```python\n",
        "```",
        "```json",
        "\n",
        " ",
        "f(x=",
        "1",
        "-",
        "1e9",
        "NaN",
        "null",
        "\ud800",
        "\x00",
        "é",
        "<|eot_id|>",
    ),
]


@given(st.lists(st.sampled_from(FRAGMENTS) | st.text(max_size=3), max_size=30).map("".join))
@examples(1500)
def test_no_text_is_too_odd(text):
    """Parsers never raise, and what they give back is well-formed."""
    for kind in formats:
        parsed = parse(text, kind, [ADD])
        assert isinstance(parsed, Parsed)
        assert [item.id for item in parsed.in_order] == [f"call{i:05d}" for i in range(len(parsed.in_order))]
        for error in parsed.errors:
            assert error.message
            error_message(error)
        for call in parsed.calls:
            json.dumps(call.arguments)
            tool_message(call, "ok")


FLOODS = [
    *("[", "{", '{"', '["', "(", "<tool_call>", "<tool_call>{", '<tool_call>{"', '<tool_call>["\\"', "</tool_call>"),
    *("<tool_call>[1,", "<tool_call><function=f>", "<tool_call><function=f><parameter=x>", "<parameter=x></parameter>"),
    *(
        "```python\n",
        "```python\n```",
        " ",
        "\n",
        "\\",
        '"',
        "'",
        "'''",
        '{"a": 1}',
        '{"name": 1}',
        "[add(x=",
        "a.",
        "-",
        "9",
    ),
    *("[f(x=1),", "f(x='", "<|python_tag|>", "<|eot_id|>", '{"name": "f", "arguments": {}}', "{ ", '[{"'),
]


@pytest.mark.timeout(120)
@for_each("flood", FLOODS, by=repr)
@for_each("head", ["", "<|python_tag|>", "<tool_call><function=f>", "[f(x=", "[f(x='''"])
def test_a_megabyte_of_anything(flood, head):
    """A quadratic parser would take hours over these; none is made to read more than 128 calls."""
    text = head + flood * (1_000_000 // len(flood))
    for kind in formats:
        parsed = parse(text, kind)
        assert len(parsed.in_order) <= 129


def test_formats_of_ones_own():
    def shout(text, tools):
        return Parsed("", (ToolCall(text.upper(), {}),))

    assert parse("f", shout).calls[0].name == "F"
    with pytest.raises(UnknownNameError, match="did you mean 'hermes'"):
        parse("", "herms")
    with pytest.raises(ConfigError, match="expected a string"):
        parse(None)
    with pytest.raises(ConfigError, match=r"tools\[1\]"):
        parse("", "json", [ADD, ADD])
    with pytest.raises(ConfigError, match=r"tools\[0\]"):
        parse("", "json", [{"function": {}}])
    assert {name for name, _ in formats.table()} == {"hermes", "json", "llama", "python", "qwen3_coder"}


def test_answers_to_calls():
    call = ToolCall("f", {}, "call00003")
    assert tool_message(call, "3") == {"role": "tool", "name": "f", "tool_call_id": "call00003", "content": "3"}
    contents = [tool_message(call, result)["content"] for result in (None, [1, "é"], {1: object}, {(1,): 2})]
    assert contents == ["null", '[1, "é"]', '{"1": "<class \'object\'>"}', "{(1,): 2}"]
    cycle = []
    cycle.append(cycle)
    assert tool_message(call, cycle)["content"] == "[[...]]"
    assert error_message(Malformed("p", "e", id="call00001"))["tool_call_id"] == "call00001"
