"""The experts that a server chose, through sessions of one turn and of several."""

import asyncio
import dataclasses

import pytest

from rl_agent import OutputError, ParsedTurn, ToolCall, create_loop, load_tokenizer, validate_output
from rl_agent.session import add_experts, finished
from rl_rollout import ServerConfig, create_server
from rl_rollout.testing import write_tiny_model
from rl_rollout.types import FinishReason, TokenOutput

PROMPT = [{"role": "user", "content": "12 + 3 = ?"}]


class Asking:
    """Asks a server for experts, and keeps what it told."""

    def __init__(self, server):
        self.server, self.told = server, []

    async def generate(self, request):
        output = await self.server.generate(dataclasses.replace(request, returns_routed_experts=True))
        self.told.append(output.routed_experts)
        return output


def look() -> str:
    """Look."""
    return "7"


def calls(text):
    return ParsedTurn(content=text, calls=(ToolCall(name="look"),))  # whatever a random model says


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    pytest.importorskip("transformers", reason="needs the extra rl-agent[hf]")
    sizes = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    return str(write_tiny_model(tmp_path_factory.mktemp("moe"), family="qwen3_moe", **sizes))


def forward(model_path, ids):
    """[tokens][layers][experts] of a forward pass of transformers."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_path, attn_implementation="eager").eval()
    with torch.inference_mode():
        logits = model(torch.tensor([ids]), output_router_logits=True).router_logits
    chosen = torch.stack([each.topk(2, dim=-1).indices for each in logits], dim=1).tolist()
    return tuple(tuple(map(tuple, token)) for token in chosen)


@pytest.mark.parametrize("name", ["single_turn", "tool"])
def test_every_trajectory_token_has_its_forward_pass_experts(model_path, name):
    tokenizer = load_tokenizer(model_path)
    options = {"tools": [look], "parser": calls, "max_turns": 3} if name == "tool" else {}
    params = {"max_new_tokens": 12, "seed": 4, "stop_token_ids": tuple(range(2, 50, 4))}

    async def main():
        server = create_server("embedded", ServerConfig(model_path=model_path, num_threads=1))
        await server.start()
        try:
            asking = Asking(server)
            asked = await create_loop(name, asking, tokenizer, **options).run(params, {"prompt": PROMPT})
            return (
                asked,
                asking.told,
                await create_loop(name, server, tokenizer, **options).run(params, {"prompt": PROMPT}),
            )
        finally:
            await server.stop()

    output, told, plain = asyncio.run(main())
    validate_output(output)
    assert output.num_turns == (3 if name == "tool" else 1) == len(told)
    ids = (*output.prompt_token_ids, *output.completion_token_ids)
    assert len(output.routed_experts) == len(ids) - 1
    assert output.routed_experts == forward(model_path, ids[:-1])
    assert (plain.completion_token_ids, plain.routed_experts) == (output.completion_token_ids, ())


def answer(num_tokens, experts):
    return TokenOutput(
        request_id="one",
        token_ids=(5,) * num_tokens,
        logprobs=(-1.0,) * num_tokens,
        weight_versions=(0,) * num_tokens,
        finish_reason=FinishReason.STOP,
        routed_experts=tuple(((expert,),) for expert in experts),
    )


def test_what_was_told_first_stays_and_what_nobody_told_is_empty():
    """By hand: a prompt of 2, turns of 2 and 1 with 2 tokens of context between them, and an untold turn."""
    known = []
    add_experts(known, 2, answer(2, [0, 1, 2]))
    add_experts(known, 6, answer(1, [9, 9, 9, 3, 4, 5]))  # fed anew, and routed elsewhere
    assert known == [((0,),), ((1,),), ((2,),), ((3,),), ((4,),), ((5,),)]
    add_experts(known, 8, answer(2, []))
    assert finished(known, 10) == (*known, (), (), ())
    assert finished(known, 4) == tuple(known[:3])
    assert finished([], 4) == ()
    late = []
    add_experts(late, 2, answer(2, []))
    add_experts(late, 4, answer(1, [6, 7, 8, 9]))
    assert late == [((6,),), ((7,),), ((8,),), ((9,),)]
    with pytest.raises(OutputError, match="reported the experts of 2 tokens, and was fed 3"):
        add_experts([], 2, answer(2, [0, 1]))


def test_experts_that_do_not_fit_the_tokens_are_no_valid_output():
    from rl_agent.types import AgentLoopOutput

    output = AgentLoopOutput(
        prompt_token_ids=(1, 2),
        completion_token_ids=(3, 4),
        loss_mask=(1, 1),
        rollout_logprobs=(-1.0, -1.0),
        weight_versions=(0, 0),
        finish_reason="stop",
        routed_experts=(((0, 1), (2, 3)), (), ((1, 0), (3, 2))),
    )
    validate_output(output)
    for wrong, sentence in (
        (output.routed_experts[:2], "routed_experts has 2 entries for 3 tokens"),
        ((*output.routed_experts[:2], ((1, 0),)), "all tokens have the same layers"),
        ((*output.routed_experts[:2], ((1, 0), (3,))), "all tokens have the same layers"),
    ):
        with pytest.raises(OutputError, match=sentence):
            validate_output(dataclasses.replace(output, routed_experts=wrong))
