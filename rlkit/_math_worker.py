"""The process behind ``math_equal``, which answers lines of JSON with the same "id"; it imports nothing of rlkit.

The first line has no question, and is answered once it is ready: by ``{"id"}``, or ``{"id", "failed"}``.
"""

from __future__ import annotations

import json
import logging
import os
import sys

_MEMORY = 4 << 30  # bytes


def main() -> None:
    """Answer questions until stdin ends."""
    out = os.fdopen(os.dup(1), "w", encoding="ascii")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what the libraries print is not an answer
    logging.disable()

    def say(**answer: object) -> None:
        out.write(json.dumps(answer) + "\n")
        out.flush()

    first = json.loads(sys.stdin.readline())["id"]
    try:
        from math_verify import parse, verify
    except Exception as error:  # noqa: BLE001  # reported, and the process ends
        say(id=first, failed=f"{type(error).__name__}: {error}")
        return
    os.dup2(1, 2)  # writing to a file is an error from now on
    _limit()

    def parsed(text: str) -> list[object]:
        marked = any(sign in text for sign in ("$", "\\boxed", "\\(", "\\["))
        expressions: list[object] = parse(text if marked else f"${text}$", parsing_timeout=None)
        return expressions or parse(text, parsing_timeout=None)

    def equal(answer: str, truth: str) -> bool:
        return bool(verify(parsed(truth), parsed(answer), timeout_seconds=None))

    equal("1/2", "$x+1$")  # load lazy imports before the clock starts
    say(id=first)
    for line in sys.stdin:
        question = json.loads(line)
        try:
            result = equal(question["answer"], question["truth"])
        except Exception:  # noqa: BLE001  # junk that the library does not foresee is not an answer
            result = False
        say(id=question["id"], equal=result)


def _limit() -> None:
    """Limit the process to 4 GiB, no files and no core dumps, where the system supports such limits."""
    try:
        import resource
    except ImportError:
        return
    for name, value in (("RLIMIT_AS", _MEMORY), ("RLIMIT_FSIZE", 0), ("RLIMIT_CORE", 0)):
        kind = getattr(resource, name, None)
        if kind is not None:
            _, hard = resource.getrlimit(kind)
            limit = value if hard == resource.RLIM_INFINITY else min(value, hard)
            resource.setrlimit(kind, (limit, hard))


if __name__ == "__main__":
    main()
