"""Attention over pages, against plain torch in float64 over contiguous keys and values."""

import pytest
import torch

from rl_csrc import ArgumentError, _cpu, paged

LEVELS = [pytest.param(level, id=name) for level, name in enumerate(("baseline", "avx2", "avx512"))]
NAN = float("nan")


def case(heads, kv_heads, key_size, value_size, page_size, lengths, counts, dtype=torch.float32):
    """Sequences of `lengths` tokens, of which the last `counts` are new; pages are dealt at random, the rest is NaN."""
    generator = torch.Generator().manual_seed(heads * key_size + page_size)
    num_pages = [-(-length // page_size) for length in lengths]
    dealt = torch.randperm(sum(num_pages) + 2, generator=generator)
    tables = torch.zeros(len(lengths), max(num_pages), dtype=torch.int64)
    keys = torch.full((len(dealt), page_size, kv_heads, key_size), NAN, dtype=dtype)
    values = torch.full((len(dealt), page_size, kv_heads, value_size), NAN, dtype=dtype)
    found, at = {"rows": [], "positions": [], "query": [], "key": [], "value": [], "all": []}, 0
    for row, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        tables[row, : num_pages[row]] = dealt[at : at + num_pages[row]]
        at += num_pages[row]
        q, k, v = (
            torch.randn(length, n, d, generator=generator).to(dtype)
            for n, d in ((heads, key_size), (kv_heads, key_size), (kv_heads, value_size))
        )
        for position in range(length - count):
            page = tables[row, position // page_size]
            keys[page, position % page_size], values[page, position % page_size] = k[position], v[position]
        found["rows"] += [row] * count
        found["positions"] += range(length - count, length)
        for name, part in (("query", q), ("key", k), ("value", v)):
            found[name].append(part[length - count :])
        found["all"].append((q.double(), k.double(), v.double(), count))
    packed = [torch.cat(found[name]) for name in ("query", "key", "value")]
    arguments = (*packed, keys, values, tables, torch.tensor(found["rows"]), torch.tensor(found["positions"]))
    return arguments, found["all"]


def expected(sequences, scaling, window=None, softcap=None, sinks=None):
    outs = []
    for q, k, v, count in sequences:
        length, group = q.shape[0], q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
        scores = torch.einsum("qhd,khd->hqk", q, k) * scaling
        if softcap is not None:
            scores = torch.tanh(scores / softcap) * softcap
        distance = torch.arange(length)[:, None] - torch.arange(length)
        is_hidden = (distance < 0) | (distance >= (window or length))
        scores = scores.masked_fill(is_hidden, float("-inf"))
        if sinks is not None:
            scores = torch.cat([scores, sinks.double().view(-1, 1, 1).expand(-1, length, 1)], dim=-1)
        weights = scores.softmax(dim=-1)[..., :length]
        outs.append(torch.einsum("hqk,khe->qhe", weights, v)[length - count :])
    return torch.cat(outs)


SHAPES = {
    "decode": (4, 2, 32, 32, 16, [1, 16, 17, 50], [1, 1, 1, 1]),
    "chunks": (6, 2, 16, 16, 4, [9, 20, 3], [9, 7, 1]),
    "odd sizes": (3, 3, 10, 7, 5, [11, 6], [2, 6]),
    "wide groups": (14, 2, 64, 64, 8, [30], [3]),
    "no group": (2, 1, 8, 128, 16, [40], [2]),
}
OPTIONS = {
    "plain": {},
    "window": {"window": 5},
    "softcap": {"softcap": 3.0},
    "sinks": {"sinks": True},
    "all": {"window": 7, "softcap": 2.0, "sinks": True},
}


@pytest.fixture(params=LEVELS)
def level(request):
    """Each instruction set that this machine has."""
    if _cpu.set_kernel_level(request.param) != request.param:
        _cpu.set_kernel_level(-1)
        pytest.skip("this machine has no such instructions")
    yield
    _cpu.set_kernel_level(-1)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("shape", SHAPES)
def test_kernel_and_reference_give_attention(shape, options, level):
    arguments, sequences = case(*SHAPES[shape])
    options = dict(OPTIONS[options])
    if options.get("sinks"):
        options["sinks"] = torch.linspace(-1, 1, SHAPES[shape][0])
    want = expected(sequences, 0.3, **options)
    caches = [arguments[3].clone(), arguments[4].clone()]
    out = paged.attention(*arguments, scaling=0.3, **options)
    torch.testing.assert_close(out.double(), want, atol=2e-6, rtol=2e-5)
    plain = paged.reference(*arguments[:3], *caches, *arguments[5:], scaling=0.3, **options)
    torch.testing.assert_close(plain.double(), want, atol=2e-6, rtol=2e-5)
    for ours, theirs in zip(arguments[3:5], caches, strict=True):  # written alike, NaN elsewhere
        torch.testing.assert_close(ours, theirs, atol=0, rtol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_types_are_computed_in_float32(dtype, level):
    arguments, sequences = case(*SHAPES["chunks"], dtype=dtype)
    out = paged.attention(*arguments, scaling=0.3)
    assert out.dtype == dtype
    torch.testing.assert_close(out.double(), expected(sequences, 0.3), atol=2e-2, rtol=2e-2)


def test_a_token_does_not_depend_on_the_others(level):
    arguments, _ = case(*SHAPES["decode"])
    whole = paged.attention(*arguments, scaling=0.3)
    for t in range(4):
        alone = [part[t : t + 1] for part in arguments[:3]]
        where = [part[t : t + 1] for part in arguments[6:]]
        out = paged.attention(*alone, *arguments[3:6], *where, scaling=0.3)
        assert out[0].equal(whole[t])


def test_strided_queries_are_read_where_they_lie():
    arguments, sequences = case(*SHAPES["chunks"])
    moved = [part.transpose(0, 1).contiguous().transpose(0, 1) for part in arguments[:3]]
    out = paged.attention(*moved, *arguments[3:], scaling=0.3)
    torch.testing.assert_close(out.double(), expected(sequences, 0.3), atol=2e-6, rtol=2e-5)


def test_a_nan_in_a_key_reaches_its_own_row_alone():
    arguments, _ = case(*SHAPES["decode"])
    arguments[1][2] = NAN
    out = paged.attention(*arguments, scaling=0.3)
    assert out[2].isnan().all()
    assert out[[0, 1, 3]].isfinite().all()


def test_what_does_not_fit_is_refused():
    arguments, _ = case(*SHAPES["decode"])
    query, key, value, keys, values, tables, rows, positions = arguments
    far = positions.clone()
    far[1] = 999
    with pytest.raises(ArgumentError, match=r"token 1 looks at \(row 1, position 999\)"):
        paged.attention(query, key, value, keys, values, tables, rows, far, scaling=1.0)
    with pytest.raises(ArgumentError, match="block_tables"):
        paged.attention(query, key, value, keys, values, tables + 10**6, rows, positions, scaling=1.0)
    with pytest.raises(ArgumentError, match="window is 0"):
        paged.attention(*arguments, scaling=1.0, window=0)
    with pytest.raises(ArgumentError, match="key"):
        paged.attention(query, key[:, :1], value, keys, values, tables, rows, positions, scaling=1.0)
    with pytest.raises(ArgumentError, match="value_cache"):
        paged.attention(query, key, value, keys, values.double(), tables, rows, positions, scaling=1.0)
    with pytest.raises(ArgumentError, match="wanted pages of at least one position"):
        paged.attention(query, key, value, keys[:, :0], values[:, :0], tables, rows, positions, scaling=1.0)
