"""Drafts from earlier completions: fewer passes, and not a bit differs."""

import asyncio
from dataclasses import replace

import pytest

from rl_bench.waiting import until_async
from rl_rollout import ConfigError, GenerateRequest, SamplingParams, ServerConfig, create_server
from rl_rollout.backends.embedded.decode_engine import Engine
from rl_rollout.backends.embedded.model.model_runner import load_model
from rl_rollout.backends.embedded.scheduling import history as history_module
from rl_rollout.backends.embedded.scheduling import scheduler as scheduler_module
from rl_rollout.backends.embedded.scheduling.history import DraftHistory
from rl_rollout.testing import FakeReceiver, load_weights, write_tiny_model

pytestmark = pytest.mark.process  # seconds of computation

DRAFTS = {"num_speculative_tokens": 6}
KINDS = [
    {"temperature": 0.3},
    {"temperature": 0.0},
    {"temperature": 0.4, "stop_token_ids": tuple(range(30, 40))},
    {"temperature": 0.5, "top_k": 5},
    {"temperature": 0.4, "top_p": 0.7},
]


def group(epoch, number, *, length=30, size=4, kinds=KINDS, **options):
    """Requests of one prompt, each with a seed of its own in every epoch."""
    prompt = tuple(3 + (number + i) % 40 for i in range(2 + 7 * number % 40))
    return [
        GenerateRequest(
            request_id=f"{epoch}-{number}-{i}",
            prompt_token_ids=prompt,
            sampling_params=SamplingParams(
                **{"max_new_tokens": length - i, "ignore_eos": True, "seed": 1000 * epoch + 10 * number + i}
                | kinds[number % len(kinds)]
            ),
            **options,
        )
        for i in range(size)
    ]


def finish(engine):
    outputs = {}
    while engine.can_step:
        engine.step()
        outputs |= {name: event for name, event in engine.take_events() if hasattr(event, "request_id")}
    return outputs


def engine_of(model, *, drafts, **config):
    return Engine(model, ServerConfig(model_path="unused", options=DRAFTS if drafts else {}, **config))


def check(model, drafted, plain):
    """Bit for bit by the native decoder. Products of torch's own vary in their last bits with the number of rows."""
    if model.fused is not None:
        assert drafted == plain
        return
    alike = [name for name, output in plain.items() if drafted[name].token_ids == output.token_ids]
    assert len(alike) > 0.9 * len(plain)  # a last bit that decides a draw is rare
    for name in alike:
        assert drafted[name].logprobs == pytest.approx(plain[name].logprobs, abs=1e-4)
        assert drafted[name].weight_versions == plain[name].weight_versions


@pytest.fixture(scope="module", params=["fused", "module"])
def model(request, qwen3_folder, tmp_path_factory):
    folder = qwen3_folder
    if request.param == "module":  # no native decoder: transformers' module over the packed tokens
        folder = write_tiny_model(tmp_path_factory.mktemp("models") / "gemma", family="gemma")
    return load_model(ServerConfig(model_path=str(folder)))


@pytest.mark.parametrize("config", [{}, {"max_num_seqs": 5}, {"kv_cache_bytes": 256 * 300}], ids=["", "seqs", "cache"])
def test_drafted_tokens_are_those_of_single_steps(model, config):
    found = {}
    for drafts in (False, True):
        engine = engine_of(model, drafts=drafts, **config)
        outputs = {}
        for epoch in range(3):
            for each in [one for number in range(6) for one in group(epoch, number)]:
                engine.submit([(each, 0)])
            outputs |= finish(engine)
        found[drafts] = outputs
        accepted = engine.steps.num_accepted
        assert engine.scheduler.pool.num_held == 0
    check(model, found[True], found[False])
    assert accepted > 300


def test_a_second_epoch_takes_a_fifth_of_the_passes(model):
    engine = engine_of(model, drafts=True)
    passes = []
    for epoch in range(2):
        before = engine.steps.num_passes
        engine.submit([(each, 0) for number in range(4) for each in group(epoch, number, kinds=[{"temperature": 0.0}])])
        finish(engine)
        passes.append(engine.steps.num_passes - before)
    assert passes[0] == 30
    assert passes[1] <= 6  # all of the second epoch's tokens were drafted, up to seven in a pass


def serve(folder, options, scenario):
    async def life():
        server = create_server("embedded", ServerConfig(model_path=str(folder), num_threads=1, options=options))
        await server.start()
        try:
            return await scenario(server)
        finally:
            await server.stop()

    return asyncio.run(life())


def segments(request, output):
    """Parts of an output of one weight version each, as requests that begin where they did: {version: {id: part}}."""
    parts, start, prompt = {}, 0, len(request.prompt_token_ids)
    while start < len(output.token_ids):
        version = output.weight_versions[start]
        end = start + output.weight_versions[start:].count(version)
        rest = replace(
            request,
            prompt_token_ids=(*request.prompt_token_ids, *output.token_ids[:start]),
            sampled_spans=((prompt, prompt + start),) if start else (),
            sampling_params=replace(request.sampling_params, max_new_tokens=end - start),
        )
        parts[version] = rest, output.token_ids[start:end], output.logprobs[start:end]
        start = end
    return parts


@pytest.mark.parametrize("adapters", [(None,), (None, "one", None, "one", "two")], ids=["", "adapters"])
@pytest.mark.process
def test_updates_and_aborts_in_the_middle_change_nothing(qwen3_folder, write_adapters, adapters):
    """Each token is what single steps draw with the weights of its version after the tokens before it."""
    folders = {name: path for name, (path, _) in write_adapters(qwen3_folder).items()} if len(adapters) > 1 else {}
    options = {"adapters": folders} if folders else {}
    weights = load_weights(qwen3_folder)
    changed = {name: tensor * 1.02 for name, tensor in weights.items()}

    async def drafted(server):
        found = []
        for epoch in range(5):
            adapter = adapters[epoch % len(adapters)]
            requests = [each for n in range(5) for each in group(epoch, n, length=200, adapter=adapter)]
            tasks = [asyncio.create_task(server.generate(each)) for each in requests]
            before = server.status()["num_passes"]
            await until_async(lambda before=before: server.status()["num_passes"] > before + 1)
            await server.pause("keep")
            await server.abort([each.request_id for each in requests[::3]])
            await server.update_weights(FakeReceiver(changed if epoch % 2 else weights, epoch + 1), epoch + 1)
            await server.resume()
            found += zip(requests, await asyncio.gather(*tasks), strict=True)
        return found, server.status()["num_accepted_draft_tokens"], server.model.fused is not None

    found, num_accepted, is_exact = serve(qwen3_folder, options | DRAFTS, drafted)
    assert num_accepted > 100
    assert len([output for _, output in found if len({*output.weight_versions}) == 2]) > 20

    async def plain(server):
        alike = []
        for version in range(6):
            await server.update_weights(
                FakeReceiver(weights if version in (0, 1, 3, 5) else changed, version + 7), version + 7
            )
            parts = [parts[version] for parts in (segments(*each) for each in found) if version in parts]
            outputs = await asyncio.gather(*(server.generate(request) for request, _, _ in parts))
            for (_, ids, logprobs), output in zip(parts, outputs, strict=True):
                alike.append(output.token_ids == ids)
                if is_exact or alike[-1]:
                    assert output.logprobs == (logprobs if is_exact else pytest.approx(logprobs, abs=1e-4))
        return alike

    alike = serve(qwen3_folder, options, plain)
    assert all(alike) if is_exact else sum(alike) > 0.9 * len(alike)


def test_a_resumed_completion_is_drafted_from_where_it_began(model):
    (whole,) = group(0, 1, size=1, kinds=[{"temperature": 0.0}])
    engine = engine_of(model, drafts=True)
    engine.submit([(whole, 0)])
    told = finish(engine)[whole.request_id].token_ids
    start = len(whole.prompt_token_ids)
    rest = GenerateRequest(
        request_id="rest",
        prompt_token_ids=(*whole.prompt_token_ids, *told[:10]),
        sampled_spans=((start, start + 10),),
        sampling_params=SamplingParams(max_new_tokens=20, temperature=0.0, ignore_eos=True),
    )
    before = engine.steps.num_passes
    engine.submit([(rest, 0)])
    assert finish(engine)["rest"].token_ids == told[10:]
    assert engine.steps.num_passes - before <= 4


def test_requests_that_need_every_step_are_not_drafted(model):
    found = {}
    for drafts in (False, True):
        engine = engine_of(model, drafts=drafts)
        found[drafts] = {}
        for epoch in range(2):
            engine.submit(
                [(each, 0) for each in group(epoch, 1, kinds=[{"temperature": 0.0, "presence_penalty": 1.0}])]
            )
            found[drafts] |= finish(engine)
    assert found[True] == found[False]
    assert engine.steps.num_drafted == 0


def test_the_longest_expected_completion_enters_first(model):
    """With two rows, a prompt known to be long no longer begins after the short ones have ended."""
    passes = {}
    for drafts in (False, True):
        engine = engine_of(model, drafts=drafts, max_num_seqs=2)
        for epoch in range(2):
            before = engine.steps.num_passes
            for number, length in [(0, 10), (1, 10), (2, 10), (3, 10), (4, 40)]:
                engine.submit([(each, 0) for each in group(epoch, number, size=1, length=length)])
            if drafts and epoch:
                engine.step()
                assert {"1-4-0"} <= {s.request.request_id for s in engine.scheduler.running}
            finish(engine)
            passes[drafts, epoch] = engine.steps.num_passes - before
    assert passes[True, 1] < passes[True, 0]
    assert passes[True, 0] == passes[False, 0]


def test_later_arrivals_overtake_a_request_only_so_often(model, monkeypatch):
    monkeypatch.setattr(scheduler_module, "MOST_OVERTAKING", 4)
    engine = engine_of(model, drafts=True, max_num_seqs=1)
    engine.submit([(each, 0) for each in group(0, 0, size=1)])
    finish(engine)
    asked = [group(1, 1, size=1), *(group(epoch, 0, size=1) for epoch in range(2, 12))]
    engine.submit([(each, 0) for requests in asked for each in requests])
    assert [*finish(engine)].index("1-1-0") < 4  # nothing is known of its prompt, and the others are longer


def test_drafts_follow_what_most_completions_did():
    history = DraftHistory()
    for each in ((1, 2, 3, 9), (1, 2, 3, 9), (1, 2, 4, 9)):
        history.add((7,), each)
    assert history.draft((7,), [], 8, is_whole=True) == [1, 2, 3, 9]
    assert history.draft((7,), [1, 2, 4], 8, is_whole=True) == [9]
    assert history.draft((7,), [5, 2], 8, is_whole=True) == [3]  # one token matches, and one is drafted
    assert history.draft((7,), [5, 1, 2], 8, is_whole=True) == [3, 9]
    assert history.draft((7,), [1], 2, is_whole=True) == [2, 3]
    assert history.draft((7,), [8], 8, is_whole=True) == []
    assert history.draft((6,), [1], 8, is_whole=True) == []
    assert (history.expected_length((7,)), history.expected_length((6,))) == (4, 0)


def test_the_history_is_bounded_and_the_oldest_prompt_goes(monkeypatch):
    monkeypatch.setattr(history_module, "MOST_TOKENS", 40)
    monkeypatch.setattr(history_module, "MOST_COMPLETIONS", 3)
    history = DraftHistory()
    for token in range(5):
        history.add((0,), [token] * 10)
    assert history.draft((0,), [1], 9, is_whole=False) == []
    assert history.draft((0,), [4], 9, is_whole=True) == [4] * 9
    history.add((1,), [1] * 10)
    history.add((2,), [2] * 10)
    assert [history.expected_length((n,)) for n in range(3)] == [0, 10, 10]


def test_prompts_count_in_the_bound_of_the_history(monkeypatch):
    monkeypatch.setattr(history_module, "MOST_TOKENS", 1000)
    history = DraftHistory()
    for number in range(20):
        history.add((number,) * 200, (1,))
    assert [bool(history.expected_length((n,) * 200)) for n in range(20)] == [False] * 16 + [True] * 4


def test_the_option_is_a_number_of_tokens(qwen3_folder):
    with pytest.raises(ConfigError, match="num_speculative_tokens=0 must be a whole number, at least 1"):
        create_server("embedded", ServerConfig(model_path=str(qwen3_folder), options={"num_speculative_tokens": 0}))
