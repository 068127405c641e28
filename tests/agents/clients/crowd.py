"""Many clients at once; ``python crowd.py FILE``, which has a list of [URL, key, way] as JSON.

Ways: "talk" asks three times, each time with all that was said; "leave" and "leave-stream" go away while they wait;
"wait" does not.
"""

import asyncio
import json
import sys
from pathlib import Path

from openai import AsyncOpenAI

WAIT = [{"role": "user", "content": "WAIT"}]


async def talk(client):
    """Ask three times."""
    messages = [{"role": "user", "content": "Hi"}]
    for i in range(3):
        options = {"model": "m", "messages": messages, "max_tokens": 8}
        if i == 1:
            parts = [chunk async for chunk in await client.chat.completions.create(**options, stream=True)]
            text = "".join(part.choices[0].delta.content or "" for part in parts if part.choices)
        else:
            text = (await client.chat.completions.create(**options)).choices[0].message.content
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "More"}]


async def leave(client, *, stream):
    """Go away while the answer is on its way."""
    request = client.chat.completions.create(model="m", messages=WAIT, stream=stream)

    async def read():
        answer = await request
        if stream:
            async for _ in answer:
                pass

    try:
        await asyncio.wait_for(read(), 3)
    except TimeoutError:
        return
    raise AssertionError("it was answered")


async def main(people):
    """Do what each is to do, all at once."""
    async with AsyncOpenAI(base_url="http://127.0.0.1", api_key="none", max_retries=0, timeout=120) as shared:
        clients = [(shared.with_options(base_url=url, api_key=key), way) for url, key, way in people]
        ways = {"talk": talk, "wait": lambda client: client.chat.completions.create(model="m", messages=WAIT)}
        await asyncio.gather(
            *(
                leave(client, stream=way == "leave-stream") if way.startswith("leave") else ways[way](client)
                for client, way in clients
            )
        )


if __name__ == "__main__":
    asyncio.run(main(json.loads(Path(sys.argv[1]).read_text("utf-8"))))
