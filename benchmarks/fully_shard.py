"""torch's ``fully_shard`` in place of rlkit's own gathering of sharded weights: two ranks on this machine, over gloo.

    python benchmarks/fully_shard.py [--timeout 10] [--tokens 512] [--rounds 5] [--only own cost ...]

Each story runs in two processes of its own, which end within a bound: ``own`` (rlkit's forward of a small Qwen3, losses
on every rank and on rank 0), ``library`` (other architectures by transformers' modules), ``uneven`` and ``drifted``
(ranks that do not compute the same layers in the same order), ``sampling``, ``killed``, ``loading``, and ``cost`` (the
model of benchmarks/sharding.py). Figures go to the screen and to benchmarks/results/fully-shard.json; docs/sharding.md
discusses them.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import runner
import sharding  # before torch is imported
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoConfig, AutoModelForCausalLM

sys.path.insert(0, str(Path(__file__).parents[1]))

import rlkit
from rlkit.backends.local.attention.tree import Segment, TreeAttention
from rlkit.backends.local.distributed.sharding import ShardedWeights, shard_groups
from rlkit.backends.local.model.base import load_base, output_embedding
from rlkit.backends.local.model.llama import FUSED, Llama, fuse_layers
from rlkit.backends.local.model.lora import with_adapter
from rlkit.backends.local.model.memory import gather_around, gathered, weights_of
from rlkit.backends.local.model.output_head import Unembedding
from rlkit.losses.prepare import PreparedLoss, prepare
from tests.models.build import build as build_small
from tests.models.families import FAMILIES
from tests.models.family import build as build_family

ARCHITECTURES = ("llama", "gemma3_text", "jamba", "mixtral", "gpt2", "zamba2")  # those of test_sharding.py
Logprobs = Callable[[rlkit.Datum], torch.Tensor]
TIMEOUT = timedelta(seconds=float(os.environ.get("GATHER_TIMEOUT", "10")))  # of a collective, set by the parent
pickled: list[str] = []  # types of what was pickled in this process


class Shards:
    """``memory.Weights`` of a module that ``fully_shard`` has; it counts, as torch's calls cannot be nested."""

    def __init__(self, module: Any) -> None:
        self._module, self._uses = module, 0

    def gather(self) -> None:
        self._uses += 1
        if self._uses == 1:
            self._module.unshard()

    def release(self) -> None:
        self._uses -= 1
        if self._uses == 0:
            self._module.reshard()


def shard(model: Any, *, layers_only: bool = False) -> None:
    """Shard a Llama or Qwen3 for rlkit's own forward, which calls no layer, so that no hook of theirs fires.

    The own forward reads q, k and v as one matrix, and gate and up. torch gives each parameter memory of its own, so
    they become one parameter, of which the linear modules have views.
    """
    mesh, vectors = init_device_mesh("cpu", (2,)), {p for p in model.parameters() if p.ndim < 2}
    for layer in model.model.layers:
        groups = [(getattr(layer, parent), names) for parent, names in FUSED]
        for parent, names in groups:
            whole = torch.cat([getattr(parent, name).weight for name in names])
            parent.register_parameter("stacked", nn.Parameter(whole, requires_grad=False))
            for name in names:
                del getattr(parent, name).weight
        _shard_module(layer, mesh, vectors)
        with gathered(weights_of(layer)):
            for parent, names in groups:
                linears = [getattr(parent, name) for name in names]
                sizes = [linear.out_features for linear in linears]
                for linear, view in zip(linears, parent.stacked.detach().split(sizes), strict=True):
                    linear.weight = nn.Parameter(view, requires_grad=False)
    if not layers_only:
        fully_shard(model.model.embed_tokens, mesh=mesh, reshard_after_forward=True)  # its hooks fire: it is called
        _shard_module(model.lm_head, mesh, set())


def _shard_module(module: nn.Module, mesh: Any, ignored: set[nn.Parameter]) -> None:
    fully_shard(module, mesh=mesh, reshard_after_forward=True, ignored_params=ignored)
    gather_around(module, Shards(module))


class Policy:
    """A model with adapters, computed by rlkit's own forward.

    Args:
        folder: of the model.
        side: where its weights are: "whole", shared out by "ours", or by "torch", with a variant after a comma.
    """

    def __init__(self, folder: str, side: str) -> None:
        self.ours: ShardedWeights | None = None
        if side == "ours":
            group, orders = shard_groups(TIMEOUT)
            self.ours = ShardedWeights(torch.device("cpu"), group, orders, TIMEOUT.total_seconds())
            reader = self.ours.reader()
            with reader.reading():
                model = load(folder)
            self.ours.shard(model, reader)
        else:
            model = load(folder)
            if side == "whole":
                fuse_layers(model)
            else:
                shard(model, layers_only="layers alone" in side)
        _leave_the_file(model, whole=side == "whole")
        self.model, rng = model, np.random.default_rng(7)
        linears = {name: m for name, m in model.named_modules() if isinstance(m, nn.Linear)}
        shapes = {name: (m.in_features, m.out_features) for name, m in linears.items()}
        self.adapter = {name: (_draw(rng, 8, n), _draw(rng, m, 8)) for name, (n, m) in shapes.items()}
        self.parameters = [x for pair in self.adapter.values() for x in pair]
        self.llama = Llama(model, self.adapter, 1.0)
        weight, weights = output_embedding(model)
        with gathered(weights):  # torch registers the parameter itself only while it is gathered
            weight = output_embedding(model)[0]
        self.head = Unembedding(weight, self.adapter["lm_head"], 1.0, weights)

    def logprobs(self, datum: rlkit.Datum) -> torch.Tensor:
        """Those of the tokens that are trained on."""
        tokens, places = torch.from_numpy(datum.tokens), torch.from_numpy(np.flatnonzero(datum.mask))
        self.llama.prepare()
        return self.head.logprobs(self._hidden(tokens, places - 1), tokens[places], None)

    @torch.no_grad()
    def next_token(self, tokens: Sequence[int]) -> int:
        """The most likely one after ``tokens``, without keys and values kept."""
        hidden = self._hidden(torch.tensor(tokens), torch.tensor([len(tokens) - 1]))
        return int(self.head.logits(hidden)[0].argmax())

    def _hidden(self, tokens: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        n, llama = tokens.numel(), self.llama
        attentions = [TreeAttention([Segment(0, n)], llama.heads, llama.key_heads, w) for w in llama.windows]
        return llama.hidden(tokens, torch.arange(n), attentions, places)

    def gather_all(self, *, backward: bool = False) -> None:
        """Give this rank's part of every unit of a forward or backward pass, and compute nothing."""
        embedding, head, layers = self.model.model.embed_tokens, self.model.lm_head, self.model.model.layers
        for module in [*reversed(layers)] if backward else [embedding, *layers, head]:
            module.unshard()
            module.reshard()

    def close(self) -> None:
        """End our own gathering; torch's has nothing to end."""
        if self.ours is not None:
            dist.barrier()  # no one computes any more
            self.ours.close()


def _leave_the_file(model: nn.Module, *, whole: bool) -> None:
    """Copy tensors that are views of the checkpoint's file, all of which would count as this process's memory."""
    fused = {name for _, names in FUSED for name in names}
    for name, p in model.named_parameters():
        if p.ndim < 2 or (whole and name.split(".")[-2] not in fused):
            p.data = p.data.clone()


def _draw(rng: np.random.Generator, *shape: int) -> torch.Tensor:
    return torch.from_numpy(0.05 * rng.standard_normal(shape).astype(np.float32)).requires_grad_()


def load(folder: str) -> Any:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, trust_remote_code=False)
    return model.eval().requires_grad_(False)


def texts(seed: int, count: int, length: int = 48) -> list[rlkit.Datum]:
    """Samples with advantages, for a loss of policy gradients."""
    rng, data = np.random.default_rng(seed), []
    for _ in range(count):
        datum = rlkit.Datum.supervised(*rng.integers(3, 290, (2, length // 2)))
        data.append(datum.with_inputs(advantages=1.0, sampling_logprobs=np.full(length // 2, -6.0, np.float32)))
    return data


def users_loss(logprobs: torch.Tensor) -> torch.Tensor:
    """A loss that only the user's process has."""
    time.sleep(0.2)
    return (logprobs.exp() - logprobs).sum()


def gradient_on_rank_0(loss: PreparedLoss, values: torch.Tensor, datum: rlkit.Datum) -> torch.Tensor:
    """The gradient of every rank's logprobs [n], computed by rank 0 while the others wait; only tensors travel."""
    first = dist.get_rank() == 0
    parts = [torch.empty_like(values) for _ in range(2)] if first else None
    dist.gather(values.detach(), parts)
    back = None if parts is None else [loss.gradient([x], [datum]).driver[0] for x in parts]
    out = torch.empty_like(values)
    dist.scatter(out, back)
    return out


def train(
    logprobs: Logprobs, parameters: Sequence[torch.Tensor], data: Sequence[rlkit.Datum], loss: PreparedLoss
) -> tuple[np.ndarray, np.ndarray]:
    """Logprobs and gradients of micro-batches of one datum each; a loss with a name is computed here."""
    for p in parameters:
        p.grad = None
    outputs = []
    for datum in data:
        values = logprobs(datum)
        slope = loss.gradient([values], [datum]).driver[0] if loss.named else gradient_on_rank_0(loss, values, datum)
        values.backward(slope)
        outputs.append(values.detach())
    return torch.cat(outputs).numpy(), torch.cat([p.grad.flatten() for p in parameters]).numpy()


def differences(a: Sequence[np.ndarray], b: Sequence[np.ndarray]) -> dict[str, float]:
    """As test_sharding.py bounds them by 1e-6: of logprobs, and of gradients as a part of the largest."""
    gradient = float(np.abs(a[1] - b[1]).max() / np.abs(a[1]).max())
    return {"logprobs": float(np.abs(a[0] - b[0]).max()), "gradient": gradient}


def attempt(call: Callable[[], object]) -> dict[str, Any]:
    """What a call raises, and in how many seconds."""
    began = time.monotonic()
    try:
        call()
    except Exception as error:  # noqa: BLE001
        text = " ".join(str(error).split())[:160]
        return {"error": type(error).__name__, "text": text, "seconds": time.monotonic() - began}
    return {"error": None, "seconds": time.monotonic() - began}


# The stories, each called by both ranks.


def own(rank: int, settings: dict[str, Any]) -> dict[str, Any]:
    """Rlkit's own forward with weights that torch shares out: whether it computes the same, and what it cannot."""
    plain = load(settings["qwen3"])
    fuse_layers(plain)
    mesh = init_device_mesh("cpu", (2,))
    for layer in plain.model.layers:
        fully_shard(layer, mesh=mesh)
    with gathered(Shards(plain.model.layers[0])):
        fused = attempt(lambda: Llama(plain, {}, 1.0))
    whole, torchs = Policy(settings["qwen3"], "whole"), Policy(settings["qwen3"], "torch")
    linear = torchs.llama.layers[0].qkv
    found: dict[str, Any] = {
        "weights fused before": fused,
        "a copy of the modules": attempt(lambda: copy.deepcopy(torchs.model)),
        "read outside of a gather": attempt(lambda: linear(torch.ones(1, linear.weight.shape[1]))),
    }
    for name, loss in (("named", prepare("importance_sampling")), ("the user's", prepare(users_loss))):
        sides = [train(x.logprobs, x.parameters, texts(rank, 3), loss) for x in (whole, torchs)]
        found[f"loss {name}"] = differences(*sides)
    return found


def library(rank: int, settings: dict[str, Any]) -> dict[str, Any]:
    """Other architectures, computed by transformers' modules, whose hooks fire: layers, then the rest with the root."""
    found: dict[str, Any] = {}
    for name in ARCHITECTURES:
        base = load_base(settings[name], "float32", "cpu")
        policies = [with_adapter(base, rlkit.Lora(rank=4, train_unembed=True), 0) for _ in range(2)]
        for policy in policies:
            rng = np.random.default_rng(7)
            for key, p in policy.named_parameters():
                if "lora_B" in key:
                    p.data.copy_(_draw(rng, *p.shape).detach())
        results: list[Any] = []

        def compare(policies: Any = policies, results: list[Any] = results) -> None:
            adapters = {p for p in policies[1].parameters() if p.requires_grad or p.ndim < 2}
            layers = [layer for m in policies[1].modules() if isinstance(m, nn.ModuleList) for layer in m]
            inside = {id(m) for layer in layers for m in layer.modules() if m is not layer}
            for layer in [x for x in layers if id(x) not in inside]:
                fully_shard(layer, reshard_after_forward=True, ignored_params=adapters)
            fully_shard(policies[1], reshard_after_forward=True, ignored_params=adapters)
            for policy in policies:

                def logprobs(datum: rlkit.Datum, policy: Any = policy) -> torch.Tensor:
                    tokens = torch.from_numpy(datum.tokens)
                    logits = policy(input_ids=tokens[None], use_cache=False).logits[0, :-1]
                    chosen = logits.log_softmax(-1).gather(1, tokens[1:, None])[:, 0]
                    return chosen[torch.from_numpy(datum.mask[1:])]

                parameters = [p for p in policy.parameters() if p.requires_grad]
                results.append(train(logprobs, parameters, texts(rank, 2), prepare("importance_sampling")))

        failed = attempt(compare)
        found[name] = failed if failed["error"] else differences(*results)
        dist.barrier()
    return found


def uneven(rank: int, settings: dict[str, Any]) -> dict[str, Any]:
    """Three micro-batches on rank 0, two on rank 1: as they come, or with an empty one that only gathers."""
    whole, loss = Policy(settings["qwen3"], "whole"), prepare("importance_sampling")
    group = dist.new_group(timeout=TIMEOUT)  # of gradients, as rlkit has it
    data, results = texts(rank, 3 - rank), []
    policy = Policy(settings["qwen3"], settings["side"])

    def step() -> None:
        results.append(train(policy.logprobs, policy.parameters, data, loss))
        if "filled" in settings["side"] and rank == 1:
            policy.gather_all()
            policy.gather_all(backward=True)
        dist.all_reduce(torch.zeros(1), group=group)

    failed = attempt(step)
    if failed["error"] is None:
        policy.close()
        failed |= differences(train(whole.logprobs, whole.parameters, data, loss), results[0])
    return failed


def drifted(rank: int, settings: dict[str, Any]) -> dict[str, Any]:
    """Rank 0 trains on a text while rank 1 scores two: as many passes over the layers, in another order."""
    policies, loss = [Policy(settings["qwen3"], side) for side in ("whole", settings["side"])], prepare("ppo")

    def work(policy: Policy) -> tuple[np.ndarray, np.ndarray]:
        if rank == 0:
            return train(policy.logprobs, policy.parameters, texts(0, 1), loss)
        with torch.no_grad():
            scored = torch.cat([policy.logprobs(datum) for datum in texts(1, 2)]).numpy()
        return scored, np.ones(1)

    results: list[tuple[np.ndarray, np.ndarray]] = []
    failed = attempt(lambda: results.extend(work(policy) for policy in policies))
    if failed["error"] is None:
        policies[1].close()
        failed |= differences(*results)
    return failed


def sampling(rank: int, settings: dict[str, Any]) -> dict[str, Any]:
    """Rank 0 draws 12 tokens, rank 1 four: as they come, or agreed upon before each token."""
    policies = [Policy(settings["qwen3"], side) for side in ("whole", settings["side"])]
    agree, drawn = "in step" in settings["side"], [[5, 6 + rank, 7], [5, 6 + rank, 7]]
    end = dist.new_group(timeout=3 * TIMEOUT)

    def draw() -> None:
        left = torch.ones(1)
        while left.item():
            if len(drawn[1]) < (7 if rank else 15):
                drawn[1].append(policies[1].next_token(drawn[1]))
            elif agree:
                policies[1].gather_all()
            left[0] = len(drawn[1]) < (7 if rank else 15)
            if agree:
                dist.all_reduce(left, op=dist.ReduceOp.MAX)

    failed = attempt(draw)
    attempt(lambda: dist.barrier(group=end))  # whoever needs no more stays
    policies[1].close()
    while len(drawn[0]) < len(drawn[1]):
        drawn[0].append(policies[0].next_token(drawn[0]))
    return failed | {"same tokens": drawn[0] == drawn[1], "tokens": len(drawn[1]) - 3}


def killed(rank: int, settings: dict[str, Any]) -> dict[str, Any]:
    """Rank 1 is killed while rank 0 waits for it in a gather."""
    policy, loss = Policy(settings["qwen3"], settings["side"]), prepare("importance_sampling")
    train(policy.logprobs, policy.parameters, texts(0, 1), loss)
    dist.barrier()
    if rank == 1:
        time.sleep(1.0)
        os.kill(os.getpid(), signal.SIGKILL)
    result = attempt(lambda: train(policy.logprobs, policy.parameters, texts(0, 1000), loss))
    return result | {"seconds": result["seconds"] - 1.0}


def loading(rank: int, settings: dict[str, Any]) -> dict[str, Any]:
    """What torch has for models that do not fit: rank 0 reads the checkpoint, and sends it weight by weight."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

    with torch.device("meta"):
        config = AutoConfig.from_pretrained(settings["qwen3"], trust_remote_code=False)
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    model.to_empty(device="cpu")
    before = len(pickled)
    state = load(settings["qwen3"]).state_dict() if rank == 0 else {}
    set_model_state_dict(model, state, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True))
    return {"pickled by it": len(pickled) - before}


def cost(rank: int, settings: dict[str, Any]) -> dict[str, Any]:
    """Four micro-batches whenever the parent says so: CPU seconds, and the peak of resident memory over the start."""
    start = peak_mb()
    policy, loss = Policy(settings["large"], settings["side"]), prepare("importance_sampling")
    loaded = peak_mb() - start
    data = texts(rank, 4, settings["tokens"])
    for line in sys.stdin:
        dist.barrier()
        Path("/proc/self/clear_refs").write_text("5")
        began, clock = time.process_time(), time.monotonic()
        train(policy.logprobs, policy.parameters, data, loss)
        dist.barrier()
        figures = {"cpu": time.process_time() - began, "wall": time.monotonic() - clock, "peak": peak_mb() - start}
        print(json.dumps(figures | {"loaded": loaded}), flush=True)
        del line
    policy.close()
    return {}


STORIES = (own, library, uneven, drifted, sampling, killed, loading, cost)
SIDES = {  # a rank may end with its process, so that each side has processes of its own
    "uneven": ("ours", "torch", "torch, filled up"),
    "drifted": ("ours", "torch", "torch, layers alone"),
    "sampling": ("ours", "torch", "torch, in step"),
    "killed": ("ours", "torch"),
}


def peak_mb() -> float:
    """The most memory that this process had, since it was last asked to forget."""
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith("VmHWM"))
    return int(line.split()[1]) / 1024


def play_part(settings: dict[str, Any]) -> None:
    """One rank of a story; its result is the last line of stdout."""

    pickle = sys.modules["pickle"]  # to count what torch pickles; rlkit's programs do not import it

    class Counted(pickle.Pickler):  # type: ignore[name-defined, misc]
        def dump(self, value: object) -> None:
            pickled.append(type(value).__name__)
            super().dump(value)

    def dumps(value: object, *arguments: Any, plain: Any = pickle.dumps, **keywords: Any) -> bytes:
        pickled.append(type(value).__name__)
        return plain(value, *arguments, **keywords)

    pickle.dumps, pickle.Pickler, dist.distributed_c10d._pickler = dumps, Counted, Counted  # noqa: SLF001
    torch.set_num_threads(1)
    store = dist.FileStore(settings["store"], 2)
    rank = int(settings["rank"])
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=TIMEOUT)
    result = globals()[settings["story"]](rank, settings)
    print(json.dumps({**result, "pickled": len(pickled), "what": " ".join(sorted(set(pickled)))}), flush=True)
    os._exit(0)  # groups whose other end was killed are not taken apart


def start(story: str, settings: dict[str, Any]) -> list[subprocess.Popen[str]]:
    """Both ranks of a story."""
    store = tempfile.mktemp(dir=settings["folder"])  # noqa: S306  # in a folder of our own
    parts = [{**settings, "story": story, "store": store, "rank": rank} for rank in range(2)]
    commands = [[sys.executable, "-W", "ignore", __file__, "--part", json.dumps(part)] for part in parts]
    pipes: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo"} | settings.get("malloc", {})
    return [subprocess.Popen(c, **pipes, env=environment, text=True) for c in commands]


def play(story: str, settings: dict[str, Any], bound: float = 240.0) -> list[dict[str, Any]]:
    """What both ranks of a story found; whichever has not ended in time is killed."""
    ranks, found = start(story, settings), []
    for rank in ranks:
        try:
            out, said = rank.communicate(timeout=bound)
        except subprocess.TimeoutExpired:
            rank.kill()
            out, said = rank.communicate()
        lines = out.strip().splitlines()
        found.append(json.loads(lines[-1]) if lines and rank.returncode == 0 else _end(rank, said))
    return found


def _end(rank: subprocess.Popen[str], said: str) -> dict[str, Any]:
    return {"status": rank.returncode, "stderr": "".join(said.strip().splitlines()[-1:])[-300:]}


def measure_cost(settings: dict[str, Any], rounds: int) -> dict[str, dict[str, float]]:
    """Medians of a step of both ranks together; the sides take turns."""
    sides = {side: start("cost", {**settings, "side": side}) for side in ("whole", "ours", "torch")}
    runs: dict[str, list[dict[str, float]]] = {side: [] for side in sides}
    for i in range(rounds + 1):
        for side, ranks in sides.items():
            for rank in ranks:
                print(file=rank.stdin, flush=True)
            lines = [rank.stdout.readline() for rank in ranks]
            if not all(lines):
                sys.exit(f"{side}: {ranks[0].communicate()[1]}")
            parts = [json.loads(line) for line in lines]
            step = {key: max(part[key] for part in parts) for key in parts[0]} | {"cpu": sum(x["cpu"] for x in parts)}
            print(f"cost {side} {i}:", {key: round(value, 2) for key, value in step.items()}, flush=True)
            if i:  # the first one warms up
                runs[side].append(step)
    for ranks in sides.values():
        for rank in ranks:
            rank.stdin.close()
        for rank in ranks:
            rank.wait(60)
    return {side: {key: statistics.median(x[key] for x in own) for key in own[0]} for side, own in runs.items()}


def show(name: str, found: Any) -> None:
    """Print a line of a table for each rank, or side, of a story."""
    if isinstance(found, list):
        found = {f"rank {rank}": x for rank, x in enumerate(found)}
    figures = {key: x for key, x in found.items() if not isinstance(x, (dict, list)) and key not in {"text", "stderr"}}
    if figures:
        cells = [f"{key} {x:.3g}" if isinstance(x, float) else f"{key} {x}" for key, x in figures.items()]
        print(f"{name:44}", "  ".join(cells), flush=True)
    for key, x in found.items():
        if isinstance(x, (dict, list)):
            show(f"{name}, {key}", x)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--timeout", type=float, default=10.0, help="seconds of a collective")
    parser.add_argument("--tokens", type=int, default=512, help="of a micro-batch, for the cost")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", nargs="*", default=[story.__name__ for story in STORIES], help="stories")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.part:
        play_part(json.loads(options.part))
    os.environ["GATHER_TIMEOUT"] = str(options.timeout)
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        settings: dict[str, Any] = {"folder": folder, "tokens": options.tokens, "large": f"{folder}/large"}
        settings["qwen3"] = str(build_small("qwen3", Path(folder) / "qwen3"))
        settings |= {name: str(build_family(FAMILIES[name], Path(folder) / name)) for name in ARCHITECTURES}
        sharding.build(settings["large"])
        sharding.build(f"{folder}/wide", hidden=1024, layers=8)
        for story in options.only:
            if story == "cost":
                returned = {"MALLOC_MMAP_THRESHOLD_": "65536"}  # or freed memory stays with malloc
                wide = {"large": f"{folder}/wide", "tokens": 64, "malloc": returned}
                found[story] = {"time": measure_cost(settings, options.rounds)}
                found[story]["memory"] = measure_cost(settings | wide, 2)
            elif story in SIDES:
                found[story] = {side: play(story, {**settings, "side": side}) for side in SIDES[story]}
            else:
                found[story] = play(story, settings)
            show(story, found[story])
    chosen = {key: getattr(options, key) for key in ("timeout", "tokens", "rounds")}
    if set(options.only) == {story.__name__ for story in STORIES}:
        runner.write("fully-shard", {**chosen, "machine": runner.machine(), **found})


if __name__ == "__main__":
    main()
