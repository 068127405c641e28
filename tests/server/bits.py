"""A program for the plain SDK that uses all that a server of the Tinker API offers; what it gets, as JSON."""

from __future__ import annotations

import numpy as np

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
    return {"losses": losses(service), "samples": samples(service), "states": states(service, rest)}


def arrays(outputs):
    return [{name: x.to_numpy().tolist() for name, x in sorted(out.items())} for out in outputs]


def prompt(tokens):
    from tinker import types

    return types.ModelInput.from_ints([int(x) for x in tokens])


def data_for(name, shifted=True):
    from tinker import types

    data = []
    for k, text in enumerate((b"the cat sat", b"on the mat", b"a b", b"12 34 56")):
        tokens = np.frombuffer(text, np.uint8).astype(np.int64)
        targets = tokens[1:] if shifted else tokens[:-1][::-1].copy()
        n = np.arange(targets.size)
        inputs = {"target_tokens": targets}
        if name == "cross_entropy":
            inputs["weights"] = (n >= k).astype(np.float32) * 0.5
        else:
            inputs["logprobs"] = np.where(n >= k, -5.0 - 0.1 * (n % 3), 0.0).astype(np.float32)
            inputs["advantages"] = np.where(n >= k, 1.0 - 0.7 * (n % 2), 0.0).astype(np.float32)
        data.append(types.Datum(prompt(tokens[:-1]), inputs))
    return data


def losses(service):
    """Three steps in flight for each hosted loss; then on targets that are not the next tokens."""
    from tinker import types

    found = {}
    for name, config in LOSSES.items():
        training = service.create_lora_training_client("toy", rank=8, seed=3).result()
        pending = []
        for _ in range(3):
            step = types.AdamParams(learning_rate=0.05, weight_decay=0.01, grad_clip_norm=1.0)
            pending.append((training.forward_backward(data_for(name), name, config), training.optim_step(step)))
        found[name] = [
            {
                "metrics": fb.result().metrics,
                "outputs": arrays(fb.result().loss_fn_outputs),
                "step": op.result().metrics,
            }
            for fb, op in pending
        ]
        other = training.forward_backward(data_for(name, shifted=False), name, config).result()
        last = training.forward(data_for(name), name, config).result()
        step = training.optim_step(types.AdamParams(learning_rate=0.05)).result()
        found[name] += [{"metrics": x.metrics, "outputs": arrays(x.loss_fn_outputs)} for x in (other, last)]
        found[name].append({"step": step.metrics})
    training = service.create_lora_training_client("toy", rank=8).result()
    targets = {"target_tokens": np.array([[66, 70], [67, 71]]), "weights": np.array([[1, 0.5], [0, 2]], np.float32)}
    wide = training.forward_backward([types.Datum(prompt([65, 66]), targets)], "cross_entropy").result()
    found["wide"] = [{"metrics": wide.metrics, "outputs": arrays(wide.loss_fn_outputs)}]
    found["custom"] = []
    for _ in range(2):
        custom = training.forward_backward_custom(data_for("cross_entropy"), near)
        found["custom"].append({"step": training.optim_step(types.AdamParams(learning_rate=0.1)).result().metrics})
        found["custom"][-1] |= {"metrics": custom.result().metrics}
    return found


def near(data, logprobs):
    loss = sum(((lp + 1.0) ** 2).sum() for lp in logprobs)
    return loss, {"near:sum": loss.item()}


def samples(service):
    from tinker import types

    training = service.create_lora_training_client("toy", rank=8).result()
    for _ in range(3):
        training.forward_backward(data_for("cross_entropy"), "cross_entropy")
        training.optim_step(types.AdamParams(learning_rate=0.2))
    sampler = training.save_weights_and_get_sampling_client().result()
    base = service.create_sampling_client(base_model="toy").result()
    ids = np.full((len(PROMPT) - 1, 3), -1)
    ids[0, 0], ids[3, 2], ids[6, 1] = 0, 101, 258
    cases = [
        (sampler, 2, {"max_tokens": 9, "seed": 5}, {}),
        (sampler, 2, {"max_tokens": 30, "seed": 6, "stop": ["t"], "temperature": 0.6}, {}),
        (sampler, 1, {"max_tokens": 9, "seed": 7, "stop": [101, 32], "top_k": 20, "top_p": 0.8}, {}),
        (sampler, 2, {"max_tokens": 9, "stop": []}, {}),
        (base, 3, {"max_tokens": 4}, {}),
        (sampler, 1, {"max_tokens": 5, "temperature": 0.0}, {"include_prompt_logprobs": True}),
        (sampler, 1, {"max_tokens": 3, "seed": 1}, {"include_prompt_logprobs": True, "prompt_logprobs_last_n": 3}),
        (
            sampler,
            1,
            {"max_tokens": 2, "seed": 2},
            {"include_prompt_logprobs": True, "topk_prompt_logprobs": 3, "topk_sample_logprobs": 2},
        ),
        (sampler, 1, {"max_tokens": 1, "seed": 2}, {"target_prompt_logprobs": types.TensorData.from_numpy(ids)}),
    ]
    found = []
    for client, n, params, options in cases:
        answer = client.sample(prompt(PROMPT), n, types.SamplingParams(**params), **options).result()
        found.append(
            {
                "sequences": [
                    {"tokens": s.tokens, "logprobs": list(s.logprobs), "stop": s.stop_reason, "top": s.topk_logprobs}
                    for s in answer.sequences
                ],
                "prompt": answer.prompt_logprobs,
                "top": answer.topk_prompt_logprobs,
                "targets": None
                if answer.target_prompt_logprobs is None
                else answer.target_prompt_logprobs.to_numpy().tolist(),
            }
        )
    return found


def states(service, rest):
    from tinker import types

    training = service.create_lora_training_client("toy", rank=4, user_metadata={"a": "b"}).result()
    number = training.model_id.split(":")[0]
    step = types.AdamParams(learning_rate=0.03)
    for _ in range(2):
        training.forward_backward(data_for("cross_entropy"), "cross_entropy")
        training.optim_step(step).result()
    whole = training.save_state("whole", ttl_seconds=3600, user_metadata={"c": "d"}).result().path
    sampler = training.save_weights_for_sampler("policy").result().path
    again = service.create_training_client_from_state_with_optimizer(whole).result()
    fresh = service.create_training_client_from_state(whole).result()
    curves = []
    for client in (training, again, fresh):
        curves.append([])
        for _ in range(2):
            fb = client.forward_backward(data_for("cross_entropy"), "cross_entropy")
            client.optim_step(step).result()
            curves[-1].append(fb.result().metrics["loss:sum"])
    training.load_state_with_optimizer(whole).result()
    curves.append(training.forward(data_for("cross_entropy"), "cross_entropy").result().metrics["loss:sum"])
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
    return rename({"curves": curves, "scored": scored, "info": info, "lists": lists}, number)


def plain(model):
    """A listed thing without its times."""
    values = model.model_dump(mode="json")
    for key in ("time", "expires_at", "last_request_time"):
        values.pop(key, None)
    for key, value in values.items():
        if isinstance(value, dict):
            values[key] = {k: v for k, v in value.items() if k not in ("time", "expires_at")}
    return values


def rename(value, number):
    """Session ids by one name."""
    import json

    return json.loads(json.dumps(value).replace(number, "<session>"))
