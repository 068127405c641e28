"""Whether a hub answers: asked once, before other libraries ask it again and again for most of a minute."""

from __future__ import annotations

import queue
import threading
from pathlib import Path

from rlkit.errors import ConfigError

__all__ = ["hub_source", "hub_trouble"]

_PATIENCE = 5.0  # seconds for an answer, through name server, proxy and all addresses of the host


def hub_source(name: str, what: str, file: str) -> str:
    """Return what ``from_pretrained`` loads for a directory or a hub id without waiting for a hub that is away.

    That is ``name`` itself, or its folder in the hub's cache where the hub does not answer, or may not be asked.

    Args:
        name: a directory, or a hub id.
        what: it is, for the message: "model" or "tokenizer".
        file: that a folder of the cache must have.

    Raises:
        ConfigError: the hub does not answer, and ``file`` is not in its cache.
    """
    if Path(name).expanduser().is_dir() or "/" not in name:
        return name
    trouble = hub_trouble()
    if not trouble:
        return name
    import huggingface_hub

    try:
        cached = huggingface_hub.try_to_load_from_cache(name, file)
    except ValueError:
        return name  # no hub id, which from_pretrained says better
    if isinstance(cached, str):
        return str(Path(cached).parent)
    raise ConfigError(
        f"{what}: {name!r} is not on this machine, and {trouble}\n"
        "Give a directory, set HF_ENDPOINT (a mirror) or HTTPS_PROXY before starting Python, or use "
        "'smollm2-135m-instruct', which needs no hub"
    )


def hub_trouble() -> str:
    """Return why nothing can come from the hub, in the words of a clause; "" where it answers, whatever it says."""
    import huggingface_hub
    from huggingface_hub import constants

    if huggingface_hub.is_offline_mode():
        return "HF_HUB_OFFLINE is set"
    endpoint = constants.ENDPOINT
    answers: queue.SimpleQueue[str] = queue.SimpleQueue()

    def ask() -> None:
        try:
            status = huggingface_hub.get_session().head(endpoint, timeout=_PATIENCE, follow_redirects=False).status_code
        except Exception as error:  # noqa: BLE001  # the client's own, of its version
            reason = " ".join(str(error).split())[:120]
            answers.put(f"{endpoint} does not answer ({type(error).__name__}: {reason})")
        else:
            answers.put(f"{endpoint} answers with status {status}" if status >= 500 else "")

    # A thread, since each of the host's addresses may take as long as the client's limit, and the name server has none.
    threading.Thread(target=ask, name="rlkit hub", daemon=True).start()
    try:
        return answers.get(timeout=_PATIENCE)
    except queue.Empty:
        return f"{endpoint} does not answer within {_PATIENCE:g} s"
