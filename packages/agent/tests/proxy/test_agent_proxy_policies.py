"""Several policies behind one proxy: the model that a request names answers it, and learns from the answer."""

import asyncio

import openai
import pytest

from rl_agent import validate_output
from rl_agent.loops.harness import credited
from rl_agent.proxy import RecordingProxy
from rl_agent.testing import FakeGenerator, FakeTokenizer

TOKENIZER = FakeTokenizer()
GO = {"role": "user", "content": "go"}


def with_client(use):
    """Run `use(client, proxy)` with the client of OpenAI; returns its answer, the trajectories and the servers."""
    servers = {
        name: FakeGenerator(lambda _, name=name: [*TOKENIZER.encode(name), 1], weight_version=version)
        for version, name in enumerate(("planner", "coder"), start=5)
    }

    async def main():
        proxy = RecordingProxy(servers["planner"], TOKENIZER)
        for name, server in servers.items():
            proxy.add_policy(name, server, TOKENIZER)
        url = await proxy.start()
        session, key = proxy.create_session()
        try:
            async with openai.AsyncOpenAI(base_url=url, api_key=key, max_retries=0) as client:
                found = await use(client)
        finally:
            await proxy.stop()
        return found, proxy.finish(session, reward=1.0), servers

    return asyncio.run(main())


@pytest.mark.promise(
    "Several policies serve one harness: the model of a request names the policy that answers and learns"
)
@pytest.mark.process
def test_the_model_of_a_request_names_the_policy():
    async def use(client):
        first = await client.chat.completions.create(model="planner", messages=[GO])
        said = {"role": "assistant", "content": first.choices[0].message.content}
        talk = [GO, said, {"role": "user", "content": "on"}]
        again = await client.chat.completions.create(model="planner", messages=talk)
        other = await client.chat.completions.create(model="coder", messages=talk)
        return [each.choices[0].message.content for each in (first, again, other)]

    said, outputs, servers = with_client(use)
    assert said == ["planner", "planner", "coder"]
    assert [(output.policy, output.num_turns, output.reward) for output in outputs] == [
        ("planner", 2, 1.0),
        ("coder", 1, 1.0),
    ], "what another policy said is no turn of this one"
    for output, server in zip(outputs, servers.values(), strict=True):
        validate_output(output)
        pairs = [*zip(output.completion_token_ids, output.loss_mask, strict=True)]
        assert [i for i, m in pairs if m] == [i for answer in server.outputs for i in answer.token_ids]
        assert max(output.weight_versions) == server.outputs[0].weight_versions[0]


@pytest.mark.process
def test_an_unknown_model_is_refused_with_the_names():
    async def use(client):
        names = [model.id async for model in client.models.list()]
        with pytest.raises(
            openai.BadRequestError, match="model 'gpt' is not served here; choose one of planner, coder"
        ):
            await client.chat.completions.create(model="gpt", messages=[GO])
        return names

    names, outputs, _ = with_client(use)
    assert names == ["planner", "coder"]
    assert outputs == []


@pytest.mark.process
def test_a_response_is_continued_by_its_own_policy():
    async def use(client):
        first = await client.responses.create(model="coder", input="go")
        with pytest.raises(openai.BadRequestError, match="is a response of model 'coder'"):
            await client.responses.create(model="planner", input="on", previous_response_id=first.id)
        await client.responses.create(model="coder", input="on", previous_response_id=first.id)

    _, (output,), _ = with_client(use)
    assert (output.policy, output.num_turns) == ("coder", 2)


@pytest.mark.process
def test_the_last_trajectory_of_each_policy_has_the_credit():
    async def use(client):
        for model in ("planner", "coder", "planner"):
            await client.chat.completions.create(model=model, messages=[GO])

    _, outputs, _ = with_client(use)
    chosen = credited(outputs, 2.0, "last")
    assert [(output.policy, output.reward) for output in chosen] == [("planner", 2.0), ("coder", 2.0)]
    assert chosen[0].metrics["num_left_out"] == 1


def test_no_policy_has_the_name_of_requests_without_one():
    proxy = RecordingProxy(FakeGenerator(lambda _: [1]), TOKENIZER)
    with pytest.raises(ValueError, match="a policy cannot be called 'policy'"):
        proxy.add_policy("policy", FakeGenerator(lambda _: [1]), TOKENIZER)
