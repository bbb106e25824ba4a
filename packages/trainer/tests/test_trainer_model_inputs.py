"""What a model is fed beside tokens: from a real server through loops and queue to a real engine, in this process."""

import dataclasses
import json

import pytest
import torch

from rl_agent.types import AgentLoopOutput
from rl_rollout.testing import write_tiny_model
from rl_trainer.checkpoints import RunState
from rl_trainer.config import load_config
from rl_trainer.data import load_datasets
from rl_trainer.errors import InputError, TrainerError
from rl_trainer.pipelines.parts import place
from rl_trainer.preflight import check_model
from rl_trainer.rewards import Score
from rl_trainer.runtime import create_runtime
from rl_trainer.workers.columns import to_columns

MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}


def config_of(model, folder, rows, *overrides):
    data = folder / "rows.jsonl"
    common = {"data_source": "reasoning_gym/mine", "reward_model": {"ground_truth": "1"}}
    data.write_text("".join(json.dumps({**row, **common}) + "\n" for row in rows))
    sizes = ["data.eval_size=1", "batch.batch_size=2", "batch.mini_batch_size=2", "batch.group_size=2"]
    sizes += ["rollout.max_new_tokens=12", "rollout.max_model_len=128", "data.max_prompt_tokens=64"]
    source = [f"model.path={model}", "data.format=rows", f"data.path={data}", "data.options={}"]
    return load_config("quickstart", [*sizes, *source, "runtime=inline", "agent.loop=single_turn", *overrides])


def questions(count):
    return [{"prompt": [{"role": "user", "content": f"{i} + {i} = ?"}]} for i in range(count)]


@pytest.fixture
def placed():
    """Places a job's parts in this process."""
    runtimes = []

    def start(config):
        runtime = create_runtime("inline", timeout_s=120)
        runtimes.append(runtime)
        datasets = load_datasets(config.data, seed=0)
        return place(config, runtime, config.model.path, datasets, RunState(seed=0, num_rows=len(datasets.train)))

    yield start
    for runtime in runtimes:
        runtime.__exit__(None, None, None)


def test_the_engine_takes_the_experts_that_the_server_chose(tmp_path, placed):
    model = write_tiny_model(tmp_path / "moe", family="qwen3_moe", **MOE)
    parts = placed(config_of(model, tmp_path, questions(4), "engine.router_replay=true", "algorithm.kl_coef=0.1"))
    batch = parts.rollout_manager.generate_sequences("train", 1).batch
    names = ["routed_experts", "prompt_token_ids", "completion_token_ids", "loss_mask"]
    data = parts.queue.get(batch, names)
    experts = data["routed_experts"].unbind()
    lengths = [len(data[name].unbind()[0]) for name in ("prompt_token_ids", "completion_token_ids")]
    assert experts[0].shape == (sum(lengths) - 1, 2, 2)

    def logprobs(meta, engine=parts.actor, column="old_logprobs"):
        scored = engine.compute_log_prob(meta, column=column)
        return parts.queue.get(scored, [column])[column].values()

    own = parts.queue.get(batch, ["rollout_logprobs"])["rollout_logprobs"].values()
    torch.testing.assert_close(logprobs(batch), own, rtol=1e-3, atol=1e-3)
    other = (data["routed_experts"].values() + 1) % 4
    data["routed_experts"] = torch.nested.nested_tensor_from_jagged(other, data["routed_experts"].offsets())
    batch = parts.queue.put(data, partition="train")
    assert (logprobs(batch) - own).abs().max() > 0.01, "other experts, other scores"
    reference = logprobs(batch, parts.reference, "ref_logprobs")
    torch.testing.assert_close(reference, own, rtol=1e-3, atol=1e-3)


def output(experts):
    return AgentLoopOutput(
        prompt_token_ids=(1, 2),
        completion_token_ids=(3, 4),
        loss_mask=(1, 1),
        rollout_logprobs=(-0.5, -0.5),
        weight_versions=(1, 1),
        extra_fields={"rollout_index": 0},
        finish_reason="stop",
        routed_experts=experts,
    )


def test_tokens_without_experts_are_told_and_never_replayed():
    whole = output((((0, 1),), ((2, 3),), ((1, 0),)))
    columns, _ = to_columns([(7, [(whole, Score(reward=0.0))], None)], has_experts=True)
    assert columns["routed_experts"].values().tolist() == [[[0, 1]], [[2, 3]], [[1, 0]]]
    assert columns["routed_experts"].dtype == torch.int16
    assert "routed_experts" not in to_columns([(7, [(whole, Score(reward=0.0))], None)])[0]
    for experts in ((), (((0, 1),), (), ((1, 0),))):
        half = dataclasses.replace(whole, routed_experts=experts)
        with pytest.raises(TrainerError, match=f"of a trajectory of 3 tokens the server told the experts of {len([e for e in experts if e])}"):  # fmt: skip  # noqa: E501
            to_columns([(7, [(half, Score(reward=0.0))], None)], has_experts=True)


def test_a_model_without_experts_has_none_to_replay(tmp_path):
    model = write_tiny_model(tmp_path / "dense")
    config = config_of(model, tmp_path, questions(2), "engine.router_replay=true")
    with pytest.raises(InputError, match="engine.router_replay=true replays the servers' choice of experts, but the"):
        check_model(config)
