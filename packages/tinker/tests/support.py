"""Stand-ins for the tests of rl-tinker: a server over fake training processes, and replicas that answer at once."""

import asyncio
import threading
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

from rl_rollout.types import FinishReason, TokenOutput
from rl_tinker.server import TinkerServer
from rl_tinker.testing import FakeGroup
from rl_tinker.types import ServeConfig

KEY = "tml-alice"


class FakeReplicas:
    """Replicas whose completion is the prompt's last token, plus 1 with each adapter, as often as asked."""

    def __init__(self):
        self.requests = []

    async def start(self):
        pass

    async def stop(self):
        pass

    async def recover(self):
        pass

    async def generate(self, request):
        self.requests.append(request)
        count = request.sampling_params.max_new_tokens
        token = request.prompt_token_ids[-1]
        top = ((token, -0.5), (token + 1, -1.5))[: request.num_top_logprobs]
        return TokenOutput(
            request_id=request.request_id,
            token_ids=(token,) * count,
            logprobs=(-0.5,) * count,
            weight_versions=(0,) * count,
            finish_reason=FinishReason.LENGTH,
            top_logprobs=(top,) * count if top else (),
            prompt_logprobs=(-0.25,) * (len(request.prompt_token_ids) - 1) if request.returns_prompt_logprobs else (),
        )

    async def stream(self, request):
        yield await self.generate(request)

    @asynccontextmanager
    async def adapter(self, checkpoint):
        yield None if checkpoint is None else checkpoint.path


@contextmanager
def running(folder: Path, model: Path, *, group=None, replicas=None, **settings):
    """A server in a thread of its own: the SDK's clients block."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()

    def run(work):
        return asyncio.run_coroutine_threadsafe(work, loop).result(60)

    async def make():
        config = ServeConfig(model_path=str(model), output_dir=str(folder), port=0, **settings)
        server = TinkerServer(config, group=group or FakeGroup(), replicas=replicas or FakeReplicas())
        await server.start()
        return server

    server = run(make())
    try:
        yield server
    finally:
        run(server.stop())
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


__all__ = ["KEY", "FakeReplicas", "running"]
