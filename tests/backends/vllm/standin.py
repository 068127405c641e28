"""A small server of vLLM's endpoints, by transformers and peft, that can be told to misbehave.

``python standin.py --model FOLDER --port PORT ...`` takes what else vLLM takes; a test may also run it in its process.
"""

from __future__ import annotations

import argparse
import http.server
import json
import os
import sys
import threading
import time

import numpy as np
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlkit.backends.samplers import TrainedPolicy


def described(model, lora, modules=("q_proj", "v_proj")):
    """A trainer's description of a policy of 128 tokens on a CPU, as far as starting a server reads it."""
    rest = dict.fromkeys(("tokenizer", "seeds", "logprobs", "trial"))
    return TrainedPolicy(
        model=model, dtype="float32", device="cpu", lora=lora, modules=modules, head=False, max_length=128, **rest
    )


LOADING = threading.Lock()  # while it loads, transformers changes how all threads make tensors


class Standin:
    """Answers requests.

    Attributes:
        faults: names of what it does wrong: "drop" (adapters), "stale" (later ones), "scale", "temper", "raw"
            (logprobs of temperature 1), "logits" (instead of logprobs), "tokenizer", "hang", "refuse" (loads), "blind"
            (to the adapters' folder), "fixed" (started without what changes adapters), "break" (connections, once;
            with "broken" always), "cut" (a connection, when it has loaded; once), "openai" (it has OpenAI's fields
            alone), "html" (it answers all with a page), "redirect" (all elsewhere),
            "locked" (it wants another key), "mute" (about its health), "headless" (it scores by the base model).
        loaded: adapters, by name.
        log: the paths that were asked for.
    """

    def __init__(self, model, name="base", max_length=129):
        self.path, self.base, self.max_length = model, name, max_length
        self.faults, self.log, self.loaded = set(), [], {}
        self.tokenizer = AutoTokenizer.from_pretrained(model)
        self.models = {name: self._read()}
        self.released = threading.Event()
        self._lock = threading.Lock()

    def _read(self):
        return AutoModelForCausalLM.from_pretrained(self.path, dtype=torch.float32).eval()

    def load(self, name, folder):
        if name in self.loaded:
            return 400, {"error": {"message": f"The lora adapter '{name}' has already been loaded."}}
        if "blind" in self.faults:
            return 404, {"error": {"message": f"Loading lora {name} failed: No adapter found for {folder}"}}
        if "refuse" in self.faults:
            return 500, {"error": {"message": "LoRA rank 64 is greater than max_lora_rank 16."}}
        with LOADING:
            adapted = PeftModel.from_pretrained(self._read(), folder).eval()
        if "scale" in self.faults:
            for module in adapted.modules():
                if hasattr(module, "lora_B"):
                    module.scaling["default"] *= 4
        stale = next(iter(self.loaded.values()), None) if "stale" in self.faults else None
        self.models[name] = self.loaded[name] = adapted if stale is None else stale
        return 200, {}

    @torch.no_grad()
    def logits(self, name, tokens):
        model = self.models[self.base if "drop" in self.faults else name]
        logits = model(input_ids=torch.tensor([tokens])).logits[0]
        return logits / 1.3 if "temper" in self.faults else logits

    def complete(self, body):
        if body["model"] not in self.models:
            return 404, {"error": {"message": f"The model `{body['model']}` does not exist."}}
        prompt, rows = body["prompt"], None
        if isinstance(prompt, str):
            prompt = self.tokenizer(prompt, add_special_tokens=body["add_special_tokens"])["input_ids"]
            prompt = prompt[::-1] if "tokenizer" in self.faults else prompt
        if body.get("prompt_logprobs") is not None:
            logprobs = self.logits(self.base if "headless" in self.faults else body["model"], prompt).log_softmax(-1)
            rows = [None]
            for i, token in enumerate(prompt[1:]):
                rows.append({str(token): {"logprob": float(logprobs[i, token]), "rank": 1, "decoded_token": "?"}})
        choices = []
        for index in range(body.get("n", 1)):
            rng, tokens, values = np.random.default_rng(body.get("seed", 0) + index), [], []
            for _ in range(body["max_tokens"]):
                logits = self.logits(body["model"], prompt + tokens)[-1].double()
                drawn = (logits / (body.get("temperature", 1.0) or 1.0)).log_softmax(-1).numpy()
                token = int(rng.choice(drawn.size, p=np.exp(drawn) / np.exp(drawn).sum()))
                if body.get("top_k") == 1:
                    drawn = np.where(drawn == drawn.max(), 0.0, -np.inf)
                    token = int(drawn.argmax())
                said = logits.log_softmax(-1).numpy() if "raw" in self.faults else drawn
                said = 20 + said if "logits" in self.faults else said
                tokens.append(token)
                values.append(float(said[token]))
            choice = {"index": index, "text": self.tokenizer.decode(tokens), "finish_reason": "length"}
            if body.get("logprobs") is not None:
                choice["logprobs"] = {"token_logprobs": values, "tokens": ["?"] * len(tokens), "top_logprobs": []}
            if "openai" not in self.faults:
                choice |= {"prompt_logprobs": rows, "prompt_token_ids": None, "token_ids": None}
                choice |= {"prompt_token_ids": prompt, "token_ids": tokens} if body.get("return_token_ids") else {}
            choices.append(choice)
        return 200, {"object": "text_completion", "model": body["model"], "choices": choices}

    def answer(self, path, body):
        self.log.append(path)
        if "locked" in self.faults:
            return 401, {"error": "Unauthorized"}
        if "redirect" in self.faults:
            return 307, {}
        if "mute" in self.faults:
            self.released.wait()
        if path == "/v1/models":
            cards = [{"id": self.base, "max_model_len": self.max_length}]
            return 200, {"data": cards + [{"id": name, "parent": self.base} for name in self.loaded]}
        if path == "/health":
            return 200, {}
        if path.endswith("_lora_adapter") and "fixed" in self.faults:
            return 404, {"detail": "Not Found"}
        if path == "/v1/load_lora_adapter":
            return self.load(body["lora_name"], body["lora_path"])
        if path == "/v1/unload_lora_adapter":
            self.models.pop(body["lora_name"], None)
            return (200, {}) if self.loaded.pop(body["lora_name"], None) else (404, {})
        if path != "/v1/completions":
            return 404, {"detail": "Not Found"}
        if "hang" in self.faults:
            self.released.wait()
        if "slow" in self.faults:
            time.sleep(1)
        with self._lock:
            return self.complete(body)


class Handler(http.server.BaseHTTPRequestHandler):
    """One connection."""

    protocol_version = "HTTP/1.1"

    def do_GET(self):
        self._answer(None)

    def do_POST(self):
        self._answer(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

    def _answer(self, body):
        standin = self.server.standin
        if "break" in standin.faults and self.path == "/v1/completions":
            if "broken" not in standin.faults:
                standin.faults.discard("break")
            self.close_connection = True
            return
        status, value = standin.answer(self.path, body)
        if "cut" in standin.faults and self.path == "/v1/load_lora_adapter":  # done, and not answered; once
            standin.faults.discard("cut")
            self.close_connection = True
            return
        text = b"<html>Hello</html>" if "html" in standin.faults else json.dumps(value).encode()
        self.send_response(status)
        if status == 307:
            self.send_header("Location", "https://elsewhere.example/")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *args):
        pass


class Http(http.server.ThreadingHTTPServer):
    """Serves a stand-in on this machine."""

    daemon_threads = True

    def __init__(self, standin, port=0):
        self.standin = standin
        super().__init__(("127.0.0.1", port), Handler)

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_port}"

    def handle_error(self, request, client_address):
        if not isinstance(sys.exception(), ConnectionError):  # a client that left
            super().handle_error(request, client_address)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--model")
    parser.add_argument("--port", type=int)
    parser.add_argument("--served-model-name")
    options, _ = parser.parse_known_args()
    assert os.environ["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] == "1"
    standin = Standin(options.model, options.served_model_name)
    standin.faults = set(filter(None, os.environ.get("STANDIN_FAULTS", "").split()))
    print("serving", flush=True)
    Http(standin, options.port).serve_forever()


if __name__ == "__main__":
    main()
