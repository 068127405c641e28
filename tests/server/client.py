"""Requests of the Tinker API without the SDK: bytes in, bytes out, over the application itself."""

from __future__ import annotations

import asyncio
import json

import httpx
import numpy as np
from tinker.proto import tinker_public_pb2 as pb

SESSION = {"tags": [], "user_metadata": None, "sdk_version": "0.38.0"}


class Client:
    """Requests of one session."""

    def __init__(self, service, **headers):
        self.service, self.headers = service, headers
        self.session = self.post("create_session", SESSION)[1]["session_id"]

    def ask(self, method, path, body=b""):
        data = body if isinstance(body, bytes) or hasattr(body, "__aiter__") else json.dumps(body).encode()

        async def respond():
            async with httpx.AsyncClient(transport=httpx.ASGITransport(self.service.app)) as client:
                return await client.request(
                    method, f"http://localhost/api/v1/{path}", content=data, headers=self.headers
                )

        return asyncio.run(respond())

    def post(self, path, body):
        """The status, and the answer: JSON, or the bytes of a protocol buffer."""
        answer = self.ask("POST", path, body)
        is_json = answer.headers["content-type"] == "application/json"
        return answer.status_code, answer.json() if is_json else answer.content

    def result(self, accepted):
        """The result of a request, of the answer to it or of its body."""
        accepted = accepted[1] if isinstance(accepted, tuple) else accepted
        status, answer = self.post("retrieve_future", {"request_id": accepted["request_id"]})
        assert status == 200, answer
        return answer

    def model(self, number=0, **options):
        body = {"session_id": self.session, "model_seq_id": number, "base_model": "toy", **options}
        return self.result(self.post("create_model", body))["model_id"]

    def step(self, model, seq_id, **params):
        params = {"learning_rate": 0.1, **params}
        return self.post("optim_step", {"model_id": model, "seq_id": seq_id, "adam_params": params})

    def save(self, model, seq_id=None, **options):
        return self.post("save_weights", {"model_id": model, "seq_id": seq_id, **options})

    def sampler(self, **options):
        body = {"session_id": self.session, "sampling_session_seq_id": 0, "base_model": "toy", **options}
        return self.post("create_sampling_session", body)[1]["sampling_session_id"]

    def sample(self, sampler, seq_id=0, params=None, **options):
        prompt = {"chunks": [{"type": "encoded_text", "tokens": [65, 66]}]}
        body = {"sampling_session_id": sampler, "seq_id": seq_id, "prompt": prompt}
        return self.post("asample", {**body, "sampling_params": {"max_tokens": 1, **(params or {})}, **options})

    def steps(self):
        """The numbers of the steps that were carried out."""
        return [x.seq_id for x in self.service.applied if x.operation == "optim_step"]


def training_call(model, seq_id, targets=(2, 3)):
    message = pb.ForwardBackwardRequest(model_id=model, seq_id=seq_id, loss_fn="cross_entropy")
    datum = message.data.add()
    datum.model_input.add().encoded_text.tokens = np.array([1, 2], np.int32).tobytes()
    tensor = datum.loss_fn_inputs["target_tokens"]
    tensor.dtype, tensor.dense = pb.DTYPE_INT64, np.array(targets, np.int64).tobytes()
    tensor.shape.append(len(targets))
    return message
