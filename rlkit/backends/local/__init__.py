"""``LocalBackend``: torch, transformers and peft in this process, or in several, on CPUs or GPUs."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Generator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

import attrs

from rlkit._drawn import DRAWN_WITH
from rlkit.backends import saves
from rlkit.backends.checking import Start
from rlkit.backends.engine import LiveEngine, SamplingEngine
from rlkit.backends.inprocess import InProcessBackend
from rlkit.backends.live import SuccessiveSampler
from rlkit.backends.local.adapted import load_adapted, start_ranks
from rlkit.backends.local.checkpoint import (
    adapter_in,
    lora_of,
    read_adapter,
    read_optimizer,
    trained_adapter,
    write_adapter,
    write_optimizer,
)
from rlkit.backends.local.checks import check_options, checked_sampler
from rlkit.backends.local.distributed.settings import Processes, processes_of, serves
from rlkit.backends.local.model.base import COPIED_UNDER
from rlkit.backends.local.model.defaults import default_max_rows, micro_batch_tokens_for
from rlkit.backends.local.model.hub import located
from rlkit.backends.local.model.lora import adapter_seed
from rlkit.backends.local.sampling.decoders import decoder_for
from rlkit.backends.local.sampling.live import LiveLocalSampler
from rlkit.backends.local.sampling.sampler import LocalSampler
from rlkit.backends.local.sampling.scheduler import Scheduler
from rlkit.backends.local.sampling.snapshots import Snapshot, take_snapshot
from rlkit.backends.local.served import served_by
from rlkit.backends.local.training.forward import training_forward
from rlkit.backends.local.training.trainer import LocalTrainer
from rlkit.backends.outputs import output
from rlkit.backends.protocol import LiveSampler, Sampler
from rlkit.backends.queue import Job
from rlkit.backends.sampling import SeedStream
from rlkit.backends.vllm.settings import Vllm
from rlkit.errors import CheckpointError, UnsupportedError
from rlkit.futures import Future
from rlkit.types import Adam, Datum, ForwardBackwardOutput, Lora

if TYPE_CHECKING:
    from rlkit.backends.local.distributed.sharding import ShardedWeights

__all__ = ["LocalBackend"]

_log = logging.getLogger(__name__)

_SNAPSHOTS = 4  # policy, reference and teacher, say, whose weights and prefixes stay while they take turns;
_COPIES = 4 * 10**9  # of merged ones as many as fit into so many bytes


class LocalBackend(InProcessBackend):
    """A LoRA on a causal language model, trained and sampled in this process, and in others beside it.

    Args:
        model: "smollm2-135m-instruct", a directory, or a hub id; None is the one that a saved path was trained on.
        lora: the adapter; None is ``Lora()``, or the saved one's shape with ``resume_from`` or ``init_from``.
        seed: for adapter initialisation and sampling; None for a fresh one.
        folder: where ``save`` writes, ``rlkit-saves`` by default.
        resume_from: a saved path: weights, optimizer, version and the stream of sampling seeds.
        init_from: a saved path: weights only.
        dtype: of the base, "float32" or "bfloat16"; the adapter and the logprobs are float32. None is that of the run
            with ``resume_from``, else "bfloat16" on a GPU of CUDA and "float32" elsewhere.
        device: "cpu", "cuda", ...; None is "cuda" where there is one.
        merge: sample with the adapter merged into a copy of its modules (True), added to their outputs (False), or
            merged for float32 models under 2 GB ("auto"). Merging into bfloat16 loses most of a small step.
        micro_batch_tokens: tokens computed at once in training; a datum of more is computed in parts. None is that of
            the run with ``resume_from``, else 1,024 on a CPU, and what 40 % of the free memory hold on a GPU, 16,384
            at most.
        offload_folder: an existing one, where datums of more than eight times as many tokens keep what goes into each
            layer, or keys and values, while they are computed on a CPU, in a file without a name; None keeps it in
            memory.
        max_rows: completions of one snapshot decoded at once at most; None is 256 on a GPU of CUDA and 64 elsewhere.
        prefix_mb: megabytes at most of the keys and values of earlier prompts and completions, from which prompts that
            begin like them are continued, as the turns of an episode do; 0 for none.
        cuda_graphs: on an NVIDIA GPU, launch decoding steps as recorded graphs; keys and values then keep their memory
            between requests. None is True there.
        sampler: what samples instead of this process, closed with the backend: "vllm", which starts a server in an
            environment of its own (``rlkit.backends.vllm.Vllm`` says which), the URL of one that runs, several, or an
            engine of yours. merge, max_rows, prefix_mb and cuda_graphs are of this process's sampling, and are refused
            beside it.
        processes: how many train and sample together, this one included, each with the model; ``Processes`` has more
            options. None is as many as torchrun started, else 1. In those that torchrun started beside the first,
            this call serves the first one, and ends the program with it.
        shard: have each of ``processes`` hold a part of the base's weights, and gather a layer while it is used, for
            those that do not fit. Samples are then decoded unmerged and without graphs.

    Raises:
        ConfigError: an option is out of range or contradicts a saved state, or the model cannot be loaded.
        CheckpointError: the saved path is missing, damaged, or another backend's.
        BackendError: one of ``processes`` did not start.
    """

    _weights: ShardedWeights | None = None
    check_options = staticmethod(check_options)

    def __init__(
        self,
        *,
        model: str | None = None,
        lora: Lora | None = None,
        seed: int | None = None,
        folder: str | Path | None = None,
        resume_from: str | None = None,
        init_from: str | None = None,
        dtype: str | None = None,
        device: str | None = None,
        merge: bool | Literal["auto"] = "auto",
        micro_batch_tokens: int | None = None,
        offload_folder: str | Path | None = None,
        max_rows: int | None = None,
        prefix_mb: int = 512,
        cuda_graphs: bool | None = None,
        sampler: SamplingEngine | Vllm | str | Sequence[str] | None = None,
        processes: int | Processes | None = None,
        shard: bool = False,
    ) -> None:
        several = processes_of(processes)
        if serves(several):
            from rlkit.backends.local.serve import serve_torchrun

            serve_torchrun(several)
        checked = check_options(
            model=model,
            lora=lora,
            seed=seed,
            folder=folder,
            resume_from=resume_from,
            init_from=init_from,
            dtype=dtype,
            device=device,
            merge=merge,
            micro_batch_tokens=micro_batch_tokens,
            offload_folder=offload_folder,
            max_rows=max_rows,
            prefix_mb=prefix_mb,
            cuda_graphs=cuda_graphs,
            sampler=sampler,
            processes=processes,
            shard=shard,
        )
        model, lora, entropy = checked.model, checked.lora, checked.entropy
        saved, resumed, rows_in, vllm = checked.saved, checked.resumed, checked.rows_in, checked.vllm
        dtype, place = checked.dtype, checked.device
        options: dict[str, object] = {"model": located(model), "dtype": dtype, "cuda_graphs": cuda_graphs}
        options |= {"max_rows": max_rows, "prefix_mb": prefix_mb, "offload_folder": rows_in and str(rows_in)}
        shared = {**options, "shard": True, "merge": False, "micro_batch_tokens": micro_batch_tokens}
        self._lora = lora
        self._ranks = start_ranks(several, shared, lora, place, device) if shard else None  # these load together
        self._weights = self._weights if self._ranks is None else self._ranks.weights
        self.base, self._peft = load_adapted(
            (model, dtype, place), lora, adapter_seed(lora, entropy), self._weights, self._ranks, fresh=saved is None
        )
        base = self.base
        micro_batch_tokens = int(
            micro_batch_tokens or resumed.get("micro_batch_tokens") or micro_batch_tokens_for(base)
        )
        forward = training_forward(self._peft, base, lora.alpha / lora.rank, micro_batch_tokens, rows_in)
        self._trainer = LocalTrainer(self._peft, base.device, micro_batch_tokens, forward)
        how = "rlkit's own forward" if base.llama else "the library's modules"
        _log.info("training on %s in %s: %s, %d tokens at once", base.device, dtype, how, micro_batch_tokens)
        self._seeds = SeedStream(entropy)
        # In bfloat16 a merge would lose what a small step changed: half of it at a learning rate of 1e-5.
        small = base.nbytes < COPIED_UNDER and dtype == "float32"
        self._merge = bool(resumed.get("merge", small)) if merge == "auto" else merge
        computing = {"merge": self._merge, "micro_batch_tokens": micro_batch_tokens}
        self._settings = {"model": located(model), "dtype": dtype, **computing}
        self._empty = Snapshot(0, 0.0, {})
        self._latest: weakref.ref[Snapshot] | None = None
        version = 0
        if saved is not None:
            with saves.restoring(saved[0]):
                version = self._load(*saved, optimizer=checked.start.resumes)
        self._scheduler = self._scheduler_of(max_rows or default_max_rows(place), prefix_mb, cuda_graphs is not False)
        self._engine = None if vllm is not None else cast("SamplingEngine | None", sampler)
        super().__init__(
            "local",
            tokenizer=base.tokenizer,
            max_length=base.max_length,
            folder=folder,
            version=version,
            background=self._scheduler,
        )
        self._scheduler.wake = self._worker.wake
        self.about = f"{Path(model).name if Path(model).exists() else model}, LoRA r={lora.rank}"
        self._submit = self._scheduler.submit
        self._begin_others(several, vllm, {**options, **self._settings}, device, checked.start)

    def _scheduler_of(self, max_rows: int, prefix_mb: int, cuda_graphs: bool) -> Scheduler:
        base, whole = self.base, self._weights is None
        merge = self._merge and whole
        decoder = partial(decoder_for, base, merge, prefix_mb * 10**6, cuda_graphs and whole, beside=[])
        return Scheduler(decoder, max_rows, min(_SNAPSHOTS, max(1, _COPIES // base.nbytes)) if merge else _SNAPSHOTS)

    def _begin_others(
        self, several: Processes | None, vllm: Vllm | None, options: dict[str, object], device: str | None, start: Start
    ) -> None:
        """Begin what runs beside this process: the other ranks, and servers that sample."""
        base, lora, trainer = self.base, self._lora, self._trainer
        try:
            if several is not None:
                self._ranks = self._ranks or start_ranks(several, options, lora, base.device, device)
                self._ranks.begin(trainer, self._scheduler, self._empty, optimizer=start.resumes)
                self._submit = self._ranks.submit
            if vllm is not None:
                self._engine = served_by(vllm, base, str(options["dtype"]), lora, self._peft, trainer, self._seeds)
        except BaseException:
            self.close()
            raise

    def capabilities(self) -> Mapping[str, Any]:
        """Return what holds for this model on this machine.

        Returns:
            "models": {its name: its longest context}. "batch_invariant": whether a sample is the same to the bit
            whatever is decoded beside it, with this processor and number of threads: never with experts, nor where
            the library's own cache or ``sampler=`` decodes; for others it is tried now, on a few tokens.
            "sampling_options": those of ``SamplingParams``; not with ``sampler=``, whose engine decides.
        """
        invariant = (
            self._engine is None
            and self._queue.submit("capabilities", lambda: self._scheduler.invariant(self._empty)).result()
        )
        offers = {} if self._engine is not None else {"sampling_options": (*DRAWN_WITH, "stop")}
        return {"models": {self._settings["model"]: self.max_length}, "batch_invariant": invariant, **offers}

    def close(self) -> None:
        """Finish what was submitted, and free the model and the sampling engine. May be called twice."""
        super().close()
        if not self._worker.forked:  # they are those of the process that opened it
            for beside in (self._weights, self._ranks, self._engine):
                if beside is not None:
                    beside.close()

    def _run(
        self, data: Sequence[Datum], loss: Any, want: Sequence[str], *, backward: bool
    ) -> Generator[None, None, ForwardBackwardOutput]:
        trainer = self._ranks or self._trainer
        outputs, parts = yield from trainer.run(data, loss, want, backward=backward)
        arrays = {name: [x.numpy() for x in outputs[name]] for name in ("logprobs", *want)}
        return output(data, arrays["logprobs"], {name: arrays[name] for name in want}, parts)

    def _optimize(self, params: Adam) -> Job[Mapping[str, float]]:
        self._check_ranks()  # behind a rank that was lost no gradient is accumulated, which is not what is to be said
        return super()._optimize(params)

    def _step(self, params: Adam) -> Mapping[str, float]:
        return (self._ranks or self._trainer).step(params)

    def _drop(self) -> None:
        (self._ranks or self._trainer).clear()

    def _snapshot(self) -> Sampler:
        self._check_ranks()  # sampling with vLLM would go on
        if self._engine is not None:
            engine_sampler = self._engine.sampler(self.version)
            if engine_sampler is None:
                self._engine.load_adapter(trained_adapter(self._peft), self.version)
                engine_sampler = self._engine.sampler(self.version)
            return checked_sampler(f"sampler({self.version})", engine_sampler)
        return LocalSampler(self, self._newest(), self._seeds, self._submit)

    def _newest(self) -> Snapshot:
        """Return a snapshot of the policy as it is: one for each step, which the samplers in between share."""
        snapshot = self._latest() if self._latest is not None else None
        if snapshot is None or snapshot.version != self.version:
            snapshot = take_snapshot(self._peft, self.version, self._lora.alpha / self._lora.rank)
            self._latest = weakref.ref(snapshot)
            if self._ranks is not None:
                self._ranks.take(snapshot)
        return snapshot

    def _live(self, *, recompute: bool) -> LiveSampler:
        if self._engine is not None:
            first = self._snapshot()

            def update(live: SuccessiveSampler) -> Future[int]:
                return self._queue.submit("update", lambda: live.become(self._snapshot()))

            made = self._engine.live_sampler(first, update) if isinstance(self._engine, LiveEngine) else None
            return made or SuccessiveSampler(first, update)
        draws = self._ranks or self._scheduler
        live = LiveLocalSampler(self, self._newest, self._seeds, draws, self._queue, recompute=recompute)
        if self._ranks is not None:
            self._ranks.take(live.snapshot)
        return live

    def _base(self) -> Sampler:
        if self._engine is not None:
            return checked_sampler("base_sampler()", self._engine.base_sampler())
        return LocalSampler(self, self._empty, self._seeds, self._submit)

    def _check_ranks(self) -> None:
        if self._ranks is not None:
            self._ranks.check()

    def saved_sampler(self, path: str) -> Future[Sampler]:
        """Open a sampler of a saved state; beside the base it costs the adapter. See ``SavedSamplers``."""
        if self._engine is not None:
            raise UnsupportedError("saved_sampler: this backend samples with sampler=; open one with rlkit.sampler")

        def job() -> LocalSampler:
            folder, state = saves.read(path, backend="local")
            with saves.restoring(folder):
                saved = lora_of(state, None)
                adapter = adapter_in(folder, self.base.model, self.base.device)
                snapshot = Snapshot(int(state.get("version", 0)), saved.alpha / saved.rank, adapter)
            return LocalSampler(self, snapshot, self._seeds, self._submit)

        return self._queue.submit("saved_sampler", job)

    def _write(self, folder: Path, *, optimizer: bool) -> dict[str, Any]:
        write_adapter(folder, self._peft)
        if optimizer:
            write_optimizer(folder, self._trainer.parameters, self._trainer.optimizer)
        seeds = {"seed": str(self._seeds.entropy), "requests": self._seeds.count}
        return {
            "lora": attrs.asdict(self._lora),
            "optimizer": "adamw-fused" if optimizer else None,
            **seeds,
            **self._settings,
        }

    def _load(self, folder: Path, state: Mapping[str, Any], *, optimizer: bool) -> int:
        read_adapter(folder, self._trainer.parameters)
        if not optimizer:
            return 0
        read_optimizer(folder, self._trainer.parameters, self._trainer.optimizer)
        try:
            self._seeds = SeedStream(int(state["seed"]), int(state["requests"]))
            return int(state["version"])
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"{folder}: its state lacks the version or the sampling seeds: {error}") from error
