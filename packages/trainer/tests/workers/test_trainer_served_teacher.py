"""A teacher behind a URL: its log-probs of what the policy wrote."""

import asyncio
import json
import shutil

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file, save_file

import rl_rollout.registry
import rl_tq
from rl_rollout.testing import write_tiny_model
from rl_rollout.types import Capabilities, ServerConfig, TokenOutput
from rl_trainer.config import load_config
from rl_trainer.config.schema import TeacherSection
from rl_trainer.errors import ConfigError, PlanError, TrainerError
from rl_trainer.planning.plan import make_plan
from rl_trainer.run import run
from rl_trainer.workers.loop_thread import LoopThread
from rl_trainer.workers.teacher import ServedTeacherWorker

PROMPTS, COMPLETIONS, MASKS = [[5, 6, 7], [8]], [[9, 10], [11, 12, 13]], [[1, 1], [1, 0, 1]]


def jagged(rows):
    offsets = torch.tensor([0, *map(len, rows)]).cumsum(0)
    return torch.nested.nested_tensor_from_jagged(torch.tensor([i for row in rows for i in row]), offsets)


@pytest.fixture
def queue():
    with rl_tq.serve("inproc://") as served:
        yield served


def taught(queue, section):
    """The column that a worker writes of two rows."""
    worker = ServedTeacherWorker(None, teacher=section, queue_address=queue.address, timeout_s=60)
    try:
        rows = {"prompt_token_ids": PROMPTS, "completion_token_ids": COMPLETIONS, "loss_mask": MASKS}
        columns = {name: jagged(values) for name, values in rows.items()}
        batch = queue.put(columns, partition="train")
        return queue.get(worker.compute_teacher_log_prob(batch))["teacher_logprobs"]
    finally:
        worker.close()


class Fake:
    """Tells minus its id of every token of a prompt but the first."""

    def __init__(self, lacks=0):
        self.lacks, self.capabilities = lacks, Capabilities(gives_prompt_logprobs=lacks is not None)
        self.sampled = {}

    async def check_health(self):
        pass

    async def stop(self):
        pass

    async def generate(self, request):
        self.sampled[request.request_id] = request.sampled_spans
        told = tuple(-float(token) for token in request.prompt_token_ids[1:])
        return TokenOutput(
            request_id=request.request_id, token_ids=(1,), logprobs=(-1.0,), weight_versions=(0,), finish_reason="stop",
            prompt_logprobs=told[self.lacks :],
        )  # fmt: skip


def test_every_completion_token_gets_its_own_log_prob(queue, monkeypatch):
    server = Fake()
    monkeypatch.setattr(rl_rollout.registry, "connect_server", lambda url, timeout_s: server)
    column = taught(queue, TeacherSection(path="t", url="http://teacher"))
    assert [row.tolist() for row in column.unbind()] == [[-9.0, -10.0], [-11.0, -12.0, -13.0]]
    # A teacher that takes images is told which tokens were sampled, and so stand for none.
    assert server.sampled == {"teach-0": ((3, 5),), "teach-1": ((1, 2), (3, 4))}


def test_a_server_with_missing_or_too_few_experts_is_refused(queue, monkeypatch):
    """Routed experts have to cover every token."""
    section = TeacherSection(path="t", url="http://teacher")
    monkeypatch.setattr(rl_rollout.registry, "connect_server", lambda url, timeout_s: Fake(None))
    with pytest.raises(ConfigError, match="teacher.url=http://teacher does not return the log-probs of a prompt's"):
        taught(queue, section)
    monkeypatch.setattr(rl_rollout.registry, "connect_server", lambda url, timeout_s: Fake(1))
    with pytest.raises(TrainerError, match="returned 1 log-probs of a completion of 2 tokens, 1 of them finite"):
        taught(queue, section)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["teacher.url=http://a", "teacher.divergence=forward"], "does not return for a prompt; choose reverse"),
        (
            ["teacher.url=http://a", "rollout.temperature=0.7"],
            "log-probs at temperature 1, and rollout.temperature=0.7",
        ),
        (["teacher.model=m"], "teacher.model=m names a model of a server, and teacher.url is not set"),
    ],
)
def test_what_a_served_teacher_cannot_do_is_refused(settings, words):
    with pytest.raises(PlanError, match=words):
        make_plan(load_config("distill", ["teacher.path=t", *settings]))


@pytest.mark.slow
@pytest.mark.parametrize("how", ["ours", "openai"])
def test_a_real_server_tells_what_the_model_computes(queue, tmp_path, how):
    from transformers import AutoModelForCausalLM

    folder = write_tiny_model(tmp_path / "teacher")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)

    async def main():
        server = rl_rollout.create_server("embedded", ServerConfig(model_path=str(folder), num_threads=1))
        address = await server.start()
        named = {"url": f"{address.url}/v1", "model": address.model} if how == "openai" else {"url": address.url}
        try:
            return await asyncio.to_thread(taught, queue, TeacherSection(path=str(folder), **named))
        finally:
            await server.stop()

    column = asyncio.run(main())
    for prompt, completion, row in zip(PROMPTS, COMPLETIONS, column.unbind(), strict=True):
        logits = model(torch.tensor([prompt + completion])).logits[0].log_softmax(-1)
        want = [float(logits[len(prompt) - 1 + i, token].detach()) for i, token in enumerate(completion)]
        assert row.tolist() == pytest.approx(want, abs=1e-4)


@pytest.mark.slow
def test_a_job_learns_from_a_teacher_that_is_served(model, tmp_path):
    """It says what the same teacher says in an engine of the job."""
    teacher = shutil.copytree(model, tmp_path / "teacher")
    weights = load_file(teacher / "model.safetensors")
    random = torch.Generator().manual_seed(1)
    weights = {name: tensor + 0.1 * torch.randn(tensor.shape, generator=random) for name, tensor in weights.items()}
    save_file(weights, teacher / "model.safetensors", metadata={"format": "pt"})
    data = tmp_path / "data.jsonl"
    lines = [{"question": f"{a} + {b} =", "answer": f"add them #### {a + b}"} for a in range(10, 20) for b in range(4)]
    data.write_text("".join(json.dumps(line) + "\n" for line in lines))
    sizes = ["steps=1", "eval_every=0", "data.eval_size=4", "data.max_prompt_tokens=128", "rollout.max_new_tokens=16"]
    sizes += ["batch.batch_size=4", "batch.mini_batch_size=4", "batch.group_size=2", "engine.precision=float32"]
    common = [*sizes, "runtime=inline", f"teacher.path={teacher}", "engine.optimizer.lr=1e-2", f"model.path={model}"]
    common += [f"data.path={data}", "save_every=0", "timeout_s=120"]

    def losses(name, *overrides):
        out = tmp_path / name
        run(load_config("distill", [*common, f"output_dir={out}", *overrides]), Console(quiet=True))
        records = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()][1:]
        return [record["metrics"]["teacher_kl"] for record in records]

    loop = LoopThread("teacher")
    server = rl_rollout.create_server("embedded", ServerConfig(model_path=str(teacher), num_threads=1))
    try:
        url = loop.run(server.start(), 120).url
        served = losses("served", f"teacher.url={url}")
    finally:
        loop.run(server.stop(), 60)
        loop.close()
    own = losses("engine")
    assert abs(own[0]) > 0.01
    assert served == pytest.approx(own, abs=1e-4)
