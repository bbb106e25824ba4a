"""Rows that begin with the same prompt are fed it once, and nothing else about them changes."""

import random
import re
from contextlib import contextmanager
from dataclasses import replace
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention import varlen

from rl_engine import ConfigError, EngineConfig, Head, LoraConfig, ParallelConfig, check, create_engine
from rl_engine.batch import prefix_tree
from rl_engine.batch.packed import repeats, take_rows
from rl_engine.batch.row_batch import RowBatch
from rl_engine.layers import packed_attention as attention
from rl_engine.layers.packed_attention import LAYOUT_KWARG, packed_attention, row_layout
from rl_engine.losses import sft_loss
from rl_engine.testing import ragged_batch, write_tiny_model

CPU = torch.device("cpu")
SLOW = pytest.mark.slow


def module_of(name):
    spec = spec_from_file_location(name, next(Path(__file__).parents[1].rglob(f"{name}.py")))
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


cut_ranks, models, moe_oracle = module_of("cut_ranks"), module_of("test_engine_architectures"), module_of("moe_oracle")
images, rows_by_themselves = module_of("test_engine_multimodal"), module_of("test_engine_attention").oracle


def packed_of(prompts, completions, *, shares_prefixes=True, device=CPU):
    batch = RowBatch(
        ragged_batch(prompts, completions), needs_mask=True, device=device, shares_prefixes=shares_prefixes
    )
    return batch.pack(range(len(prompts)))


def test_what_is_fed_and_looked_at():
    packed = packed_of([[5, 6], [7, 8, 9], [5, 6], [5], [5, 6]], [[1, 2, 3], [4, 5], [6], [7, 8], [9, 1]])
    shared = packed.shared
    # 7 8 9 4 is a row by itself, 5 is shared by all others, 6 behind it by three; the most tokens in front come first
    assert packed.token_ids.tolist() == [7, 8, 9, 4, 5, 1, 2, 9, 7, 6]
    assert packed.position_ids.tolist() == [0, 1, 2, 3, 0, 2, 3, 2, 1, 1]
    assert shared.lengths == (4, 1, 2, 1, 1, 1)
    assert shared.before == (0, 0, 2, 2, 1, 1)
    assert shared.keys.index.tolist() == [0, 1, 2, 3, 4, 4, 9, 5, 6, 4, 9, 7, 4, 8, 4, 9]
    assert packed.labels.tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 9, 1]
    assert packed.score_index.tolist() == [9, 5, 6, 2, 3, 9, 4, 8, 9, 7]
    assert packed.num_valid == 10


def test_rows_without_a_prompt_in_common_are_left_as_they_are():
    packed = packed_of([[5, 6], [7]], [[1, 2], [3]])
    assert packed.shared is None
    assert packed.token_ids.tolist() == [5, 6, 1, 7]


def test_gradients_of_copies_are_summed_in_wide_numbers():
    index = torch.tensor([2, 0, 2, 2, 1, 2])
    source = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(6, 3, dtype=torch.float64)
    taken = take_rows(source, repeats(index, 4, CPU))
    assert torch.equal(taken, source[index])
    (got,) = torch.autograd.grad((taken * weight).sum(), source)
    (want,) = torch.autograd.grad((source[index] * weight).sum(), source)
    torch.testing.assert_close(got, want)
    # 1 + 1000 times 2^-9: added one by one to a bfloat16 one, none of them would arrive
    narrow = torch.ones(1, 1, dtype=torch.bfloat16, requires_grad=True)
    parts = torch.cat([torch.ones(1, 1), torch.full((1000, 1), 2.0**-9)]).bfloat16()
    take_rows(narrow, repeats(torch.zeros(1001, dtype=torch.int64), 1, CPU)).backward(parts)
    assert float(narrow.grad) == pytest.approx(1 + 1000 * 2.0**-9, rel=2**-8)


OPTIONS = [(1, {}), (12, {"sliding_window": 3}), (1, {"softcap": 2.0}), (1, {"s_aux": True})]
MORE_OPTIONS = [(12, {}), (1, {"sliding_window": 3}), (12, {"softcap": 2.0}), (12, {"s_aux": True})]


@pytest.mark.process
@pytest.mark.parametrize(("scale", "options"), [*OPTIONS, *(pytest.param(*case, marks=SLOW) for case in MORE_OPTIONS)])
@settings(deadline=None, max_examples=15)
@given(data=st.data())
def test_attention_is_that_of_whole_rows(scale, options, data):
    """With `scale` 12 rows are long enough for torch's own kernel."""
    prompts = data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=4))
    rows = data.draw(st.lists(st.tuples(st.integers(0, len(prompts) - 1), st.integers(1, 9)), min_size=1, max_size=9))
    # every token has an id of its own, by which it is found again
    given = (
        [[1000 * index + place for place in range(prompts[index] * scale)] for index, _ in rows],
        [[10**6 + 1000 * row + place for place in range(own * scale)] for row, (_, own) in enumerate(rows)],
    )
    whole, packed = packed_of(*given, shares_prefixes=False), packed_of(*given)
    place_of = {token: place for place, token in enumerate(packed.token_ids.tolist())}
    fed_as = [place_of[token] for token in whole.token_ids.tolist()]
    first = [fed_as.index(place) for place in range(packed.num_valid)]
    draw = torch.Generator().manual_seed(len(fed_as))
    inputs = [torch.randn(packed.num_valid, heads, 8, dtype=torch.float64, generator=draw) for heads in (4, 2, 2)]
    mine, theirs = ([part.clone().requires_grad_() for part in inputs] for _ in "ab")
    if "s_aux" in options:
        options = {"s_aux": torch.tensor([0.1, -1.0, 2.0, 0.5], dtype=torch.float64)}
    layout = row_layout(packed.lengths, CPU, shared=packed.shared)
    got, _ = packed_attention(None, *to_heads(mine), None, **{LAYOUT_KWARG: layout}, **options)
    names = {"sliding_window": "window", "softcap": "softcap", "s_aux": "sinks"}
    plain = {names[name]: value for name, value in options.items()}
    want = rows_by_themselves(*to_heads([part[fed_as] for part in theirs]), whole.lengths, **plain)
    torch.testing.assert_close(got[0], want[0, first])
    weight = torch.randn(got.shape[1:], dtype=torch.float64, generator=draw)
    ours = torch.autograd.grad((got[0] * weight).sum(), mine)
    torch.testing.assert_close(ours, torch.autograd.grad((want[0, first] * weight).sum(), theirs))


def to_heads(parts):
    return [part.transpose(0, 1)[None] for part in parts]


GROUPS = [[5] * 70] * 5 + [[6] * 9] * 2 + [[7] * 40], [[1] * length for length in (30, 1, 12, 64, 7, 3, 20, 11)]


def varlen_attn(query, key, value, cu_q, cu_k, max_q, max_k, *, scale=None, window_size=(-1, -1), enable_gqa=False):
    """What the flash kernel does by its documentation: causal from the bottom right corner."""
    assert (max_q, max_k) == (cu_q.diff().max(), cu_k.diff().max())
    assert window_size[1] == 0
    parts = []
    for row in range(len(cu_q) - 1):
        q, k, v = (
            part[offsets[row] : offsets[row + 1]].transpose(0, 1)
            for part, offsets in ((query, cu_q), (key, cu_k), (value, cu_k))
        )
        distance = torch.arange(k.shape[1] - q.shape[1], k.shape[1])[:, None] - torch.arange(k.shape[1])
        seen = (distance >= 0) & ((distance <= window_size[0]) | (window_size[0] < 0))
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, seen, scale=scale, enable_gqa=enable_gqa)
        parts.append(out.transpose(0, 1))
    return torch.cat(parts)


def attended(packed, inputs, window):
    """Outputs and the inputs' gradients."""
    device = inputs[0].device
    options = {LAYOUT_KWARG: row_layout(packed.lengths, device, shared=packed.shared), "sliding_window": window}
    out, _ = packed_attention(None, *to_heads(inputs), None, **options)
    weight = torch.arange(out.shape[1], device=device, dtype=out.dtype)[None, :, None, None].cos()
    return out.detach(), *torch.autograd.grad((out * weight).sum(), inputs)


@pytest.mark.parametrize(("prompt", "times"), [(20, 1), (200, 2)])
def test_large_copies_of_keys_alone_are_made_again(prompt, times):
    """Keys of 8 rows that share a prompt: 248 for 84 tokens, or 1,680 for 264, with 2 of 6 heads."""
    packed = packed_of([[5] * prompt] * 8, [[row + 10] * 8 for row in range(8)])
    shapes = [(packed.num_valid, heads, 8) for heads in (6, 2, 2)]
    inputs = [torch.randn(shape, generator=torch.Generator().manual_seed(0)).requires_grad_() for shape in shapes]
    layout = row_layout(packed.lengths, CPU, shared=packed.shared)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
        out, _ = packed_attention(None, *to_heads(inputs), None, **{LAYOUT_KWARG: layout})
        out.sum().backward()
    copies = [event for event in seen.events() if event.name == "_RepeatRows"]
    assert len(copies) == 2 * times  # of keys and of values


@pytest.mark.parametrize("window", [None, 20])
def test_the_flash_kernel_is_given_segments_and_their_keys(monkeypatch, window):
    packed, draw = packed_of(*GROUPS), torch.Generator().manual_seed(0)
    inputs = [
        torch.randn(packed.num_valid, heads, 8, dtype=torch.float64, generator=draw, requires_grad=True)
        for heads in (4, 2, 2)
    ]
    want = attended(packed, inputs, window)
    monkeypatch.setattr(varlen, "varlen_attn", varlen_attn)
    monkeypatch.setattr(attention, "_fits_varlen", lambda *_: True)
    torch.testing.assert_close(attended(packed, inputs, window), want)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="the variable-length flash kernel needs a CUDA device")
@pytest.mark.parametrize("window", [None, 20])
def test_the_flash_kernel_agrees_with_blocks(monkeypatch, window):
    cuda, draw = torch.device("cuda"), torch.Generator().manual_seed(0)
    packed = packed_of(*GROUPS, device=cuda)
    inputs = [
        torch.randn(packed.num_valid, heads, 64, generator=draw).to(cuda, torch.bfloat16).requires_grad_()
        for heads in (4, 2, 2)
    ]
    flash = attended(packed, inputs, window)
    monkeypatch.setattr(attention, "_fits_varlen", lambda *_: False)
    torch.testing.assert_close(flash, attended(packed, inputs, window), atol=3e-2, rtol=3e-2)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    folder = tmp_path_factory.mktemp("prompts")
    cut_ranks.write_models(folder)
    write_tiny_model(folder / "qwen3")
    moe_oracle.write_model(folder / "experts")
    models.folder_of(folder / "mamba", "mamba", models.PADDED["mamba"])
    models.folder_of(folder / "dropout", "gpt2", models.GPT2)
    models.folder_of(folder / "no module", "llama", {"attention_dropout": 0.1})
    images.write_model(folder / "images", "qwen3_vl")
    return folder


SEEDS = [range(1), pytest.param(range(1, 4), marks=SLOW)]


def built(path, **changes):
    engine = create_engine("fsdp", EngineConfig(model_path=str(path), **({"precision": "float64"} | changes)))
    engine.initialize()
    return engine


@pytest.mark.process
@pytest.mark.parametrize("seeds", SEEDS)
@pytest.mark.parametrize("head", [Head.LM, Head.REWARD])
def test_every_loss_has_the_gradient_of_rows_one_at_a_time(folders, monkeypatch, head, seeds):
    """Groups, trees of completions, budgets and orders drawn at random; the oracle is transformers' own."""
    monkeypatch.setattr(prefix_tree, "MIN_APART", 1)
    is_judge = head == Head.REWARD
    config = EngineConfig(
        model_path=str(folders / ("judge" if is_judge else "policy")),
        precision="float64", head=head, entropy=not is_judge, prefix_sharing=True,
    )  # fmt: skip
    engine = create_engine("fsdp", config)
    engine.initialize()
    spared = 0
    for seed in seeds:
        for name in (name for name in cut_ranks.LOSSES if (name in cut_ranks.OF_VALUES) == is_judge):
            engine.optimizer_zero_grad()
            draw, drawn = random.Random(f"{name} {seed}"), cut_ranks.draw_batch(seed)
            engine._config = replace(config, max_tokens_per_gpu=draw.choice([34, 40, 64, 4096]))
            pairs = draw.sample(range(len(drawn[0]) // 2), len(drawn[0]) // 2)
            rows = [row for pair in pairs for row in (2 * pair, 2 * pair + 1)]
            batch = cut_ranks.batch_of(drawn, rows, has_candidates=name in cut_ranks.OF_CANDIDATES)
            with fed_tokens(engine) as inputs:
                metrics = engine.forward_backward_batch(batch, cut_ranks.LOSSES[name]).metrics
            spared += sum(len(drawn[0][row]) + len(drawn[1][row]) - (not is_judge) for row in rows) - sum(inputs)
            wanted, gradients = cut_ranks.reference(folders, seed, name)
            assert metrics == pytest.approx(wanted, rel=1e-9, abs=1e-9)
            for key, value in engine.parts.built.scorer.model.named_parameters():
                if key in gradients:
                    torch.testing.assert_close(value.grad, gradients[key], rtol=1e-8, atol=1e-10)
    engine.close()
    assert spared > 0


@contextmanager
def fed_tokens(engine):
    """How many tokens each micro-batch feeds."""
    seen = []
    handle = engine.parts.built.scorer.register_forward_pre_hook(
        lambda _, given: seen.append(given[0].token_ids.numel())
    )
    yield seen
    handle.remove()


WAYS = {
    "plain": {},
    "recomputed": {"activation_checkpointing": True},
    "adapter": {"lora": LoraConfig(rank=2)},
    "value": {"head": Head.VALUE},
    "everything asked": {"entropy": True, "sum_pi_squared": True, "num_candidates": 3},
    "scores alone": {"optimizer": None},
}


def group_batch(seed=0):
    """Three prompts of one to forty tokens with up to nine completions each, in any order, and a row by itself."""
    draw = random.Random(seed)
    prompts = [[draw.randrange(70) for _ in range(length)] for length in (1, 12, 40)]
    groups = [prompt for prompt in prompts for _ in range(draw.randint(2, 9))] + [[3, 4, 5]]
    draw.shuffle(groups)
    return ragged_batch(groups, [[draw.randrange(70) for _ in range(draw.randint(1, 20))] for _ in groups])


IN_PIECES = [("plain", 120), *(pytest.param(way, 120, marks=SLOW) for way in WAYS if way != "plain")]


@pytest.mark.process
@pytest.mark.promise("Shared prompts are computed once, and nothing depends on it")
@pytest.mark.parametrize(("way", "budget"), [*((way, 4096) for way in WAYS), *IN_PIECES])
def test_nothing_depends_on_it(folders, way, budget):
    """In float32, whose norms transformers computes in any number format; what is fed is less."""
    seen = []
    for prefix_sharing in (None, False):
        engine = built(folders / "qwen3", prefix_sharing=prefix_sharing, max_tokens_per_gpu=budget, **WAYS[way])
        loss = value_loss if WAYS[way].get("head") else sft_loss
        with fed_tokens(engine) as inputs:
            is_frozen = way == "scores alone"
            output = engine.forward_backward_batch(group_batch(), loss, forward_only=is_frozen)
            norm = 0.0 if is_frozen else engine.optimizer_step()
        columns = {name: column.values() for name, column in output.columns.items()}
        seen.append((columns, output.metrics, norm, dict(engine.get_per_tensor_param()[0]), sum(inputs)))
        engine.close()
    ours, plain = seen
    torch.testing.assert_close(ours[0], plain[0], rtol=1e-6, atol=1e-7)
    assert ours[1] == pytest.approx(plain[1], rel=1e-6)
    assert ours[2] == pytest.approx(plain[2], rel=1e-6)
    torch.testing.assert_close(ours[3], plain[3], rtol=1e-5, atol=1e-7)
    assert ours[4] < 0.8 * plain[4]


@pytest.mark.process
@pytest.mark.parametrize("is_recomputed", [False, True])
def test_many_copies_of_keys_are_not_kept(folders, monkeypatch, is_recomputed):
    """Attention is computed again instead, with the same gradient; and again where whole layers are recomputed."""
    batch, seen, attend = (
        ragged_batch([[5, 6, 7, 8] * 10] * 12, [[9 + row, 1, 2] for row in range(12)]),
        [],
        attention.attend,
    )
    for prefix_sharing in (True, False):
        engine = built(folders / "qwen3", prefix_sharing=prefix_sharing, activation_checkpointing=is_recomputed)
        calls = []
        monkeypatch.setattr(attention, "attend", lambda *given, to=calls: to.append(1) or attend(*given))
        output = engine.forward_backward_batch(batch, sft_loss)
        seen.append((output.metrics["loss"], engine.optimizer_step(), len(calls)))
        engine.close()
    assert seen[0][:2] == pytest.approx(seen[1][:2], rel=1e-6)
    layers = 2
    assert seen[1][2] == layers * (1 + is_recomputed)
    assert seen[0][2] == layers * (2 + is_recomputed)


def value_loss(output, rows):
    return output.values.square().sum() / output.counts.tokens - output.values.sum() / output.counts.tokens, {}


@pytest.mark.process
def test_a_budget_counts_a_shared_prompt_once(folders):
    batch = ragged_batch([[5] * 100] * 8, [[6 + row] * 10 for row in range(8)])
    seen = {}
    for prefix_sharing, budget in ((True, 180), (True, 179), (False, 180)):
        engine = built(folders / "qwen3", prefix_sharing=prefix_sharing, max_tokens_per_gpu=budget)
        with fed_tokens(engine) as inputs:
            engine.forward_backward_batch(batch, sft_loss)
        seen[prefix_sharing, budget] = inputs
        engine.close()
    # the last token of a completion is in the budget and is not fed
    assert seen == {(True, 180): [172], (True, 179): [136, 136], (False, 180): [109] * 8}


REFUSED = {
    "experts": ("fsdp", "experts", {}, "Qwen3MoeForCausalLM has routers"),
    "padded rows": ("fsdp", "mamba", {}, "MambaForCausalLM has layers that mix tokens outside attention"),
    "dropout": ("fsdp", "dropout", {"dropout": True}, "GPT2LMHeadModel is trained with dropout"),
    "dropout by the config alone": ("fsdp", "no module", {"dropout": True}, "LlamaForCausalLM is trained with dropout"),
    "dropout of an adapter": ("fsdp", "qwen3", {"lora": LoraConfig(dropout=0.1)}, "is trained with dropout"),
    "cut tokens": ("fsdp", "qwen3", {"parallel": ParallelConfig(sp=2)}, r"parallel\.sp is 2"),
    "megatron": ("megatron", "qwen3", {}, "the megatron backend feeds every row its prompt"),
}


@pytest.mark.process
@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_share_is_refused_or_left_alone(folders, case):
    backend, model, changes, why = REFUSED[case]
    size = changes.get("parallel", ParallelConfig()).sp
    config = EngineConfig(model_path=str(folders / model), **changes)
    assert re.search(f"^no: .*{why}", check(backend, config, size)["prefix_sharing"])
    with pytest.raises(ConfigError, match=f"prefix_sharing is true and .*{why}"):
        check(backend, replace(config, prefix_sharing=True), size)
    assert check(backend, replace(config, prefix_sharing=False), size)["prefix_sharing"] == "no"


@pytest.mark.process
@pytest.mark.parametrize("backend", ["fsdp", "torchtitan"])
def test_what_can_says_so(folders, backend):
    config = EngineConfig(model_path=str(folders / "qwen3"))
    for prefix_sharing in (None, True):
        assert check(backend, replace(config, prefix_sharing=prefix_sharing))["prefix_sharing"] == "yes"


def test_a_frozen_model_with_dropout_shares(folders):
    """Nothing drops out where nothing is trained."""
    assert check("fsdp", EngineConfig(model_path=str(folders / "dropout"), optimizer=None)) == {"prefix_sharing": "yes"}


@pytest.mark.process
def test_a_backend_of_another_library_shares(folders):
    seen = []
    for prefix_sharing in (True, False):
        config = EngineConfig(model_path=str(folders / "qwen3"), precision="float64", prefix_sharing=prefix_sharing)
        engine = create_engine("torchtitan", config)
        engine.initialize()
        with fed_tokens(engine) as inputs:
            output = engine.forward_backward_batch(group_batch(), sft_loss)
        seen.append((output.columns["logprobs"].values(), output.metrics["loss"], engine.optimizer_step(), sum(inputs)))
        engine.close()
    (ours, *shared), (plain, *others) = seen
    torch.testing.assert_close(ours, plain, rtol=1e-9, atol=1e-9)
    assert shared[:2] == pytest.approx(others[:2], rel=1e-9)
    assert shared[2] < 0.8 * others[2]
