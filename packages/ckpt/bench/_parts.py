"""What one core has to do for a sync, each part alone: the floor under what a whole sync can reach."""

import torch
from packages.ckpt.bench._child import digest

from rl_ckpt.tensors.digest import LEAF_BYTES, leaves_of, pack_leaves, unpack_leaves

SLOT_BYTES = 8 << 20
NUM_SLOTS = 4


def raw(tensor):
    return tensor.view(-1).view(torch.uint8)


def pieces(tensors, slots):
    """Every tensor in pieces of at most a slot, each with the slot that it would be in."""
    count = 0
    for tensor in tensors.values():
        for piece in raw(tensor).split(SLOT_BYTES):
            yield piece, slots[count % NUM_SLOTS][: piece.numel()]
            count += 1


def measure(run, weights, mine, num_bytes):
    """Copies beside copies that verify, and digests that the copy does not hide."""
    slots = [torch.randint(0, 256, (SLOT_BYTES,), dtype=torch.uint8) for _ in range(NUM_SLOTS)]

    def copy():
        for piece, slot in pieces(mine, slots):
            piece.copy_(slot)

    def send():
        for piece, slot in pieces(weights, slots):
            pack_leaves(piece, 0, slot, 0, piece.numel())

    def receive_into():
        for piece, slot in pieces(mine, slots):
            unpack_leaves(slot, [(piece, 0, 0, piece.numel())])

    def iterate():
        for piece, slot in pieces(mine, slots):
            leaves_of(slot)
            piece.copy_(slot)

    run.compare(
        "one core's part of a sync, alone",
        {
            "sender over shm: copy into the ring, with digests": send,
            "receive_into over shm: copy out of the ring, with digests": receive_into,
            "iterate: digest in the ring, then a copy out of it": iterate,
            "sender over tcp: digests alone": lambda: digest(weights),
        },
        limit={"copy out of the ring": copy},
        unit="GB/s",
        amount=num_bytes / 1e9,
    )


def verification(run, weights):
    """What the digests cost where they are made: packing with them, beside packing without."""
    leaves = [leaf for tensor in weights.values() for leaf in raw(tensor).split(LEAF_BYTES)]
    slot = torch.zeros(LEAF_BYTES, dtype=torch.uint8)

    def with_digests():
        for leaf in leaves:
            pack_leaves(leaf, 0, slot, 0, leaf.numel())

    def without():
        for leaf in leaves:
            slot[: leaf.numel()].copy_(leaf)

    run.compare(
        "verification: packing the weights",
        {"with digests": with_digests},
        limit={"without": without},
        unit="ms",
        goal=">= 0.9 of limit",
    )
