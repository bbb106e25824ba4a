"""What clients and servers say to one another: routed experts, packed and as lists, and from a server to a client."""

import asyncio
import base64
import json
import struct
from dataclasses import replace

import pytest
import torch

from rl_rollout import (
    FinishReason,
    GenerateRequest,
    RolloutError,
    SamplingParams,
    ServerConfig,
    TokenOutput,
    connect_server,
    create_server,
)
from rl_rollout.http.messages import (
    chunk_from_json,
    line_of,
    message_of,
    output_from_json,
    output_to_json,
    partial_from_json,
)
from rl_rollout.testing import write_tiny_model

EXPERTS = (((0, 1), (2, 3)), ((4, 5), (6, 7)), ((8, 9), (10, 255)))
WIDE = tuple(tuple(tuple(expert + 256 for expert in layer) for layer in token) for token in EXPERTS)
OUTPUT = TokenOutput(
    request_id="r",
    token_ids=(5, 6),
    logprobs=(-0.5, -1.0),
    weight_versions=(3, 3),
    finish_reason=FinishReason.LENGTH,
    routed_experts=EXPERTS,
)


def told(output):
    """As it comes out of JSON."""
    return json.loads(json.dumps(output_to_json(output)))


def test_experts_are_bytes_where_they_fit_and_else_two_each_the_low_one_first():
    data = base64.b64encode(bytes([0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 255])).decode()
    assert told(OUTPUT)["routed_experts"] == {"shape": [3, 2, 2], "dtype": "uint8", "data": data}
    wide = told(replace(OUTPUT, routed_experts=WIDE))["routed_experts"]
    assert (wide["dtype"], base64.b64decode(wide["data"])[-2:]) == ("int16", struct.pack("<h", 511))


@pytest.mark.parametrize("experts", [EXPERTS, WIDE, (((-1,),),), ()])
def test_an_output_comes_back_as_it_was(experts):
    output = replace(OUTPUT, routed_experts=experts)
    assert output_from_json(told(output)) == output


def test_a_line_keeps_every_bit_and_tells_nan_as_null():
    logprobs = (-0.1, -1e-45, -(2.0**-149), float("nan"), -3.4028234663852886e38)
    output = replace(OUTPUT, logprobs=logprobs, top_logprobs=(), prompt_logprobs=())
    line = line_of(output_to_json(output))
    assert line.count(b"\n") == line.count(b"null") == 1
    # repr tells one NaN from a number, and not from another NaN
    assert repr(output_from_json(message_of(line))) == repr(output)
    message = message_of(line)
    assert repr(chunk_from_json(message).logprobs) == repr(logprobs)
    assert repr(partial_from_json("r", [message, message]).logprobs) == repr(2 * logprobs)


def test_a_line_tells_minus_infinity_from_nan():
    """A token that cannot be drawn may be in the prompt, or among the most likely ones."""
    top = (((5, -0.25), (6, float("nan")), (7, float("-inf"))), ())
    output = replace(OUTPUT, top_logprobs=top, prompt_logprobs=(0.0, float("-inf")))
    assert repr(output_from_json(message_of(line_of(output_to_json(output))))) == repr(output)


def test_lists_are_read_too():
    assert output_from_json({**told(OUTPUT), "routed_experts": [[[0, 1]], [[2, 3]]]}).routed_experts == (
        ((0, 1),),
        ((2, 3),),
    )


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"shape": [3, 2, 3]}, r"12 numbers for the shape \[3, 2, 3\]"),
        ({"dtype": "int64"}, "'int64'.*wanted shape, dtype and data"),
        ({"data": "?"}, "wanted shape, dtype and data"),
    ],
)
def test_what_is_no_packed_experts_is_a_sentence(changed, message):
    packed = told(OUTPUT)["routed_experts"] | changed
    with pytest.raises(RolloutError, match=message):
        output_from_json({**told(OUTPUT), "routed_experts": packed})


def test_a_client_gets_the_experts_that_the_server_tells(tmp_path):
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    folder = write_tiny_model(tmp_path / "moe", family="qwen3_moe", **experts)

    async def scenario():
        server = create_server("embedded", ServerConfig(model_path=str(folder), num_threads=1))
        client = connect_server((await server.start()).url)
        await client.start()
        asked = GenerateRequest(
            request_id="r",
            prompt_token_ids=(5, 6, 7),
            sampling_params=SamplingParams(max_new_tokens=6, temperature=0.0, ignore_eos=True),
            returns_routed_experts=True,
        )
        try:
            return await server.generate(asked), await client.generate(asked)
        finally:
            await client.stop()
            await server.stop()

    ours, theirs = asyncio.run(scenario())
    assert theirs == ours
    assert torch.tensor(theirs.routed_experts).shape == (3 + 6 - 1, 2, 2)
