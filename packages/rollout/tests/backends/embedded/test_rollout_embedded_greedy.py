"""Greedy decoding is token for token what transformers' own `generate` gives, whatever the batch does meanwhile."""

import functools
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rl_rollout import ConfigError, FinishReason, GenerateRequest, ModelFolderError, SamplingParams, ServerConfig
from rl_rollout.backends.embedded import decode_engine as engine_module
from rl_rollout.backends.embedded.decode_engine import Engine
from rl_rollout.backends.embedded.model.model_runner import load_model
from rl_rollout.testing import write_tiny_model

FAMILIES = {
    "qwen3": {},
    "qwen2": {},
    "llama": {},
    # Every second layer looks back 8 tokens.
    "qwen3-sliding": {
        "family": "qwen3",
        "use_sliding_window": True,
        "sliding_window": 8,
        "layer_types": ["full_attention", "sliding_attention"],
    },
    "mistral": {"sliding_window": 8},
    "gemma2": {"sliding_window": 8, "query_pre_attn_scalar": 8, "attn_logit_softcapping": 5.0},
    "gemma3_text": {
        "sliding_window": 8,
        "query_pre_attn_scalar": 8,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    "gpt_oss": {
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention"],
    },
}
DELTA = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
SPARSE = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}
FAMILIES |= {"qwen3_next": DELTA | SPARSE, "qwen3_5_text": DELTA}
MAX_NEW_TOKENS = 24


def prompts():
    lengths = [1, 2, 5, 13, 34, 13]
    return [tuple(3 + (7 * i + 5 * length) % 45 for i in range(length)) for length in lengths]


def expected(folder, some_prompts):
    """What transformers gives, one prompt at a time: no padding, no batch."""
    from transformers import AutoModelForCausalLM

    # The attention of ours that allows nothing special: sdpa has no softcap and no sinks.
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    with torch.inference_mode():
        return [
            tuple(
                model.generate(
                    torch.tensor([prompt]),
                    attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
                    max_new_tokens=MAX_NEW_TOKENS,
                    do_sample=False,
                )[0, len(prompt) :].tolist()
            )
            for prompt in some_prompts
        ]


def build(folder, **overrides):
    config = ServerConfig(model_path=str(folder), **overrides)
    return Engine(load_model(config), config)


def greedy(request_id, prompt, max_new_tokens=MAX_NEW_TOKENS, *, ignore_eos=False):
    params = SamplingParams(max_new_tokens=max_new_tokens, temperature=0.0, ignore_eos=ignore_eos)
    return GenerateRequest(request_id=str(request_id), prompt_token_ids=prompt, sampling_params=params), 0


def run_to_end(engine):
    outputs = {}
    while engine.can_step:
        engine.step()
        outputs.update(engine.take_events())
    return outputs


def fed_tokens(engine):
    """Every token that the model is given from now on; in place of those that one native call feeds, as many zeros."""
    fed = []
    real, real_generate = engine.steps.batch_builder.batch, engine.model.fused.generate

    def batch(*arguments):
        packed, ids = real(*arguments)
        fed.extend(ids.tolist())
        return packed, ids

    def generate(*arguments):
        drawn = real_generate(*arguments)
        fed.extend([0] * int(drawn[2].sum()))
        return drawn

    engine.steps.batch_builder.batch, engine.model.fused.generate = batch, generate
    return fed


@pytest.mark.process
@pytest.mark.parametrize("name", FAMILIES)
def test_greedy_equals_transformers(name, tmp_path):
    overrides = dict(FAMILIES[name])
    folder = write_tiny_model(tmp_path / name, family=overrides.pop("family", name), **overrides)
    engine = build(folder)
    engine.submit(greedy(i, prompt) for i, prompt in enumerate(prompts()))
    outputs = run_to_end(engine)
    assert [outputs[str(i)].token_ids for i in range(len(prompts()))] == expected(folder, prompts())


@pytest.mark.process
def test_greedy_equals_transformers_as_requests_join_and_leave(qwen3_folder):
    # Three rows for six requests, and lengths that differ: rows are reused, moved, and the cache grows.
    engine = build(qwen3_folder, max_num_seqs=3)
    want = dict(zip(map(str, range(6)), expected(qwen3_folder, prompts()), strict=True))
    outputs = {}
    pending = [greedy(i, prompt, 4 + 4 * i) for i, prompt in enumerate(prompts())]
    while pending or engine.can_step:
        if pending:
            engine.submit([pending.pop(0)])
        engine.step()
        outputs.update(engine.take_events())
    for i in range(6):
        assert outputs[str(i)].token_ids == want[str(i)][: 4 + 4 * i]


def test_a_long_prompt_holds_nobody_up(qwen3_folder, monkeypatch):
    monkeypatch.setattr(engine_module, "MOST_STEPS", 1)
    engine = build(qwen3_folder, options={"chunk_tokens": 16})
    long_prompt = tuple(3 + i % 45 for i in range(100))
    engine.submit([greedy("short", (5, 6), 40, ignore_eos=True)])
    engine.step()
    fed = fed_tokens(engine)
    engine.submit([greedy("long", long_prompt, 4, ignore_eos=True)])
    lengths = []
    for _ in range(8):
        fed.clear()
        engine.step()
        lengths.append(len(fed))
    # 100 tokens in chunks of 16: seven steps, in each of which the short one gets its token too.
    assert lengths == [17] * 6 + [5, 2]
    assert run_to_end(engine)["long"].token_ids == expected(qwen3_folder, [long_prompt])[0][:4]


requests = st.tuples(st.integers(0, 3), st.integers(1, 40), st.integers(1, 20), st.integers(0, 6), st.booleans())


schedules = given(st.lists(requests, min_size=1, max_size=8), st.integers(8, 12), st.integers(1, 24), st.integers(1, 8))


@settings(deadline=None, max_examples=8, suppress_health_check=[HealthCheck.function_scoped_fixture])
@schedules
def test_any_schedule_gives_the_tokens_of_each_alone(shared_engine, schedule, num_blocks, chunk_tokens, max_num_seqs):
    check_schedule(*shared_engine, schedule, num_blocks, chunk_tokens, max_num_seqs)


@pytest.mark.slow
@settings(deadline=None, max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
@schedules
def test_many_schedules(shared_engine, schedule, num_blocks, chunk_tokens, max_num_seqs):
    check_schedule(*shared_engine, schedule, num_blocks, chunk_tokens, max_num_seqs)


def check_schedule(model, alone, schedule, num_blocks, chunk_tokens, max_num_seqs):
    """Random arrivals, aborts, lengths and shared prefixes, in a cache with room for one request and a bit."""
    config = ServerConfig(
        model_path="unused",
        max_num_seqs=max_num_seqs,
        kv_cache_bytes=num_blocks * 8 * 256,
        options={"block_size": 8, "chunk_tokens": chunk_tokens},
    )
    engine = Engine(model, config)
    outputs, want, aborts = {}, {}, {}
    for i, (family, prompt_len, new_tokens, wait, is_aborted) in enumerate(schedule):
        prompt = tuple(3 + (family + k) % 45 for k in range(prompt_len))
        want[str(i)] = alone(prompt)[:new_tokens]
        engine.submit([greedy(i, prompt, new_tokens, ignore_eos=True)])
        if is_aborted:
            aborts[str(i)] = wait
        for _ in range(wait):
            if engine.can_step:
                engine.step()
        if is_aborted:
            engine.abort([str(i)])
        outputs.update(engine.take_events())
    outputs.update(run_to_end(engine))
    for name, tokens in want.items():
        got = outputs[name].token_ids
        assert got == tokens[: len(got)]
        assert got == tokens or (name in aborts and outputs[name].finish_reason is FinishReason.ABORT)
    pool = engine.scheduler.pool
    assert pool.num_held == 0
    assert pool.num_free == pool.limit


@pytest.fixture(scope="module")
def shared_engine(qwen3_folder):
    """A model, and what it gives to a prompt that is served alone."""
    model = load_model(ServerConfig(model_path=str(qwen3_folder)))

    @functools.cache
    def alone(prompt):
        engine = Engine(model, ServerConfig(model_path="unused"))
        engine.submit([greedy("alone", prompt, 20, ignore_eos=True)])
        return run_to_end(engine)["alone"].token_ids

    return model, alone


def test_the_rest_of_a_chunked_prompt_is_computed_if_tiny(shared_engine):
    model, alone = shared_engine
    prompt = tuple(range(5, 21))  # two blocks
    for chunk_tokens in (13, 14, 15):
        engine = Engine(
            model, ServerConfig(model_path="unused", options={"block_size": 8, "chunk_tokens": chunk_tokens})
        )
        engine.submit([greedy("r", prompt, 20, ignore_eos=True)])
        assert run_to_end(engine)["r"].token_ids == alone(prompt)


def test_the_youngest_gives_its_blocks_back(shared_engine):
    model, _ = shared_engine
    config = ServerConfig(model_path="unused", kv_cache_bytes=10 * 8 * 256, options={"block_size": 8})
    engine = Engine(model, config)
    engine.submit([greedy(name, (i, 6), 60, ignore_eos=True) for i, name in enumerate(("old", "young"), start=3)])
    assert list(run_to_end(engine)) == ["old", "young"]
    assert engine.scheduler.num_preemptions > 0


def test_logprobs_are_those_of_a_forward_pass(qwen3_folder):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(qwen3_folder).eval()
    engine = build(qwen3_folder)
    params = SamplingParams(max_new_tokens=30, temperature=0.7, seed=3, ignore_eos=True)
    engine.submit(
        (GenerateRequest(request_id=str(i), prompt_token_ids=prompt, sampling_params=params), 0)
        for i, prompt in enumerate(prompts())
    )
    outputs = run_to_end(engine)
    for i, prompt in enumerate(prompts()):
        ids = outputs[str(i)].token_ids
        with torch.inference_mode():
            logits = model(torch.tensor([[*prompt, *ids]])).logits[0, len(prompt) - 1 : -1]
        want = (logits / 0.7).log_softmax(-1).gather(-1, torch.tensor(ids)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(outputs[str(i)].logprobs), want, atol=1e-4, rtol=0)


def test_a_neighbour_that_is_cut_off_changes_no_bit(qwen3_folder):
    def outputs(*neighbours):
        engine = build(qwen3_folder)
        plain = SamplingParams(max_new_tokens=60, temperature=0.7, seed=3, ignore_eos=True)
        params = {"plain": plain, **{name: replace(plain, top_k=4) for name in neighbours}}
        engine.submit(
            (GenerateRequest(request_id=name, prompt_token_ids=(5, 6, 7), sampling_params=each), 0)
            for name, each in params.items()
        )
        return run_to_end(engine)["plain"]

    assert outputs("cut") == outputs()


def test_a_group_is_computed_once(qwen3_folder):
    engine = build(qwen3_folder)
    fed = fed_tokens(engine)
    prompt = prompts()[4]
    engine.submit(greedy(i, prompt, 9, ignore_eos=True) for i in range(8))
    engine.step()
    assert fed == list(prompt)  # and all eight have their first token
    engine.submit([greedy("late", prompt, 9, ignore_eos=True)])  # while the group runs: two blocks of 16 are known
    outputs = run_to_end(engine)
    assert len(fed) == len(prompt) + 8 * 8 + len(prompt) % 16 + 8
    alone = build(qwen3_folder)
    alone.submit([greedy("alone", prompt, 9, ignore_eos=True)])
    assert len(outputs) == 9
    assert {output.token_ids for output in outputs.values()} == {run_to_end(alone)["alone"].token_ids}


@pytest.mark.process
@pytest.mark.promise("recurrent state is kept next to the KV cache")
@pytest.mark.parametrize("name", ["qwen3_next", "qwen3_5_text"])
def test_states_follow_their_sequences(name, tmp_path):
    """Rows move, prompts come in chunks, groups share one, and weights change in the middle of completions."""
    folder = write_tiny_model(tmp_path / "model", family=name, **FAMILIES[name])
    engine = build(folder, max_num_seqs=3, options={"chunk_tokens": 8})
    want = dict(zip(map(str, range(6)), expected(folder, prompts()), strict=True))
    outputs, pending = {}, [greedy(i, prompt, 4 + 4 * i) for i, prompt in enumerate(prompts())]
    while pending or engine.can_step:
        if pending:
            engine.submit([pending.pop(0)])
        engine.step()
        outputs.update(engine.take_events())
        if len(pending) == 1:
            engine.set_version(1)  # of the same weights: all that run are computed again
    for i in range(6):
        assert outputs[str(i)].token_ids == want[str(i)][: 4 + 4 * i]
    engine.submit(greedy(f"again {i}", prompts()[4]) for i in range(3))  # one computes it, and shares its state
    outputs = run_to_end(engine)
    assert {output.token_ids for output in outputs.values()} == {want["4"]}


def test_drafts_and_states_are_rejected_together(tmp_path):
    folder = write_tiny_model(tmp_path / "model", family="qwen3_5_text", **DELTA)
    with pytest.raises(ConfigError, match="num_speculative_tokens=2 .* has a state that cannot go back"):
        build(folder, options={"num_speculative_tokens": 2})


def test_a_model_that_keeps_more_than_keys_and_values_is_refused(tmp_path):
    folder = write_tiny_model(tmp_path / "model", family="minimax", layer_types=DELTA["layer_types"])
    with pytest.raises(ModelFolderError, match="linear_attention"):
        build(folder)


@pytest.mark.parametrize(
    ("family", "told"),
    [("diffllama", "layer 0 asks for attention twice"), ("doge", "DogeAttention asks for attention_mask")],
)
def test_attention_of_another_kind_is_refused(family, told, tmp_path):
    with pytest.raises(ModelFolderError, match=told):
        build(write_tiny_model(tmp_path / "model", family=family))


@pytest.mark.process
def test_frequencies_depending_on_the_batch_are_refused(tmp_path):
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
    rope |= {"short_factor": [1.0] * 4, "long_factor": [4.0, 5.0, 6.0, 7.0]}
    folder = write_tiny_model(tmp_path / "model", family="llama", rope_parameters=rope, max_position_embeddings=256)
    with pytest.raises(ConfigError, match="max_model_len=256: .* set it to 64 at most"):
        build(folder)
    engine = build(folder, max_model_len=64)
    engine.submit(greedy(str(i), prompt) for i, prompt in enumerate(prompts()))
    outputs = run_to_end(engine)
    assert [outputs[str(i)].token_ids for i in range(len(prompts()))] == expected(folder, prompts())


@pytest.mark.promise("Routed experts are those of a forward pass")
@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
def test_routed_experts_are_those_of_a_forward_pass(name, tmp_path):
    from dataclasses import replace

    from transformers import AutoModelForCausalLM

    folder = write_tiny_model(tmp_path / name, family=name, **FAMILIES[name])
    engine, prompt = build(folder), prompts()[3]
    asked, _ = greedy("asks", prompt, 6, ignore_eos=True)
    # Others share the prompt, join before and leave in between: rows move.
    engine.submit([greedy("short", prompt, 2, ignore_eos=True), (replace(asked, returns_routed_experts=True), 0)])
    engine.submit([greedy("other", prompts()[2], 9, ignore_eos=True)])
    outputs = run_to_end(engine)
    output = outputs["asks"]
    assert outputs["short"].routed_experts == ()
    assert output.token_ids[:2] == outputs["short"].token_ids
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    ids = torch.tensor([[*prompt, *output.token_ids[:-1]]])
    with torch.inference_mode():
        found = model(ids, output_router_logits=True).router_logits
    want = torch.stack([logits.topk(2, dim=-1).indices for logits in found], dim=1)
    assert torch.tensor(output.routed_experts).equal(want)


def test_a_model_without_experts_tells_none(qwen3_folder):
    assert not build(qwen3_folder).model.experts.reports_choice
