"""``LocalBackend``: torch, transformers and peft in this process, or in several, on CPUs or GPUs."""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Generator, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

import attrs

from rlkit._runtime import follow_torchrun
from rlkit._seeds import SeedStream
from rlkit.backends import saves
from rlkit.backends.local.checkpoint import (
    adapter_in,
    lora_of,
    read_adapter,
    read_optimizer,
    trained_adapter,
    write_adapter,
    write_optimizer,
)
from rlkit.backends.local.checks import ResolvedOptions, check_options, check_sampler, read_processes, resolve_local
from rlkit.backends.local.model.base import COPIED_UNDER, Base, load_base
from rlkit.backends.local.model.lora import adapter_seed, decide_head, describe_lora, with_adapter
from rlkit.backends.local.model.memory import default_max_rows, free_bytes, micro_batch_tokens_for
from rlkit.backends.local.products.linear import adapter_of
from rlkit.backends.local.sampling.decoders import make_decoder
from rlkit.backends.local.sampling.sampler import LiveLocalSampler, LocalSampler, Snapshot, take_snapshot
from rlkit.backends.local.sampling.scheduler import Scheduler
from rlkit.backends.local.training.forward import OwnLogprobs, loud, training_forward
from rlkit.backends.local.training.trainer import LocalTrainer
from rlkit.backends.options import LocalOptions, takes
from rlkit.backends.protocol import LiveSampler, Sampler
from rlkit.backends.samplers import LoraAdapter, SamplingEngine, SuccessiveSampler, TrainedPolicy
from rlkit.backends.trainer import InProcessBackend, Job, assemble_output
from rlkit.errors import CheckpointError, RankLost, UnsupportedError
from rlkit.futures import Future
from rlkit.losses.prepare import PreparedLoss
from rlkit.types import SAMPLING_OPTIONS, Adam, Datum, ForwardBackwardOutput, Lora

if TYPE_CHECKING:
    from peft import PeftModel
    from torch.distributed.device_mesh import DeviceMesh

    from rlkit.backends.local.distributed.leader import Leader

__all__ = ["LocalBackend"]

_log = logging.getLogger(__name__)

_SNAPSHOTS = 4  # policy, reference and teacher, say, whose weights and prefixes stay while they take turns


@attrs.frozen(eq=False)
class LoadedPolicy:
    """A model with its adapter, and what trains and samples it in this process.

    Attributes:
        base: the model.
        peft: the peft model.
        lora: the shape of its adapter.
        trainer: computes its gradient.
        scheduler: decodes its samples.
        seeds: of requests that bring none.
        version: optimizer steps that the saved state had taken.
        options: with what was decided where the user gave none.
        bare: the snapshot without an adapter.
    """

    base: Base
    peft: PeftModel
    lora: Lora
    trainer: LocalTrainer
    scheduler: Scheduler
    seeds: SeedStream
    version: int
    options: LocalOptions
    bare: Snapshot = attrs.field(factory=lambda: Snapshot(0, 0.0, {}))

    @property
    def trained(self) -> TrainedPolicy:
        """Return the description of the policy that a sampling engine needs."""
        names, head = adapter_of(self.peft), self.base.model.get_output_embeddings()

        @contextlib.contextmanager
        def trial(strength: float) -> Iterator[LoraAdapter]:
            with loud(self.trainer, self.lora, strength):
                yield trained_adapter(self.peft)

        return TrainedPolicy(
            model=self.base.path,
            dtype=str(self.options.dtype),
            device=str(self.base.device),
            lora=self.lora,
            modules=list({name.rpartition(".")[2] for name in names}),
            head=any(self.base.model.get_submodule(name) is head for name in names),
            tokenizer=self.base.tokenizer,
            max_length=self.base.max_length,
            seeds=self.seeds,
            logprobs=OwnLogprobs(self.trainer),
            trial=trial,
        )

    def snapshot(self, version: int) -> Snapshot:
        """Return a snapshot of the policy as it is; called in the trainer's thread."""
        return take_snapshot(self.peft, version, self.lora.alpha / self.lora.rank)


def load_policy(resolved: ResolvedOptions[LocalOptions], mesh: DeviceMesh | None) -> LoadedPolicy:
    """Load the model, add the adapter, fresh or saved, and choose how both are computed.

    Args:
        resolved: the options.
        mesh: of the ranks that share the base's weights out, if they do.

    Raises:
        ConfigError: the model cannot be loaded, or an option does not fit it.
        CheckpointError: the saved state is damaged, or another model's.
    """
    options, dtype, saved = resolved.options, resolved.dtype, resolved.saved
    device, sharded = resolved.device, mesh is not None
    base = load_base(resolved.model, dtype, "cpu" if sharded else device)
    lora = decide_head(resolved.lora, base)
    peft = with_adapter(base, lora, adapter_seed(lora, resolved.entropy), fresh=saved is None)
    free = free_bytes(device)
    if mesh is not None and free is not None:
        free -= base.nbytes // mesh.size()
    tokens = int(options.micro_batch_tokens or micro_batch_tokens_for(base, free))
    forward = training_forward(peft, base, tokens)
    if mesh is not None:
        forward.head_splits(base.text[:8])  # tried here, since ranks compute layers in one order afterwards
        base = resolve_name("rlkit.backends.local.distributed.shard:shard")(base, peft, mesh, device)
    trainer = LocalTrainer(peft, base.device, tokens, forward)
    how = "trees" if base.layout == "packed" else "rows"
    _log.info("training on %s in %s: %s of %d tokens at once", base.device, dtype, how, tokens)
    # In bfloat16 a merge would lose what a small step changed: half of it at a learning rate of 1e-5.
    small = base.nbytes < COPIED_UNDER and dtype == "float32"
    merge, copies = small if options.merge == "auto" else bool(options.merge), int(options.merged_copies or 1)
    decided = attrs.evolve(options, lora=lora, merge=merge, merged_copies=copies, micro_batch_tokens=tokens)
    seeds, version = _restore(resolved, trainer)
    return LoadedPolicy(
        base=base,
        peft=peft,
        lora=lora,
        trainer=trainer,
        scheduler=_make_scheduler(base, decided),
        seeds=seeds,
        version=version,
        options=decided,
    )


def _make_scheduler(base: Base, options: LocalOptions) -> Scheduler:
    copies, rows = options.merged_copies or 1, options.max_rows or default_max_rows(base.device)
    graphs = options.cuda_graphs is not False
    decoder = partial(make_decoder, base, bool(options.merge), options.prefix_mb * 10**6, graphs, [])
    return Scheduler(decoder, rows, max(_SNAPSHOTS, copies), copies if options.merge else None)


def _restore(resolved: ResolvedOptions[LocalOptions], trainer: LocalTrainer) -> tuple[SeedStream, int]:
    """Put the saved state into the trainer; return the stream of seeds and the version that it had."""
    if resolved.saved is None:
        return SeedStream(resolved.entropy), 0
    folder, state = resolved.saved
    with saves.restoring(folder):
        read_adapter(folder, trainer.parameters)
        if not resolved.resumes:
            return SeedStream(resolved.entropy), 0
        read_optimizer(folder, trainer.parameters, trainer.optimizer)
        try:
            return SeedStream(int(state["seed"]), int(state["requests"])), int(state["version"])
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"{folder}: its state lacks the version or the sampling seeds: {error}") from error


class LocalBackend(InProcessBackend):
    """A LoRA on a causal language model, trained and sampled in this process, and in others if it is told to.

    Its options are those of ``rlkit.backends.options.LocalOptions``.

    Raises:
        ConfigError: an option is out of range or contradicts a saved state, or the model cannot be loaded.
        CheckpointError: the saved path is missing, damaged, or another backend's.
        BackendError: one of ``processes`` did not start.
    """

    _leader: Leader | None = None  # of other ranks
    _seeds: SeedStream
    check_options = staticmethod(check_options)

    @takes(LocalOptions)
    def __init__(self, **options: Any) -> None:
        asked = LocalOptions(**options)
        processes = read_processes(asked)
        if processes is not None:
            follow_torchrun()
        resolved = resolve_local(asked)
        if processes is None:
            policy = load_policy(resolved, None)
        else:
            load = partial(load_policy, resolved)
            self._leader = processes.open(resolved.options.for_ranks(), resolved.device, asked.device, load)
            policy = self._leader.policy
        self._policy, self.base, self._seeds = policy, policy.base, policy.seeds
        self._trainer, self._scheduler = policy.trainer, policy.scheduler
        self._settings = {"model": resolved.model, **policy.options.kept()}
        self._latest: weakref.ref[Snapshot] | None = None
        self._engine: SamplingEngine | None = None
        super().__init__(
            "local",
            tokenizer=self.base.tokenizer,
            max_length=self.base.max_length,
            folder=asked.folder,
            version=policy.version,
            background=self._leader or policy.scheduler,
        )
        policy.scheduler.wake = self._worker.wake
        name = Path(resolved.model)
        self.about = f"{name.name if name.exists() else resolved.model}, {describe_lora(policy.lora)}"
        self._draws = self._leader or policy.scheduler
        try:
            engine = resolved.engine
            if engine is not None:
                self._engine = engine if isinstance(engine, SamplingEngine) else engine.open(policy.trained)
        except BaseException:
            self.close()
            raise

    def capabilities(self) -> Mapping[str, object]:
        """Return the abilities of this model on this machine.

        Returns:
            "models": {its name: its longest context}. "batch_invariant": whether a sample is the same to the bit
            whatever is decoded with it, with this processor and number of threads: never with experts, nor where
            the library's own cache or ``sampler=`` decodes; for others it is tried now, on a few tokens.
            "sampling_options": those of ``SamplingParams``; none with ``shard=True`` alone, which does not sample; not
            with ``sampler=``, where the engine decides.
        """
        abilities: dict[str, object] = {"models": {self._settings["model"]: self.max_length}, "batch_invariant": False}
        if self._engine is not None:
            return abilities
        if self._policy.options.shard:
            return {**abilities, "sampling_options": ()}
        invariant = self._queue.enqueue("capabilities", lambda: self._scheduler.invariant(self._policy.bare)).result()
        return {**abilities, "batch_invariant": invariant, "sampling_options": (*SAMPLING_OPTIONS, "stop")}

    def close(self) -> None:
        """Finish what was submitted, and free the model and the sampling engine. May be called twice."""
        super().close()
        if not self._worker.forked:  # they are those of the process that opened it
            for beside in (self._leader, self._engine):
                if beside is not None:
                    beside.close()

    def _run(
        self, data: Sequence[Datum], loss: PreparedLoss | None, want: Sequence[str], *, backward: bool
    ) -> Generator[None, None, ForwardBackwardOutput]:
        self._check_ranks()
        outputs, parts = yield from self._trainer.run(data, loss, want, backward=backward)
        arrays = {name: [x.numpy() for x in outputs[name]] for name in ("logprobs", *want)}
        return assemble_output(data, arrays["logprobs"], {name: arrays[name] for name in want}, parts)

    def _optimize(self, params: Adam) -> Job[Mapping[str, float]]:
        self._check_ranks()  # once a rank is lost no gradient is accumulated, but that is not the error to raise
        return super()._optimize(params)

    def _step(self, params: Adam) -> Mapping[str, float]:
        metrics = self._trainer.step(params)
        if self._leader is not None:
            with contextlib.suppress(RankLost):  # the step is made, and can be saved; all calls after it say so
                self._leader.share()
        return metrics

    def _facts(self) -> dict[str, object]:
        return {**self._settings, "device": str(self.base.device), "lora": self._policy.lora, **super()._facts()}

    def _drop(self) -> None:
        self._trainer.clear()

    def _snapshot(self) -> Sampler:
        self._check_ranks()  # sampling with vLLM would go on
        if self._engine is not None:
            engine_sampler = self._engine.sampler(self.version)
            if engine_sampler is None:
                self._engine.load_adapter(trained_adapter(self._policy.peft), self.version)
                engine_sampler = self._engine.sampler(self.version)
            return check_sampler(f"sampler({self.version})", engine_sampler)
        return LocalSampler(self, self._newest(), self._seeds, self._draws.submit)

    def _newest(self) -> Snapshot:
        """Return a snapshot of the policy as it is: one for each step, which the samplers in between share."""
        self._check_samples()
        snapshot = self._latest() if self._latest is not None else None
        if snapshot is None or snapshot.version != self.version:
            snapshot = self._policy.snapshot(self.version)
            if self._leader is not None:
                self._leader.add_snapshot(snapshot)
            self._latest = weakref.ref(snapshot)
        return snapshot

    def _live(self, *, recompute: bool) -> LiveSampler:
        if self._engine is not None:
            first = self._snapshot()

            def update(live: SuccessiveSampler) -> Future[int]:
                return self._queue.enqueue("update", lambda: live.switch_to(self._snapshot()))

            return SuccessiveSampler(first, update)
        live = LiveLocalSampler(self, self._newest, self._seeds, self._draws, self._queue, recompute=recompute)
        if self._leader is not None:
            self._leader.add_snapshot(live.snapshot)
        return live

    def _base(self) -> Sampler:
        if self._engine is not None:
            return check_sampler("base_sampler()", self._engine.base_sampler())
        self._check_samples()
        return LocalSampler(self, self._policy.bare, self._seeds, self._draws.submit)

    def _check_ranks(self) -> None:
        if self._leader is not None:
            self._leader.check()

    def _check_samples(self) -> None:
        if self._policy.options.shard:
            what = "shard=True: a token would take all weights of all processes"
            raise UnsupportedError(f"{what}; connect with sampler='vllm' to sample and to compute logprobs of texts")

    def saved_sampler(self, path: str) -> Future[Sampler]:
        """Open a sampler of a saved state, which costs the memory of the adapter alone. See ``SavedSamplers``."""
        if self._engine is not None:
            raise UnsupportedError("saved_sampler: this backend samples with sampler=; use rlkit.sampler for a save")
        self._check_samples()

        def job() -> LocalSampler:
            folder, state = saves.read(path, backend="local")
            with saves.restoring(folder):
                saved = lora_of(state, None)
                adapter = adapter_in(folder, self.base.model, self.base.device)
                snapshot = Snapshot(int(state.get("version", 0)), saved.alpha / saved.rank, adapter)
            return LocalSampler(self, snapshot, self._seeds, self._draws.submit)

        return self._queue.enqueue("saved_sampler", job)

    def _write(self, folder: Path, *, optimizer: bool) -> dict[str, object]:
        write_adapter(folder, self._policy.peft)
        if optimizer:
            write_optimizer(folder, self._trainer.parameters, self._trainer.optimizer)
        seeds = {"seed": str(self._seeds.entropy), "requests": self._seeds.count}
        return {
            "lora": attrs.asdict(self._policy.lora),
            "optimizer": "adamw-fused" if optimizer else None,
            **seeds,
            **self._settings,
        }
