import asyncio
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from packages.omni.tests.actions.conftest import HEADS, REACH
from packages.omni.tests.test_engine import batch_of
from packages.omni.tests.test_server import Weights

from rl_agent.errors import FailureError
from rl_agent.registry import create_loop, create_tokenizer
from rl_agent.validation import validate_output
from rl_engine.errors import BatchError, ConfigError, ModelFolderError
from rl_engine.registry import create_engine
from rl_engine.types import EngineConfig, Head, LoraConfig, OptimizerConfig
from rl_omni.actions import load_policy
from rl_omni.pictures import data_url
from rl_omni.testing import write_tiny_pipeline, write_tiny_policy
from rl_rollout.errors import RequestError
from rl_rollout.registry import create_server, launch_server
from rl_rollout.types import GenerateRequest, ServerConfig

ROOT = Path(__file__).parents[4]


def engine_of(folder, **settings):
    trained = {"optimizer": OptimizerConfig(lr=1e-3, weight_decay=0.0)}
    engine = create_engine("actions", EngineConfig(model_path=folder, **trained | settings))
    engine.initialize()
    return engine


def played(folder, count=4, server=None, **options):
    """Trajectories of `count` episodes at the same time."""

    async def play():
        serving = server or create_server("actions", ServerConfig(model_path=folder))
        await serving.start()
        loop = create_loop("actions", serving, create_tokenizer(folder), **{"environment": REACH} | options)
        try:
            return await asyncio.gather(*(loop.run({"seed": seed}, {"seed": seed}) for seed in range(count)))
        finally:
            await serving.stop()

    return asyncio.run(play())


def columns_of(outputs):
    return batch_of(
        {
            "prompt_token_ids": [torch.tensor(each.prompt_token_ids) for each in outputs],
            "loss_mask": [torch.tensor(each.loss_mask) for each in outputs],
            **{name: [each.columns[name] for each in outputs] for name in ("pictures", "actions")},
        }
    )


@pytest.fixture(scope="module")
def outputs(policy):
    return played(policy)


def loss(output, rows):
    del rows
    return -output.scores.sum() / output.counts.tokens / 100, {}


@pytest.mark.promise("Pictures and actions of an episode are columns with a step axis, without token ids")
@pytest.mark.process
def test_an_episode_is_a_trajectory_of_its_steps(policy, outputs):
    for output in outputs:
        validate_output(output)
        steps = output.num_turns
        assert output.completion_token_ids == ()
        assert output.columns["pictures"].shape == (steps, 3, 32, 32)
        assert output.columns["pictures"].dtype == torch.uint8
        assert len(output.columns["actions"]) == len(output.rollout_logprobs) == steps
        assert (output.extra_fields["end"] == "terminated") == (output.reward == 1)
    again = played(policy, 1)[0]
    torch.testing.assert_close(again.columns["actions"][0], outputs[0].columns["actions"][0])  # by its seed


@pytest.mark.promise("Engine and server of an action policy give the same log-probs, of bins and of a flow")
@pytest.mark.process
def test_an_engine_gives_the_log_probs_of_the_server(policy, outputs):
    found = engine_of(policy).forward_backward_batch(columns_of(outputs), None).columns["logprobs"]
    for own, output in zip(found.unbind(), outputs, strict=True):
        assert own.tolist() == pytest.approx(output.rollout_logprobs, abs=2e-3)


@pytest.mark.process
def test_environments_share_a_forward_pass(policy, monkeypatch):
    sizes = []
    original = type(load_policy(policy)).hidden

    def counted(self, prompts, pictures):
        sizes.append(len(prompts))
        return original(self, prompts, pictures)

    monkeypatch.setattr("rl_omni.actions.policy.ActionPolicy.hidden", counted)
    played(policy, 16)
    assert max(sizes) > 4


class Corridor:
    """Ends with its fifth action; remembers what it was given."""

    text = "reach"

    def __init__(self):
        self.actions = []

    def shown(self):
        url = data_url(torch.rand(3, 16, 16))
        return [{"type": "image", "image": url}, {"type": "text", "text": self.text}]

    def reset(self, *, seed):
        del seed
        return self.shown(), {}

    def step(self, action):
        self.actions.append(action)
        return self.shown(), 0.5, len(self.actions) == 5, False, {}


class Talker(Corridor):
    def step(self, action):
        self.text = "red"
        return super().step(action)


@pytest.mark.process
def test_a_chunk_is_played_action_by_action(tmp_path):
    folder = str(write_tiny_policy(tmp_path, HEADS["flow"] | {"chunk_size": 3}, ("reach", "red"), patch_size=8))
    corridor = Corridor()
    output = played(folder, 1, environment=None, environments={"corridor": lambda: corridor})[0]
    assert (output.num_turns, output.reward, output.metrics["num_steps"]) == (2, 2.5, 5)
    assert output.columns["actions"].shape == (2, 4, 3, 2)
    expected = output.columns["actions"][:, -1].clamp(-1, 1).flatten(0, 1)[:5]
    assert torch.equal(torch.tensor(np.stack(corridor.actions)), expected)
    with pytest.raises(FailureError, match="the text of its observation"):
        played(folder, 1, environment=None, environments={"talker": Talker})


@pytest.mark.process
@pytest.mark.parametrize("lora", [None, LoraConfig(rank=2)])
def test_a_step_raises_the_log_probs_that_the_loss_wants(policy, outputs, lora):
    engine, batch = engine_of(policy, lora=lora), columns_of(outputs)
    before = engine.forward_backward_batch(batch, None).columns["logprobs"].values().sum()
    for _ in range(3):
        engine.optimizer_zero_grad()
        engine.forward_backward_batch(batch, loss)
        assert engine.optimizer_step() > 0
    assert engine.forward_backward_batch(batch, None).columns["logprobs"].values().sum() > before


@pytest.mark.process
def test_a_server_gets_the_weights_of_the_engine(policy, outputs, tmp_path):
    engine, batch = engine_of(policy, lora=LoraConfig(rank=2)), columns_of(outputs)
    engine.forward_backward_batch(batch, loss)
    engine.optimizer_step()
    expected = engine.forward_backward_batch(batch, None).columns["logprobs"].values()
    weights = {name: tensor.clone() for name, tensor in engine.get_per_tensor_param()[0]}
    engine.save_model(tmp_path / "saved")
    other = engine_of(str(tmp_path / "saved")).forward_backward_batch(batch, None).columns["logprobs"].values()
    torch.testing.assert_close(other, expected, atol=1e-3, rtol=1e-4)

    async def updated():
        server = create_server("actions", ServerConfig(model_path=policy))
        await server.start()
        await server.update_weights(Weights(weights.items()), 3)
        loop = create_loop("actions", server, create_tokenizer(policy), environment=REACH)
        output = await loop.run({"seed": 1}, {"seed": 1})
        await server.stop()
        return output

    output = asyncio.run(updated())
    assert set(output.weight_versions) == {3}
    own = engine.forward_backward_batch(columns_of([output]), None).columns["logprobs"].values()
    assert own.tolist() == pytest.approx(output.rollout_logprobs, abs=2e-3)


@pytest.mark.process
def test_a_critic_gives_a_value_for_every_observation(policy, outputs, tmp_path):
    critic, batch = engine_of(policy, head=Head.VALUE), columns_of(outputs)
    assert not critic.forward_backward_batch(batch, None).columns["values"].values().any()
    critic.forward_backward_batch(batch, loss)
    critic.optimizer_step()
    values = critic.forward_backward_batch(batch, None).columns["values"].values()
    assert (values > 0).all()
    critic.save_model(tmp_path / "critic")
    saved = engine_of(str(tmp_path / "critic"), head=Head.VALUE).forward_backward_batch(batch, None)
    torch.testing.assert_close(saved.columns["values"].values(), values)


@pytest.mark.process
def test_a_launched_server_acts_alike(policy, outputs):
    """In a process of its own, over HTTP: every column to the bit."""
    there = played(policy, 1, launch_server("actions", ServerConfig(model_path=policy)))[0]
    for name, tensor in played(policy, 1)[0].columns.items():
        assert torch.equal(there.columns[name], tensor), name
    assert there.rollout_logprobs[0] == pytest.approx(outputs[0].rollout_logprobs[0], abs=1e-4)


@pytest.mark.process
@pytest.mark.parametrize(
    ("column", "change", "message"),
    [
        ("pictures", None, "no column pictures"),
        ("pictures", lambda x: x[:-1], "row 0 has lengths"),
        ("pictures", lambda x: x.float(), "uint8"),
        ("actions", lambda x: x[:, 0], "row 0 has actions"),
        ("prompt_token_ids", lambda x: x[:1], "0 image placeholders"),
    ],
)
def test_a_wrong_batch_is_refused(policy, outputs, column, change, message):
    data = columns_of(outputs)
    if change is None:
        del data[column]
    else:
        data[column] = batch_of({column: [change(row) for row in data[column].unbind()]})[column]
    with pytest.raises(BatchError, match=message):
        engine_of(policy).forward_backward_batch(data, None)


@pytest.mark.process
def test_a_wrong_request_is_refused(policy, outputs):
    async def refused():
        server = create_server("actions", ServerConfig(model_path=policy))
        await server.start()
        good = GenerateRequest(request_id="a", prompt_token_ids=outputs[0].prompt_token_ids)
        for request, message in (
            (good, "it has 0 images"),
            (replace(good, images=("data:,x",)), "no data URL of an image"),
            (replace(good, images=("data:,x",), prompt_token_ids=(1,)), "0 image placeholders"),
        ):
            with pytest.raises(RequestError, match=message):
                await server.generate(request)
        await server.stop()

    asyncio.run(refused())


def test_a_folder_of_something_else_is_refused(tmp_path, policy):
    with pytest.raises(ModelFolderError, match="no ActionPolicy"):
        engine_of(str(write_tiny_pipeline(tmp_path)))
    with pytest.raises(ConfigError, match="head=reward"):
        engine_of(policy, head=Head.REWARD)


@pytest.mark.promise("rl-train trains action policies in environments, by GRPO and by PPO with a critic")
@pytest.mark.process
@pytest.mark.parametrize(
    ("policy", "recipe"),
    [
        ("bins", "reach"),
        ("flow", "reach_ppo"),
        pytest.param("bins", "reach_ppo", marks=pytest.mark.slow),
        pytest.param("flow", "reach", marks=pytest.mark.slow),
    ],
    indirect=["policy"],
)
def test_the_trainer_trains_an_action_policy(policy, tmp_path, recipe):
    groups = ["batch.batch_size=4", "batch.mini_batch_size=4"]  # one optimizer step: the ratio is 1
    groups += ["batch.group_size=2"] if recipe == "reach" else ["critic.warmup_steps=0"]
    words = [f"model.path={policy}", f"output_dir={tmp_path / 'out'}", "steps=2", *groups]
    command = [sys.executable, "-m", "rl_trainer.cli", f"examples/actions/{recipe}.yaml", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False, cwd=ROOT)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    records = [json.loads(line) for line in (tmp_path / "out/metrics.jsonl").read_text().splitlines()]
    for version, record in enumerate(records[1:], 2):
        assert record["weights"]["version"] == version
        assert not record["failures"]
        assert record["metrics"]["ratio"] == pytest.approx(1, abs=1e-2)
    assert (tmp_path / "out/checkpoint-2/model/model_index.json").is_file()
