"""Calls in a policy's text: what is read, and what is said of what cannot be read."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlkit.errors import ConfigError, UnknownNameError
from rlkit.tools import Malformed, Parsed, ToolCall, error_message, formats, parse, tool_message
from tests.each import for_each
from tests.properties import examples

NUMBERS = {"x": {"type": "integer"}, "y": {"type": "integer"}, "note": {"type": "string"}}
PARAMETERS = {"type": "object", "properties": NUMBERS, "required": ["x"], "additionalProperties": False}
ADD = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": PARAMETERS}}


def read(text, kind, tools=None):
    """(text outside, [(name, arguments)], [problem])"""
    parsed = parse(text, kind, tools)
    return parsed.text_outside, [(c.name, c.arguments) for c in parsed.calls], [e.problem for e in parsed.errors]


def tag(body):
    return f"<tool_call>{body}</tool_call>"


def call_f(arguments):
    return tag(f'{{"name": "f", "arguments": {arguments}}}')


def xml(body, name="f"):
    return tag(f"<function={name}>{body}</function>")


CALL = '{"name": "add", "arguments": {"x": 1}}'
ONE = [("add", {"x": 1})]
INNER = '{"type": "function", "function": {"name": "f", "arguments": {}}}'
LINES = tag("\n<function=add>\n<parameter=x>\n1\n</parameter>\n</function>\n")
UNCLOSED = "<tool_call><function=f><parameter=s>\na\n\nb\n</parameter></function>"
PYTHON = r"""[in(class=true, true=null, x='\d' '''\n''')]"""  # words that are JSON's, or Python's own
VALUES = "[f(a=-1.5e3, b='it\\'s\\n', c=[1, (2,), {'k': None}], d=True, e=\"\"\"two\nlines\"\"\", g='\\d')]"
READ = {"a": -1500.0, "b": "it's\n", "c": [1, [2], {"k": None}], "d": True, "e": "two\nlines", "g": "\\d"}


@for_each(
    ("text", "kind", "expected"),  # the text outside and the calls, or the problem of the only error
    [
        ("no call", "hermes", ("no call", [])),
        (f"a {tag(CALL)} b", "hermes", ("a  b", ONE)),
        (tag(f"\n{CALL}\n") + "\n" + tag(f"\n{CALL}\n"), "hermes", ("", ONE * 2)),
        (f"<tool_call>\n{CALL}\n", "hermes", ("", ONE)),  # the closing tag was a stop string
        (call_f('{"s": "</tool_call>"}'), "hermes", ("", [("f", {"s": "</tool_call>"})])),
        (tag('{"name": "f", "parameters": {}}'), "hermes", ("", [("f", {})])),
        (call_f('"{\\"x\\": 1}"'), "hermes", ("", [("f", {"x": 1})])),
        (tag(INNER), "hermes", ("", [("f", {})])),
        (tag('{"name": "é", "arguments": {"s": "\\u00e9🎈"}}'), "hermes", ("", [("é", {"s": "é🎈"})])),
        ("<tool_call>", "hermes", "the JSON is not valid: Expecting value"),
        (tag(""), "hermes", "the JSON is not valid: Expecting value"),
        ('<tool_call>{"name": "f", "arguments": {</tool_call>', "hermes", "the JSON is not valid: Expecting property"),
        (call_f('{"a": NaN}'), "hermes", "NaN is not a finite number"),
        (call_f('{"a": 1e999}'), "hermes", "1e999 is not a finite number"),
        (call_f('{"a": "b\nc"}'), "hermes", "Invalid control character"),
        (tag("[" * 10**5), "hermes", "nested too deeply"),
        (call_f('{"x": ' * 70 + "1" + "}" * 70), "hermes", "nested too deeply"),
        (call_f(f'{{"a": {"9" * 5000}}}'), "hermes", "not valid"),
        (tag("[1]"), "hermes", "a call is an object, but this is a list"),
        (tag('{"arguments": {}}'), "hermes", 'the object has no "name" with the name of a tool'),
        (tag('{"name": 3, "arguments": {}}'), "hermes", 'no "name"'),
        (tag('{"name": "f"}'), "hermes", 'the object has no "arguments"'),
        (call_f("[1]"), "hermes", '"arguments" is a list, not an object'),
        (call_f('"x"'), "hermes", '"arguments" is a string, not an object'),
        (f"<tool_call>{CALL} and more", "hermes", "</tool_call> is missing"),
        (tag(f"{CALL}, {CALL}"), "hermes", "</tool_call> is missing"),
        (CALL, "json", ("", ONE)),
        (f"[{CALL}, {CALL}]", "json", ("", ONE * 2)),
        (f"Let me see: {CALL} so", "json", ("Let me see:  so", ONE)),
        (f"```json\n{CALL}\n```", "json", ("", ONE)),
        ('The set {1, 2} and [3] and {"a": 1}.', "json", ('The set {1, 2} and [3] and {"a": 1}.', [])),
        ('{"name": "add", "arguments": {"x": }}', "json", "the JSON is not valid: Expecting value"),
        ('{"tool": "add"}', "json", 'no "name"'),
        ('[{"name": "add"}]', "json", 'no "arguments"'),
        ("It is 3.", "llama", ("It is 3.", [])),
        ("[1] is a source", "llama", ("[1] is a source", [])),
        ('{"answer": 3}', "llama", ('{"answer": 3}', [])),
        ('{"name": "add", "parameters": {"x": 1}}', "llama", ("", ONE)),
        ('<|python_tag|>{"name": "add", "parameters": {"x": 1}}<|eom_id|>', "llama", ("", ONE)),
        (f"{CALL}; {CALL}", "llama", ("", ONE * 2)),
        (f"{CALL}\n{CALL}", "llama", ("", ONE * 2)),
        ("[add(x=1), add(x=1)]", "llama", ("", ONE * 2)),
        ("hm <|python_tag|>[add(x=1)]<|eot_id|>", "llama", ("hm", ONE)),
        ('<|python_tag|>search.call(query="a b")', "llama", ("", [("search", {"query": "a b"})])),
        (PYTHON, "llama", ("", [("in", {"class": True, "true": None, "x": "\\d\n"})])),
        (VALUES, "llama", ("", [("f", READ)])),
        ("<|python_tag|>", "llama", "no call follows <|python_tag|>"),
        ('{"name": "add", "parameters": {"x": }}', "llama", "the JSON is not valid"),
        (f"{CALL} and that is it", "llama", "text follows the calls"),
        ("[add(1)]", "llama", "arguments need names: tool(argument=value)"),
        ("<|python_tag|>print(1)", "llama", "arguments need names"),
        ("[add(x=1, x=2)]", "llama", "the argument x comes twice"),
        ("[add(x=y)]", "llama", "'y' is not a literal value"),
        ("[add(x=__import__('os'))]", "llama", "'__import__' is not a literal value"),
        ("[add(x=1+1)]", "llama", "'1' is not a literal value"),
        ("[add(x=b'1')]", "llama", "is not a literal value"),
        ("[add(x=1e999)]", "llama", "is not a literal value"),
        ("[add(x='abc", "llama", "what is no literal value"),
        ("[add(x=1)", "llama", "the calls are not closed"),
        ("[add(x=1) add(x=1)]", "llama", "the calls are not Python: invalid syntax"),
        ("[add(x=1)(x=2)]", "llama", "the name of a tool is missing"),
        ("[add(x=" + "[" * 100, "llama", "the value is nested too deeply"),
        ("[add(x={1: 2})]", "llama", "a key of a dictionary is not a string"),
        ("a\n```python\nprint(1)\n```\nb", "python", ("a\n\nb", [("python", {"code": "print(1)\n"})])),
        ("```py\n1\n```\n```python\n2\n```", "python", ("", [("python", {"code": f"{i}\n"}) for i in (1, 2)])),
        ("```\nno language\n```", "python", ("```\nno language\n```", [])),
        ("```python\nprint(1)", "python", "the block of code is not closed"),
        (LINES, "qwen3_coder", ("", [("add", {"x": "1"})])),
        (f"a{xml('', 'now')}b", "qwen3_coder", ("ab", [("now", {})])),
        (UNCLOSED, "qwen3_coder", ("", [("f", {"s": "a\n\nb"})])),
        (tag("{}"), "qwen3_coder", "<function=NAME> is missing"),
        (xml("<parameter=x>1"), "qwen3_coder", "the parameter x is not closed"),
        (tag("<function=f><parameter=x>1</parameter>"), "qwen3_coder", "</function> is missing"),
        (xml("text"), "qwen3_coder", "</function> is missing, or there is text"),
        ("<tool_call><function=f></function> more", "qwen3_coder", "</tool_call> is missing"),
        (xml("<parameter=x>1</parameter><parameter=x>2</parameter>"), "qwen3_coder", "the parameter x comes twice"),
    ],
)
def test_what_is_read(text, kind, expected):
    """The calls; or one error, which says what is wrong, where, and what was expected."""
    if isinstance(expected, tuple):
        assert read(text, kind) == (*expected, [])
        return
    parsed = parse(text, kind)
    assert parsed.calls == () or expected == "text follows the calls"
    (error,) = parsed.errors
    assert expected in error.problem
    assert 0 <= error.position <= len(text)
    assert error.message.startswith(("The tool call was not made: ", "The call of "))
    assert "Expected: " in error.message
    assert len(error.message) < 500


def test_a_good_call_behind_a_bad_one_is_made():
    broken, good = tag("{oops}"), tag(CALL)
    outside, calls, errors = read(f"{broken}{good}{broken}<tool_call>{{<tool_call>{CALL}", "hermes")
    assert (outside, calls, len(errors)) == ("", ONE * 2, 3)
    found = parse(broken + good).in_order
    assert [(type(item), item.id) for item in found] == [(Malformed, "call00000"), (ToolCall, "call00001")]
    broken = "<tool_call><function=</tool_call>"
    assert read(broken + xml("", "now") + broken, "qwen3_coder")[1] == [("now", {})]


def test_the_place_of_an_error():
    text = 'Well: <tool_call>{"name": "add", "arguments": {x: 1}}</tool_call>'
    (error,) = parse(text).errors
    assert text[error.position :].startswith("x: 1")
    assert error.excerpt in text


HALF = "\ud83d"
UNEXPECTED = "Additional properties are not allowed ('z' was unexpected); the schema has x, y, note"


@for_each(
    ("name", "arguments", "problems"),
    [
        ("add", {"x": 1}, []),
        ("ad", {"x": 1}, ["the tool does not exist"]),
        ("add", {}, ["arguments: 'x' is a required property"]),
        ("add", {"x": "1"}, ["arguments.x: '1' is not of type 'integer'"]),
        ("add", {"x": 1, "z": 2}, [f"arguments: {UNEXPECTED}"]),
        ("add", {"x": 1, "note": HALF}, ["it has half of a character"]),  # which no tokenizer encodes
        (HALF, {}, ["it has half of a character"]),
    ],
)
def test_arguments_are_checked(name, arguments, problems):
    """Without schemas there is nothing to check by."""
    text = tag(json.dumps({"name": name, "arguments": arguments}))
    call = (name, arguments)
    assert read(text, "hermes", [ADD]) == ("", [] if problems else [call], problems)
    assert read(text, "hermes") == ("", [call], [])


def test_an_unknown_tool_is_answered_with_the_ones_there_are():
    (error,) = parse('{"name": "ad", "arguments": {}}', "json", [ADD]).errors
    assert error.message == (
        "The call of ad was not made: the tool does not exist.\n"
        'Where: character 0, at \'{"name": "ad", "arguments": {}}\'.\nExpected: one of: add.'
    )


def test_values_of_qwen3_coder_get_the_types_of_the_schema():
    values = {  # schema, text, value
        "n": ({"type": "integer"}, "3", 3),
        "s": ({"type": "string"}, "3", "3"),
        "b": ({"type": "boolean"}, "True", True),
        "l": ({"type": "array"}, "[1, 2]", [1, 2]),
        "o": ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "null", None),
        "u": ({}, "3", "3"),
        "i": ({"type": ["integer", "null"]}, "null", None),
        "e": ({"enum": [1, 2]}, "2", 2),
        "c": ({"anyOf": [{"enum": ["1"]}, {"type": "null"}]}, "1", "1"),
        "t": ({"type": ["string", "null"]}, "null", None),
        "m": ({"enum": ["1", 2]}, "1", "1"),
    }
    properties = {key: schema for key, (schema, _, _) in values.items()}
    tool = {"name": "f", "parameters": {"type": "object", "properties": properties}}
    text = xml("".join(f"<parameter={key}>\n{written}\n</parameter>\n" for key, (_, written, _) in values.items()))
    assert read(text, "qwen3_coder", [tool])[1] == [("f", {key: value for key, (_, _, value) in values.items()})]
    wrong = read(xml("<parameter=n>three</parameter>"), "qwen3_coder", [tool])
    assert wrong[2] == ["arguments.n: 'three' is not of type 'integer'"]


scalars = st.none() | st.booleans() | st.integers(-(10**9), 10**9) | st.text()
json_values = st.recursive(
    scalars | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
names = st.from_regex(r"[a-z_][a-z0-9_]{0,10}", fullmatch=True)


@given(st.lists(st.tuples(names, st.dictionaries(names, json_values, max_size=3)), min_size=1, max_size=3))
@examples(150)
def test_what_is_written_is_read(calls):
    """Every format gives back the calls that were written in it, as JSON or as Python writes them."""
    objects = [{"name": name, "arguments": arguments} for name, arguments in calls]
    parameters = [json.dumps({"name": name, "parameters": arguments}) for name, arguments in calls]
    assert read("\n".join(tag(f"\n{json.dumps(item)}\n") for item in objects), "hermes") == ("", calls, [])
    assert read(json.dumps(objects), "json") == ("", calls, [])
    assert read("; ".join(parameters), "llama") == ("", calls, [])
    calls = [(name + "_", arguments) for name, arguments in calls]
    written = [f"{name}({', '.join(f'{k}={v!r}' for k, v in arguments.items())})" for name, arguments in calls]
    assert read(f"[{', '.join(written)}]", "llama") == ("", calls, [])


WORDS = """<tool_call> </tool_call> <function=f> </function> <parameter=x> </parameter> <|python_tag|> <|eot_id|>
{ } [ ] " ' ''' \"\"\" \\ : , ; = ( ) ``` ```json f(x= 1 - 1e9 NaN null é"""
FRAGMENTS = [*WORDS.split(), "```python\n", "\n", " ", '{"name": "f", "arguments": {', "\ud800", "\x00"]


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


WORDS = """[ { {" [" ( \\ " ' ''' a. - 9 [add(x= [f(x=1), f(x=' [{" </tool_call> <|python_tag|> <|eot_id|>
<tool_call> <tool_call>{ <tool_call>{" <tool_call>["\\" <tool_call>[1, <parameter=x></parameter>
<tool_call><function=f> <tool_call><function=f><parameter=x>"""
FLOODS = [*WORDS.split(), " ", "\n", "{ ", "```python\n", "```python\n```"]
FLOODS += ['{"a": 1}', '{"name": 1}', '{"name": "f", "arguments": {}}']


@pytest.mark.timeout(120)
@for_each("flood", FLOODS, by=repr)
@for_each("head", ["", "<|python_tag|>", "<tool_call><function=f>", "[f(x=", "[f(x='''"])
def test_a_megabyte_of_anything(flood, head):
    """A quadratic parser would take hours over these; none is made to read more than 128 calls."""
    text = head + flood * (1_000_000 // len(flood))
    for kind in formats:
        assert len(parse(text, kind).in_order) <= 129


def test_formats_of_ones_own():
    def shout(text, tools):
        return Parsed("", (ToolCall(text.upper(), {}),))

    assert parse("f", shout).calls[0].name == "F"
    for arguments, kind, message in (
        (("", "herms"), UnknownNameError, "did you mean 'hermes'"),
        ((None,), ConfigError, "expected a string"),
        (("", "json", [ADD, ADD]), ConfigError, r"tools\[1\]"),
        (("", "json", [{"function": {}}]), ConfigError, r"tools\[0\]"),
    ):
        with pytest.raises(kind, match=message):
            parse(*arguments)
    assert {name for name, _ in formats.table()} == {"hermes", "json", "llama", "python", "qwen3_coder"}


def test_answers_to_calls():
    call = ToolCall("f", {}, "call00003")
    assert tool_message(call, "3") == {"role": "tool", "name": "f", "tool_call_id": "call00003", "content": "3"}
    cycle = []
    cycle.append(cycle)
    results = {
        None: "null",
        (1, "é"): '[1, "é"]',
        frozenset(): '"frozenset()"',
        np.float32(1.5): "1.5",
        "caf\udce9": "caf\ufffd",
        10**5000: "ValueError: Exceeds the limit (4300 digits) for integer string conversion; use "
        "sys.set_int_max_str_digits() to increase the limit",
    }
    assert [tool_message(call, result)["content"] for result in results] == list(results.values())
    nested = [tool_message(call, result)["content"] for result in ({1: np.arange(2)}, {(1,): 2}, cycle)]
    assert nested == ['{"1": [0, 1]}', "{(1,): 2}", "[[...]]"]
    assert error_message(Malformed("p", "e", id="call00001"))["tool_call_id"] == "call00001"
