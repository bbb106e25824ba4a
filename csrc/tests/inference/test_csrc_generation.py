"""Several steps of generation in one call: the bits of one step at a time, and every sequence ends where it should."""

import itertools
import math
import threading
import weakref
from dataclasses import replace

import pytest
import torch
from csrc_kit import random_decoder as make
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_csrc import ArgumentError, _cpu, sampling
from rl_csrc.inference.decoder import Drawing

LEVELS = list(range(min(_cpu.set_kernel_level(-1), 2) + 1))
PAGE_SIZE = 4
SHARED = {"hidden": 128, "inner": 256, "head_size": 32}
"""As large as it takes for threads to share the rows."""

NEVER = 40


def drawing_of(num_rows, *, limit=NEVER, stop_ids=((-1,),), greedy=()):
    rows = torch.arange(num_rows)
    return Drawing(
        temperature=0.5 + rows % 3 / 2,
        streams=sampling.streams_of(rows),
        is_greedy=torch.isin(rows, torch.tensor(greedy)) if greedy else None,
        limits=torch.full_like(rows, limit),
        stop_ids=torch.tensor(stop_ids).expand(num_rows, -1).contiguous(),
    )


class Sequences:
    """`num_rows` sequences whose first token is fed next, at position 0, over pages of their own that hold NaN."""

    def __init__(self, decoder, num_rows, num_pages=8):
        self.decoder = decoder
        self.rows = torch.arange(num_rows)
        self.ids = self.rows * 7 % decoder.embedding.shape[0]
        self.positions = torch.zeros_like(self.rows)
        self.tables = torch.randperm(num_rows * num_pages).view(num_rows, num_pages)
        shape = num_rows * num_pages, PAGE_SIZE, decoder.num_kv_heads, decoder.head_size
        self.keys, self.values = ([decoder.norm.new_full(shape, torch.nan) for _ in decoder.layers] for _ in "kv")

    def generate(self, drawing, steps, **options):
        """Token ids and log-probs of each row."""
        places = self.ids, self.positions, self.rows, self.tables, self.keys, self.values
        ids, logprobs, counts = self.decoder.generate(*places, drawing=drawing, steps=steps, **options)
        return [
            list(zip(*pair, strict=True))[:n]
            for *pair, n in zip(*map(torch.Tensor.tolist, (ids, logprobs, counts)), strict=True)
        ]


def one_at_a_time(sequences, drawing):
    """The same by calls of the decoder and of `draw`, and the rules again."""
    found = [[] for _ in sequences.rows]
    ids, positions = sequences.ids.clone(), sequences.positions.clone()
    live = sequences.rows.tolist()
    while live:
        which = torch.tensor(live)
        places = which, sequences.tables, sequences.keys, sequences.values
        logits = sequences.decoder(ids[which], positions[which], *places)
        new, logprobs = sampling.draw(logits, **drawing.of(which), positions=positions[which] + 1)
        ids[which] = new
        positions[which] += 1
        for row, token, logprob in zip(live, new.tolist(), logprobs.tolist(), strict=True):
            found[row].append((token, logprob))
        live = [
            row
            for row, (*_, (token, logprob)) in ((row, found[row]) for row in live)
            if len(found[row]) + 1 < drawing.limits[row]
            and token not in drawing.stop_ids[row].tolist()
            and math.isfinite(logprob)
        ]
    return found


@pytest.mark.process
@settings(max_examples=15)
@given(
    num_rows=st.integers(1, 40),
    steps=st.integers(1, 12),
    num_threads=st.integers(1, 3),
    level=st.sampled_from(LEVELS),
    stop=st.integers(-1, 69),
)
def test_the_bits_are_those_of_one_step_at_a_time(num_rows, steps, num_threads, level, stop):
    decoder = make(**SHARED, windows=(6, None))
    drawing = drawing_of(num_rows, limit=11, stop_ids=(stop, 5, 50), greedy=(1, 4))
    drawing = replace(drawing, limits=drawing.limits - torch.arange(num_rows) % 8)
    _cpu.set_kernel_level(level)
    try:
        want = one_at_a_time(Sequences(decoder, num_rows), drawing)
        sequences = Sequences(decoder, num_rows)
        found = sequences.generate(drawing, steps, num_threads=num_threads)
    finally:
        _cpu.set_kernel_level(-1)
    assert found == [tokens[:steps] for tokens in want]


def test_a_call_goes_on_where_another_ended():
    decoder = make(**SHARED)
    whole, parts = Sequences(decoder, 20), Sequences(decoder, 20)
    want = whole.generate(drawing_of(20), 12, num_threads=2)
    first = parts.generate(drawing_of(20), 5, num_threads=2)
    parts.ids, parts.positions = torch.tensor([tokens[-1][0] for tokens in first]), parts.positions + 5
    rest = parts.generate(drawing_of(20), 7, num_threads=2)
    assert [a + b for a, b in zip(first, rest, strict=True)] == want


def test_plain_torch_generates_the_same():
    drawing = drawing_of(6, limit=9, stop_ids=(3, 20), greedy=(2,))
    want = Sequences(make(), 6).generate(drawing, 10)
    for decoder in (make(torch.float64), make()):
        decoder._kernel = None
        found = Sequences(decoder, 6).generate(drawing, 10)
        assert [[token for token, _ in row] for row in found] == [[token for token, _ in row] for row in want]
        theirs, ours = (torch.tensor([logprob for row in rows for _, logprob in row]) for rows in (found, want))
        torch.testing.assert_close(theirs, ours, atol=2e-5, rtol=2e-5)


def test_it_needs_pages_for_what_it_feeds_and_no_more():
    """At the limit a token is drawn and not fed: 2 pages hold positions 0 to 7, which give the tokens at 1 to 8."""
    decoder = make()
    drawing = drawing_of(3, limit=2 * PAGE_SIZE + 1)
    assert [len(tokens) for tokens in Sequences(decoder, 3, num_pages=2).generate(drawing, 30)] == [8, 8, 8]
    sequences = Sequences(decoder, 3, num_pages=2)
    with pytest.raises(ArgumentError, match=r"row 1, position 0\), or those that follow it"):
        sequences.generate(replace(drawing, limits=drawing.limits + torch.tensor([0, 1, 0])), 30)
    assert all(part.isnan().all() for part in sequences.keys + sequences.values)
    assert [len(tokens) for tokens in sequences.generate(drawing_of(3), 2 * PAGE_SIZE)] == [8, 8, 8]


@pytest.mark.parametrize("num_threads", [1, 2])
def test_a_row_that_is_not_finite_ends_and_spoils_no_other(num_threads):
    decoder, num_rows = make(**SHARED), 40
    want = Sequences(decoder, num_rows).generate(drawing_of(num_rows), 6)
    sequences = Sequences(decoder, num_rows)
    token = want[33][2][0]
    decoder.embedding[token] = torch.nan
    found = sequences.generate(drawing_of(num_rows), 6, num_threads=num_threads)
    num_spoilt = 0
    for first, ours, theirs in zip(sequences.ids.tolist(), found, want, strict=True):
        fed = [first, *(id_ for id_, _ in theirs[:5])]
        if token in fed:
            num_spoilt += 1
            *ours, (_, logprob) = ours
            assert not math.isfinite(logprob)
            theirs = theirs[: fed.index(token)]
        assert ours == theirs
    assert 1 <= num_spoilt < num_rows


@pytest.mark.process
@pytest.mark.parametrize("num_rows", [3, 40])
def test_an_interrupt_ends_it_with_the_step_that_it_is_in(num_rows):
    decoder = make(**SHARED, num_positions=4096)
    sequences, interrupt = Sequences(decoder, num_rows, num_pages=1024), torch.ones(1, dtype=torch.int64)
    drawing = drawing_of(num_rows, limit=4096)
    first = sequences.generate(drawing, 4000, interrupt=interrupt, num_threads=2)
    assert [len(tokens) for tokens in first] == [1] * num_rows
    interrupt.zero_()
    # It is set while the call is under way, from another thread: the steps may differ, their tokens do not.
    timer = threading.Timer(0.02, interrupt.fill_, [1])
    timer.start()
    found = sequences.generate(drawing, 4000, interrupt=interrupt, num_threads=2)
    timer.join()
    assert all(len(tokens) < 4000 for tokens in found)
    longest = max(len(tokens) for tokens in found)
    want = Sequences(decoder, num_rows, num_pages=1024).generate(drawing, longest)
    assert found == [tokens[: len(ours)] for tokens, ours in zip(want, found, strict=True)]


def test_caches_released_during_a_call_live_as_long_as_it():
    """As where one thread generates and another one empties the lists that both have."""
    decoder = make(**SHARED, num_positions=4096)
    sequences, interrupt = Sequences(decoder, 40, num_pages=1024), torch.zeros(1, dtype=torch.int64)
    caches = [weakref.ref(cache) for cache in sequences.keys + sequences.values]
    options = {"drawing": drawing_of(40, limit=4096), "steps": 4000, "interrupt": interrupt, "num_threads": 1}
    thread = threading.Thread(target=sequences.generate, kwargs=options)
    thread.start()
    while sequences.keys[0][sequences.tables[0, 0], 1].isnan().any():  # position 1: the call is under way
        assert thread.is_alive()
    sequences.keys.clear()
    sequences.values.clear()
    are_kept, is_under_way = [cache() is not None for cache in caches], thread.is_alive()
    interrupt.fill_(1)
    thread.join()
    assert is_under_way
    assert all(are_kept)
    assert [cache() for cache in caches] == [None] * len(caches)


def test_what_does_not_fit_is_refused():
    decoder = make()
    sequences, drawing = Sequences(decoder, 3), drawing_of(3)
    for name, other, told in (
        ("temperature", torch.ones(2), "temperature"),
        ("streams", torch.ones(3), "streams"),
        ("is_greedy", torch.ones(3), "is_greedy"),
        ("limits", torch.full((3,), 65), r"limits\[0\] is 65; allowed are up to 64"),
        ("stop_ids", torch.zeros(2, 1, dtype=torch.int64), "stop_ids"),
    ):
        with pytest.raises(ArgumentError, match=told):
            sequences.generate(replace(drawing, **{name: other}), 4)
    with pytest.raises(ArgumentError, match="steps is 0"):
        sequences.generate(drawing, 0)
    with pytest.raises(ArgumentError, match="interrupt"):
        sequences.generate(drawing, 4, interrupt=torch.zeros(2, dtype=torch.int64))
    for name, value in itertools.product(("ids", "positions", "rows"), (-1, 5000)):
        sequences = Sequences(decoder, 3)
        getattr(sequences, name)[2] = value
        with pytest.raises(ArgumentError):
            sequences.generate(drawing, 4)
        assert all(part.isnan().all() for part in sequences.keys + sequences.values)
