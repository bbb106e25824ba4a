"""Stand-ins for the tests of rl-tinker: a server over fake training processes, and replicas that answer at once."""

import asyncio
import json
import threading
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import numpy as np

from rl_rollout.types import FinishReason, TokenOutput
from rl_tinker.base import TrainingGroup
from rl_tinker.durable import sync_tree
from rl_tinker.errors import CommandError, RanksLostError
from rl_tinker.server import TinkerServer
from rl_tinker.types import Answer, Command, ServeConfig, Verb
from rl_tinker.wire.results import encode_forward_backward
from rl_tinker.wire.rows import decode_forward_backward

KEY = "tml-alice"


class FakeGroup(TrainingGroup):
    """Group whose models are one number each: its gradient is the sum of the weights of the rows' losses.

    A step adds the learning rate times the gradient. `calls` lists what was called; `lose_next` loses the processes in
    the middle of that many commands, `lose_at` in the one of that number.
    """

    def __init__(self) -> None:
        self._incarnation = 1
        self.values: dict[str, float] = {}
        """Value of each model in memory."""
        self.gradients: dict[str, float] = {}
        self.calls: list[tuple[str, tuple[str, ...]]] = []
        self.lose_next, self.lose_at = 0, -1

    @property
    def incarnation(self) -> int:
        return self._incarnation

    async def start(self) -> None:
        pass

    async def stop(self) -> None:
        pass

    async def call(self, command: Command) -> Answer:
        models = tuple(model for model, _ in command.requests) or (command.model,)
        self.calls.append(("backward" if command.backward else str(command.verb), models))
        if command.verb not in (Verb.CREATE, Verb.RESTORE) and (lost := set(models) - self.values.keys()):
            raise CommandError(f"there is no model {lost.pop()}")
        if self.lose_next or len(self.calls) == self.lose_at + 1:
            self.lose_next = max(self.lose_next - 1, 0)
            self._incarnation += 1
            self.values.clear()
            self.gradients.clear()
            raise RanksLostError("lost on purpose")
        return self._run(command, command.model)

    def _run(self, command: Command, model: str) -> Answer:
        match command.verb:
            case Verb.FORWARD:
                results = [self._pass(*request, backward=command.backward) for request in command.requests]
                return Answer(results=results, errors=[""] * len(results))
            case Verb.CREATE:
                self.values[model] = float(command.adapter.seed if command.adapter else 0)
            case Verb.RESTORE:
                self.values[model] = json.loads((Path(command.folder) / "adapter.json").read_text())
            case Verb.DROP:
                del self.values[model], self.gradients[model]
                return Answer()
            case _:
                pass
        gradient = self.gradients.get(model, 0.0)
        if command.adam is not None:
            self.gradients[model] = 0.0
            if not np.isfinite(gradient * command.adam.learning_rate):
                raise CommandError("the gradient norm is not finite")
            self.values[model] += command.adam.learning_rate * gradient
        elif command.verb in (Verb.CREATE, Verb.RESTORE):
            self.gradients[model] = 0.0
        if command.verb != Verb.RESTORE:
            self._write(model, Path(command.folder))
        return Answer(metrics={"grad_norm": abs(gradient)} if command.adam else {})

    def _pass(self, model: str, body: bytes, *, backward: bool) -> bytes:
        rows = decode_forward_backward(body).rows
        loss = float(sum(row.inputs.get("weights", np.ones(1)).sum(dtype=np.float64) for row in rows))
        if backward:
            self.gradients[model] += loss
        logprobs = [np.full(row.targets.shape, -self.values[model], np.float32) for row in rows]
        return encode_forward_backward(logprobs, {"loss:sum": loss})

    def _write(self, model: str, folder: Path) -> None:
        folder.mkdir()
        (folder / "adapter.json").write_text(json.dumps(self.values[model]))
        (folder / "optimizer.json").write_text("{}")
        sync_tree(folder)


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
        return asyncio.run_coroutine_threadsafe(work, loop).result(600)

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


__all__ = ["KEY", "FakeGroup", "FakeReplicas", "running"]
