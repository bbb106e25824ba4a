"""The pass of a decoder: plain torch in float64 beside the kernel, whose bits depend on a token's own past alone."""

import pytest
import torch
from csrc_kit import random_decoder as make
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_csrc import ArgumentError, _cpu
from rl_csrc.inference.decoder import Decoder, DecoderLayer, longrope_limit, pack_linear

LEVELS = list(range(min(_cpu.set_kernel_level(-1), 2) + 1))
PAGE_SIZE = 4
SHAPES = {
    "plain": {},
    "biases, no norms of heads": {"has_bias": True, "has_head_norms": False, "num_heads": 6},
    "odd sizes": {"hidden": 30, "inner": 37, "num_heads": 3, "num_kv_heads": 1, "head_size": 10, "vocab_size": 33},
    "windows": {"windows": (5, None, 3)},
    "more inputs than a step": {"hidden": 96, "inner": 300, "num_heads": 5, "num_kv_heads": 5, "head_size": 64},
}

SHARED = {"hidden": 128, "inner": 256, "head_size": 32}
"""As large as it takes for threads to share the work of 40 sequences, or of 150 tokens."""


class Tokens:
    """Sequences of the given lengths, all of whose tokens are new, over pages dealt at random that hold NaN."""

    def __init__(self, decoder, lengths):
        self.decoder = decoder
        self.rows = torch.tensor([row for row, length in enumerate(lengths) for _ in range(length)])
        self.positions = torch.cat([torch.arange(length) for length in lengths])
        self.ids = (self.positions * 31 + self.rows * 7 + 3) % decoder.embedding.shape[0]
        num_pages = -(-max(lengths) // PAGE_SIZE)
        dealt = torch.randperm(len(lengths) * num_pages, generator=torch.Generator().manual_seed(0))
        self.tables = dealt.view(len(lengths), num_pages)
        shape = len(dealt), PAGE_SIZE, decoder.num_kv_heads, decoder.head_size
        self.keys, self.values = ([decoder.norm.new_full(shape, torch.nan) for _ in decoder.layers] for _ in "kv")

    def __call__(self, of=slice(None), which=None, run=None):
        """Logits of some of the tokens in one call."""
        run = self.decoder if run is None else run
        where = self.rows[of], self.tables, self.keys, self.values
        return run(self.ids[of], self.positions[of], *where, which)


@pytest.fixture(params=LEVELS)
def level(request):
    """Each instruction set that this machine has."""
    assert _cpu.set_kernel_level(request.param) == request.param
    yield
    _cpu.set_kernel_level(-1)


@pytest.fixture
def threads():
    """Set their number; as it was afterwards."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize("shape", SHAPES)
def test_kernel_and_reference_give_the_pass_in_float64(shape, level):
    lengths = [1, 20, 7]
    exact, ours, plain = (
        Tokens(make(dtype, **SHAPES[shape]), lengths) for dtype in (torch.float64, torch.float32, torch.float32)
    )
    want = exact()
    torch.testing.assert_close(ours().double(), want, atol=2e-5, rtol=2e-5)
    torch.testing.assert_close(plain(run=plain.decoder.reference).double(), want, atol=2e-5, rtol=2e-5)
    for found, wanted in zip(ours.keys + ours.values, exact.keys + exact.values, strict=True):
        torch.testing.assert_close(found.double(), wanted, atol=2e-5, rtol=2e-5, equal_nan=True)


def test_the_reference_is_what_the_formulas_say():
    """One token at position 0 sees itself: values alone come through attention, and nothing is rotated."""
    decoder = make(torch.float64, windows=(None,), has_bias=True)
    (layer,) = decoder.layers

    def normed(x, scales):
        return x / (x.square().mean() + 1e-6).sqrt() * scales

    x = decoder.embedding[3]
    qkv = layer.qkv.weight @ normed(x, layer.input_norm) + layer.qkv.bias
    value = qkv[-2 * 16 :].view(2, 16).repeat_interleave(2, dim=0).flatten()
    x = x + layer.out.weight @ value + layer.out.bias
    gate, up = (layer.gate_up.weight @ normed(x, layer.post_norm) + layer.gate_up.bias).chunk(2)
    x = x + layer.down.weight @ (gate / (1 + (-gate).exp()) * up) + layer.down.bias
    torch.testing.assert_close(Tokens(decoder, [1])()[0], decoder.head.weight @ normed(x, decoder.norm))


@pytest.mark.process
@pytest.mark.promise("The same of a decoder's pass")
@settings(max_examples=15)
@given(
    lengths=st.lists(st.integers(1, 24), min_size=1, max_size=24),
    cuts=st.lists(st.integers(1, 24), max_size=3),
    level=st.sampled_from(LEVELS),
    num_threads=st.integers(1, 3),
)
def test_a_token_s_bits_ignore_neighbours_and_threads(lengths, cuts, level, num_threads):
    decoder = make(**SHARED, windows=(6, None))
    before = torch.get_num_threads()
    _cpu.set_kernel_level(level)
    try:
        torch.set_num_threads(1)
        whole = Tokens(decoder, lengths)
        want = whole()
        torch.set_num_threads(num_threads)
        parts, found, at = Tokens(decoder, lengths), [], 0
        for count in [*cuts, len(want)]:
            found.append(parts(of=slice(at, at + count)))
            at += count
        assert torch.cat(found).equal(want)
        for ours, wanted in zip(parts.keys + parts.values, whole.keys + whole.values, strict=True):
            assert ours.nan_to_num().equal(wanted.nan_to_num())
    finally:
        torch.set_num_threads(before)
        _cpu.set_kernel_level(-1)


@pytest.mark.parametrize("num_threads", [1, 2])
def test_rows_of_a_decode_step_are_those_of_the_prompt_at_once(level, threads, num_threads):
    """Many rows, one token each: where threads take rows from end to end."""
    threads(num_threads)
    lengths = [9] * 40
    together, stepwise = (Tokens(make(**SHARED), lengths) for _ in range(2))
    want = together().view(40, 9, -1)
    for position in range(9):
        assert stepwise(of=stepwise.positions == position).equal(want[:, position])


def test_rows_that_look_at_what_another_writes_wait_for_it(threads):
    """Row 0 writes position 3, the last of a page that all the others, at position 4, have as their first."""
    threads(2)
    decoder = make(**SHARED)
    want = Tokens(decoder, [PAGE_SIZE + 1])()
    tokens = Tokens(decoder, [PAGE_SIZE + 1] * 40)
    tokens.ids = tokens.ids[: PAGE_SIZE + 1].repeat(40)
    tokens.tables[:, 0] = tokens.tables[0, 0]
    tokens(of=slice(PAGE_SIZE - 1))
    is_fed = tokens.positions == PAGE_SIZE
    is_fed[PAGE_SIZE - 1], is_fed[PAGE_SIZE] = True, False  # of row 0
    logits = tokens(of=is_fed)
    assert logits[0].equal(want[PAGE_SIZE - 1])
    assert logits[1:].equal(want[PAGE_SIZE].expand(39, -1))


def test_logits_of_chosen_tokens_alone(level):
    tokens = Tokens(make(), [5, 8])
    which = torch.tensor([12, 0, 4, 4])
    assert tokens(which=which).equal(tokens()[which])
    many = torch.zeros(30, dtype=torch.int64)  # more logits than tokens
    assert tokens(which=many).equal(tokens()[many])
    assert tokens(which=many[:0]).shape == (0, 70)
    assert tokens(of=slice(0, 0)).shape == (0, 70)


def test_what_is_not_finite_stays_in_its_row(level):
    decoder = make()
    want = Tokens(decoder, [3, 4, 2])()
    decoder.embedding[(1 * 31 + 7 + 3) % 70] = torch.nan  # row 1, position 1
    found = Tokens(decoder, [3, 4, 2])()
    assert found[4:7].isnan().all()
    is_other = torch.tensor([True] * 4 + [False] * 3 + [True] * 2)
    assert found[is_other].equal(want[is_other])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(1, 1), (31, 5), (32, 7), (70, 48)])
def test_packed_weights_are_the_weights(shape, dtype):
    weight = torch.randn(shape, dtype=dtype)
    packed = pack_linear(weight.t().contiguous().t(), None)
    assert packed.weight.equal(weight)
    assert packed.panels.shape == (-(-shape[0] // 32), shape[1], 32)
    assert packed.panels.transpose(1, 2).flatten(0, 1)[shape[0] :].count_nonzero() == 0


def test_what_is_out_of_range_is_refused_and_nothing_written(level):
    tokens = Tokens(make(), [3, 6])
    for name, at, value, told in (
        ("ids", 4, 70, r"ids\[4\] is 70; allowed are 0 to 69"),
        ("ids", 0, -1, r"ids\[0\] is -1"),
        ("positions", 8, 64, r"positions\[8\] is 64; allowed are 0 to 63"),
        ("positions", 2, 40, r"block_tables .* token 2 looks at \(row 0, position 40\)"),
        ("rows", 1, 2, r"token 1 looks at \(row 2"),
    ):
        column = getattr(tokens, name)
        good = int(column[at])
        column[at] = value
        with pytest.raises(ArgumentError, match=told):
            tokens()
        column[at] = good
    with pytest.raises(ArgumentError, match=r"which\[1\] is 9; allowed are 0 to 8"):
        tokens(which=torch.tensor([0, 9]))
    assert all(part.isnan().all() for part in tokens.keys + tokens.values)


def test_what_does_not_fit_is_refused():
    tokens = Tokens(make(), [3])
    keys = tokens.keys
    tokens.keys = keys[:1]
    with pytest.raises(ArgumentError, match="1 caches for 2 layers"):
        tokens()
    tokens.keys = [keys[0], keys[1].double()]
    with pytest.raises(ArgumentError, match="a key cache"):
        tokens()
    tokens.keys = [keys[0], keys[1][:, :, :, ::2]]
    with pytest.raises(ArgumentError, match="a key cache"):
        tokens()
    tokens.keys, tokens.positions = keys, tokens.positions[:2]
    with pytest.raises(ArgumentError, match="positions"):
        tokens()
    with pytest.raises(ArgumentError, match=r"window is 0"):
        make(windows=(0,))
    with pytest.raises(ArgumentError, match=r"num_heads is 4 and num_kv_heads 3"):
        make(num_kv_heads=3)
    with pytest.raises(ArgumentError, match=r"wanted \[out, in\]"):
        pack_linear(torch.zeros(3, 4), torch.zeros(4))


def test_layers_that_do_not_fit_together_are_refused():
    good = make()
    options = {name: getattr(good, name) for name in ("embedding", "norm", "head", "cos", "sin", "num_heads", "eps")}
    options["num_kv_heads"] = 2
    fields = {name: getattr(good.layers[0], name) for name in good.layers[0].__slots__}
    for name, other, told in (
        ("qkv", pack_linear(torch.zeros(32, 48)), "qkv gives 32 numbers; wanted 128"),
        ("down", pack_linear(torch.zeros(48, 81)), "down"),
        ("input_norm", torch.ones(47), "input_norm"),
        ("query_norm", torch.ones(16, dtype=torch.float64), "query_norm"),
        ("gate_up", pack_linear(torch.zeros(1, 48)), "gate_up gives 1 numbers; wanted at least 2"),
    ):
        with pytest.raises(ArgumentError, match=told):
            Decoder(layers=[DecoderLayer(**fields | {name: other})], **options)
    nothing = torch.zeros(64, 0)
    for changed, told in (({"embedding": torch.zeros(70, 0)}, "embedding"), ({"cos": nothing, "sin": nothing}, "cos")):
        with pytest.raises(ArgumentError, match=f"{told} is .* wanted at least one column"):
            Decoder(layers=[DecoderLayer(**fields)], scaling=1.0, **options | changed)


@pytest.mark.parametrize(
    ("rope", "original", "limit"),
    [
        ({"rope_type": "longrope", "original_max_position_embeddings": 64}, None, 64),
        ({"type": "longrope"}, 100, 100),  # older configs keep the length beside the settings
        ({"full": {"type": "longrope", "original_max_position_embeddings": 8}, "sliding": {}}, None, 8),
        ({"rope_type": "yarn", "original_max_position_embeddings": 64}, 64, None),
        (None, 64, None),
    ],
)  # fmt: skip
def test_longrope_has_a_limit_and_other_ropes_have_none(rope, original, limit):
    assert longrope_limit(rope, original) == limit
