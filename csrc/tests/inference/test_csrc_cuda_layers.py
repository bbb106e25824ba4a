"""The GPU's steps between a layer's products, on the emulated device and on a real one, beside plain torch."""

import pytest
import torch

from rl_csrc.inference import layers, paged

pytestmark = pytest.mark.process

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
TOLERANCES = {torch.float32: 5e-6, torch.bfloat16: 1.6e-2, torch.float16: 2e-3}


def drawn(gpu, *shape, dtype, seed=0):
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, generator=generator).to(dtype).to(gpu.device)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [8, 300, 1024])
@pytest.mark.parametrize("adds", [True, False])
def test_a_sum_and_its_norm_are_those_of_plain_torch(gpu, dtype, size, adds):
    residual, weight = drawn(gpu, 5, size, dtype=dtype), drawn(gpu, size, dtype=dtype, seed=1)
    x = drawn(gpu, 5, size, dtype=dtype, seed=2) if adds else None
    want_sum = residual if x is None else residual + x
    want = layers._norm(want_sum, weight, 1e-6)
    out = gpu.call("add_norm", residual, x, weight, 1e-6)
    assert residual.equal(want_sum)
    assert out.dtype == dtype
    torch.testing.assert_close(out, want, atol=TOLERANCES[dtype], rtol=TOLERANCES[dtype])


SHAPES = {  # heads, key heads, size, page size, with head norms
    "qwen3": (4, 2, 128, 16, True),
    "llama": (6, 2, 64, 4, False),
    "small": (3, 3, 10, 5, True),
    "wide": (2, 1, 256, 16, True),
}


def case(gpu, shape, dtype):
    """Arguments of `rotate_to_pages`: three rows with 1, 4 and 2 new tokens; pages that nobody writes hold NaN."""
    heads, kv_heads, size, page_size, has_norms = SHAPES[shape]
    rows = torch.tensor([0, 1, 1, 1, 1, 2, 2])
    positions = torch.tensor([9, 2, 3, 4, 5, 0, 1])
    tables = torch.randperm(9, generator=torch.Generator().manual_seed(1)).view(3, 3)
    norms = [drawn(gpu, size, dtype=dtype, seed=i) if has_norms else None for i in (1, 2)]
    angles = torch.arange(20)[:, None] / 10 ** torch.linspace(0, 2, size // 2)
    turns = [part.to(dtype).to(gpu.device) for part in (angles.cos(), angles.sin())]
    caches = [torch.full((9, page_size, kv_heads, size), float("nan"), dtype=dtype, device=gpu.device) for _ in "kv"]
    qkv = drawn(gpu, len(rows), heads + 2 * kv_heads, size, dtype=dtype, seed=3)
    return [qkv, *norms, *turns, *caches, *(x.to(gpu.device) for x in (tables, rows, positions)), 1e-6]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_heads_are_normed_rotated_and_written_as_by_plain_torch(gpu, shape, dtype):
    arguments = case(gpu, shape, dtype)
    plain = [x.clone() if isinstance(x, torch.Tensor) else x for x in arguments]
    query = gpu.call("rotate_to_pages", *arguments)
    # The plain form runs where its tensors lie, were it not for the kernel: on a GPU too it is what is compared with.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layers, "has_cuda", lambda: False)
        want = layers.rotate_to_pages(*plain)
    tolerance = {"atol": TOLERANCES[dtype], "rtol": TOLERANCES[dtype]}
    torch.testing.assert_close(query, want, **tolerance)
    torch.testing.assert_close(arguments[5], plain[5], equal_nan=True, **tolerance)
    torch.testing.assert_close(arguments[6], plain[6], equal_nan=True, atol=0, rtol=0)  # values are only copied
    assert plain[6].isnan().any()


def test_a_table_s_columns_are_read_where_they_lie(gpu):
    arguments = case(gpu, "qwen3", torch.bfloat16)
    wide = torch.cat([arguments[7], torch.full((3, 5), 10**6, device=gpu.device)], dim=1)
    others = [x.clone() if isinstance(x, torch.Tensor) else x for x in arguments]
    others[7] = wide[:, :3]
    assert gpu.call("rotate_to_pages", *arguments).equal(gpu.call("rotate_to_pages", *others))
    torch.testing.assert_close(arguments[5], others[5], equal_nan=True, atol=0, rtol=0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_gate_is_that_of_plain_torch(gpu, dtype):
    gate_up = drawn(gpu, 7, 2 * 136, dtype=dtype) * 4
    gate_up[3, 5] = float("nan")
    out = gpu.call("gated", gate_up)
    gate, up = gate_up.chunk(2, dim=-1)
    want = torch.nn.functional.silu(gate) * up
    torch.testing.assert_close(out, want, atol=TOLERANCES[dtype], rtol=TOLERANCES[dtype], equal_nan=True)
    assert out[3].isnan().sum() == 1
    assert gpu.call("gated", gate_up[:, :14].contiguous()) is None  # no whole 16 bytes


def test_attention_over_cached_keys_is_the_same(gpu):
    dtype = torch.bfloat16
    arguments = case(gpu, "qwen3", dtype)
    tables, rows, positions = arguments[7:10]
    # Everything that a token sees is in the cache: earlier positions too.
    keys, values = (drawn(gpu, 9, 16, 2, 128, dtype=dtype, seed=s) for s in (5, 6))
    key, value = (drawn(gpu, len(rows), 2, 128, dtype=dtype, seed=s) for s in (7, 8))
    query = drawn(gpu, len(rows), 4, 128, dtype=dtype)
    options = {"scaling": 0.1, "window": None, "softcap": None, "sinks": None}
    both = gpu.call("paged_attention", query, key, value, keys, values, tables, rows, positions, **options)
    alone = gpu.call("paged_attention", query, None, None, keys, values, tables, rows, positions, **options)
    assert alone.equal(both)
    want = paged.reference(query, None, None, keys, values, tables, rows, positions, scaling=0.1)
    torch.testing.assert_close(alone, want, atol=1.6e-2, rtol=1.6e-2)
