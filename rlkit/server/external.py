"""Endpoints: weights to download. A file has an address of its own, signed, since it is fetched without the key."""

from __future__ import annotations

import datetime as dt
import hashlib
import hmac
import time
import urllib.parse

from rlkit.server.requests import ApiError, Fields, Request, Response
from rlkit.server.state import Endpoints, ServerState, TrainingRun
from rlkit.server.storage import saved
from rlkit.server.training import Job, of_model

__all__ = ["endpoints", "signed"]

endpoints = Endpoints()
_SECONDS = 3600  # that an address is good for
_FILES = "/api/v1/external_weights/"


@of_model(endpoints, "save_weights_external")
def save_weights_external(state: ServerState, run: TrainingRun, fields: Fields) -> Job:
    """Save a model's adapter to be downloaded."""
    if fields.items("age_encryption_recipients", None):
        raise ApiError(400, "age_encryption_recipients: this server does not encrypt; the files stay on its machine")
    save = saved(state, run, fields, "external_weights", fields.text("path"))
    return lambda: {"path": save(), "type": "save_weights_external"}


@endpoints.add("GET", "training_runs/{run_id}/checkpoints/external_weights/{name}/external_weights_urls")
def external_weights_urls(state: ServerState, request: Request, run_id: str, name: str) -> Response:
    """Return an address for each file, on this server, by the host that the client called."""
    checkpoint = state.checkpoints.find(f"tinker://{run_id}/external_weights/{name}", "external_weights")
    expires = int(time.time()) + _SECONDS
    scheme = "https" if request.headers.get("x-forwarded-proto") == "https" else "http"
    base = f"{scheme}://{request.headers.get('host', 'localhost')}"
    urls = {}
    for file in state.models.files(checkpoint.handle):
        path = f"{_FILES}{run_id}/{name}/{file}"
        query = urllib.parse.urlencode({"expires": expires, "signature": _signature(state, path, expires)})
        urls[file] = f"{base}{urllib.parse.quote(path)}?{query}"
    return Response.json({"urls": urls, "expires": dt.datetime.fromtimestamp(expires, dt.UTC).isoformat()})


@endpoints.add("GET", "external_weights/{run_id}/{name}/{file:path}")
def download(state: ServerState, request: Request, run_id: str, name: str, file: str) -> Response:
    """One file."""
    if not signed(state, request):
        raise ApiError(
            403, "the address of this file is not signed by this server, or its time is over; ask for a new one"
        )
    checkpoint = state.checkpoints.find(f"tinker://{run_id}/external_weights/{name}", "external_weights")
    place = state.models.files(checkpoint.handle).get(file)
    if place is None:
        raise ApiError(404, f"{checkpoint.path} has no file {file!r}")
    return Response(200, {"content-type": "application/octet-stream"}, b"", place)


def signed(state: ServerState, request: Request) -> bool:
    """Whether the request is for a file, at an address that this server made and that is still good."""
    expires, signature = request.query.get("expires", ""), request.query.get("signature", "")
    if not request.path.startswith(_FILES) or not (expires.isascii() and expires.isdecimal()) or len(expires) > 12:
        return False
    good = hmac.compare_digest(signature.encode(), _signature(state, request.path, int(expires)).encode())
    return good and time.time() <= int(expires)


def _signature(state: ServerState, path: str, expires: int) -> str:
    return hmac.new(state.secret, f"{expires} {path}".encode(), hashlib.sha256).hexdigest()
