"""Start SkyRL's server of the Tinker API so that the SDK can speak to it. Run by the Python of .venv-server alone.

    .venv-server/bin/python tests/realserver/launch.py --port 8001 --base-model DIR --backend jax ...

The options are those of ``skyrl.tinker.api``. As it is installed, skyrl 0.4.0 was written for an older SDK, Python 3.12
and ``uv``, answers less than the API documents, and trains by other gradients. Changed here:

- ``patch_api``: what the SDK 0.38 asks for beyond it, and the end tokens of the model where a request names no stop.
- ``patch_scheduler``: a step is not applied before the gradient that was sent before it.
- ``patch_answers``: a first entry in ``prompt_logprobs``, and ``metrics["loss:sum"]``.
- ``patch_gradients``: gradients are sums over tokens and datums, as the Tinker API documents them, in place of means
  over sequences of means over their weights; and a model does not start with what another left in its place.

Models, optimizer, sampler and storage run as they are installed.

It ends when its standard input is closed, so it never outlives who started it; the engine, a child process, ends with
it.
"""

import argparse
import os
import random
import signal
import sys
import threading
import typing
from typing import Any

# ruff: noqa: B008  # FastAPI's way to ask for a session


def patch_api(ends: list[int]) -> Any:
    """Return the module ``skyrl.tinker.api``, with what the SDK 0.38 asks for beyond it; ``ends``: the end tokens."""
    import datetime as dt

    from fastapi import Depends, Request, Response
    from skyrl.tinker import api, types
    from skyrl.tinker.config import config_to_argv
    from sqlmodel import select
    from sqlmodel.ext.asyncio.session import AsyncSession

    def engine_command(parent: list[str], config: Any) -> list[str]:
        """The engine in this Python and with its own patches, instead of ``uv run`` in an environment of uv's."""
        del parent
        return [sys.executable, __file__, "--engine", *config_to_argv(config)]

    api._build_uv_run_cmd_engine = engine_command

    def replace(path: str) -> Any:
        """Takes a route off, and gives the decorator that puts another one there."""
        api.app.router.routes[:] = [route for route in api.app.router.routes if getattr(route, "path", "") != path]
        return api.app.post(path)

    @replace("/api/v1/asample")
    async def asample(
        request: api.SampleRequest, raw: Request, session: AsyncSession = Depends(api.get_session)
    ) -> dict[str, Any]:
        """The SDK wants an id for each sequence with the promise of a sample, and fails without them. No stop at all
        means the model's end tokens to it; to the server it means what an empty list does."""
        if request.sampling_params.stop is None:
            request.sampling_params.stop = ends
        answer = await api.asample(request, raw, session)
        ids = [f"{answer.request_id}:{i}" for i in range(request.num_samples)]
        return {**answer.model_dump(), "sample_sequence_ids": ids}

    @api.app.post("/api/v1/sessions/{session_id}/finish")
    async def finish(session_id: str, session: AsyncSession = Depends(api.get_session)) -> dict[str, Any]:
        """``ServiceClient.close`` asks for this. The session is made to look silent, so that the server ends it."""
        found = await session.get(api.SessionDB, session_id)
        if found is None:
            raise api.HTTPException(status_code=404, detail="Session not found")
        found.last_heartbeat_at = dt.datetime(2000, 1, 1, tzinfo=dt.UTC)
        await session.commit()
        return {"session_id": session_id}

    @replace("/api/v1/client/config")
    async def client_config(response: Response) -> dict[str, Any]:
        """The SDK opens a connection for this and forgets it; closed from here, it is no leak of the program's."""
        response.headers["connection"] = "close"
        return {"pjwt_auth_enabled": False}

    class Load(api.LoadWeightsRequest):  # type: ignore[name-defined, misc]
        model_id: str | None = None
        session_id: str | None = None
        model_seq_id: int | None = None

    @replace("/api/v1/load_weights")
    async def load_weights(request: Load, raw: Request, session: AsyncSession = Depends(api.get_session)) -> Any:
        """The SDK makes a client from a path by one request, which names the session and the client's number in it
        but no model; here that is a new model with the path's LoRA, and then the server's own load."""
        if request.model_id is None:
            request.model_id = f"{request.session_id}:train:{request.model_seq_id}"  # as the SDK makes it up, too
            known = await session.get(api.ModelDB, request.model_id)
            if known is not None:  # the request came twice: the answer to the first
                loads = select(api.FutureDB.request_id).where(
                    api.FutureDB.model_id == request.model_id,
                    api.FutureDB.request_type == types.RequestType.LOAD_WEIGHTS,
                )
                request_id = str((await session.exec(loads)).one())
                return api.FutureResponse(future_id=request_id, request_id=request_id)
            path = types.TinkerPath.parse(request.path)
            if path is None:
                raise api.HTTPException(status_code=400, detail=f"{request.path} is no tinker:// path")
            source = await api.get_model(session, path.primary_id)
            lora = types.LoraConfig.model_validate({**source.lora_config, "seed": random.randrange(2**31)})
            create = types.CreateModelInput(lora_config=lora)
            number = await api.create_future(session, types.RequestType.CREATE_MODEL, request.model_id, create)
            session.add(
                api.ModelDB(
                    model_id=request.model_id,
                    base_model=source.base_model,
                    lora_config=lora.model_dump(),
                    status="created",
                    request_id=number,
                    session_id=request.session_id,
                )
            )
        return await api.load_weights(request, raw, session)

    return api


def patch_scheduler() -> None:
    """Have the engine look for optimizer steps before it looks for gradients.

    It asks for gradients first, and then for steps without a gradient before them that has to wait. A gradient and its
    step that both arrive between the two queries are a step that is carried out alone, without its gradient. In this
    order such a step is left for the next round, in which its gradient is found.
    """
    from skyrl.tinker import types
    from skyrl.tinker.engine import TinkerEngine

    passes, others = TinkerEngine.find_batchable_model_passes, TinkerEngine.find_single_requests
    found: list[Any] = []  # of the round; the engine has one thread

    def find_passes(self: Any, session: Any, request_type: Any) -> Any:
        if request_type == types.RequestType.FORWARD_BACKWARD:  # the first query of a round
            found.append(others(self, session))
        return passes(self, session, request_type)

    TinkerEngine.find_batchable_model_passes = find_passes
    TinkerEngine.find_single_requests = lambda self, session: found.pop()


def patch_answers() -> None:
    """Complete the engine's answers."""
    from skyrl.backends import jax as backend

    model_pass = backend.JaxBackendImpl._model_pass

    def with_loss(self: Any, batch: Any, run: Any) -> Any:
        """Programs read the loss from ``metrics["loss:sum"]``; the server gives the losses of the tokens only."""
        results = model_pass(self, batch, run)
        for result in results.values():
            total = sum(sum(x["elementwise_loss"]["data"]) for x in result.loss_fn_outputs)
            result.metrics["loss:sum"] = total
        return results

    sample = backend.JaxBackendImpl.sample

    def with_first(self: Any, prepared_batch: Any) -> Any:
        """The first token of a prompt has no logprob; the server leaves it out, where its own type and the SDK have an
        entry for every token."""
        results = sample(self, prepared_batch)
        for result in results.values():
            if getattr(result, "prompt_logprobs", None) is not None:
                result.prompt_logprobs = [None, *result.prompt_logprobs]
        return results

    backend.JaxBackendImpl._model_pass = with_loss
    backend.JaxBackendImpl.sample = with_first


def patch_gradients() -> None:
    """Make gradients sums, and have every model start without one."""
    import jax
    import jax.numpy as jnp
    from skyrl.backends import jax as backend
    from skyrl.tinker import loss_fns

    delete_model = backend.JaxBackendImpl.delete_model

    def with_its_gradient(self: Any, model_id: str) -> None:
        """A model that ends leaves what it had accumulated in its place; the next one there would start with it."""
        place = self.models[model_id].adapter_index
        delete_model(self, model_id)
        with jax.set_mesh(self.mesh):
            self.accumulated_grads = self.accumulated_grads.reset_adapter(jnp.int32(place))

    backend.JaxBackendImpl.delete_model = with_its_gradient

    @jax.custom_vjp
    def scaled(value: Any, scale: Any) -> Any:
        """``value``, with ``scale`` times its gradient."""
        del scale
        return value

    scaled.defvjp(lambda value, scale: (value, scale), lambda scale, g: (g * scale, jnp.zeros_like(scale)))

    def summed(loss: Any) -> Any:
        """The server divides each sequence's loss by the sum of its weights, or by 1e-9 where they are of both signs
        and their sum is negative; here the gradient is multiplied by that beforehand."""

        def function(logprobs: Any, mask: Any, *rest: Any) -> Any:
            return scaled(loss(logprobs, mask, *rest), jnp.maximum(mask.sum(axis=-1), 1e-9))

        return function

    loss_fns.LOSS_FUNCTIONS[:] = [summed(loss) for loss in loss_fns.LOSS_FUNCTIONS]

    def total(self: Any, adapter: Any) -> Any:
        """The server divides the accumulated gradient by the number of sequences; this leaves it as it is."""

        def only(path: Any, gradient: Any) -> Any:
            place = backend.get_adapter_idx(path, adapter)
            return jnp.zeros_like(gradient).at[place].set(gradient[place])

        return jax.tree.map_with_path(only, self.grad_sum)

    backend.AccumulatedGradients.get_mean = total


def main() -> None:
    """Serves until its standard input is closed, or runs the engine (what the server starts as its child)."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", action="store_true", help="be the engine")
    options, rest = parser.parse_known_args()

    import typing_extensions

    # pydantic takes typing.TypedDict from Python 3.12 on only; skyrl.tinker.types has one.
    typing.TypedDict = typing_extensions.TypedDict  # type: ignore[assignment]
    if options.engine:
        patch_scheduler()
        patch_answers()
        patch_gradients()
        sys.argv[1:] = rest
        from skyrl.tinker import engine

        engine.main()
        return
    import uvicorn
    from skyrl.tinker.config import EngineConfig, add_model

    server = argparse.ArgumentParser()
    add_model(server, EngineConfig)
    server.add_argument("--port", type=int, required=True)
    found = vars(server.parse_args(rest))
    port = found.pop("port")
    from transformers import GenerationConfig

    ends = GenerationConfig.from_pretrained(found["base_model"]).eos_token_id
    api = patch_api(ends if isinstance(ends, list) else [ends])
    api.app.state.engine_config = EngineConfig.model_validate(found)

    def until_closed() -> None:
        sys.stdin.buffer.read()
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=until_closed, daemon=True).start()
    uvicorn.run(api.app, host="127.0.0.1", port=port, log_level="warning")


if __name__ == "__main__":
    main()
