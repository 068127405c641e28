"""Data in a page: JSON, compressed, as text that no HTML parser can take for anything else."""

from __future__ import annotations

import base64
import gzip
import json
from typing import Any

from rlkit._json import plain

__all__ = ["packed", "unpacked"]


def packed(value: object) -> str:
    """``value`` as JSON, gzip and base64: letters, digits, "+", "/" and "=" only.

    What is not finite, which a damaged or an old file may hold, becomes text: no page fails for one number.

    >>> unpacked(packed({"text": "</script>"}))
    {'text': '</script>'}
    """
    options: dict[str, Any] = {"ensure_ascii": False, "allow_nan": False, "separators": (",", ":"), "default": str}
    try:
        text = json.dumps(value, **options)
    except (ValueError, TypeError):  # seldom, and it takes a copy
        text = json.dumps(plain(value), **options)
    data = text.encode("utf-8", errors="backslashreplace")  # a lone surrogate is no text
    return base64.b64encode(gzip.compress(data, 6, mtime=0)).decode()


def unpacked(text: str) -> object:
    """Return what ``packed`` was given."""
    return json.loads(gzip.decompress(base64.b64decode(text)))
