"""Generation's kernels on a CPU: the pass of a decoder, attention over pages, and the draw of tokens.

Beside each are plain torch and what its matrix products, or reading its bytes once, take in the same run.
"""

from __future__ import annotations

from copy import copy
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional

from rl_csrc import _cpu, paged, sampling
from rl_csrc.inference.decoder import Decoder, DecoderLayer, Drawing, pack_linear

if TYPE_CHECKING:
    from collections.abc import Callable

    from rl_bench import Run

SEQUENCES, CONTEXT, PAGE, STEPS = 64, 512, 16, 16
HEADS, KV_HEADS, HEAD_SIZE = 8, 4, 64


def main(run: Run) -> None:
    torch.manual_seed(0)
    run.parameters(threads=torch.get_num_threads(), level=_cpu.kernel_level(), sequences=SEQUENCES, context=CONTEXT)
    with torch.no_grad():
        _attention(run)
        for hidden, inner, num_layers in ((192, 512, 2), (1024, 3072, 2 if run.quick else 8)):
            _decoder(run, hidden, inner, num_layers)
        _draw(run)


def _pages(num_layers: int) -> tuple[list[Tensor], list[Tensor], Tensor]:
    """Caches of keys and of values, and the table of their pages, which lie in no order."""
    num_pages = SEQUENCES * CONTEXT // PAGE
    keys, values = ([torch.randn(num_pages, PAGE, KV_HEADS, HEAD_SIZE) for _ in range(num_layers)] for _ in range(2))
    return keys, values, torch.randperm(num_pages).view(SEQUENCES, -1)


def _attention(run: Run) -> None:
    (keys,), (values,), tables = _pages(1)
    query = torch.randn(SEQUENCES, HEADS, HEAD_SIZE)
    key, value = torch.randn(2, SEQUENCES, KV_HEADS, HEAD_SIZE)
    rows, positions = torch.arange(SEQUENCES), torch.full((SEQUENCES,), CONTEXT - 1)
    arguments = (query, key, value, keys, values, tables, rows, positions)
    # what SDPA would take if every sequence lay in one piece
    whole_keys, whole_values = (x[tables].flatten(1, 2).transpose(1, 2).contiguous() for x in (keys, values))
    run.compare(
        f"attention over pages, {SEQUENCES} tokens",
        {"rl_csrc": partial(paged.attention, *arguments, scaling=0.125)},
        peers={
            "plain torch": partial(paged.reference, *arguments, scaling=0.125),
            "SDPA without pages": lambda: functional.scaled_dot_product_attention(
                query[:, :, None], whole_keys, whole_values, enable_gqa=True
            ),
        },
        limit={"read keys and values": lambda: (keys.sum(), values.sum())},
        unit="ms",
    )


def _decoder(run: Run, hidden: int, inner: int, num_layers: int) -> None:
    vocab = 8192
    heads = HEADS * HEAD_SIZE
    shapes = {
        "qkv": (heads + 2 * KV_HEADS * HEAD_SIZE, hidden), "out": (hidden, heads),
        "gate_up": (2 * inner, hidden), "down": (hidden, inner),
    }  # fmt: skip
    weights = [
        {name: torch.randn(shape) * shape[1] ** -0.5 for name, shape in shapes.items()} for _ in range(num_layers)
    ]
    head = torch.randn(vocab, hidden) * hidden**-0.5
    layers = [
        DecoderLayer(
            **{name: pack_linear(weight) for name, weight in each.items()},
            input_norm=torch.ones(hidden),
            post_norm=torch.ones(hidden),
        )
        for each in weights
    ]
    angles = torch.rand(CONTEXT, HEAD_SIZE // 2)
    decoder = Decoder(
        embedding=head, layers=layers, norm=torch.ones(hidden), head=pack_linear(head),
        cos=angles.cos(), sin=angles.sin(), num_heads=HEADS, num_kv_heads=KV_HEADS, eps=1e-6,
    )  # fmt: skip
    plain = copy(decoder)  # its reference takes weights out of their panels at each call, which plain torch need not
    plain.layers = tuple(
        replace(layer, **{name: partial(functional.linear, weight=weight) for name, weight in each.items()})
        for layer, each in zip(layers, weights, strict=True)
    )
    plain.head = partial(functional.linear, weight=head)
    keys, values, tables = _pages(num_layers)
    ids, rows = torch.randint(vocab, (SEQUENCES,)), torch.arange(SEQUENCES)
    inputs = {width: torch.randn(SEQUENCES, width) for width in {shape[1] for shape in shapes.values()}}

    def products() -> None:
        for each in weights:
            for weight in each.values():
                functional.linear(inputs[weight.shape[1]], weight)
        functional.linear(inputs[hidden], head)

    for name, context in (("short", 32), ("full", CONTEXT)):
        positions = torch.full((SEQUENCES,), context - 1)
        arguments = (ids, positions, rows, tables, keys, values)
        run.compare(
            f"one token of {SEQUENCES} sequences, {num_layers} layers of {hidden}, {name} context",
            {"rl_csrc": partial(decoder, *arguments)},
            peers={"plain torch": partial(plain.reference, *arguments)},
            limit={"matrix products alone": products},
            unit="ms",
        )
    _generate(run, decoder, ids, (rows, tables, keys, values), products)


def _generate(run: Run, decoder: Decoder, ids: Tensor, places: tuple[Any, ...], products: Callable[[], None]) -> None:
    """Several steps in one call, and the same by a call of the pass and one of the draw for each."""
    drawing = Drawing(
        temperature=torch.ones(SEQUENCES),
        streams=sampling.streams_of(torch.arange(SEQUENCES)),
        limits=torch.full((SEQUENCES,), CONTEXT),
        stop_ids=torch.full((SEQUENCES, 1), -1),
    )
    start, everyone = torch.full((SEQUENCES,), 32), torch.arange(SEQUENCES)

    def step_by_step() -> None:
        new, positions = ids, start
        for _ in range(STEPS):
            logits = decoder(new, positions, *places)
            positions = positions + 1
            new, _ = sampling.draw(logits, **drawing.of(everyone), positions=positions)

    run.compare(
        f"{STEPS} tokens of {SEQUENCES} sequences drawn, {len(decoder.layers)} layers of {decoder.norm.numel()}",
        {
            "rl_csrc, one call": partial(decoder.generate, ids, start, *places, drawing=drawing, steps=STEPS),
            "rl_csrc, two calls a step": step_by_step,
        },
        limit={"matrix products alone": lambda: [products() for _ in range(STEPS)]},
        unit="ms",
    )


def _draw(run: Run) -> None:
    logits = torch.randn(SEQUENCES, 151_936)
    temperature, streams = torch.ones(SEQUENCES), sampling.streams_of(torch.arange(SEQUENCES))
    arguments = {"temperature": temperature, "streams": streams, "positions": torch.full((SEQUENCES,), 7)}
    run.compare(
        f"draw {SEQUENCES} tokens of 151,936, with log-probs",
        {"rl_csrc": partial(sampling.draw, logits, **arguments)},
        peers={
            "plain torch": partial(sampling.reference, logits, **arguments),
            "softmax + multinomial (no log-probs)": lambda: torch.multinomial(logits.softmax(-1), 1),
        },
        limit={"read": lambda: _cpu.read_floor(logits)},
        unit="ms",
    )
