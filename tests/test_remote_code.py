"""Code that comes with a model, a tokenizer, a data set or a message is never run, whatever stdin says."""

from __future__ import annotations

import io
import json
import shutil
import sys
import types
from pathlib import Path

import pytest

import rlkit
from rlkit.chat import Chat
from rlkit.errors import CheckpointError, ConfigError, DataError

SAYS = "brings its own code, which rlkit never runs"
CODE = """import pathlib
pathlib.Path(r{mark!r}).touch()
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel, PreTrainedTokenizerFast
class Config(PretrainedConfig):
    model_type = "evil"
class Model(PreTrainedModel):
    config_class = Config
class Tokenizer(PreTrainedTokenizerFast):
    pass
"""


@pytest.fixture
def mark(tmp_path, monkeypatch):
    """A file that foreign code would make; stdin says "y" for ever."""
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n" * 1000))
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    return tmp_path / "ran"


@pytest.fixture
def folder(tiny, tmp_path, mark):
    """A small Llama's folder with code beside it; ``change(file, **fields)`` writes into one of its files."""
    made = Path(shutil.copytree(tiny("llama"), tmp_path / "model"))
    (made / "evil.py").write_text(CODE.format(mark=str(mark)))

    def change(file, **fields):
        path = made / file
        path.write_text(json.dumps((json.loads(path.read_text()) if path.exists() else {}) | fields))
        return str(made)

    return change


UNKNOWN = {"model_type": "evil", "architectures": ["Evil"]}
EVERY = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model", "AutoTokenizer": ["evil.Tokenizer", None]}
REFUSED = {
    "a configuration": ("config.json", UNKNOWN | {"auto_map": EVERY}),
    "a configuration of a repository": ("config.json", UNKNOWN | {"auto_map": {"AutoConfig": "a/b--evil.Config"}}),
    "a model of a known configuration": ("config.json", {"model_type": "vit", "auto_map": EVERY}),
    "a tokenizer": ("tokenizer_config.json", {"tokenizer_class": "Evil", "auto_map": EVERY}),
    "a kernel": ("config.json", {"attn_implementation": "owner/kernel"}),
}


@pytest.mark.parametrize("what", REFUSED)
def test_models_that_bring_code_are_refused(what, folder, mark):
    name, fields = REFUSED[what]
    path = folder(name, **fields)
    with pytest.raises(ConfigError, match=SAYS):
        rlkit.connect("local", model=path, device="cpu")
    with pytest.raises(ConfigError, match=SAYS):
        rlkit.sampler("local", model=path, device="cpu")
    assert not mark.exists()


def test_code_beside_what_the_library_has_itself_is_left_alone(folder, mark):
    """Processors are not read; a Llama is transformers' own, whatever its folder offers in its place."""
    folder("processor_config.json", processor_class="Evil", auto_map={"AutoProcessor": "evil.Tokenizer"})
    folder("preprocessor_config.json", auto_map={"AutoImageProcessor": "evil.Tokenizer"})
    folder("generation_config.json", custom_generate="evil")
    path = folder("config.json", auto_map=EVERY)
    with rlkit.connect("local", model=path, device="cpu") as policy:
        sampler = policy.sampler().result()
        assert sampler.sample([5, 6], rlkit.SamplingParams(max_tokens=2), seed=0).result()
    assert not mark.exists()


def test_tokenizers_that_bring_code_are_refused(folder, mark):
    from rlkit.backends.tinker._connect import find_tokenizer
    from rlkit.backends.tokenizers import tokenizer_from

    path = folder("tokenizer_config.json", tokenizer_class="Evil", auto_map=EVERY)
    with pytest.raises(ConfigError, match=SAYS):
        tokenizer_from(path)
    sdk = pytest.importorskip("tinker.lib.public_interfaces.sampling_client")
    client = types.SimpleNamespace(get_tokenizer=lambda: sdk._load_tokenizer_from_model_info("model", path))
    with pytest.raises(ConfigError, match=SAYS):  # a server says which
        find_tokenizer(None, client, 30.0)
    assert not mark.exists()


def test_adapters_that_bring_code_are_refused(tiny, folder, mark, tmp_path):
    """peft's mapping of classes and a base model of an adapter are not followed."""
    path = folder("config.json", **UNKNOWN, auto_map=EVERY)
    adapter = tmp_path / "adapter"
    mapping = {"base_model_class": "Model", "parent_library": "evil"}
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text(
        json.dumps({"peft_type": "LORA", "base_model_name_or_path": path, "auto_mapping": mapping, "r": 4})
    )
    shutil.copy(Path(path) / "evil.py", adapter)
    for option in ("init_from", "resume_from"):
        with pytest.raises(CheckpointError):
            rlkit.connect("local", model=tiny("llama"), device="cpu", **{option: str(adapter)})
    assert not mark.exists()


def test_data_sets_that_bring_code_are_refused(mark, monkeypatch):
    """As the package datasets does before its release 4, whose argument and variable later ones leave aside."""
    from rlkit.envs import _adapters
    from rlkit.recipes import data

    def load_dataset(name, subset=None, *, split="train", trust_remote_code=None):
        import os

        if trust_remote_code is None:
            given = os.environ.get("HF_DATASETS_TRUST_REMOTE_CODE", "ask")
            trust_remote_code = {"1": True, "0": False}.get(given) if given != "ask" else input("[y/N] ") == "y"
        if not trust_remote_code:
            raise ValueError(f"{name} contains custom code. Please pass `trust_remote_code=True`")
        mark.touch()

    package = types.ModuleType("datasets")
    package.load_dataset = load_dataset
    package.config = types.SimpleNamespace(HF_DATASETS_CACHE="/no/such/folder")
    monkeypatch.setattr(data, "hub_trouble", lambda: "")
    monkeypatch.setitem(sys.modules, "datasets", package)
    monkeypatch.delenv("HF_DATASETS_TRUST_REMOTE_CODE", raising=False)
    with pytest.raises(ConfigError, match=SAYS):
        data.read_rows("owner/name", where="data.path")
    assert _adapters.package("gem", "datasets", "pip") is package  # an environment, which loads its data set itself
    with pytest.raises(ValueError, match="custom code"):
        package.load_dataset("owner/name")
    assert not mark.exists()


def test_images_are_no_reason_to_run_a_processor():
    """Some renderers load the model's own processor, with its code, for the first image: none gets that far."""
    chat = Chat(rlkit.connect("toy").tokenizer)
    images = [{"type": kind, "text": "", "image": "a.png"} for kind in ("image", "image_url", "input_image", "video")]
    for part in [*images, {"text": "", "image": "a.png"}, {"image_url": {"url": "file:///a"}}, None, 3]:
        with pytest.raises(DataError, match="only text is supported"):
            chat.start([{"role": "user", "content": [part]}])


def test_templates_end_at_their_sandbox(tiny):
    """transformers' own way to render and rlkit's tell it as one error."""
    from rlkit.backends.tokenizers import tokenizer_from
    from rlkit.chat.templates import Template

    tokenizer = tokenizer_from(tiny("llama"))
    messages = [{"role": "user", "content": "a"}]
    for text, reason in {
        "{{ cycler.__init__.__globals__.os.system('true') }}": "unsafe",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}": "unsafe",
        "{% for i in range(10**9) %}a{% endfor %}": "Range too big",
        "{% macro a() %}{{ a() }}{% endmacro %}{{ a() }}": "recursion",
        "{% include '/etc/passwd' %}": "no loader",
        "{{ 1 / 0 }}": "division",
        "{{ messages[0].x.y }}": "no attribute",
    }.items():
        for render in (
            lambda text=text: Template(text).render(messages),
            lambda text=text: tokenizer.apply_chat_template(messages, chat_template=text),
        ):
            with pytest.raises(DataError, match=f"the chat template refuses messages with the roles user: .*{reason}"):
                render()
