"""Omni thinkers: images, videos and sounds ride along with a packed batch, and rows score as they do by themselves."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForImageTextToText

from rl_engine import BatchError, EngineConfig, ModelFolderError, Precision, create_engine, describe_model
from rl_engine.losses import sft_loss
from rl_engine.testing import ragged, ragged_batch

IMAGE, START, END, VIDEO, SOUND, OPEN, CLOSE = range(70, 77)
MELS = 8
TEXT = {
    "vocab_size": 80, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "pad_token_id": 0, "initializer_range": 0.2,
}  # fmt: skip
VISION = {
    "depth": 2, "hidden_size": 16, "num_heads": 2, "intermediate_size": 24, "patch_size": 4, "out_hidden_size": 32,
    "initializer_range": 0.2,
}  # fmt: skip
TOWER = {
    "d_model": 16, "encoder_layers": 2, "encoder_attention_heads": 2, "encoder_ffn_dim": 24, "num_mel_bins": MELS,
    "output_dim": 32, "max_source_positions": 64, "initializer_range": 0.2,
}  # fmt: skip
ROPE = {"rope_type": "default", "rope_theta": 1e4}
IDS = {
    "image_token_id": IMAGE, "video_token_id": VIDEO, "audio_token_id": SOUND, "vision_start_token_id": START,
    "vision_end_token_id": END, "audio_start_token_id": OPEN, "audio_end_token_id": CLOSE,
}  # fmt: skip
FAMILIES = {
    "qwen2_5_omni": {
        "text_config": TEXT | {"rope_parameters": ROPE | {"mrope_section": [1, 1, 2]}},
        "vision_config": VISION | {"window_size": 16, "fullatt_block_indexes": [1]},
        "audio_config": TOWER | {"n_window": 4},
    },
    "qwen3_omni_moe": {
        "text_config": TEXT
        | {"head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
        | {"rope_parameters": ROPE | {"mrope_section": [2, 1, 1]}},
        "vision_config": VISION | {"deepstack_visual_indexes": [0], "num_position_embeddings": 64},
        "audio_config": TOWER | {"n_window": 50, "n_window_infer": 100, "downsample_hidden_size": 4},
    },
}
TOKENS = {"qwen2_5_omni": {5: 1, 21: 5, 9: 2}, "qwen3_omni_moe": {5: 1, 21: 3, 9: 2, 130: 17}}
"""Tokens of a sound by its frames, after two halvings, or three of each hundred frames."""
ROWS = [("image", 21), (), (9, 5), ("image", "video", 5), (5, "image", "image", 21), ("video",)]
"""Media of each row, in order: sounds as their frames."""
SPEECH = {"talker.model.norm.weight": torch.arange(3.0), "token2wav.scale": torch.ones(2)}


def write_thinker(folder, kind):
    torch.manual_seed(1)
    names = {"image_token_id", "video_token_id", "audio_token_id"} if kind == "qwen2_5_omni" else set()
    ids = {name.replace("token_id", "token_index") if name in names else name: value for name, value in IDS.items()}
    config = AutoConfig.for_model(f"{kind}_thinker", **FAMILIES[kind], **ids)
    AutoModelForImageTextToText.from_config(config, dtype=torch.float32).save_pretrained(folder)
    return folder


def write_whole(folder, kind):
    """The folder of a whole omni model: its thinker under a prefix, and tensors that speak."""
    write_thinker(folder, kind)
    weights = {f"thinker.{name}": value for name, value in load_file(folder / "model.safetensors").items()}
    save_file(weights | SPEECH, folder / "model.safetensors", {"format": "pt"})
    thinker = json.loads((folder / "config.json").read_text())
    whole = {"model_type": kind, "architectures": ["OmniForConditionalGeneration"], "thinker_config": thinker}
    (folder / "config.json").write_text(json.dumps(whole))
    return folder


def rows_of(kind, media=ROWS):
    """(prompt, completion, columns) of each row."""
    draw, rows = torch.Generator().manual_seed(2), []
    for shown in media:
        prompt = torch.randint(1, 60, (3,), generator=draw).tolist()
        columns = {name: [] for name in ("pixel_values", "image_grid_thw", "pixel_values_videos", "video_grid_thw")}
        columns |= {"second_per_grid_ts": [], "input_features": [], "audio_feature_lengths": []}
        for medium in shown:
            if medium == "image":
                columns["pixel_values"].append(torch.randn(8, 96, generator=draw))
                columns["image_grid_thw"].append(torch.tensor([[1, 4, 2]]))
                prompt += [START, IMAGE, IMAGE, END, 5]
            elif medium == "video":
                columns["pixel_values_videos"].append(torch.randn(16, 96, generator=draw))
                columns["video_grid_thw"].append(torch.tensor([[2, 2, 4]]))
                columns["second_per_grid_ts"].append(torch.tensor([1.0]))
                prompt += [START, *[VIDEO] * 4, END, 6]
            else:
                columns["input_features"].append(torch.randn(medium, MELS, generator=draw))
                columns["audio_feature_lengths"].append(torch.tensor([medium]))
                prompt += [OPEN, *[SOUND] * TOKENS[kind][medium], CLOSE, 7]
        completion = torch.randint(1, 60, (4,), generator=draw).tolist()
        rows.append((prompt, completion, {name: torch.cat(parts) for name, parts in columns.items() if parts}))
    return rows


def batch_of(rows):
    batch = ragged_batch([row[0] for row in rows], [row[1] for row in rows])
    found = {name: value for row in rows for name, value in row[2].items()}
    for name, example in found.items():
        batch[name] = ragged([row[2].get(name, example[:0]) for row in rows], example.dtype)
    return batch


def arguments_of(columns):
    """The row's columns as transformers' processors give them."""
    found = {name: value.double() if value.is_floating_point() else value for name, value in columns.items()}
    if (seconds := found.pop("second_per_grid_ts", None)) is not None:
        found["video_second_per_grid"] = seconds
    if (lengths := found.pop("audio_feature_lengths", None)) is not None:
        parts = found["input_features"].split(lengths.tolist())
        found["input_features"] = torch.nn.utils.rnn.pad_sequence(parts, batch_first=True).transpose(1, 2)
        found["feature_attention_mask"] = (torch.arange(lengths.max()) < lengths[:, None]).long()
    return found


def exact(folder, **options):
    load = AutoModelForImageTextToText.from_pretrained
    options |= {"dtype": torch.float64, "attn_implementation": "eager", "experts_implementation": "eager"}
    return load(folder, **options).eval()


def oracle(model, rows):
    found = []
    for prompt, completion, columns in rows:
        ids = torch.tensor([prompt + completion])
        logits = model(ids, attention_mask=torch.ones_like(ids), **arguments_of(columns)).logits[
            0, len(prompt) - 1 : -1
        ]
        found.append(logits.log_softmax(-1).gather(1, torch.tensor(completion)[:, None])[:, 0])
    (-torch.cat(found).mean()).backward()
    return [row.detach() for row in found], {name: value.grad for name, value in model.named_parameters()}


def built(folder, **changes):
    engine = create_engine("fsdp", EngineConfig(model_path=str(folder), precision=Precision.FLOAT64, **changes))
    engine.initialize()
    return engine


def compare(output, want):
    for got, expected in zip(output.columns["logprobs"].unbind(), want, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.process
@pytest.mark.parametrize("kind", FAMILIES)
def test_a_thinker_scores_and_learns_as_transformers(tmp_path, kind):
    folder, rows = write_thinker(tmp_path, kind), rows_of(kind)
    want, gradients = oracle(exact(folder), rows)
    for budget in (4096, 44):  # all in one micro-batch, and some of them without a medium of each kind
        engine = built(folder, max_tokens_per_gpu=budget)
        assert engine.parts.built.scorer.is_packed
        output = engine.forward_backward_batch(batch_of(rows), sft_loss)
        assert output.num_micro_batches == 1 or budget < 4096
        compare(output, want)
        for name, parameter in engine.parts.built.scorer.model.named_parameters():
            if gradients[name] is not None:
                torch.testing.assert_close(parameter.grad, gradients[name], rtol=1e-3, atol=1e-5)
        engine.close()


@pytest.mark.process
def test_rows_of_one_prompt_share_its_sounds(tmp_path):
    """Three answers to a prompt of a picture and two sounds, one to the same tokens with another sound, and text."""
    kind = "qwen2_5_omni"  # of models with experts no row shares a prompt
    folder, draw = write_thinker(tmp_path, kind), torch.Generator().manual_seed(6)
    (prompt, _, columns), text = rows_of(kind, [(21, "image", 9), ()])
    answers = torch.randint(1, 60, (3, 5), generator=draw).tolist()
    other = columns | {"input_features": torch.randn(columns["input_features"].shape, generator=draw)}
    rows = [(prompt, answer, columns) for answer in answers]
    rows = [rows[0], (prompt, answers[0], other), *rows[1:], text]
    want, gradients = oracle(exact(folder), rows)
    assert (want[0] - want[1]).abs().max() > 1e-3
    heard = {}
    for shares in (True, False):
        engine = built(folder, prefix_sharing=shares, max_tokens_per_gpu=4096)
        model, seen = engine.parts.built.scorer.model, []
        tower = model.base_model.audio_tower
        tower.register_forward_pre_hook(
            lambda _, args, given, seen=seen: seen.append(int(given["feature_lens"].sum())), with_kwargs=True
        )
        compare(engine.forward_backward_batch(batch_of(rows), sft_loss), want)
        for name, parameter in model.named_parameters():
            if gradients[name] is not None:
                torch.testing.assert_close(parameter.grad, gradients[name], rtol=1e-3, atol=1e-5)
        heard[shares] = sum(seen)
        engine.close()
    assert heard == {True: 2 * 30, False: 4 * 30}


@pytest.mark.process
@pytest.mark.parametrize("kind", FAMILIES)
def test_a_sound_token_that_the_model_wrote_is_plain(tmp_path, kind):
    """Fed after the prompt, where transformers looks for no sound: in a row with a sound, and in text alone."""
    folder = write_thinker(tmp_path, kind)
    rows = [(prompt, [SOUND, *answer], columns) for prompt, answer, columns in rows_of(kind, [(21,), ()])]
    model, want = exact(folder), []
    for prompt, completion, columns in rows:
        ids = torch.tensor([prompt])
        first = model(ids, attention_mask=torch.ones_like(ids), use_cache=True, **arguments_of(columns))
        rest = model(torch.tensor([completion[:-1]]), past_key_values=first.past_key_values, use_cache=True)
        logits = torch.cat([first.logits[0, -1:], rest.logits[0]])
        want.append(logits.log_softmax(-1).gather(1, torch.tensor(completion)[:, None])[:, 0].detach())
    engine = built(folder)
    for chosen in ([0, 1], [1]):
        compare(engine.forward_backward_batch(batch_of([rows[i] for i in chosen]), None), [want[i] for i in chosen])
    engine.close()


@pytest.mark.process
@pytest.mark.parametrize("kind", FAMILIES)
def test_a_whole_omni_model_is_saved_with_what_speaks(tmp_path, kind):
    """The thinker alone is trained and exported, under the folder's names; the rest is written as it was."""
    source = write_whole(tmp_path / "model", kind)
    before, rows = load_file(source / "model.safetensors"), rows_of(kind, [("image", 9), ()])
    want, _ = oracle(exact(source, config=AutoConfig.from_pretrained(source).thinker_config), rows)
    engine = built(source)
    compare(engine.forward_backward_batch(batch_of(rows), sft_loss), want)
    assert {name for name, _ in engine.get_per_tensor_param()[0]} == before.keys() - SPEECH.keys()
    engine.optimizer_step()
    engine.save_model(tmp_path / "out")
    after = load_file(tmp_path / "out" / "model.safetensors")
    assert after.keys() == before.keys()
    changed = {name for name in after if not torch.equal(after[name], before[name].to(after[name].dtype))}
    assert "thinker.audio_tower.conv_out.weight" in changed or "thinker.audio_tower.conv1.weight" in changed
    assert not changed & SPEECH.keys()
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["model_type"], config["architectures"]) == (kind, ["OmniForConditionalGeneration"])
    engine.close()
    again = built(tmp_path / "out")
    again.close()


@pytest.mark.process
def test_sounds_that_do_not_fit_are_refused(tmp_path):
    engine = built(write_thinker(tmp_path, "qwen2_5_omni"), optimizer=None)
    (prompt, completion, columns), *_ = rows_of("qwen2_5_omni", [(21,)])

    def refused(message, prompt=prompt, **changes):
        batch = batch_of([(prompt, completion, columns | changes)])
        with pytest.raises(BatchError, match=message):
            engine.forward_backward_batch(batch, None)

    refused("make 5 tokens, but 21 frames, 6 audio tokens", [*prompt, SOUND])
    refused("and 2 tokens that open a sound", [*prompt, OPEN])
    refused("Row 0 has 1 sounds of 20 frames", audio_feature_lengths=torch.tensor([20]))
    refused(r"wanted \(frames, 8\)", input_features=torch.zeros(21, 9))
    with pytest.raises(BatchError, match=r"audio tokens \(74\) need input_features and audio_feature_lengths"):
        engine.forward_backward_batch(ragged_batch([prompt], [completion]), None)
    engine.close()


@pytest.mark.core
@pytest.mark.parametrize("kind", FAMILIES)
def test_a_thinker_is_described_by_its_section(tmp_path, kind):
    thinker = FAMILIES[kind] | {"model_type": f"{kind}_thinker"}
    thinker["vision_config"] = thinker["vision_config"] | {"spatial_merge_size": 2}
    for values in (thinker, {"model_type": kind, "thinker_config": thinker}):
        (tmp_path / "config.json").write_text(json.dumps(values))
        (tmp_path / "preprocessor_config.json").write_text("{}")
        facts = describe_model(tmp_path)
        assert (facts.config["vocab_size"], facts.takes_images, facts.takes_audio) == (80, True, True)
        (tmp_path / "preprocessor_config.json").unlink()
        assert not describe_model(tmp_path).takes_audio
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind, "thinker_config": [1]}))
    with pytest.raises(ModelFolderError, match=r"has thinker_config=\[1\]; it must be an object"):
        describe_model(tmp_path)


@pytest.mark.process
@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", FAMILIES)
def test_ranks_with_sounds_and_with_pictures_learn_together(tmp_path, start_ranks, kind):
    """Of two ranks one has a sound where the other has a picture; each reads its own slices of the whole folder."""
    write_whole(tmp_path / "model", kind)
    seen = start_ranks(Path(__file__).parents[1] / "support" / "omni_ranks.py", tmp_path, 2, kind)
    engine = built(tmp_path / "model", max_tokens_per_gpu=4096)
    loss = engine.forward_backward_batch(batch_of(rows_of(kind)), sft_loss).metrics["loss"]
    assert seen["step"] == pytest.approx((loss, engine.optimizer_step()), rel=1e-6)
    alone = {name: tensor.clone() for name, tensor in engine.get_per_tensor_param()[0]}
    engine.close()
    together = load_file(tmp_path / "out" / "model.safetensors")
    assert together.keys() == alone.keys() | SPEECH.keys()
    for name, tensor in alone.items():
        torch.testing.assert_close(together[name], tensor, rtol=1e-5, atol=1e-7)
