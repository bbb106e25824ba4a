"""Which layers lie on which stage of a pipeline."""

import pytest

from rl_engine.backends.megatron.architectures import split_layers

pytestmark = pytest.mark.process


def test_first_and_last_stages_have_fewer_layers_if_uneven():
    assert split_layers(94, 8, 1) == [11, 12, 12, 12, 12, 12, 12, 11]  # Qwen3-235B
    assert split_layers(61, 16, 1) == [2, *[4] * 14, 3]  # DeepSeek-V3
    assert split_layers(3, 2, 1) == [1, 2]
    assert split_layers(8, 2, 2) == [2, 2, 2, 2]
    assert min(split_layers(2, 3, 1)) == 0  # too few: refused
