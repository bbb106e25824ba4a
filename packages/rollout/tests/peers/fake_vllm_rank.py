"""A further rank of `fake_vllm.py`: a process that receives every version of the weights, and computes nothing.

Commands come as lines of JSON: `{"url", "timeout_s"}` opens a session, `{"version"}` receives; the answer to that is a
line with the number of tensors.
"""

import asyncio
import json
import sys

from rl_rollout import CkptReceiver


async def main():
    receiver = None
    while line := await asyncio.to_thread(sys.stdin.readline):
        told = json.loads(line)
        if "url" in told:
            if receiver is not None:
                await receiver.close()
            receiver = CkptReceiver(told["url"], timeout_s=told["timeout_s"])
            continue
        count = 0
        async for _ in receiver.receive_weights():
            count += 1
        assert receiver.version == told["version"]
        sys.stdout.write(json.dumps({"count": count}) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    asyncio.run(main())
