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
from rl_agent.base import AgentLoop
from rl_agent.types import AgentLoopOutput, GroupResult
from rl_bench.waiting import until
from rl_rollout.errors import RequestError
from rl_rollout.testing import write_tiny_model
from rl_rollout.types import Capabilities, ServerConfig, TokenOutput
from rl_trainer.config import load_config
from rl_trainer.config.schema import TeacherSection
from rl_trainer.errors import ConfigError, PlanError
from rl_trainer.planning.plan import make_plan
from rl_trainer.rewards import Score
from rl_trainer.run import run
from rl_trainer.workers.agent import Job
from rl_trainer.workers.columns import to_columns
from rl_trainer.workers.loop_thread import LoopThread
from rl_trainer.workers.teacher import ServedTeacher

PROMPTS, COMPLETIONS, MASKS = [[5, 6, 7], [8]], [[9, 10], [11, 12, 13]], [[1, 1], [1, 0, 1]]


def trajectory(prompt, completion, mask):
    return AgentLoopOutput(
        prompt_token_ids=tuple(prompt), completion_token_ids=tuple(completion), loss_mask=tuple(mask),
        rollout_logprobs=(-0.5,) * len(mask), weight_versions=(1,) * len(mask), finish_reason="stop", text="",
        extra_fields={"rollout_index": 0},
    )  # fmt: skip


def taught(section):
    """A group of two trajectories after a served teacher was asked."""
    outputs = [trajectory(*row) for row in zip(PROMPTS, COMPLETIONS, MASKS, strict=True)]
    group = GroupResult(row_index=0, rollouts=tuple((each,) for each in outputs), failures=())

    async def ask():
        teacher = ServedTeacher(section, num_sharing=1, timeout_s=60)
        await teacher.start()
        try:
            return await teacher.complete(group, None)
        finally:
            await teacher.close()

    return asyncio.run(ask())


def column_of(group):
    rows = [(output, Score(reward=0.0)) for rollout in group.rollouts for output in rollout]
    return to_columns([(1, rows, None)])[0]["teacher_logprobs"]


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


def test_every_completion_token_gets_its_own_log_prob(monkeypatch):
    server = Fake()
    monkeypatch.setattr(rl_rollout.registry, "connect_server", lambda url, timeout_s: server)
    column = column_of(taught(TeacherSection(path="t", url="http://teacher")))
    assert [row.tolist() for row in column.unbind()] == [[-9.0, -10.0], [-11.0, -12.0, -13.0]]
    # A teacher that takes images is told which tokens were sampled, and so stand for none.
    assert sorted(server.sampled.values()) == [((1, 2), (3, 4)), ((3, 5),)]


def test_a_server_without_prompt_log_probs_is_refused(monkeypatch):
    monkeypatch.setattr(rl_rollout.registry, "connect_server", lambda url, timeout_s: Fake(None))
    with pytest.raises(ConfigError, match="teacher.url=http://teacher does not return the log-probs of a prompt's"):
        taught(TeacherSection(path="t", url="http://teacher"))


def test_a_group_that_the_teacher_cannot_score_fails(monkeypatch):
    monkeypatch.setattr(rl_rollout.registry, "connect_server", lambda url, timeout_s: Fake(1))
    group = taught(TeacherSection(path="t", url="http://teacher"))
    assert group.rollouts == ()
    (failure,) = group.failures
    assert (failure.kind, failure.stage) == ("grader", "teacher")
    assert "returned 1 log-probs of a completion of 2 tokens, 1 of them finite" in failure.message


class Picky(Fake):
    """Refuses a prompt that has the token 13."""

    async def generate(self, request):
        if 13 in request.prompt_token_ids:
            raise RequestError("the prompt has a token that this model lacks")
        return await super().generate(request)


def test_an_unscorable_row_is_replaced_and_reported(agent_worker, monkeypatch):
    """It fails before it is put, so that no group is claimed that cannot be learned from; others are put."""
    monkeypatch.setattr(rl_rollout.registry, "connect_server", lambda url, timeout_s: Picky())

    class Loop(AgentLoop):
        async def run(self, sampling_params, row):
            return trajectory([5], row["ids"], [1] * len(row["ids"]))

    class Scorer:
        step = 0

        async def start(self):
            pass

        close = start

        async def values(self, completion, row):
            return {}

        async def scores(self, completions, values, row):
            return [Score(reward=1.0) for _ in values]

    with rl_tq.serve("inproc://") as queue:
        section = TeacherSection(path="t", url="http://teacher")
        worker = agent_worker(queue, Loop, Scorer(), teacher=section)
        rows = {1: [9, 10], 2: [12, 13], 3: [11]}
        jobs = [
            Job(row={"ids": ids}, row_index=n, group_id=n, place=n, where=f"train.jsonl, row {n}")
            for n, ids in rows.items()
        ]
        worker.submit(jobs, {}, "train", 1)
        reports = []
        until(lambda: reports.extend(worker.poll()) or sum(len(r.finished) + len(r.failed) for r in reports) == 3)
        put = queue.get_meta(partition="train", columns=["group_id", "teacher_logprobs"], batch_size=2, task="t")
        worker.close()
        assert sorted(tags["group_id"] for tags in put.tags) == [1, 3]
    assert [group for report in reports for group in report.failed] == [2]
    (report,) = [report for report in reports if report.failed]
    assert report.failures == {"grader": 1}
    assert report.last_failure == "train.jsonl, row 2: the prompt has a token that this model lacks"


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
def test_a_real_server_tells_what_the_model_computes(tmp_path, how):
    from transformers import AutoModelForCausalLM

    folder = write_tiny_model(tmp_path / "teacher")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)

    async def main():
        server = rl_rollout.create_server("embedded", ServerConfig(model_path=str(folder), num_threads=1))
        address = await server.start()
        named = {"url": f"{address.url}/v1", "model": address.model} if how == "openai" else {"url": address.url}
        try:
            return await asyncio.to_thread(taught, TeacherSection(path=str(folder), **named))
        finally:
            await server.stop()

    column = column_of(asyncio.run(main()))
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
