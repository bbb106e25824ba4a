"""The SGLang backend: against a fake that speaks its protocol, and against the real server where there is one."""

import asyncio
import io
import json
import pickle
from dataclasses import replace

import pytest
import torch
from adapters_alone import check_adapter_alone
from rollout_servers import fake_sglang_config, real_model, real_sglang, real_sglang_config, request, serve

from rl_rollout import (
    ConfigError,
    FinishReason,
    GenerateRequest,
    GenerationError,
    ModelFolderError,
    RequestError,
    SamplingParams,
    ServerConfig,
    ServerStartError,
    UnsupportedError,
    create_server,
)
from rl_rollout.backends.sglang import lora_arguments, read_answer, session_payload, structured_fields
from rl_rollout.testing import ServerConformance


async def fill_the_cache(config, room):
    """Requests that could never fit, those that just fit one at a time, and what a lone one gives.

    Args:
        config: Of a server with room for `room` tokens beside the two that SGLang keeps.
        room: At least 200.
    """
    server = create_server("sglang", config)
    await server.start()
    try:
        for prompt, count in (((5,) * room, 1), ((5,), room)):
            with pytest.raises(RequestError, match=f"it needs {room + 1} tokens of cache and there are {room}; raise"):
                await server.generate(request(prompt=prompt, max_new_tokens=count))
        alone = await server.generate(request(max_new_tokens=room - 3))
        requests = [request(str(i), max_new_tokens=room - 3) for i in range(4)]
        return alone, await asyncio.gather(*map(server.generate, requests))
    finally:
        await server.stop()


def check_full_cache(config, room):
    alone, outputs = asyncio.run(fill_the_cache(config, room))
    assert len(alone.token_ids) == room - 3
    assert [output.token_ids for output in outputs] == [alone.token_ids] * 4


@pytest.mark.process
@pytest.mark.contract
class TestProtocol(ServerConformance):
    @pytest.fixture(scope="class")
    @classmethod
    def served(cls, long_folder, new_trainer):
        config = fake_sglang_config(long_folder, "--enable-memory-saver", "--enable-deterministic-inference")
        yield from serve("sglang", config, new_trainer(60), max_model_len=4094)

    def test_truncated_logprobs_are_the_behaviour_policy_s(self, served):
        output = served.generate(temperature=0.7, top_k=5)
        assert all(x <= 0 for x in output.logprobs)  # the fake tells 99 elsewhere

    @pytest.mark.parametrize("top_k", [0, 5])
    def test_a_nucleus_is_refused(self, served, top_k):
        with pytest.raises(UnsupportedError, match="leave top_p at 1"):
            served.generate(temperature=0.7, top_k=top_k, top_p=0.9)
        assert len(served.generate(top_k=top_k, top_p=0.9).token_ids) == 8  # greedy: nothing is cut off

    def test_a_request_that_is_late_or_left_is_ended_in_the_server(self, served, monkeypatch):
        server, post_generate, post_abort = served.server, served.server.post_generate, served.server.post_abort
        asked, ended = asyncio.Queue(), asyncio.Queue()

        async def generate(request, images, flight):
            asked.put_nowait([flight.upstream_id])
            return await post_generate(request, images, flight)

        async def abort(upstream_ids):
            await post_abort(upstream_ids)
            ended.put_nowait(upstream_ids)

        async def scenario():
            long = request(max_new_tokens=4000, ignore_eos=True)
            for timeout_s in (0.5, 0.2, 0.1, 0.05):  # the stand-in may be done before: the machine decides
                late = await server.generate(replace(long, timeout_s=timeout_s))
                sent = await asked.get()
                if late.finish_reason is FinishReason.TIMEOUT and late.token_ids:
                    break
            assert late.finish_reason is FinishReason.TIMEOUT
            assert 0 < len(late.token_ids) < 4000
            assert await ended.get() == sent
            left = asyncio.create_task(server.generate(long))
            sent = await asked.get()
            left.cancel()
            await asyncio.wait([left])
            assert await ended.get() == sent

        monkeypatch.setattr(server, "post_generate", generate)
        monkeypatch.setattr(server, "post_abort", abort)
        served.run(scenario())

    test_stop_ends_it = ServerConformance.test_stop_ends_it


@pytest.mark.contract
@real_sglang
class TestRealSglang(ServerConformance):
    @pytest.fixture(scope="class")
    @classmethod
    def served(cls, tmp_path_factory, new_trainer):
        folder = real_model(tmp_path_factory.mktemp("sglang"))
        config = real_sglang_config(folder, max_model_len=8192)
        yield from serve("sglang", config, new_trainer(60), max_model_len=8190)

    test_stop_ends_it = ServerConformance.test_stop_ends_it


@real_sglang
class TestLimitsOfTheRealOneOnCpu:
    """Its own words where it dies at start: this is all that adapters and sleep have been run against."""

    def test_a_full_cache(self, tmp_path):
        check_full_cache(real_sglang_config(real_model(tmp_path), max_total_tokens=402), 400)

    def test_an_argument_that_it_does_not_know(self, qwen3_folder):
        server = create_server("sglang", real_sglang_config(qwen3_folder, "--no-such-argument"))
        with pytest.raises(ServerStartError, match=r"(?s)sglang .* ended with code .*--no-such-argument"):
            asyncio.run(server.start())

    def test_adapters(self, qwen3_folder, write_adapters):
        folders = {name: folder for name, (folder, _) in write_adapters(qwen3_folder, has_rslora=False).items()}
        server = create_server(
            "sglang", real_sglang_config(qwen3_folder, "--lora-backend", "torch_native", adapters=folders)
        )
        with pytest.raises(ServerStartError, match="pin_memory=True requires a CUDA|no NVIDIA driver"):
            asyncio.run(server.start())

    def test_sleep(self, qwen3_folder):
        server = create_server("sglang", real_sglang_config(qwen3_folder, "--enable-memory-saver"))
        with pytest.raises(ServerStartError, match="torch_memory_saver"):
            asyncio.run(server.start())


@pytest.mark.slow
def test_a_full_cache(long_folder):
    check_full_cache(fake_sglang_config(long_folder, "--max-total-tokens", "402"), 400)


def test_adapters_have_room_beside_requests_without_one(qwen3_folder, write_adapters):
    folders = {name: folder for name, (folder, _) in write_adapters(qwen3_folder, has_rslora=False).items()}
    server = create_server("sglang", fake_sglang_config(qwen3_folder, adapters=folders))
    assert server.capabilities.has_adapters
    assert not server.capabilities.updates_weights  # what SGLang does with them then, nobody has seen
    told = lora_arguments(list(server.adapters.values()))
    assert told[:4] == ["--enable-lora", "--max-loras-per-batch", "3", "--lora-paths"]
    assert [json.loads(path) for path in told[4:]] == [
        {"lora_name": name, "lora_path": folder, "pinned": False} for name, folder in folders.items()
    ]


@pytest.mark.slow
def test_an_adapter_alone_is_replaced_and_nothing_else(qwen3_folder, write_adapters, tmp_path):
    adapters = write_adapters(qwen3_folder, has_rslora=False)
    config = fake_sglang_config(qwen3_folder, adapters={name: folder for name, (folder, _) in adapters.items()})
    check_adapter_alone("sglang", config, adapters, tmp_path)


@pytest.mark.parametrize("setting", [{"use_rslora": True}, {"rank_pattern": {"q_proj": 3}}, {"use_dora": True}])
def test_adapters_that_it_would_take_for_plain_ones_are_refused(qwen3_folder, tmp_path, setting):
    (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 4, **setting}))
    with pytest.raises(ModelFolderError, match=f"adapter 'mine' has {next(iter(setting))}="):
        create_server("sglang", fake_sglang_config(qwen3_folder, adapters={"mine": str(tmp_path)}))


def test_what_it_cannot_do_is_refused(qwen3_folder):
    with pytest.raises(ConfigError, match="--max-total-tokens N"):
        create_server("sglang", ServerConfig(model_path=str(qwen3_folder), kv_cache_bytes=1))
    can = create_server("sglang", fake_sglang_config(qwen3_folder)).capabilities
    assert (can.sleep_levels, can.is_seeded, can.has_adapters) == ((), False, False)


@pytest.mark.parametrize(
    ("params", "fields"),
    [
        ({}, {}),
        ({"json_schema": '{"type": "object"}'}, {"json_schema": '{"type": "object"}'}),
        ({"regex": "[a-c]+"}, {"regex": "[a-c]+"}),
        ({"choice": ("yes", "n.o")}, {"regex": r"(?:yes)|(?:n\.o)"}),
    ],
)
def test_a_structure_is_a_field_of_its_sampling_params(params, fields):
    assert structured_fields(SamplingParams(**params)) == fields


@pytest.mark.parametrize(
    ("arguments", "structured"),
    [((), "none"), (("--grammar-backend", "none"), "none"), (("--grammar-backend", "xgrammar"), "restricted")],
    ids=["none", "off", "own"],
)
def test_structured_outputs_take_a_tokenizer(qwen3_folder, arguments, structured):
    """Without one SGLang turns its grammars off; log-probs are of what was sampled from."""
    server = create_server("sglang", fake_sglang_config(qwen3_folder, *arguments))
    assert server.capabilities.structured == structured
    assert ("--skip-tokenizer-init" in server.process.command) == (structured == "none")


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated:UserWarning")
def test_the_payload_is_a_name_and_a_tensor_of_the_version():
    ((address, version),) = pickle.load(io.BytesIO(session_payload("shm://policy", 7)))
    assert (address, version.tolist(), version.dtype) == ("shm://policy", [7], torch.int64)


def test_an_abort_for_a_fault_of_the_server_is_an_error():
    told = {"finish_reason": {"type": "abort", "status_code": 500, "message": "out of memory"}}
    with pytest.raises(GenerationError, match="'r': out of memory"):
        read_answer(GenerateRequest(request_id="r", prompt_token_ids=(1,)), {"output_ids": [], "meta_info": told})
