"""What clients post, kept on its way to the endpoints."""

from __future__ import annotations

import json
from pathlib import Path

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rlkit.gateway import Gateway
from rlkit.gateway import _app as server
from rlkit.gateway._app import create_app

__all__ = ["Recorder"]


class Recorder:
    """Stands in front of the endpoints of all gateways that are opened from now on.

    Attributes:
        posted: [path behind the session's, body], in the order in which they came.
    """

    def __init__(self) -> None:
        self.posted: list[tuple[str, object]] = []
        server.create_app = self._in_front  # type: ignore[assignment]

    def write(self, path: Path) -> None:
        """Write what was posted since the last time; long texts, which instructions are, are cut."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(shortened(self.posted), indent=1) + "\n", "utf-8")
        self.posted.clear()

    def _in_front(self, gateway: Gateway, **options: bool) -> ASGIApp:
        app = create_app(gateway, **options)

        async def record(scope: Scope, receive: Receive, send: Send) -> None:
            parts: list[bytes] = []

            async def read() -> Message:
                event = await receive()
                if event["type"] == "http.request" and scope["method"] == "POST":
                    parts.append(event.get("body", b""))
                    if not event.get("more_body") and any(parts):
                        self.posted.append(("/" + scope["path"].split("/", 3)[-1], json.loads(b"".join(parts))))
                        parts.clear()
                return event

            await app(scope, read, send)

        return record


def shortened(value: object) -> object:
    """Return JSON whose long texts have their beginnings alone."""
    if isinstance(value, str):
        return value if len(value) <= 400 else value[:60] + " ..."
    if isinstance(value, dict):
        return {name: shortened(each) for name, each in value.items()}
    return [shortened(each) for each in value] if isinstance(value, (list, tuple)) else value
