"""What a model is fed beside tokens: from a real server through loops and queue to a real engine, in this process."""

import base64
import dataclasses
import io
import json
import random
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

import rl_agent.registry
from rl_agent.types import AgentLoopOutput
from rl_engine.registry import describe_model
from rl_rollout.testing import write_tiny_model, write_tiny_vl_model
from rl_trainer.checkpoints import RunState
from rl_trainer.config import load_config
from rl_trainer.data import load_datasets
from rl_trainer.errors import InputError, TrainerError
from rl_trainer.pipeline.rollout_source import RolloutSource
from rl_trainer.planning.preflight import check_model
from rl_trainer.rewards import Score
from rl_trainer.runtime import create_runtime
from rl_trainer.setup import place
from rl_trainer.workers.columns import ImageReader, to_columns

NOTHING = Score(reward=0.0)
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
        return place(config, runtime, Path(config.model.path), datasets, RunState(seed=0, num_rows=len(datasets.train)))

    yield start
    for runtime in runtimes:
        runtime.__exit__(None, None, None)


@pytest.mark.process
def test_the_engine_takes_the_experts_that_the_server_chose(tmp_path, placed):
    model = write_tiny_model(tmp_path / "moe", family="qwen3_moe", **MOE)
    components = placed(config_of(model, tmp_path, questions(4), "engine.router_replay=true", "algorithm.kl_coef=0.1"))
    components.source.release(1)
    batch = components.source.take(1).batch
    names = ["routed_experts", "prompt_token_ids", "completion_token_ids", "loss_mask"]
    data = components.queue.get(batch, names)
    experts = data["routed_experts"].unbind()
    lengths = [len(data[name].unbind()[0]) for name in ("prompt_token_ids", "completion_token_ids")]
    assert experts[0].shape == (sum(lengths) - 1, 2, 2)

    def logprobs(meta, engine=components.actor, column="old_logprobs"):
        scored = engine.compute_log_prob(meta, column=column)
        return components.queue.get(scored, [column])[column].values()

    own = components.queue.get(batch, ["rollout_logprobs"])["rollout_logprobs"].values()
    torch.testing.assert_close(logprobs(batch), own, rtol=1e-3, atol=1e-3)
    other = (data["routed_experts"].values() + 1) % 4
    data["routed_experts"] = torch.nested.nested_tensor_from_jagged(other, data["routed_experts"].offsets())
    batch = components.queue.put(data, partition="train")
    assert (logprobs(batch) - own).abs().max() > 0.01, "other experts, other scores"
    reference = logprobs(batch, components.reference, "ref_logprobs")
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


def photo(width, height, seed):
    """A data URL of noise."""
    file = io.BytesIO()
    pixels = random.Random(seed).randbytes(3 * width * height)
    Image.frombytes("RGB", (width, height), pixels).save(file, "png")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


class Camera(rl_agent.Tool):
    """Answers with a picture, another one every time."""

    def __init__(self):
        super().__init__("look", "Look.", {"type": "object", "properties": {}})
        self.num_calls = 0

    async def call(self, arguments, session_id):
        self.num_calls += 1
        return rl_agent.ToolResult(text="8", images=(photo(8, 16, self.num_calls),))


def look(text):
    return rl_agent.ParsedTurn(content=text, calls=(rl_agent.ToolCall(name="look"),))  # a random model calls nothing


@pytest.mark.process
@pytest.mark.parametrize(("family", "loop"), [("qwen2_5_vl", "single_turn"), ("qwen3_vl", "tool")])
def test_the_engine_sees_the_images_of_prompts_and_of_tools(tmp_path, placed, monkeypatch, family, loop):
    model = write_tiny_vl_model(tmp_path / "vl", family=family)
    place = json.loads((model / "config.json").read_text())["image_token_id"]
    weights = load_file(model / "model.safetensors")
    weights["lm_head.weight"][place] *= 4.0  # it draws placeholders now and then
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    options = {"tools": [Camera()], "parser": look, "max_turns": 2} if loop == "tool" else {}
    create_loop = rl_agent.create_loop
    monkeypatch.setattr(rl_agent.registry, "create_loop", lambda _, *parts, **__: create_loop(loop, *parts, **options))
    sampling = RolloutSource.sampling
    stops = {"stop_token_ids": tuple(range(2, 50, 3))}  # a random model stops soon
    monkeypatch.setattr(RolloutSource, "sampling", lambda *args, **kwargs: sampling(*args, **kwargs) | stops)
    (tmp_path / "b.png").write_bytes(base64.b64decode(photo(24, 8, 1).partition(",")[2]))
    rows = [
        {"prompt": [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": f"{i}"}]}], "images": [x]}
        for i, x in enumerate((photo(8, 8, 0), str(tmp_path / "b.png"), photo(8, 32, 2)))
    ]
    components = placed(config_of(model, tmp_path, rows, "algorithm.kl_coef=0.1"))
    components.source.release(1)
    batch = components.source.take(1).batch
    scored = batch.union(components.actor.compute_log_prob(batch))
    scored = scored.union(components.reference.compute_log_prob(scored, column="ref_logprobs"))
    names = [
        "pixel_values",
        "image_grid_thw",
        "prompt_token_ids",
        "completion_token_ids",
        "loss_mask",
        "rollout_logprobs",
        "old_logprobs",
    ]
    videos = [name for name in describe_model(model).image_columns if name not in names]  # no row has one
    data = components.queue.get(scored, [*names, *videos, "ref_logprobs"])
    grids = data["image_grid_thw"].unbind()
    assert [len(grid) for grid in grids] == [2 if loop == "tool" else 1] * 4
    for prompt, completion, mask, grid, pixels in zip(
        *(data[name].unbind() for name in (*names[2:5], "image_grid_thw", "pixel_values")), strict=True
    ):
        counts = [int(each.prod()) // 4 for each in grid]
        assert int((prompt == place).sum()) == counts[0]
        assert int(((completion == place) & (mask == 0)).sum()) == sum(counts[1:])
        assert len(pixels) == 4 * sum(counts)

    def lead(found):
        wrote = data["loss_mask"].values().bool()
        return (found.values() - data["rollout_logprobs"].values())[wrote]

    wrote = data["completion_token_ids"].values()[data["loss_mask"].values().bool()]
    assert (wrote == place).any(), "the model drew a placeholder, which is a token like any other"
    assert lead(data["old_logprobs"]).abs().max() < 1e-4
    torch.testing.assert_close(data["ref_logprobs"].values(), data["old_logprobs"].values())
    other = data.select(*names[:6], *videos).clone()
    other["pixel_values"] = torch.nested.nested_tensor_from_jagged(
        -2 * data["pixel_values"].values(), data["pixel_values"].offsets()
    )
    blind = components.actor.compute_log_prob(components.queue.put(other, partition="train"))
    assert lead(components.queue.get(blind, ["old_logprobs"])["old_logprobs"]).max() > 0.01, "they are looked at"


def test_images_of_groups_are_kept_once_and_lengths_count_them(tmp_path):
    from rl_tq import PerGroup

    model = write_tiny_vl_model(tmp_path / "vl")
    reader = ImageReader(model)
    place = json.loads((model / "config.json").read_text())["image_token_id"]
    urls = [photo(24, 8, 1), photo(8, 8, 2)]
    assert reader.num_added(urls) == (3 - 1) + (1 - 1)
    seen = dataclasses.replace(output(()), prompt_token_ids=(1, place, 2), images=tuple(urls[:1]), loss_mask=(1, 1))
    more = dataclasses.replace(
        seen,
        completion_token_ids=(3, place, 4),
        loss_mask=(1, 0, 1),
        rollout_logprobs=(-0.5, 0.0, -0.25),
        weight_versions=(1, -1, 1),
        images=(urls[1], urls[0]),
    )
    columns, tags = to_columns([(7, [(seen, NOTHING), (seen, NOTHING)], None)], reader=reader)
    assert isinstance(columns["pixel_values"], PerGroup)
    assert columns["pixel_values"].values.unbind()[0].shape == (12, 96)
    assert columns["prompt_token_ids"].unbind()[0].tolist() == [1, place, place, place, 2]
    columns, tags = to_columns([(7, [(seen, NOTHING), (more, Score(reward=1.0))], None)], reader=reader)
    assert columns["image_grid_thw"].offsets().tolist() == [0, 1, 3]
    rows = {name: columns[name].unbind()[1].tolist() for name in ("completion_token_ids", "loss_mask", "rewards")}
    assert rows == {
        "completion_token_ids": [3, place, place, place, 4],
        "loss_mask": [1, 0, 0, 0, 1],
        "rewards": [0.0, 0.0, 0.0, 0.0, 1.0],
    }
    assert tags[1]["num_tokens"] == 5
    with pytest.raises(TrainerError, match="a trajectory: 1 images and 2 places for them"):
        reader.read([dataclasses.replace(more, images=tuple(urls[1:]))])
    with pytest.raises(TrainerError, match="does not say how to prepare them"):
        to_columns([(7, [(seen, NOTHING)], None)])


@pytest.mark.promise("A token whose experts the server did not tell is an error")
def test_tokens_without_experts_are_told_and_never_replayed():
    whole = output((((0, 1),), ((2, 3),), ((1, 0),)))
    columns, _ = to_columns([(7, [(whole, NOTHING)], None)], has_experts=True)
    assert columns["routed_experts"].values().tolist() == [[[0, 1]], [[2, 3]], [[1, 0]]]
    assert columns["routed_experts"].dtype == torch.int16
    assert "routed_experts" not in to_columns([(7, [(whole, NOTHING)], None)])[0]
    for experts in ((), (((0, 1),), (), ((1, 0),))):
        half = dataclasses.replace(whole, routed_experts=experts)
        with pytest.raises(TrainerError, match=f"of a trajectory of 3 tokens the server reported the experts of {len([e for e in experts if e])}"):  # fmt: skip  # noqa: E501
            to_columns([(7, [(half, NOTHING)], None)], has_experts=True)


def test_a_model_without_experts_has_none_to_replay(tmp_path):
    model = write_tiny_model(tmp_path / "dense")
    config = config_of(model, tmp_path, questions(2), "engine.router_replay=true")
    with pytest.raises(InputError, match="engine.router_replay=true replays the servers' choice of experts, but the"):
        check_model(config)
