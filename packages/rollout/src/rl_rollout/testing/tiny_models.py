"""Random models of a few ten thousand parameters, as Hugging Face folders. Public through `rl_rollout.testing`."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

SPECIAL = ("<pad>", "<eos>", "<unk>")
VISION = ("<vision>", "<image>", "<video>", "</vision>")
"""Tokens of a vision-language model, after the alphabet."""
VISION_NAMES = ("vision_bos_token", "image_token", "video_token", "vision_eos_token")
"""Names of `VISION` in transformers' processors."""

TINY_ALPHABET = "0123456789+-*/=() \nabcdefghijklmnopqrstuvwxyz?.,:"
"""Alphabet of a tiny model's tokenizer: one token per character, after `<pad>` (0), `<eos>` (1) and `<unk>` (2)."""
VOCAB_SIZE = 3 + len(TINY_ALPHABET)
PLAIN_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
VISION_TEMPLATE = (
    "{% for message in messages %}{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}{% if part['type'] == 'image' %}<vision><image></vision>"
    "{% elif part['type'] == 'video' %}<vision><video></vision>"
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}{% endfor %}"
)


def write_tiny_model(folder: Path, *, family: str = "qwen3", seed: int = 0, **overrides: Any) -> Path:
    """Write a random model of a few ten thousand parameters and a character-level tokenizer as a Hugging Face folder.

    Args:
        folder: Written to; made if it is not there.
        family: `qwen3`, `llama`, or any model type that transformers knows and that takes the same config fields.
        seed: Seed of the weights.
        **overrides: Fields of the model's config.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    vocab_size = _write_tokenizer(folder, (), PLAIN_TEMPLATE)
    sizes = _sizes(vocab_size) | {"tie_word_embeddings": family == "qwen3"}
    return _write_model(folder, AutoModelForCausalLM, AutoConfig.for_model(family, **(sizes | overrides)), seed)


def write_tiny_vl_model(
    folder: Path, *, family: str = "qwen2_5_vl", seed: int = 0, patch_size: int = 4, **overrides: Any
) -> Path:
    """Write a random vision-language model with an image processor, and with `<vision><image></vision>` in chats.

    Args:
        folder: Written to; made if it is not there.
        family: `qwen2_5_vl`, `qwen3_vl`, `qwen3_5`, `llava`, `internvl`, `mistral3`, or `qwen3_vl_moe` and
            `qwen3_5_moe` with their experts among `overrides`.
        seed: Seed of the weights.
        patch_size: Pixels of a patch's side; an image has a feature for each two by two of them.
        **overrides: Fields of the language model's config.
    """
    from transformers import AutoConfig, AutoModelForImageTextToText
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    if family in _TILED:
        return _write_tiled(folder, family, seed, overrides)
    vocab_size = _write_tokenizer(folder, VISION, VISION_TEMPLATE)
    text = _sizes(vocab_size) | overrides
    feature = (2 * patch_size) ** 2
    size = {"shortest_edge": feature, "longest_edge": 16 * feature}  # pixels of the smallest and the largest image
    Qwen2VLImageProcessorPil(patch_size=patch_size, merge_size=2, temporal_patch_size=2, size=size).save_pretrained(
        folder
    )
    vision = {"depth": 2, "hidden_size": 16, "num_heads": 2, "intermediate_size": 24, "patch_size": patch_size}
    vision |= {"out_hidden_size": text["hidden_size"], "initializer_range": 0.2}
    vision |= {
        "qwen2_5_vl": {"window_size": 4 * patch_size, "fullatt_block_indexes": [1]},
        "qwen3_vl": {"deepstack_visual_indexes": [0], "num_position_embeddings": 64},
        "qwen3_5": {"num_position_embeddings": 64},
    }[family.removesuffix("_moe")]
    half = text["head_dim"] // 2
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [half // 4, half // 4, half // 2]}
    if family.startswith("qwen3"):
        rope |= {"mrope_section": [half // 2, half // 4, half // 4], "mrope_interleaved": True}
    if family.startswith("qwen3_5"):
        rope["partial_rotary_factor"] = 1.0
        text |= {"layer_types": ["linear_attention", "full_attention"]}
        text |= {f"linear_num_{name}_heads": 2 for name in ("key", "value")}
        text |= {f"linear_{name}_head_dim": 8 for name in ("key", "value")}
    ids = {
        f"{name}_token_id": vocab_size - len(VISION) + index
        for index, name in enumerate(("vision_start", "image", "video", "vision_end"))
    }
    config = AutoConfig.for_model(
        family,
        text_config=text | {"rope_parameters": rope},
        vision_config=vision,
        tie_word_embeddings=False,
        **ids,
    )
    return _write_model(folder, AutoModelForImageTextToText, config, seed)


SOUNDS = ("<audio>", "<sound>", "</audio>")
"""Tokens of sounds, after `VISION`."""


def write_tiny_omni_model(
    folder: Path, *, family: str = "qwen2_5_omni", seed: int = 0, is_whole: bool = False, **overrides: Any
) -> Path:
    """Write a random omni thinker with its processors, and with `<audio><sound></audio>` in chats.

    Args:
        folder: Written to; made if it is not there.
        family: `qwen2_5_omni`, or `qwen3_omni_moe`, of four experts.
        seed: Seed of the weights.
        is_whole: Write it as the thinker of a whole omni model, next to a tensor of the part that speaks.
        **overrides: Fields of the language model's config.
    """
    import torch
    from safetensors.torch import save_file
    from transformers import AutoConfig, AutoModelForImageTextToText, WhisperFeatureExtractor
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    is_mixture = family == "qwen3_omni_moe"
    names = (*VISION_NAMES, "audio_bos_token", "audio_token", "audio_eos_token")
    sound = "{% elif part['type'] == 'audio' %}" + "".join(SOUNDS)
    template = VISION_TEMPLATE.replace("{% else %}{{ part", f"{sound}{{% else %}}{{{{ part")
    vocab_size = _write_tokenizer(folder, (*VISION, *SOUNDS), template, names)
    ids = dict(zip(("vision_start", "image", "video", "vision_end", "audio_start", "audio", "audio_end"),
                   range(vocab_size - 7, vocab_size), strict=True))  # fmt: skip
    keys = {name: f"{name}_token_{'id' if is_mixture or '_' in name else 'index'}" for name in ids}
    ears = WhisperFeatureExtractor(feature_size=16, chunk_length=4, return_attention_mask=True)
    size = {"shortest_edge": 64, "longest_edge": 1024}
    eyes = Qwen2VLImageProcessorPil(patch_size=4, merge_size=2, temporal_patch_size=2, size=size)
    both = ears.to_dict() | eyes.to_dict()
    (folder / "preprocessor_config.json").write_text(json.dumps({k: v for k, v in both.items() if k != "mel_filters"}))
    text = _sizes(vocab_size) | overrides
    vision = {"depth": 2, "hidden_size": 16, "num_heads": 2, "intermediate_size": 24, "patch_size": 4}
    tower = {
        "d_model": 16,
        "encoder_layers": 2,
        "encoder_attention_heads": 2,
        "encoder_ffn_dim": 24,
        "num_mel_bins": 16,
    }
    for part in (vision, tower):
        part |= {"initializer_range": 0.2}
    vision |= {"out_hidden_size": text["hidden_size"]}
    tower |= {"output_dim": text["hidden_size"], "max_source_positions": 64, "n_window": 50}
    half = text["head_dim"] // 2
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": 1e4}
    if is_mixture:
        text |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
        vision |= {"deepstack_visual_indexes": [0], "num_position_embeddings": 64}
        tower |= {"n_window_infer": 100, "downsample_hidden_size": 4}
        rope |= {"mrope_section": [half // 2, half // 4, half // 4], "mrope_interleaved": True}
    else:
        vision |= {"window_size": 16, "fullatt_block_indexes": [1]}
        rope |= {"mrope_section": [half // 4, half // 4, half // 2]}
    config = AutoConfig.for_model(
        f"{family}_thinker",
        text_config=text | {"rope_parameters": rope},
        vision_config=vision,
        audio_config=tower,
        tie_word_embeddings=False,
        **{keys[name]: token_id for name, token_id in ids.items()},
    )
    _write_model(folder, AutoModelForImageTextToText, config, seed)
    if is_whole:
        weights = {f"thinker.{name}": tensor for name, tensor in load_weights(folder).items()}
        save_file(weights | {"talker.scale": torch.ones(1)}, folder / "model.safetensors", {"format": "pt"})
        whole = {"model_type": family, "thinker_config": json.loads((folder / "config.json").read_text())}
        (folder / "config.json").write_text(json.dumps(whole))
    return folder


_TILED = {
    "llava": ("<image>",),
    "internvl": ("<img>", "</img>", "<IMG_CONTEXT>", "<video>"),
    "mistral3": ("[IMG]", "[IMG_BREAK]", "[IMG_END]"),
}
"""Families of one-axis positions, with the special tokens of their processors."""


def _write_tiled(folder: Path, family: str, seed: int, overrides: dict[str, Any]) -> Path:
    """Write a model whose images are tiles of 8 x 8 pixels, or of Mistral 3 patches of 4 x 4 and up to 24 x 24."""
    import transformers
    from transformers import AutoConfig, AutoModelForImageTextToText, AutoTokenizer

    special = _TILED[family]
    place = "<IMG_CONTEXT>" if family == "internvl" else special[0]
    names = {"internvl": ("start_image_token", "end_image_token", "context_image_token", "video_token")}
    template = VISION_TEMPLATE.replace("<vision><image></vision>", place)
    vocab_size = _write_tokenizer(folder, special, template, names.get(family, ()))
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    vision: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    vision |= {"num_attention_heads": 2, "image_size": 8, "patch_size": 4, "initializer_range": 0.2, "head_dim": 8}
    tile = {"height": 8, "width": 8}
    if family == "llava":
        vision |= {"model_type": "clip_vision_model"}
        processor: Any = transformers.CLIPImageProcessorPil(size={"shortest_edge": 8}, crop_size=tile)
        more: dict[str, Any] = {"vision_feature_layer": -1}
    elif family == "internvl":
        vision |= {"image_size": [8, 8], "patch_size": [4, 4]}
        processor = transformers.GotOcr2ImageProcessorPil(size=tile, max_patches=4)
        more = {"image_seq_length": 1, "downsample_ratio": 0.5}
    else:
        vision |= {"image_size": 24, "model_type": "pixtral"}
        processor = transformers.PixtralImageProcessorPil(patch_size=4, size={"longest_edge": 24})
        more = {"spatial_merge_size": 2}
    processor.save_pretrained(folder)
    text = {"model_type": "mistral" if family == "mistral3" else "qwen2", **_sizes(vocab_size), **overrides}
    place_id = tokenizer.convert_tokens_to_ids(place)
    ids = {"image_token_id" if family == "internvl" else "image_token_index": place_id}
    config = AutoConfig.for_model(
        family, text_config=text, vision_config=vision, tie_word_embeddings=False, **ids, **more
    )
    return _write_model(folder, AutoModelForImageTextToText, config, seed)


def encoded_tone(kind: str, hertz: float, *, seconds: float = 1.0, rate: int = 16_000) -> bytes:
    """A sine as a file, by PyAV: `wav`, `flac`, `mp3` or another format of FFmpeg with an encoder of its own."""
    import io

    import av
    import numpy as np

    file, wave = io.BytesIO(), np.sin(2 * np.pi * hertz * np.arange(round(seconds * rate)) / rate)
    with av.open(file, "w", format=kind) as container:
        codec = {"wav": "pcm_s16le", "mp3": "libmp3lame"}.get(kind, kind)
        stream: Any = container.add_stream(codec, rate=rate, layout="mono")
        frame = av.AudioFrame.from_ndarray((16_000 * wave).astype(np.int16)[None], format="s16", layout="mono")
        frame.sample_rate = rate
        fitted = av.AudioResampler(format=stream.format.name, layout="mono", rate=rate).resample(frame)
        for part in (*fitted, None):
            container.mux(stream.encode(part))
    return file.getvalue()


def load_weights(folder: Path | str) -> dict[str, Tensor]:
    """Load the weights of a model folder, by name."""
    from safetensors.torch import load_file

    return load_file(f"{folder}/model.safetensors")


def _sizes(vocab_size: int) -> dict[str, Any]:
    return {
        "vocab_size": vocab_size,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 256,
        "bos_token_id": None,
        "eos_token_id": 1,
        "pad_token_id": 0,
        # Wide enough that random logits differ clearly, so that greedy decoding has no near ties.
        "initializer_range": 0.2,
    }


def _write_tokenizer(
    folder: Path, special: tuple[str, ...], chat_template: str, names: tuple[str, ...] = VISION_NAMES
) -> int:
    """Write a character-level tokenizer; returns the size of its vocabulary."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocab = {token: i for i, token in enumerate((*SPECIAL, *TINY_ALPHABET, *special))}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in special])
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        extra_special_tokens=dict(zip(names, special, strict=False)),
    )
    wrapped.chat_template = chat_template
    wrapped.save_pretrained(folder)
    return len(vocab)


def _write_model(folder: Path, auto_class: Any, config: Any, seed: int) -> Path:
    import torch

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        auto_class.from_config(config, dtype=torch.float32).save_pretrained(folder)
    return folder
