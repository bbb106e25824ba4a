"""Families of vision-language models beyond Qwen's: right in packed rows, or refused by name."""

import json

import pytest
import torch
from transformers import AutoConfig, AutoModelForImageTextToText

from rl_csrc.inference.images import from_patches, to_patches
from rl_engine import BatchError, EngineConfig, Precision, create_engine, describe_model
from rl_engine.losses import sft_loss
from rl_engine.testing import ragged, ragged_batch

IMAGE, BREAK, END = 70, 71, 72
TEXT = {
    "vocab_size": 80, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 128, "pad_token_id": 0,
}  # fmt: skip
VISION = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 8,
    "patch_size": 4, "head_dim": 8,
}  # fmt: skip
RIGHT = {
    "llava": {
        "vision_config": VISION | {"model_type": "clip_vision_model"},
        "text_config": TEXT | {"model_type": "llama"},
        "vision_feature_layer": -1,
    },
    "llava_siglip": {
        "vision_config": VISION | {"model_type": "siglip_vision_model"},
        "text_config": TEXT | {"model_type": "qwen2"},
        "vision_feature_select_strategy": "full",
    },
    "internvl": {
        "vision_config": VISION | {"image_size": [8, 8], "patch_size": [4, 4]},
        "text_config": TEXT | {"model_type": "qwen3"},
    },
    "mistral3": {
        "vision_config": VISION | {"image_size": 24, "model_type": "pixtral"},
        "text_config": TEXT | {"model_type": "mistral", "sliding_window": 6},
        "spatial_merge_size": 2,
    },
}
REFUSED = {
    "gemma3": "Gemma 3",
    "llava_next": "LLaVA-NeXT",
    "llava_onevision": "LLaVA-OneVision",
    "idefics3": "'idefics3'",
}
FEATURES = {"llava": 4, "llava_siglip": 4, "internvl": 1}
"""Features of an image, or tile of one."""
ROWS = [[(16, 8), (8, 24)], [], [(24, 24)], [(8, 8), (8, 8)]]
"""Images of each row: height and width of Mistral 3's, of which the others take as many."""


def write_model(folder, name):
    torch.manual_seed(1)
    kind = name.partition("_siglip")[0]
    place = {"image_token_id" if kind == "internvl" else "image_token_index": IMAGE}
    config = AutoConfig.for_model(kind, **RIGHT[name], **place, tie_word_embeddings=False)
    AutoModelForImageTextToText.from_config(config, dtype=torch.float32).save_pretrained(folder)
    return folder


def built(folder, **changes):
    engine = create_engine("fsdp", EngineConfig(model_path=str(folder), precision=Precision.FLOAT64, **changes))
    engine.initialize()
    return engine


def rows_of(name):
    """(prompt, completion, pixels, sizes) of each row, as the engine takes them."""
    draw, rows = torch.Generator().manual_seed(2), []
    for sizes in ROWS:
        prompt = torch.randint(1, 60, (3,), generator=draw).tolist()
        pixels = torch.empty(0, 48) if name == "mistral3" else torch.empty(0, 3, 8, 8)
        for height, width in sizes:
            if name == "mistral3":
                image = torch.randn(3, height, width, generator=draw)
                pixels = torch.cat([pixels, to_patches(image, 4)])
                run = ([IMAGE] * (width // 8) + [BREAK]) * (height // 8)
            else:
                pixels = torch.cat([pixels, torch.randn(1, 3, 8, 8, generator=draw)])
                run = [IMAGE] * FEATURES[name]
            prompt += [*run, END, 5]
        rows.append((prompt, torch.randint(1, 60, (4,), generator=draw).tolist(), pixels, sizes))
    return rows


def batch_of(name, rows):
    batch = ragged_batch([row[0] for row in rows], [row[1] for row in rows])
    batch["pixel_values"] = ragged([row[2] for row in rows], torch.float32)
    if name == "mistral3":
        batch["image_sizes"] = ragged([torch.tensor(row[3], dtype=torch.int64).view(-1, 2) for row in rows])
    return batch


def oracle(name, folder, rows):
    """Log-probs and gradients of transformers, row by row."""
    load = AutoModelForImageTextToText.from_pretrained
    model, found = load(folder, dtype=torch.float64, attn_implementation="eager").eval(), []
    for prompt, completion, pixels, sizes in rows:
        seen = {}
        if sizes:
            seen = {"pixel_values": pixels.double()}
        if sizes and name == "mistral3":
            sizes = torch.tensor(sizes)
            seen = {"pixel_values": from_patches(pixels.double(), sizes, 4), "image_sizes": sizes}
        logits = model(torch.tensor([prompt + completion]), **seen).logits[0, len(prompt) - 1 : -1]
        found.append(logits.log_softmax(-1).gather(1, torch.tensor(completion)[:, None])[:, 0])
    (-torch.cat(found).mean()).backward()
    return [row.detach() for row in found], {name: value.grad for name, value in model.named_parameters()}


@pytest.mark.process
@pytest.mark.parametrize("name", RIGHT)
def test_a_family_scores_and_learns_as_transformers(tmp_path, name):
    folder, rows = write_model(tmp_path, name), rows_of(name)
    want, gradients = oracle(name, folder, rows)
    for budget in (4096, 24):  # all in one micro-batch, and one of them without an image
        engine = built(folder, max_tokens_per_gpu=budget)
        assert engine.parts.built.scorer.is_packed
        output = engine.forward_backward_batch(batch_of(name, rows), sft_loss)
        assert output.num_micro_batches == 1 or budget < 4096
        for got, expected in zip(output.columns["logprobs"].unbind(), want, strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
        for key, parameter in engine.parts.built.scorer.model.named_parameters():
            if gradients[key] is not None:  # transformers has none where a tower's last layer is not read
                torch.testing.assert_close(parameter.grad, gradients[key], rtol=1e-3, atol=1e-5)
        engine.close()


@pytest.mark.process
@pytest.mark.parametrize("name", RIGHT)
def test_images_of_a_family_that_do_not_fit_are_refused(tmp_path, name):
    engine = built(write_model(tmp_path, name), optimizer=None)
    (prompt, completion, pixels, sizes), *_ = rows_of(name)
    batch = batch_of(name, [([*prompt, IMAGE], completion, pixels, sizes)])
    with pytest.raises(BatchError, match=r"Row 0 has images of \d+ features and \d+ image tokens"):
        engine.forward_backward_batch(batch, None)
    batch["image_grid_thw"] = ragged([[[1, 2, 2]]])
    with pytest.raises(BatchError, match="image_grid_thw and .* does not take it"):
        engine.forward_backward_batch(batch, None)
    with pytest.raises(BatchError, match=r"image tokens \(70\) need pixel_values"):
        engine.forward_backward_batch(ragged_batch([prompt], [completion]), None)
    engine.close()


@pytest.mark.core
@pytest.mark.parametrize("kind", [*RIGHT, *REFUSED])
def test_a_family_takes_images_or_is_refused_by_name(tmp_path, kind):
    config = RIGHT.get(kind, {"vision_config": {"hidden_size": 16}})
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind.partition("_siglip")[0], **config}))
    (tmp_path / "preprocessor_config.json").write_text("{}")
    facts = describe_model(tmp_path)
    assert facts.takes_images == (kind in RIGHT)
    if kind in REFUSED:
        assert REFUSED[kind] in facts.why_blind
        assert "families that take images: Qwen2-VL" in facts.why_blind
