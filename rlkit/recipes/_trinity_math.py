r"""The verdicts of Trinity-RFT's boxed and DAPO rewards: two texts are rewritten and compared, nothing is computed.

So ``\boxed{\frac{14}{2}}`` is not 7 here. ``rlkit.answers.math_equal`` is the comparison that computes. Odd rules below
are the behaviour of the classes of 0.6.0, so that runs can be compared; tests hold both verdicts to their output.
"""

from __future__ import annotations

import contextlib
import functools
import math
import re
import tomllib
from collections.abc import Mapping, Sequence
from importlib import resources

__all__ = ["boxed_verdict", "dapo_verdict"]

_INTEGER = re.compile(r"0|-?[1-9][0-9]*")
_LONGEST = 10_000  # characters; longer answers are compared unchanged, in bounded time
_SHOWN = 20  # characters of an answer without a box that DAPO's verdict reads


def boxed_verdict(response: str, truth: str) -> bool:
    r"""Return whether the last box is written like the truth, up to units, spaces and forms of fractions.

    >>> boxed_verdict(r"so \boxed{\tfrac12}", "1/2"), boxed_verdict(r"\boxed{0.5}", "1/2"), boxed_verdict("7", "7")
    (True, False, False)
    """
    try:
        answer, boxed_truth = _last_box(response), _last_box(truth)
    except ValueError:
        return False
    if answer is None:
        return False
    right = truth if boxed_truth is None else boxed_truth
    if max(len(answer), len(right)) > _LONGEST:
        return answer == right
    try:
        return _plain(answer) == _plain(right)
    except (ValueError, IndexError):  # words that are not a number: "thousand one"
        return answer == right


def _last_box(text: str) -> str | None:
    r"""Return the content of the last box; None without one. ValueError: it is an \fbox, or begins otherwise."""
    if r"\boxed " in text:
        return text.rpartition(r"\boxed ")[2].partition("$")[0]
    start, end = _find_box(text)
    if end < 0:
        return None
    if not text.startswith(r"\boxed{", start):
        raise ValueError
    return text[start + len(r"\boxed{") : end]


def _find_box(text: str) -> tuple[int, int]:
    r"""Return the positions of the last \boxed, else of the last \fbox, and of the brace that closes it; -1: none."""
    start, depth = text.rfind(r"\boxed" if r"\boxed" in text else r"\fbox"), 0
    for i in range(start, len(text) if start >= 0 else start):
        depth += {"{": 1, "}": -1}.get(text[i], 0)
        if text[i] == "}" and depth == 0:
            return start, i
    return start, -1


_TABLE = tomllib.loads(resources.files(__package__).joinpath("_trinity_math.toml").read_text("utf-8"))


@functools.cache
def _unit_patterns() -> list[re.Pattern[str]]:
    words = _TABLE["boxed_units"]
    words = [*words, *(f"{word}s" for word in words if not word.endswith("s"))]
    return [re.compile(rf"(^|\W){word}($|\W)") for word in words]


_Rule = tuple["str | re.Pattern[str]", str]


def _rules(name: str) -> list[_Rule]:
    return [(re.compile(old[1]) if old[:1] == ["re"] else old[0], new) for *old, new in _TABLE[name]]


_BOXED_SPELLINGS, _BOXED_NUMBERS, _DAPO_SPELLINGS = map(_rules, ("boxed_spellings", "boxed_numbers", "dapo_spellings"))
_DAPO_NUMBERS: Sequence[_Rule] = (
    *_rules("dapo_numbers"),
    *((re.compile(rf"{unit}(es)?(s)? *(\^[0-9]+)?"), "") for unit in _TABLE["dapo_units"]),
    (re.compile(r"\^ *\\circ"), ""),
)


def _rewrite(text: str, rules: Sequence[_Rule]) -> str:
    for old, new in rules:
        text = text.replace(old, new) if isinstance(old, str) else old.sub(new, text)
    return text


def _plain(text: str) -> str | None:
    """Return an answer in the form that the boxed verdict compares; None if it is empty then."""
    text = _rewrite(text.strip().replace("\n", "").rstrip("."), _BOXED_SPELLINGS)
    for pattern in _unit_patterns() * 2:
        text = pattern.sub(r"\1\2", text) or text
    with contextlib.suppress(ValueError):
        text = str(_number_in_words(text))
    text = _braced_fractions(_rewrite(text, _BOXED_NUMBERS))
    text = _slash_as_fraction(text, or_roots=True)
    if text[:1] + text[-1:] in ("{}", "()"):
        text = text[1:-1]
    return text.strip() or None


def _braced_fractions(text: str, *, empty_is_wrong: bool = False) -> str:
    r"""Return the text with \frac12 as \frac{1}{2}; unchanged where one has less than two signs.

    Raises:
        IndexError: ``empty_is_wrong``, and nothing follows one.
    """
    first, *rest = text.split(r"\frac")
    written = [first]
    for part in rest:
        if empty_is_wrong and not part:
            raise IndexError
        if not part.startswith("{"):
            if len(part) < 2:
                return text
            below = part[1:] if part[1] == "{" else f"{{{part[1]}}}{part[2:]}"
            part = f"{{{part[0]}}}{below}"
        written.append(part)
    return r"\frac".join(written)


def _slash_as_fraction(text: str, *, or_roots: bool = False) -> str:
    """Return a/b of two integers as a fraction, other texts as they are; ``or_roots``: roots count as integers."""
    parts = text.split("/")
    fits = [_INTEGER.fullmatch(part) or (or_roots and "sqrt" in part) for part in parts]
    return rf"\frac{{{parts[0]}}}{{{parts[1]}}}" if len(parts) == 2 and all(fits) else text


_ONES = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"]
_ONES += ["thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen"]
_TENS = ["twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]
_LARGE = {"billion": 10**9, "million": 10**6, "thousand": 1000}
_WORDS = {word: value for value, word in enumerate(_ONES)} | {word: 20 + 10 * i for i, word in enumerate(_TENS)}
_WORDS |= {"hundred": 100, **_LARGE, "point": 0}


def _number_in_words(text: str) -> int | float:
    """Return the number that the English words in a text make, ignoring the text between them.

    Raises:
        ValueError: there are no such words, one that may occur once occurs twice, or they are not in order.
        IndexError: no number precedes a thousand, a million, a billion.
    """
    text = text.replace("-", " ").lower()
    if text.isdigit():
        return int(text)
    words = [word for word in text.split() if word in _WORDS]
    if not words or any(words.count(word) > 1 for word in (*_LARGE, "point")):
        raise ValueError
    decimals: list[str] = []
    if "point" in words:
        at = words.index("point")
        words, decimals = words[:at], words[at + 1 :]
    total = _whole_number(words)
    if decimals and all(word in _ONES[:10] for word in decimals):
        total += float("0." + "".join(str(_WORDS[word]) for word in decimals))
    return total


def _whole_number(words: list[str]) -> float:
    places = [words.index(word) for word in _LARGE if word in words]
    if places != sorted(places):
        raise ValueError
    if len(words) == 1:
        return _WORDS[words[0]]
    total, start = 0, 0
    for word, value in _LARGE.items():
        if word in words:
            total += _below_thousand(words[start : words.index(word)]) * value
            start = words.index(word) + 1
    return total + (_below_thousand(words[start:]) if start < len(words) else 0)


def _below_thousand(words: list[str]) -> int:
    if not words:
        raise IndexError
    first, *others = (_WORDS[word] for word in words)
    if len(others) == 1:
        return first * others[0] if 100 in (first, others[0]) else first + others[0]
    return first * others[0] + sum(others[1:]) if len(others) in (2, 3) else first


def dapo_verdict(response: str, truth: str) -> bool:
    r"""Return whether the box after the thinking, or without one the text, is written like the truth or equals it.

    A number is also right as percent of the truth, and to 1e-4 of it. Without a box it reads 20 characters.

    >>> dapo_verdict("7", "7"), dapo_verdict(r"\boxed{50\%}", "0.5"), dapo_verdict(r"\boxed{\frac{14}{2}}", "7")
    (True, True, False)
    """
    answer = response.rpartition("</think>")[2]
    start, end = _find_box(answer)
    boxed = answer[answer.find("{", start) + 1 : end].strip() if end >= 0 else ""
    if not boxed and len(answer) > _SHOWN:
        boxed = f"{answer[:_SHOWN]}(... output is truncated.)"
    answer = boxed or answer
    if _tidied(truth) == _tidied(answer):
        return True
    texts = _without_units(truth), _without_units(answer)
    if texts[0] == texts[1] or (texts[1] and _equal_fractions(*texts)):
        return True
    if r"\pi" in answer + truth:
        return False
    try:
        return _same_value(answer, truth)
    except (ValueError, OverflowError, IndexError):
        return False


def _unwrapped(text: str) -> str:
    inner = re.search(r"^\\text\{(.+?)\}$", text)
    return text if inner is None else inner[1]


def _tidied(text: str) -> str:
    """Return an answer without units, spaces and meaningless signs of LaTeX; unchanged where that fails."""
    text = _unwrapped(text.strip()).strip()
    short = _rewrite(text, _DAPO_SPELLINGS)
    if short.count(r"\text{ ") > 1:
        return text
    short = _rewrite(short.partition(r"\text{ ")[0], [("\\\\%", ""), (r"\%", ""), (" .", " 0."), ("{.", "{0.")])
    if not short:
        return ""
    short = f"0{short}" if short.startswith(".") else short
    sides = short.split("=")
    short = sides[1] if len(sides) == 2 and len(sides[0]) <= 2 else short
    if short.endswith(r"\sqrt") or r"\sqrt\sqrt" in short:
        return text
    short = re.sub(r"\\sqrt([^{])", r"\\sqrt{\1}", short, flags=re.DOTALL).replace(" ", "")
    try:
        short = _braced_fractions(short, empty_is_wrong=True)
    except IndexError:
        return text
    return _slash_as_fraction(r"\frac{1}{2}" if short == "0.5" else short)


def _without_units(text: str) -> str:
    """Return an answer as plain text in small letters: units and LaTeX read, numbers in one form."""
    text = _rewrite(_unwrapped(text), _DAPO_NUMBERS)
    if text[:1] + text[-1:] == "{}":
        text = text[1:-1]
    text = re.sub(r",\\! *", "", text)
    value = _number(text)
    if value is not None and _is_whole(value):
        text = str(round(value))
    if "\\" in text:
        with contextlib.suppress(RecursionError):  # braces in braces in braces
            text = _read_latex(text)
    text = re.sub("- *", "-", text)
    text = re.sub("([0-9]) +([0-9])", r"\1+\2", text).lower()
    value = _number(_joined(text))
    return str(int(float(text.replace(",", "")))) if value is not None and _is_whole(value) else text


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _is_whole(value: float) -> bool:
    return math.isfinite(value) and abs(value - round(value)) <= 1e-7


def _joined(text: str) -> str:
    """Return the text without the commas between thousands."""
    while (shorter := re.sub(r"(\d)(,)(\d\d\d)($|\D)", r"\1\3\4", text)) != text:
        text = shorter
    return text


def _equal_fractions(truth: str, answer: str) -> bool:
    """Return whether both are fractions of integers, or tuples of such, with the same digits."""
    parts = [_tuple_parts(_joined(text)) for text in (truth, answer)]
    if len(parts[0]) > 1 and (truth[0], truth[-1]) != (answer[0], answer[-1]):
        return False
    fraction = re.compile(r"^-?[0-9]+.?/0*[1-9][0-9]*.?$")
    return bool(parts[0]) and parts[0] == parts[1] and all(fraction.search(part) for part in parts[0])


def _tuple_parts(text: str) -> list[str]:
    brackets = "()[]"
    if len(text) > 2 and text[0] in brackets and text[-1] in brackets and not set(brackets) & set(text[1:-1]):
        return [part.strip() for part in text[1:-1].split(",")]
    return [text] if text else []


def _same_value(answer: str, truth: str) -> bool:
    """Return whether two texts are one, but for case, spaces and brackets, or one number, part by part.

    Raises:
        ValueError, OverflowError: the text before an underscore (a base) is not a number.
        IndexError: a part is empty.
    """
    one, two = _without_base(answer)[:1000], _without_base(truth)
    if one.strip().lower() == two.strip().lower() or one.replace(" ", "") == two.replace(" ", ""):
        return True
    said, right = (_number(text.replace("{,}" if "{,}" in text else ",", "")) for text in (one, two))
    if said is not None and right is not None:
        return any(math.isclose(value, said, rel_tol=1e-4) for value in (right / 100, right, right * 100))
    if not one:
        return False
    one, two = _interval(one.strip()), two.strip()
    return _same_unbracketed(one, two) or _same_parts(one, two)


def _same_unbracketed(one: str, two: str) -> bool:
    for opening, closing, other in ("[](", "()["):
        if one.startswith(opening) and one.endswith(closing) and not two.startswith(other):
            one, two = one.strip("[]()"), two.strip("[]()")
            break
    return re.sub(r"[{}()]", "", one) == re.sub(r"[{}()]", "", two)


def _same_parts(one: str, two: str) -> bool:
    """Return whether two tuples, intervals, lists or points are one, part by part."""
    bracketed = one and two and one[0] in "([" and one[-1] in ")]" and (one[0], one[-1]) == (two[0], two[-1])
    if bracketed and _all_same(one[1:-1].split(","), two[1:-1].split(",")):
        return True
    ones, twos = ([part.strip() for part in text.split(",")] for text in (one, two))
    if len(ones) == len(twos) > 1:
        return _all_same(ones, twos)
    if one.startswith("Point") and two[0] == "(" and two[-1] == ")":
        return _all_same(one[one.find("(") + 1 : -1].split(","), two[1:-1].split(","))
    return False


def _all_same(ones: Sequence[str], twos: Sequence[str]) -> bool:
    return len(ones) == len(twos) and all(map(_same_value, ones, twos))


def _without_base(text: str) -> str:
    """Return a text without dollar and percent signs, and without the base below a number."""
    if re.match(r"\$\d+(\.\d+)?", text):
        return text[1:]
    if re.match(r"^\d+(\.\d+)?\\?%$", text):
        return text.replace("\\%", "").replace("%", "")
    return str(int(float(text.partition("_")[0]))) if "_" in text else text


def _interval(text: str) -> str:
    """Return SymPy's name of an interval in brackets."""
    found = re.match(r"^Interval(|\.Ropen|\.Lopen|\.open)\((.*)\)$", text)
    if found is None:
        return text
    brackets = {"": "[]", ".Ropen": "[)", ".Lopen": "(]", ".open": "()"}[found[1]]
    return f"{brackets[0]}{found[2]}{brackets[1]}"


# LaTeX as plain text: the text of commands. Others give only the content of their braces.
_SIGNS: Mapping[str, str] = _TABLE["signs"] | {name: name for name in _TABLE["functions"]}
_FONTS = ("mathbb", "mathbf", "mathcal", "mathfrak", "mathscr", "hat", "vec", "bar", "tilde", "dot")
_TOKEN = re.compile(r"\\(?:([a-zA-Z]+)\*?\s*|(.))|(.)", re.DOTALL)
_MATRIX = re.compile(r"\\begin\{(?:[bpvBV]?(?:small)?matrix|array)\}(.*?)\\end\{[a-zA-Z]+\}", re.DOTALL)


def _read_latex(text: str) -> str:
    r"""Return LaTeX as plain text: \frac{1}{2} as 1/2, \sqrt2 as sqrt(2), signs and letters, no braces."""
    text = text.replace(r"\tfrac", r"\frac").replace(r"\dfrac", r"\frac").replace(r"\frac", r" \frac")
    text = _MATRIX.sub(lambda m: "[ " + re.sub(r"\s*\\\\\s*", "; ", m[1].strip()).replace("&", " ") + " ]", text)
    tokens = [sign or f"\\{name or escaped}" for name, escaped, sign in _TOKEN.findall(text)]
    return _rewrite(_read_until("", tokens[::-1]), list(_TABLE["words"].items())).strip()


def _read_until(closing: str, tokens: list[str]) -> str:
    """Take tokens from the end of the list up to the closing sign, or all; return their text."""
    parts = []
    while tokens:
        if tokens[-1] == closing:
            tokens.pop()
            break
        parts.append(_read_next(tokens))
    return "".join(parts)


def _read_next(tokens: list[str]) -> str:
    sign = tokens.pop()
    if sign == "{":
        return _read_until("}", tokens)
    if len(sign) == 1:
        return sign.strip("}")
    name = sign[1:]
    if name == "frac":
        return f"{_read_argument(tokens)}/{_read_argument(tokens)}"
    if name == "sqrt":
        if tokens[-1:] == ["["]:
            tokens.pop()
            _read_until("]", tokens)
        return f"sqrt({_read_argument(tokens)})"
    if name in _FONTS:
        return f"<{name} {_read_argument(tokens)}>"
    if name == "mbox":
        _read_argument(tokens)
    return _SIGNS.get(name, "")


def _read_argument(tokens: list[str]) -> str:
    while tokens and tokens[-1].isspace():
        tokens.pop()
    return _read_next(tokens) if tokens else ""
