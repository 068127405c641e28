"""How completions are to be drawn: the fields that the APIs share, and those that vLLM adds."""

from __future__ import annotations

from typing import Final

from rlkit.gateway.dialects.body import Body, refuse, wrong
from rlkit.gateway.types import Answerer, Draw

__all__ = ["draw"]

_UNSUPPORTED: Final = {
    "logit_bias": (),
    "response_format": ({"type": "text"},),
    "structured_outputs": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "structural_tag": (),
    "bad_words": (),
    "allowed_token_ids": (),
    "logits_processors": (),
    "min_tokens": (0,),
    "thinking_token_budget": (),
    "use_beam_search": (False,),
    "length_penalty": (1,),
    "truncate_prompt_tokens": (),
    "include_stop_str_in_output": (False,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "prompt_embeds": (),
    "repetition_detection": (),
}


def draw(body: Body, answerer: Answerer, max_tokens: int | None, *, tokens_only: bool = False) -> Draw:
    """Return how to draw.

    Args:
        body: with the fields of the completions APIs and those that vLLM adds.
        answerer: its tokenizer spells the ids of ``stop_token_ids`` where there are texts to stop at, too.
        max_tokens: as the client gave it.
        tokens_only: no text is returned, so that fields about text have no effect.
    """
    text_only = ("skip_special_tokens", "spaces_between_special_tokens", "include_stop_str_in_output")
    refuse(body, {name: x for name, x in _UNSUPPORTED.items() if not (tokens_only and name in text_only)})
    temperature = body.number("temperature", 0.0, 1000.0)
    if temperature is not None and 0.0 < temperature < 0.001:
        raise wrong(body.path("temperature"), temperature, "0, or a number in [0.001, 1000]")
    top_p = body.number("top_p", 0.0, 1.0)
    if top_p == 0.0:
        raise wrong(body.path("top_p"), 0, "a number above 0 and at most 1", "temperature 0 is greedy")
    top_k = body.integer("top_k", low=-1, high=2**31 - 1)
    seed = body.integer("seed", low=-(2**63), high=2**64 - 1)
    return Draw(
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=-1 if top_k == 0 else top_k,
        min_p=body.number("min_p", 0.0, 1.0),
        repetition_penalty=body.number("repetition_penalty", 0.001, 1000.0),
        presence_penalty=body.number("presence_penalty", -2.0, 2.0),
        frequency_penalty=body.number("frequency_penalty", -2.0, 2.0),
        stop=_stop(body, answerer),
        ignore_eos=body.flag("ignore_eos"),
        seed=None if seed is None else seed % 2**64,
    )


def _stop(body: Body, answerer: Answerer) -> tuple[str, ...] | tuple[int, ...]:
    texts, ids = body.texts("stop"), tuple(body.tokens("stop_token_ids"))
    for i, token in enumerate(ids):
        if token >= answerer.tokenizer.vocab_size:
            raise wrong(f"{body.path('stop_token_ids')}[{i}]", token, f"less than {answerer.tokenizer.vocab_size}")
    if len(texts) + len(ids) > 128:
        raise wrong(body.path("stop"), len(texts) + len(ids), "at most 128 stops")
    if not texts:
        return tuple(dict.fromkeys(ids))
    spelled = [answerer.tokenizer.decode([token], skip_special=False) for token in ids]
    return tuple(dict.fromkeys([*texts, *spelled]))
