"""Vision-language models: images ride along with a packed batch, and rows score as they do by themselves."""

import pytest
import torch
from csrc.tests.support.video_reference import positions_of
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForImageTextToText

from rl_engine import BatchError, EngineConfig, Precision, create_engine
from rl_engine.losses import sft_loss
from rl_engine.testing import ragged, ragged_batch, write_tiny_model

pytestmark = pytest.mark.process

IMAGE, START, END, VIDEO = 70, 71, 72, 73
TEXT = {
    "vocab_size": 80, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "pad_token_id": 0,
}  # fmt: skip
SIZES = {"depth": 2, "hidden_size": 16, "num_heads": 2, "intermediate_size": 24}
VISION = SIZES | {"patch_size": 4, "out_hidden_size": 32}
TEMPORAL = {"tokens_per_second": 2}
IDS = {"image_token_id": IMAGE, "video_token_id": VIDEO, "vision_start_token_id": START, "vision_end_token_id": END}
QWEN3 = TEXT | {
    "head_dim": 8,
    "rope_parameters": {"rope_type": "default", "mrope_section": [2, 1, 1], "rope_theta": 1e4},
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
NETS = {
    "layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2, "linear_num_value_heads": 2,
    "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "rope_parameters": QWEN3["rope_parameters"] | {"partial_rotary_factor": 1.0},
}  # fmt: skip
MODALITIES = {
    "qwen2_5_vl": {
        "text_config": TEXT | {"rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2]}},
        "vision_config": VISION | TEMPORAL | {"window_size": 16, "fullatt_block_indexes": [1]},
    },
    "qwen3_vl": {
        "text_config": QWEN3,
        "vision_config": VISION | {"deepstack_visual_indexes": [0], "num_position_embeddings": 64},
    },
    "qwen3_vl_moe": {
        "text_config": QWEN3 | EXPERTS,
        "vision_config": VISION | {"deepstack_visual_indexes": [0], "num_position_embeddings": 64},
    },
    "qwen3_5": {"text_config": QWEN3 | NETS, "vision_config": VISION | {"num_position_embeddings": 64}},
    "qwen3_5_moe": {
        "text_config": QWEN3 | NETS | EXPERTS | {"shared_expert_intermediate_size": 24},
        "vision_config": VISION | {"num_position_embeddings": 64},
    },
}
GRIDS = [[[1, 4, 2]], [], [[1, 2, 2], [1, 4, 4]], [[1, 2, 4]]]  # of each row's images; four patches make a token
VIDEO_GRIDS = [[], [[2, 2, 4]], [[1, 2, 2], [2, 4, 2]], [[3, 2, 2]]]  # of each row's videos, frames first


def write_model(folder, kind):
    torch.manual_seed(1)
    config = AutoConfig.for_model(kind, **MODALITIES[kind], **IDS, tie_word_embeddings=False)
    AutoModelForImageTextToText.from_config(config, dtype=torch.float32).save_pretrained(folder)
    return folder


def rows_of(patch_size):
    """(prompt, completion, pixels, grids) of each row."""
    draw, rows = torch.Generator().manual_seed(2), []
    for grids in GRIDS:
        prompt = torch.randint(1, 60, (3,), generator=draw).tolist()
        for grid in grids:
            prompt += [START, *[IMAGE] * (torch.tensor(grid).prod().item() // 4), END, 5]
        completion = torch.randint(1, 60, (4,), generator=draw).tolist()
        patches = sum(torch.tensor(grid).prod().item() for grid in grids)
        rows.append((prompt, completion, torch.randn(patches, patch_size, generator=draw), grids))
    return rows


def with_videos(rows, patch_size, kind):
    """The rows with videos behind their images, and the seconds of a step of each where the model reads them."""
    draw, longer = torch.Generator().manual_seed(3), []
    for (prompt, completion, pixels, grids), videos in zip(rows, VIDEO_GRIDS, strict=True):
        for frames, height, width in videos:
            size = height * width // 4
            # Qwen3 parts frames by their times, written in the text
            parts = [frames] if kind == "qwen2_5_vl" else [1] * frames
            prompt = prompt + [token for part in parts for token in (START, *[VIDEO] * (part * size), END, 6)]
        patches = sum(torch.tensor(grid).prod().item() for grid in videos)
        seconds = torch.arange(1.0, len(videos) + 1.0) * 1.5 if kind == "qwen2_5_vl" else None
        found = torch.randn(patches, patch_size, generator=draw)
        longer.append((prompt, completion, pixels, grids, found, videos, seconds))
    return longer


def batch_of_videos(rows):
    batch = batch_of(rows)
    batch["pixel_values_videos"] = ragged([row[4] for row in rows], torch.float32)
    batch["video_grid_thw"] = ragged([torch.tensor(row[5], dtype=torch.int64).view(-1, 3) for row in rows])
    if rows[0][6] is not None:
        batch["second_per_grid_ts"] = ragged([row[6] for row in rows], torch.float32)
    return batch


def batch_of(rows):
    batch = ragged_batch([row[0] for row in rows], [row[1] for row in rows])
    batch["pixel_values"] = ragged([row[2] for row in rows], torch.float32)
    batch["image_grid_thw"] = ragged([torch.tensor(row[3], dtype=torch.int64).view(-1, 3) for row in rows])
    return batch


def patch_numbers(folder):
    vision = AutoConfig.from_pretrained(folder).vision_config
    return 3 * vision.temporal_patch_size * vision.patch_size**2


def exact(folder):
    load = AutoModelForImageTextToText.from_pretrained
    return load(folder, dtype=torch.float64, attn_implementation="eager", experts_implementation="eager").eval()


def oracle(folder, rows):
    model = exact(folder)
    found = []
    for prompt, completion, pixels, grids, *videos in rows:
        ids = torch.tensor([prompt + completion])
        seen = {}
        if grids:
            seen = {"pixel_values": pixels.double(), "image_grid_thw": torch.tensor(grids)}
        if videos and videos[1]:
            seen |= {"pixel_values_videos": videos[0].double(), "video_grid_thw": torch.tensor(videos[1])}
            seen |= {} if videos[2] is None else {"second_per_grid_ts": videos[2]}
        kinds = (ids == IMAGE).int() + 2 * (ids == VIDEO).int()
        per_second = getattr(model.config.vision_config, "tokens_per_second", None)
        if per_second:  # transformers' own have text overlap with the frames of a video
            seen["position_ids"] = positions_of(kinds[0].tolist(), seen, per_second)[:, None]
        logits = model(ids, mm_token_type_ids=kinds, **seen).logits[0, len(prompt) - 1 : -1]
        found.append(logits.log_softmax(-1).gather(1, torch.tensor(completion)[:, None])[:, 0])
    (-torch.cat(found).mean()).backward()
    return [row.detach() for row in found], {name: value.grad for name, value in model.named_parameters()}


def built(folder, **changes):
    engine = create_engine("fsdp", EngineConfig(model_path=str(folder), precision=Precision.FLOAT64, **changes))
    engine.initialize()
    return engine


@pytest.mark.process
@pytest.mark.parametrize("has_videos", [False, True])
@pytest.mark.parametrize("kind", MODALITIES)
def test_scores_and_gradients_are_those_of_rows_by_themselves(tmp_path, kind, has_videos):
    folder = write_model(tmp_path, kind)
    rows = rows_of(patch_numbers(folder))
    if has_videos:
        rows = with_videos(rows, patch_numbers(folder), kind)
    want, gradients = oracle(folder, rows)
    for budget in (4096, 32 if has_videos else 24):  # all in one micro-batch, and one of them without an image
        engine = built(folder, max_tokens_per_gpu=budget)
        assert engine.parts.built.scorer.is_packed
        output = engine.forward_backward_batch(batch_of_videos(rows) if has_videos else batch_of(rows), sft_loss)
        assert output.num_micro_batches == 1 or budget < 4096
        for got, expected in zip(output.columns["logprobs"].unbind(), want, strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
        for name, parameter in engine.parts.built.scorer.model.named_parameters():
            torch.testing.assert_close(parameter.grad, gradients[name], rtol=1e-3, atol=1e-5)
        engine.close()


@pytest.mark.process
@pytest.mark.parametrize("kind", MODALITIES)
def test_equal_tokens_with_other_pictures_are_not_one_prompt(tmp_path, kind):
    folder = write_model(tmp_path, kind)
    (prompt, completion, pixels, grids), other = rows_of(patch_numbers(folder))[0], torch.Generator().manual_seed(5)
    rows = [(prompt, completion, pixels, grids)] * 2
    rows.append((prompt, completion, torch.randn(pixels.shape, generator=other), grids))
    want, _ = oracle(folder, rows)
    assert (want[0] - want[2]).abs().max() > 1e-3
    engine = built(folder)
    for got, expected in zip(
        engine.forward_backward_batch(batch_of(rows), None).columns["logprobs"].unbind(), want, strict=True
    ):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
    engine.close()


@pytest.mark.process
@pytest.mark.parametrize("kind", ["qwen2_5_vl", "qwen3_vl"])
def test_rows_of_one_prompt_share_its_images(tmp_path, kind):
    """Three answers to a prompt of two images, one to the same tokens with another picture, and one to text."""
    folder, draw = write_model(tmp_path, kind), torch.Generator().manual_seed(6)
    text, (prompt, _, pixels, grids) = rows_of(patch_numbers(folder))[1:3]
    answers = torch.randint(1, 60, (3, 5), generator=draw).tolist()
    rows = [(prompt, answer, pixels, grids) for answer in answers]
    rows.insert(1, (prompt, answers[0], torch.randn(pixels.shape, generator=draw), grids))
    rows.append(text)
    want, gradients = oracle(folder, rows)
    patches = {}
    for shares in (True, False):
        engine = built(folder, prefix_sharing=shares, max_tokens_per_gpu=4096)
        model, seen = engine.parts.built.scorer.model, []
        model.base_model.visual.register_forward_pre_hook(lambda _, args, seen=seen: seen.append(len(args[0])))
        output = engine.forward_backward_batch(batch_of(rows), sft_loss)
        for got, expected in zip(output.columns["logprobs"].unbind(), want, strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(parameter.grad, gradients[name], rtol=1e-3, atol=1e-5)
        patches[shares] = sum(seen)
        engine.close()
    assert patches == {True: 2 * len(pixels), False: 4 * len(pixels)}


@pytest.mark.process
@pytest.mark.parametrize("kind", MODALITIES)
def test_a_placeholder_written_by_the_model_is_a_plain_token(tmp_path, kind):
    """Fed after the prompt, where transformers looks for none: with images, without any, and for a video."""
    folder = write_model(tmp_path, kind)
    rows = [
        (prompt, completion[:1] + drawn + completion[1:], pixels, grids)
        for (prompt, completion, pixels, grids), drawn in zip(
            rows_of(patch_numbers(folder)), ([IMAGE], [IMAGE, VIDEO], [VIDEO, IMAGE], [START, IMAGE, END]), strict=True
        )
    ]
    model = exact(folder)
    want, has_nets = [], "linear_num_key_heads" in MODALITIES[kind]["text_config"]
    for prompt, completion, pixels, grids in rows:
        seen = {"pixel_values": pixels.double(), "image_grid_thw": torch.tensor(grids)} if grids else {}
        ids = torch.tensor([prompt])
        with torch.set_grad_enabled(not has_nets):  # a cached state is written in place
            first = model(ids, mm_token_type_ids=(ids == IMAGE).int(), use_cache=True, **seen)
            rest = model(torch.tensor([completion[:-1]]), past_key_values=first.past_key_values, use_cache=True)
        logits = torch.cat([first.logits[0, -1:], rest.logits[0]])
        want.append(logits.log_softmax(-1).gather(1, torch.tensor(completion)[:, None])[:, 0])
    if not has_nets:
        (-torch.cat(want).mean()).backward()
    engine = built(folder, max_tokens_per_gpu=4096)
    output = engine.forward_backward_batch(batch_of(rows), sft_loss)
    for got, expected in zip(output.columns["logprobs"].unbind(), want, strict=True):
        torch.testing.assert_close(got, expected.detach(), rtol=1e-5, atol=1e-5)
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    for name, parameter in [] if has_nets else engine.parts.built.scorer.model.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[name], rtol=1e-3, atol=1e-5)
    given = batch_of(rows)  # not of the model's own, it stands for an image that is not there
    given["loss_mask"] = ragged([[1, 0, *[1] * (len(row[1]) - 2)] for row in rows])
    with pytest.raises(BatchError, match="Row 0 has grids of 8 patches, 8 patches and 3 image tokens"):
        engine.forward_backward_batch(given, sft_loss)
    engine.close()


@pytest.mark.process
def test_images_that_do_not_fit_are_refused(tmp_path):
    folder = write_model(tmp_path / "sees", "qwen2_5_vl")
    (prompt, completion, pixels, grids), *_ = rows = rows_of(patch_numbers(folder))
    engine = built(folder, optimizer=None)
    for row, message in (
        ((prompt, completion, pixels[:4], grids), "Row 0 has grids of 8 patches, 4 patches and 2 image tokens"),
        (([1, 2], completion, pixels, grids), "8 patches and 0 image tokens; 4 patches belong to each"),
        ((prompt, completion, pixels[:, :5], grids), r"wanted \(patches, 96\) and \(images, 3\)"),
    ):
        with pytest.raises(BatchError, match=message):
            engine.forward_backward_batch(batch_of([row]), None)
    with pytest.raises(BatchError, match=r"hold image tokens \(70\); give pixel_values and image_grid_thw\."):
        engine.forward_backward_batch(ragged_batch([prompt], [completion]), None)
    with pytest.raises(BatchError, match="come together"):
        engine.forward_backward_batch(batch_of(rows).exclude("image_grid_thw"), None)
    with pytest.raises(BatchError, match=r"hold video tokens \(73\); give pixel_values_videos and video_grid_thw\."):
        engine.forward_backward_batch(ragged_batch([[1, VIDEO]], [[2]]), None)
    seen = with_videos(rows, patch_numbers(folder), "qwen2_5_vl")
    timed = batch_of_videos(seen)
    timed["second_per_grid_ts"] = ragged([torch.ones(1)] * len(seen), torch.float32)
    with pytest.raises(BatchError, match="second_per_grid_ts needs one number for each video of video_grid_thw"):
        engine.forward_backward_batch(timed, None)
    engine.close()
    blind = built(write_tiny_model(tmp_path / "blind"), optimizer=None)
    with pytest.raises(BatchError, match="has pixel_values and the model takes no images"):
        blind.forward_backward_batch(batch_of([rows[1]]), None)
    with pytest.raises(BatchError, match="has pixel_values_videos and the model takes no images"):
        blind.forward_backward_batch(batch_of_videos(seen).exclude("pixel_values", "image_grid_thw"), None)
    blind.close()


@pytest.mark.process
def test_time_is_refused_where_the_text_tells_it(tmp_path):
    folder = write_model(tmp_path, "qwen3_vl")
    rows = with_videos(rows_of(patch_numbers(folder)), patch_numbers(folder), "qwen2_5_vl")
    engine = built(folder, optimizer=None)
    with pytest.raises(BatchError, match="has second_per_grid_ts and Qwen3VLModel reads time from its text"):
        engine.forward_backward_batch(batch_of_videos(rows), None)
    engine.close()


@pytest.mark.process
def test_qwen3_5_is_trained_and_saved_with_its_tower(tmp_path):
    """Qwen3.5: as the causal LM that transformers has for its kind it would lose its vision tower."""
    engine = built(write_model(tmp_path / "model", "qwen3_5"))
    found = engine.forward_backward_batch(ragged_batch([[5, 6]], [[10, 11, 12]]), sft_loss).columns["logprobs"].unbind()
    engine.save_model(tmp_path / "out")
    engine.close()
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("model", "out"))
    assert before.keys() == after.keys()
    want, _ = oracle(tmp_path / "out", [([5, 6], [10, 11, 12], None, [])])
    torch.testing.assert_close(found[0], want[0], rtol=1e-4, atol=1e-5, check_dtype=False)
