"""Requests of the Tinker API without the SDK: bytes in, bytes out, over the application itself."""

from __future__ import annotations

import asyncio
import json

import httpx
import numpy as np
from tinker.proto import tinker_public_pb2 as pb

BASE = "http://localhost/api/v1/"
SESSION = {"tags": [], "user_metadata": None, "sdk_version": "0.38.0"}


class Client:
    """Requests of one session and one model."""

    def __init__(self, service, headers=None):
        self.service = service
        self.headers = headers or {}
        self.session = self.post("create_session", SESSION)[1]["session_id"]

    def post(self, path, body, *, method="POST", **headers):
        data = body if isinstance(body, bytes) or hasattr(body, "__aiter__") else json.dumps(body).encode()

        async def ask():
            async with httpx.AsyncClient(transport=httpx.ASGITransport(self.service.app)) as client:
                return await client.request(method, BASE + path, content=data, headers={**self.headers, **headers})

        answer = asyncio.run(ask())
        text = answer.headers["content-type"] == "application/json"
        return answer.status_code, answer.json() if text else answer.content

    def get(self, path):
        return self.post(path, b"", method="GET")

    def model(self, number=0, **options):
        body = {"session_id": self.session, "model_seq_id": number, "base_model": "toy", **options}
        status, accepted = self.post("create_model", body)
        assert status == 200, accepted
        return self.result(accepted)["model_id"]

    def result(self, accepted):
        """The result of a request, of the answer to it or of its body."""
        accepted = accepted[1] if isinstance(accepted, tuple) else accepted
        status, answer = self.post("retrieve_future", {"request_id": accepted["request_id"]})
        assert status == 200, answer
        return answer

    def step(self, model, seq_id, **params):
        params = {"learning_rate": 0.1, **params}
        return self.post("optim_step", {"model_id": model, "seq_id": seq_id, "adam_params": params})

    def sampler(self, **options):
        body = {"session_id": self.session, "sampling_session_seq_id": 0, "base_model": "toy", **options}
        return self.post("create_sampling_session", body)[1]["sampling_session_id"]

    def sample(self, sampler, seq_id=0, tokens=(65, 66), params=None, **options):
        prompt = {"chunks": [{"type": "encoded_text", "tokens": list(tokens)}]}
        body = {"sampling_session_id": sampler, "seq_id": seq_id, "prompt": prompt}
        return self.post("asample", {**body, "sampling_params": {"max_tokens": 1, **(params or {})}, **options})


def training_call(model, seq_id, tokens=(1, 2), targets=(2, 3), *, forward_only=False):
    message = pb.ForwardBackwardRequest(
        model_id=model, seq_id=seq_id, loss_fn="cross_entropy", forward_only=forward_only
    )
    datum = message.data.add()
    datum.model_input.add().encoded_text.tokens = np.array(tokens, np.int32).tobytes()
    tensor = datum.loss_fn_inputs["target_tokens"]
    tensor.dtype, tensor.dense = pb.DTYPE_INT64, np.array(targets, np.int64).tobytes()
    tensor.shape.append(len(targets))
    return message
