import pytest

from rl_csrc.inference.images import image_columns

VISION = {"spatial_merge_size": 2, "patch_size": 14}
LINEAR = {"layer_types": ["linear_attention", "full_attention"]}


@pytest.mark.parametrize(
    ("config", "want"),
    [
        ({"model_type": "qwen3"}, False),
        ({"vision_config": VISION}, True),
        ({"vision_config": VISION, "text_config": {"layer_types": ["sliding_attention", "full_attention"]}}, True),
        ({"vision_config": VISION, "text_config": LINEAR}, True),  # Qwen3.5
        ({"vision_config": VISION, "layer_types": ["chunked_attention"]}, False),
        ({"vision_config": {"patch_size": 14}}, False),  # another interface
        ({"vision_config": None}, False),
    ],
)
def test_models_that_take_images_among_packed_tokens(config, want):
    assert bool(image_columns(config)) is want
