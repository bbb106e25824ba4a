"""The GPU's paged attention and draw of tokens, on the emulated device and on a real one, beside plain torch."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import pytest
import torch

from rl_csrc.inference import paged, sampling

pytestmark = pytest.mark.process

if TYPE_CHECKING:
    from csrc_kit import Implementation

NAN = float("nan")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SHAPES = {  # heads, key heads, size, page size, tokens of each sequence, of which so many are new
    "decode": (4, 2, 64, 16, [1, 16, 17, 50], [1, 1, 1, 1]),
    "chunks": (6, 2, 16, 4, [9, 20, 3], [9, 7, 1]),
    "odd pages": (3, 3, 24, 5, [11, 6], [2, 6]),
    "wide groups": (18, 2, 128, 8, [30], [3]),
    "many heads": (8, 1, 256, 16, [40], [2]),
    "splits": (4, 2, 64, 16, [700, 3, 256, 257], [1, 1, 1, 1]),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"window": 5},
    "wide window": {"window": 300},
    "softcap": {"softcap": 3.0},
    "sinks": {"sinks": True},
    "all": {"window": 7, "softcap": 2.0, "sinks": True},
}


def case(shape: str, dtype: torch.dtype, device: torch.device) -> list[torch.Tensor]:
    """Arguments of `paged.attention`; pages are dealt at random, and hold NaN where nothing was written."""
    heads, kv_heads, size, page_size, lengths, counts = SHAPES[shape]
    generator = torch.Generator().manual_seed(heads * size + page_size)
    num_pages = [-(-length // page_size) for length in lengths]
    dealt = torch.randperm(sum(num_pages) + 2, generator=generator)
    tables = torch.zeros(len(lengths), max(num_pages) + 1, dtype=torch.int64)
    caches = [torch.full((len(dealt), page_size, kv_heads, size), NAN, dtype=dtype) for _ in range(2)]
    new, rows, positions, at = [], [], [], 0
    for row, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        tables[row, : num_pages[row]] = dealt[at : at + num_pages[row]]
        at += num_pages[row]
        rows += [row] * count
        positions += range(length - count, length)
        for position in range(length - count):
            for cache in caches:
                value = torch.randn(kv_heads, size, generator=generator).to(dtype)
                cache[tables[row, position // page_size], position % page_size] = value
    for each in (heads, kv_heads, kv_heads):
        new.append(torch.randn(len(rows), each, size, generator=generator).to(dtype))
    return [x.to(device) for x in (*new, *caches, tables[:, :-1], torch.tensor(rows), torch.tensor(positions))]


def attend(gpu: Implementation, arguments: list[torch.Tensor], **options: Any) -> torch.Tensor:
    wanted: dict[str, Any] = {"scaling": 0.3, "window": None, "softcap": None, "sinks": None, **options}
    return gpu.call("paged_attention", *arguments, **wanted)


@pytest.mark.process
@pytest.mark.parametrize(
    ("shape", "options", "dtype"),
    [
        *((shape, "plain", dtype) for shape in SHAPES for dtype in DTYPES),
        *(("splits", options, torch.bfloat16) for options in OPTIONS if options != "plain"),
        *(("chunks", options, torch.float32) for options in OPTIONS if options != "plain"),
    ],
)
def test_attention_over_pages_is_that_of_plain_torch(
    gpu: Implementation, shape: str, options: str, dtype: torch.dtype
) -> None:
    arguments, wanted = case(shape, dtype, gpu.device), dict(OPTIONS[options])
    if wanted.get("sinks"):
        wanted["sinks"] = torch.linspace(-1, 1, SHAPES[shape][0], device=gpu.device)
    plain = [x.clone() for x in arguments]
    want = paged.reference(*plain, scaling=0.3, **wanted)
    out = attend(gpu, arguments, **wanted)
    assert out.dtype == dtype
    tolerance = 5e-6 if dtype == torch.float32 else 1.6e-2 if dtype == torch.bfloat16 else 2e-3
    torch.testing.assert_close(out, want, atol=tolerance, rtol=tolerance)
    for ours, theirs in zip(arguments[3:5], plain[3:5], strict=True):  # written alike, NaN elsewhere
        torch.testing.assert_close(ours, theirs, atol=0, rtol=0, equal_nan=True)


@pytest.mark.parametrize("shape", ["decode", "splits"])
def test_a_token_s_bits_ignore_neighbours_and_table_width(gpu: Implementation, shape: str) -> None:
    arguments = case(shape, torch.bfloat16, gpu.device)
    whole = attend(gpu, arguments)
    wide = torch.cat([arguments[5], torch.zeros(4, 40, dtype=torch.int64, device=gpu.device)], dim=1)
    for t in range(4):
        alone = [x[t : t + 1] for x in (*arguments[:3], *arguments[6:])]
        out = attend(gpu, [*alone[:3], *arguments[3:5], wide, *alone[3:]])
        assert out[0].equal(whole[t])


def test_a_nan_in_a_key_reaches_its_own_row_alone(gpu: Implementation) -> None:
    arguments = case("splits", torch.bfloat16, gpu.device)
    arguments[1][2] = NAN
    out = attend(gpu, arguments)
    assert out[2].isnan().all()
    assert out[[0, 1, 3]].isfinite().all()


def test_sizes_that_the_kernel_does_not_know_are_left_to_torch(gpu: Implementation) -> None:
    arguments = [x[..., :10].contiguous() if x.dim() > 2 else x for x in case("chunks", torch.bfloat16, gpu.device)]
    before = [x.clone() for x in arguments]
    assert attend(gpu, arguments) is None
    for ours, theirs in zip(arguments, before, strict=True):
        torch.testing.assert_close(ours, theirs, equal_nan=True)


def draws(
    gpu: Implementation, logits: torch.Tensor, temperature: float = 1.0, position: int = 0, greedy: Any = None
) -> Any:
    rows = logits.shape[0]
    options = {
        "temperature": torch.full((rows,), temperature, device=gpu.device),
        "streams": sampling.streams_of(torch.arange(rows)).to(gpu.device),
        "positions": torch.full((rows,), position, device=gpu.device),
        "is_greedy": None if greedy is None else torch.tensor(greedy, device=gpu.device),
    }
    return gpu.call("draw", logits.to(gpu.device), **options), options


@pytest.mark.process
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [3, 1000, 1003, 40_001])
def test_a_draw_inverts_the_distribution_at_the_row_s_own_number(
    gpu: Implementation, dtype: torch.dtype, size: int
) -> None:
    logits = (torch.randn(40, size, generator=torch.Generator().manual_seed(size)) * 3).to(dtype).to(gpu.device)
    (ids, logprobs), options = draws(gpu, logits, 0.7, 5)
    want = (logits.float() / 0.7).double().log_softmax(dim=-1)
    torch.testing.assert_close(logprobs.double(), want.gather(1, ids[:, None])[:, 0], atol=1e-5, rtol=1e-5)
    # A row's number lies in the interval of its token, but for what rounding moves.
    number = sampling.uniform(options["streams"], options["positions"])
    upto = want.exp().cumsum(dim=-1).gather(1, ids[:, None])[:, 0]
    assert (number < upto + 1e-6).all()
    assert (number > upto - want.gather(1, ids[:, None])[:, 0].exp() - 1e-6).all()


@pytest.mark.process
def test_equal_tokens_cut_the_interval_evenly(gpu: Implementation) -> None:
    (ids, logprobs), options = draws(gpu, torch.zeros(60, 20_000), position=7)
    number = sampling.uniform(options["streams"], options["positions"]) * 20_000
    assert (ids - number.long()).abs().max() <= 1
    torch.testing.assert_close(logprobs, torch.full_like(logprobs, -math.log(20_000)))


def test_greedy_rows_take_the_first_of_the_largest(gpu: Implementation) -> None:
    logits = torch.zeros(3, 9000)
    logits[:, [8100, 4200, 8999]] = 2.5
    logits[2, 17] = 2.75
    (ids, _), _ = draws(gpu, logits, greedy=[True, True, True])
    assert ids.tolist() == [4200, 4200, 17]
    (mixed, _), _ = draws(gpu, logits, greedy=[False, True, False])
    (sampled, _), _ = draws(gpu, logits)
    assert mixed.tolist() == [int(sampled[0]), 4200, int(sampled[2])]


def test_minus_infinity_is_never_drawn_and_non_finite_shows(gpu: Implementation) -> None:
    logits = torch.full((64, 5000), -math.inf)
    logits[:, 2501] = -3.0
    logits[:, 4999] = -80.0
    (ids, logprobs), _ = draws(gpu, logits)
    assert ids.tolist() == [2501] * 64
    assert logprobs.abs().max() < 1e-6
    for bad in (NAN, math.inf):
        broken = torch.zeros(2, 5000)
        broken[0, 4001] = bad
        (ids, logprobs), _ = draws(gpu, broken)
        assert not logprobs[0].isfinite()
        assert logprobs[1].isfinite()
        assert 0 <= int(ids[0]) < 5000


def test_rows_may_lie_apart_and_misaligned(gpu: Implementation) -> None:
    wide = torch.randn(7, 1013, generator=torch.Generator().manual_seed(3)).to(torch.bfloat16).to(gpu.device)
    cut = wide[:, 3:1003]
    (ids, logprobs), _ = draws(gpu, cut)
    (again, same), _ = draws(gpu, cut.contiguous())
    assert ids.equal(again)
    assert logprobs.equal(same)
