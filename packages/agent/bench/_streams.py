"""A client of many streams at once, in a process of its own: when each piece of text arrived, as JSON.

Usage: python _streams.py URL NUM_STREAMS
"""

from __future__ import annotations

import asyncio
import gc
import json
import sys
import time

import aiohttp


async def read(session: aiohttp.ClientSession, url: str, name: str) -> list[float]:
    body = {"model": "policy", "stream": True, "messages": [{"role": "user", "content": "x" * 200}]}
    async with session.post(url, json=body, headers={"Authorization": f"Bearer {name}"}) as response:
        return [time.monotonic() async for line in response.content if b'"delta": {"content": ' in line]


async def main(url: str, num_streams: int) -> None:
    connector, timeout = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout(total=120)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        arrivals = await asyncio.gather(*(read(session, url, str(i)) for i in range(num_streams)))
    print(json.dumps(arrivals))


if __name__ == "__main__":
    gc.disable()  # with a thousand answers open its pauses, of up to 40 ms, would be the p99 that is measured
    asyncio.run(main(sys.argv[1], int(sys.argv[2])))
