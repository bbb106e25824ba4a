import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention import varlen

from rl_engine import ConfigError
from rl_engine.layers import packed_attention as attention
from rl_engine.layers.packed_attention import LAYOUT_KWARG, packed_attention, row_layout

CPU = torch.device("cpu")


def oracle(q, k, v, lengths, *, window=None, softcap=None, sinks=None):
    """Row by row, head by head: (1, H, T, D) to (1, T, H, D)."""
    groups, outputs, start = q.shape[1] // k.shape[1], [], 0
    for length in lengths:
        part = slice(start, start + length)
        heads = []
        for head in range(q.shape[1]):
            scores = q[0, head, part] @ k[0, head // groups, part].T * q.shape[-1] ** -0.5
            if softcap:
                scores = softcap * torch.tanh(scores / softcap)
            distance = torch.arange(length)[:, None] - torch.arange(length)
            scores = scores.masked_fill((distance < 0) | (distance >= (window or length)), -torch.inf)
            if sinks is not None:
                scores = torch.cat([scores, sinks[head].expand(length, 1)], 1)
            heads.append(scores.softmax(-1)[:, :length] @ v[0, head // groups, part])
        outputs.append(torch.stack(heads, 1))
        start += length
    return torch.cat(outputs)[None]


def tensors(lengths, heads=4, key_heads=2, size=8):
    generator = torch.Generator().manual_seed(sum(lengths))

    def draw(count):
        return torch.randn(1, count, sum(lengths), size, dtype=torch.float64, generator=generator)

    return [part.requires_grad_() for part in (draw(heads), draw(key_heads), draw(key_heads))]


def compare(lengths, **options):
    mine, theirs = tensors(lengths), tensors(lengths)
    names = {"sliding_window": "window", "softcap": "softcap", "s_aux": "sinks"}
    out, _ = packed_attention(None, *mine, None, **{LAYOUT_KWARG: row_layout(lengths, CPU)}, **options)
    want = oracle(*theirs, lengths, **{names[name]: value for name, value in options.items()})
    torch.testing.assert_close(out, want)
    weight = torch.randn(want.shape, dtype=want.dtype, generator=torch.Generator().manual_seed(0))
    for got, expected in zip(
        torch.autograd.grad((out * weight).sum(), mine), torch.autograd.grad((want * weight).sum(), theirs), strict=True
    ):
        torch.testing.assert_close(got, expected)


@pytest.mark.process
@settings(deadline=None, max_examples=30)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=25))
def test_rows_see_only_themselves(lengths):
    compare(lengths)


@pytest.mark.parametrize("lengths", [[5, 5, 5], [120, 110, 3, 2], [1], [200, 7]])
def test_equal_long_and_mixed_rows(lengths):
    compare(lengths)


def test_sliding_window_softcap_and_sinks():
    lengths = [9, 7, 7, 2]
    compare(lengths, sliding_window=3)
    compare(lengths, softcap=2.0)
    compare(lengths, s_aux=torch.tensor([0.1, -1.0, 2.0, 0.5], dtype=torch.float64))
    compare([130, 4], sliding_window=100)


def test_blocks_hold_rows_of_like_length():
    layout = row_layout([300, 290, 100, 90, 9], CPU)
    assert [(block.queries.num_tokens, block.num_rows, block.queries.width) for block in layout.blocks] == [
        (590, 2, 300),
        (199, 3, 100),
    ]
    assert layout.cu_seqlens.tolist() == [0, 300, 590, 690, 780, 789]


def test_a_model_that_drops_keyword_arguments_is_refused():
    with pytest.raises(ConfigError, match="rows cannot be packed"):
        packed_attention(torch.nn.Identity(), *tensors([2]), None)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="the variable-length flash kernel needs a CUDA device")
@pytest.mark.parametrize("window", [None, 20])
def test_flash_agrees_with_blocks(monkeypatch, window):
    lengths = [70, 64, 9, 3]
    inputs = [part.detach().to("cuda", torch.bfloat16).requires_grad_() for part in tensors(lengths, size=64)]
    layout = {LAYOUT_KWARG: row_layout(lengths, torch.device("cuda")), "sliding_window": window}
    found = []
    for is_flash in (True, False):
        if not is_flash:
            monkeypatch.setattr(attention, "_fits_varlen", lambda *_: False)
        out, _ = packed_attention(None, *inputs, None, **layout)
        weight = torch.arange(out.shape[1], device="cuda", dtype=out.dtype)[None, :, None, None].cos()
        found.append((out.detach(), *torch.autograd.grad((out * weight).sum(), inputs)))
    torch.testing.assert_close(found[0], found[1], atol=3e-2, rtol=3e-2)


@pytest.mark.parametrize("has_gqa", [True, False])
def test_the_flash_kernel_is_given_what_it_takes(monkeypatch, has_gqa):
    """On a CPU: a stand-in with the kernel's signature, of this torch and of an older one."""
    lengths, given = [7, 4], {}

    def varlen_attn(query, key, value, cu_q, cu_k, max_q, max_k, *, scale=None, window_size=(-1, -1), enable_gqa=False):
        given.update(heads=key.shape[1], rows=cu_q.tolist(), longest=max_q, window=window_size, is_gqa=enable_gqa)
        groups = query.shape[1] // key.shape[1]
        rows = row_layout(lengths, CPU)
        repeated = (part.repeat_interleave(groups, 1) for part in (key, value))
        return attention.attend(query, *repeated, rows, attention.Options(scale, 0.0, None, None, None))

    def older(query, key, value, cu_q, cu_k, max_q, max_k, *, scale=None, window_size=(-1, -1)):
        return varlen_attn(query, key, value, cu_q, cu_k, max_q, max_k, scale=scale, window_size=window_size)

    monkeypatch.setattr(varlen, "varlen_attn", varlen_attn if has_gqa else older)
    q, k, v = (part.detach() for part in tensors(lengths))
    layout = row_layout(lengths, CPU)
    want, _ = packed_attention(None, q, k, v, None, **{LAYOUT_KWARG: layout})
    options = attention.Options(q.shape[-1] ** -0.5, 0.0, None, None, None)
    got = attention.varlen(*(part[0].transpose(0, 1) for part in (q, k, v)), layout, options)
    torch.testing.assert_close(got[None], want)
    heads = k.shape[1] if has_gqa else q.shape[1]
    assert given == {"heads": heads, "rows": [0, 7, 11], "longest": 7, "window": (-1, 0), "is_gqa": has_gqa}
