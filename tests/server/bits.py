"""A program for the plain SDK that uses all that a server of the Tinker API offers; what it gets, as JSON."""

from __future__ import annotations

import json

import numpy as np

from tests.server.sdk import prompt, types

PROMPT = list(b"hello 12")
LOSSES = {
    "cross_entropy": {},
    "importance_sampling": {},
    "ppo": {"clip_low_threshold": 0.9},
    "cispo": {},
    "dro": {"beta": 0.1},
    "gspo": {},
}


def play(service, rest):
    """All of it, in order. Floats as they come."""
    found = {"losses": losses(service), "samples": samples(service), "states": states(service, rest)}
    return json.loads(json.dumps(found))


def data_for(name, shifted=True):
    data = []
    for k, text in enumerate((b"the cat sat", b"on the mat", b"a b", b"12 34 56")):
        tokens = np.frombuffer(text, np.uint8).astype(np.int64)
        targets = tokens[1:] if shifted else tokens[:-1][::-1].copy()
        n = np.arange(targets.size)
        inputs = {
            "logprobs": np.where(n >= k, -5.0 - 0.1 * (n % 3), 0.0),
            "advantages": np.where(n >= k, 1.0 - 0.7 * (n % 2), 0.0),
        }
        if name == "cross_entropy":
            inputs = {"weights": (n >= k) * 0.5}
        inputs = {key: x.astype(np.float32) for key, x in inputs.items()}
        data.append(types.Datum(prompt(tokens[:-1]), {"target_tokens": targets, **inputs}))
    return data


TEXTS = data_for("cross_entropy")


def describe(result, **more):
    outputs = [{name: x.to_numpy().tolist() for name, x in sorted(out.items())} for out in result.loss_fn_outputs]
    return {"metrics": result.metrics, "outputs": outputs, **more}


def losses(service):
    """Three steps in flight for each hosted loss; then on targets that are not the next tokens."""
    found, pending = {}, []
    for name, config in LOSSES.items():
        training = service.create_lora_training_client("toy", rank=8, seed=3).result()
        step = types.AdamParams(learning_rate=0.05, weight_decay=0.01, grad_clip_norm=1.0)
        pending = [
            (training.forward_backward(data_for(name), name, config), training.optim_step(step)) for _ in range(3)
        ]
        found[name] = [describe(fb.result(), step=op.result().metrics) for fb, op in pending]
        other = training.forward_backward(data_for(name, shifted=False), name, config).result()
        last = training.forward(data_for(name), name, config).result()
        step = training.optim_step(types.AdamParams(learning_rate=0.05)).result()
        found[name] += [describe(other), describe(last), {"step": step.metrics}]
    training = service.create_lora_training_client("toy", rank=8).result()
    targets = {"target_tokens": np.array([[66, 70], [67, 71]]), "weights": np.array([[1, 0.5], [0, 2]], np.float32)}
    wide = training.forward_backward([types.Datum(prompt([65, 66]), targets)], "cross_entropy").result()
    found["wide"], found["custom"] = [describe(wide)], []
    for _ in range(2):
        custom = training.forward_backward_custom(TEXTS, near)
        step = training.optim_step(types.AdamParams(learning_rate=0.1)).result()
        found["custom"].append({"step": step.metrics, "metrics": custom.result().metrics})
    return found


def near(data, logprobs):
    loss = sum(((lp + 1.0) ** 2).sum() for lp in logprobs)
    return loss, {"near:sum": loss.item()}


def samples(service):
    training = service.create_lora_training_client("toy", rank=8).result()
    for _ in range(3):
        training.forward_backward(TEXTS, "cross_entropy")
        training.optim_step(types.AdamParams(learning_rate=0.2))
    sampler = training.save_weights_and_get_sampling_client().result()
    base = service.create_sampling_client(base_model="toy").result()
    ids = np.full((len(PROMPT) - 1, 3), -1)
    ids[0, 0], ids[3, 2], ids[6, 1] = 0, 101, 258
    tops = {"include_prompt_logprobs": True, "topk_prompt_logprobs": 3, "topk_sample_logprobs": 2}
    cases = [
        (sampler, 2, {"max_tokens": 9, "seed": 5}, {}),
        (sampler, 2, {"max_tokens": 30, "seed": 6, "stop": ["t"], "temperature": 0.6}, {}),
        (sampler, 1, {"max_tokens": 9, "seed": 7, "stop": [101, 32], "top_k": 20, "top_p": 0.8}, {}),
        (sampler, 2, {"max_tokens": 9, "stop": []}, {}),
        (base, 3, {"max_tokens": 4}, {}),
        (sampler, 1, {"max_tokens": 5, "temperature": 0.0}, {"include_prompt_logprobs": True}),
        (sampler, 1, {"max_tokens": 3, "seed": 1}, {"include_prompt_logprobs": True, "prompt_logprobs_last_n": 3}),
        (sampler, 1, {"max_tokens": 2, "seed": 2}, tops),
        (sampler, 1, {"max_tokens": 1, "seed": 2}, {"target_prompt_logprobs": types.TensorData.from_numpy(ids)}),
    ]
    found = []
    for client, n, params, options in cases:
        answer = client.sample(prompt(PROMPT), n, types.SamplingParams(**params), **options).result()
        sequences = [
            {"tokens": s.tokens, "logprobs": list(s.logprobs), "stop": s.stop_reason, "top": s.topk_logprobs}
            for s in answer.sequences
        ]
        scores = {"prompt": answer.prompt_logprobs, "top": answer.topk_prompt_logprobs}
        targets = answer.target_prompt_logprobs
        found.append({"sequences": sequences, **scores, "targets": targets and targets.to_numpy().tolist()})
    return found


def states(service, rest):
    training = service.create_lora_training_client("toy", rank=4, user_metadata={"a": "b"}).result()
    step = types.AdamParams(learning_rate=0.03)

    def train(client):
        fb = client.forward_backward(TEXTS, "cross_entropy")
        client.optim_step(step).result()
        return fb.result().metrics["loss:sum"]

    for _ in range(2):
        train(training)
    whole = training.save_state("whole", ttl_seconds=3600, user_metadata={"c": "d"}).result().path
    sampler = training.save_weights_for_sampler("policy").result().path
    again = service.create_training_client_from_state_with_optimizer(whole).result()
    fresh = service.create_training_client_from_state(whole).result()
    curves = [[train(client) for _ in range(2)] for client in (training, again, fresh)]
    training.load_state_with_optimizer(whole).result()
    curves.append(training.forward(TEXTS, "cross_entropy").result().metrics["loss:sum"])
    named = service.create_sampling_client(model_path=sampler).result()
    scored = named.compute_logprobs(prompt(PROMPT)).result()
    info = training.get_info().model_dump()
    lists = {
        "runs": [plain(run) for run in rest.list_training_runs().result().training_runs],
        "run": plain(rest.get_training_run(training.model_id).result()),
        "states": [plain(x) for x in rest.list_checkpoints(training.model_id).result().checkpoints],
        "all": [plain(x) for x in rest.list_user_checkpoints(limit=1).result().checkpoints],
        "weights": rest.get_weights_info_by_tinker_path(whole).result().model_dump(),
        "models": rest.get_server_capabilities().result().model_dump(),
        "sampler": plain(rest.get_sampler(named._sampling_session_id).result()),
    }
    rest.delete_checkpoint_from_tinker_path(sampler).result()
    lists["left"] = [plain(x) for x in rest.list_checkpoints(training.model_id).result().checkpoints]
    text = json.dumps({"curves": curves, "scored": scored, "info": info, "lists": lists})
    return json.loads(text.replace(training.model_id.split(":")[0], "<session>"))


def plain(model):
    """A listed thing without its times."""
    hidden = ("time", "expires_at", "last_request_time")

    def strip(value):
        return {k: strip(v) for k, v in value.items() if k not in hidden} if isinstance(value, dict) else value

    return strip(model.model_dump(mode="json"))
