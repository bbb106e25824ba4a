"""Weights that change a little from version to version, for chains of differences."""

import torch

LARGE = 3 << 20
"""Numbers of a tensor of several leaves."""


def weights_of(version, *, large=LARGE):
    """One number in 200 is another one in each version, and one small tensor is whole new."""
    generator = torch.Generator().manual_seed(0)
    weights = {"large": torch.randn(large, generator=generator), "small": torch.randn(7, 5, generator=generator)}
    weights["half"] = torch.randn(300, 400, generator=generator).bfloat16()
    for each in range(2, version + 1):
        weights["large"][each::200] += 1
        weights["half"].view(-1)[each::200] += 1
    weights["small"] += version
    return weights
