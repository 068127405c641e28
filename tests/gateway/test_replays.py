"""What agents that others wrote really post, replayed: tests/agents/check.py --record tests/gateway/clients."""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
from pathlib import Path

import attrs
import pytest

pytest.importorskip("starlette")

import rlkit
from rlkit.gateway import Gateway
from tests.agents.cases import CASES
from tests.agents.check import LENGTH, untrue
from tests.agents.policy import Told

BY_NAME = {case.name.replace("/", "-"): case for case in CASES}
PINNED = json.loads(Path(__file__).with_name("replays.json").read_text("utf-8"))
FILES = sorted(Path(__file__).with_name("clients").glob("*.json"))


def digest(tokens):
    return hashlib.sha256(tokens.tobytes()).hexdigest()[:16]


async def replay(session, posted):
    """Post all bodies in order; an id of an earlier response is replaced by that of this session."""
    last = None
    async with session.client() as client:
        for path, body in posted:
            if body.get("previous_response_id"):
                body["previous_response_id"] = last
            if "thread" in body:  # was refused; what the SDK did then follows
                continue
            answer = await client.post(path.removeprefix("/v1"), json=body)
            assert answer.status_code == 200, answer.text
            named = re.search(r'"id": ?"(resp_[^"]+)"', answer.text)
            last = named and named[1]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_client_makes_the_branches_that_it_should(file):
    """The prompts' tokens and the settings that differ from none are those of ``replays.json``."""
    case, asked = BY_NAME[file.stem], []
    posted = json.loads(file.read_text("utf-8"))
    with rlkit.connect("toy", seed=0, max_length=LENGTH) as policy, policy.sampler().result() as sampler:
        told = Told(sampler, case.say)
        with Gateway(told, params=rlkit.SamplingParams(max_tokens=4096)) as gateway, gateway.session() as session:
            answer = session.answer

            async def answered(request):
                given = attrs.asdict(request.sampling, filter=lambda field, value: value != field.default)
                asked.append(json.loads(json.dumps(given)))
                return await answer(request)

            session.answer = answered
            asyncio.run(replay(session, posted))
            found = {"prompts": [digest(node.sample.prompt) for node in session.turns], "sampling": asked}
            assert found == PINNED[file.stem]
            assert (len(session.turns), len(session.branches)) == (case.turns, case.branches)
            assert session.metrics["rewritten"] == case.rewritten
            assert untrue(session, told.samples, policy) == []
