"""What options are where none is given, on a CPU and on GPUs that are played by numbers."""

from __future__ import annotations

import pytest

import rlkit

torch = pytest.importorskip("torch")
pytest.importorskip("peft")

from rlkit.backends.local.model import memory  # noqa: E402
from rlkit.backends.local.model.base import load_base  # noqa: E402
from rlkit.backends.local.model.memory import free_bytes  # noqa: E402
from rlkit.backends.local.training.micro_batches import pack  # noqa: E402
from tests.backends.local import white_box  # noqa: E402


def test_defaults_of_a_cpu(tiny, tmp_path):
    """float32 and 1,024 tokens; None is the same as leaving an option out."""
    options = {"model": tiny("llama"), "device": "cpu", "lora": rlkit.Lora(rank=2), "folder": tmp_path}
    none = dict.fromkeys(("dtype", "micro_batch_tokens", "max_rows", "cuda_graphs"))
    with rlkit.connect("local", **options) as one, rlkit.connect("local", **options, **none) as same:
        assert one.base is same.base
        assert one.base.model.dtype == torch.float32
        assert one._settings == same._settings
        assert one._settings["micro_batch_tokens"] == 1024


def test_the_log_says_which_paths_run(tiny, caplog):
    """Of training when it is connected, of decoding when it begins."""
    with (
        caplog.at_level("INFO", "rlkit.backends.local"),
        rlkit.connect("local", model=tiny("llama"), device="cpu", lora=rlkit.Lora(rank=2)) as policy,
    ):
        policy.sampler().result().logprobs([3, 4]).result()
    assert "training on cpu in float32: trees of 1024 tokens at once" in caplog.messages
    assert any(text.startswith("decoding on cpu: ContinuousBatching") for text in caplog.messages)


def test_defaults_of_a_gpu(monkeypatch):
    """bfloat16 where it is computed, and more rows."""
    cuda = torch.device("cuda", 0)
    for known in (True, False):
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation, known=known: known)
        assert memory.default_dtype(cuda) == ("bfloat16" if known else "float32")
    assert memory.default_dtype(torch.device("mps")) == "float32"
    assert [memory.default_max_rows(torch.device(x)) for x in ("cuda", "mps", "cpu")] == [256, 64, 64]


def test_free_memory_is_what_can_be_allocated(monkeypatch):
    """On a GPU of CUDA with what torch holds unused; on a Mac under what is recommended; a CPU does not say."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (1000, 8000))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 500)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: 200)
    monkeypatch.setattr(torch.mps, "recommended_max_memory", lambda: 700)
    monkeypatch.setattr(torch.mps, "driver_allocated_memory", lambda: 100)
    assert [free_bytes(torch.device(x)) for x in ("cuda", "mps", "cpu")] == [1300, 600, None]


def test_micro_batches_follow_the_free_memory(tiny, monkeypatch):
    """In thousands of tokens, within bounds; other architectures keep more of a token, and so get fewer."""
    base = load_base(tiny("llama"), "float32", "cpu")
    each = memory.activation_bytes(base)
    assert memory.micro_batch_tokens_for(base) == 1024
    found = [memory.micro_batch_tokens_for(base, int(n * each / memory.SHARE)) for n in (10, 5200, 10**6)]
    assert found == [1024, 5120, 16384]
    monkeypatch.setattr(memory, "LLAMA", frozenset())
    assert memory.micro_batch_tokens_for(base, int(5200 * each / memory.SHARE)) == 2048


def test_what_is_kept_of_a_token_is_counted(tiny):
    """What autograd keeps of a micro-batch is at most the estimate, and more than a third of it."""
    with rlkit.connect("local", model=tiny("qwen3"), device="cpu", lora=rlkit.Lora(rank=2), seed=0) as policy:
        base, kept = policy.base, {}
        (forward, *_) = white_box.forwards(policy)
        weights = {x.untyped_storage().data_ptr() for x in [*base.model.parameters(), base.head]}
        (batch,) = pack([rlkit.Datum.supervised(list(range(3, 103)), [5])], 1024)

        def note(x):
            if x.untyped_storage().data_ptr() not in weights:
                kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
            return x

        with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
            forward.hidden_at(*forward._inputs(batch))
    estimate = batch.tokens.size * memory.activation_bytes(base)
    assert estimate / 3 < sum(kept.values()) < 1.1 * estimate


def test_a_resumed_run_keeps_its_options(tiny, tmp_path):
    """What changes numbers: dtype and micro-batches; an option that is given wins, and ``init_from`` begins anew."""
    options = {"device": "cpu", "folder": tmp_path}
    with rlkit.connect(
        "local",
        model=tiny("llama"),
        lora=rlkit.Lora(rank=2),
        dtype="bfloat16",
        micro_batch_tokens=77,
        merge=True,
        **options,
    ) as first:
        path = first.save("x").result()
    with rlkit.connect("local", resume_from=path, **options) as resumed:
        assert resumed.base.model.dtype == torch.bfloat16
        assert resumed._settings["micro_batch_tokens"] == 77
        assert resumed._settings["merge"] is True
    with rlkit.connect("local", resume_from=path, dtype="float32", micro_batch_tokens=78, **options) as changed:
        assert changed.base.model.dtype == torch.float32
        assert changed._settings["micro_batch_tokens"] == 78
    with rlkit.connect("local", init_from=path, **options) as fresh:
        assert fresh.base.model.dtype == torch.float32
        assert fresh._settings["micro_batch_tokens"] == 1024
    with rlkit.connect("local", resume_from=path, merge=False, **options) as changed:
        assert changed._settings["merge"] is False
