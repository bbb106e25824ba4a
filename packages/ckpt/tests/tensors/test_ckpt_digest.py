"""Digests of tensors and models against their definition in WIRE.md, computed here from rl-csrc's digest alone."""

import struct

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import rl_ckpt
import rl_csrc
from rl_ckpt.tensors.digest import LEAF_BYTES, combine, leaves_of, unpack_leaves
from rl_ckpt.tensors.spec import as_bytes

SIZES = [0, 1, 7, 8, 255, 4096, LEAF_BYTES - 1, LEAF_BYTES, LEAF_BYTES + 1, 2 * LEAF_BYTES + 9]


def random_bytes(num_bytes):
    return torch.randint(0, 256, (num_bytes,), dtype=torch.uint8)


class Weight(torch.Tensor):
    """As engines have them."""


def test_a_subclass_of_tensor_is_copied_as_its_elements():
    raw, content = as_bytes(torch.arange(100).as_subclass(Weight)), torch.zeros(800, dtype=torch.uint8)
    assert unpack_leaves(raw, [(content, 0, 0, 800)]) == [leaves_of(content)]
    assert torch.equal(content.view(torch.int64), torch.arange(100))


@pytest.mark.parametrize("num_bytes", SIZES)
def test_copying_gives_the_digests_of_the_leaves(num_bytes):
    slot, content = random_bytes(num_bytes), random_bytes(num_bytes)
    expected = [rl_csrc.digest(slot[i : i + LEAF_BYTES]) for i in range(0, max(num_bytes, 1), LEAF_BYTES)]
    assert leaves_of(slot) == expected
    assert unpack_leaves(slot, [(content, 0, 0, len(content))]) == [expected]
    assert torch.equal(content, slot)


def test_a_model_digest_written_out_by_hand():
    weights = {"b": torch.arange(6, dtype=torch.float32).reshape(2, 3), "a": torch.tensor(7, dtype=torch.int64)}
    a = struct.pack("<HBB", 1, 9, 0) + b"a" + struct.pack("<Q", rl_csrc.digest(weights["a"]))
    b = struct.pack("<HBB", 1, 12, 2) + b"b" + struct.pack("<QQQ", 2, 3, rl_csrc.digest(weights["b"]))
    assert rl_ckpt.tree_digest(weights) == rl_csrc.digest(a + b)


def test_a_tensor_of_several_leaves_has_their_combined_digest():
    raw = random_bytes(2 * LEAF_BYTES + 5)
    leaves = [rl_csrc.digest(part) for part in raw.split(LEAF_BYTES)]
    assert combine(leaves_of(raw)) == rl_csrc.digest(struct.pack("<3Q", *leaves))


@given(st.permutations(["x", "y", "z.weight"]))
def test_order_and_strides_do_not_matter(names):
    weights = {"x": torch.ones(3), "y": torch.eye(3), "z.weight": torch.arange(6.0).reshape(2, 3)}
    strided = {name: weights[name].t().contiguous().t() if weights[name].ndim == 2 else weights[name] for name in names}
    assert rl_ckpt.tree_digest(strided) == rl_ckpt.tree_digest(weights.items())


def test_names_dtypes_shapes_and_bits_matter():
    base = {"w": torch.zeros(2, 3)}
    others = [
        {"v": torch.zeros(2, 3)},
        {"w": torch.zeros(3, 2)},
        {"w": torch.zeros(2, 3, dtype=torch.int32)},
        {"w": torch.full((2, 3), -0.0)},
        {"w": torch.zeros(2, 3), "v": torch.zeros(0)},
        {},
    ]
    digests = [rl_ckpt.tree_digest(weights) for weights in [base, *others]]
    assert len(set(digests)) == len(digests)


def test_a_name_that_comes_twice_has_no_digest():
    with pytest.raises(rl_ckpt.TensorError, match="'a' comes twice"):
        rl_ckpt.tree_digest([("a", torch.ones(2)), ("b", torch.ones(2)), ("a", torch.zeros(2))])
