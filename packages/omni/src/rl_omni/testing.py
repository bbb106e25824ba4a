"""Tiny pipelines and policies with random weights for tests and examples."""

from __future__ import annotations

import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import torch

from rl_omni.actions import write_policy
from rl_omni.errors import PipelineError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

VOCAB_SIZE = 16
"""Tokens of the tiny text encoder; the last one ends a prompt."""
_WIDTH = 32
_SETTINGS: dict[str, dict[str, Any]] = {
    "SD3Transformer2DModel": {
        "sample_size": 8,
        "patch_size": 2,
        "in_channels": 3,
        "out_channels": 3,
        "num_layers": 2,
        "attention_head_dim": 16,
        "num_attention_heads": 2,
        "caption_projection_dim": _WIDTH,
        "pooled_projection_dim": _WIDTH,
        "pos_embed_max_size": 8,
    },
    "FluxTransformer2DModel": {
        "in_channels": 12,
        "num_layers": 1,
        "num_single_layers": 1,
        "attention_head_dim": 16,
        "num_attention_heads": 2,
        "pooled_projection_dim": _WIDTH,
        "axes_dims_rope": (4, 6, 6),
    },
    "QwenImageTransformer2DModel": {
        "in_channels": 12,
        "out_channels": 3,
        "num_layers": 1,
        "attention_head_dim": 16,
        "num_attention_heads": 2,
        "axes_dims_rope": (4, 6, 6),
    },
}


def write_tiny_pipeline(folder: str | Path, transformer: str = "SD3Transformer2DModel", *, seed: int = 0) -> Path:
    """Write a pipeline of pixels (no VAE) with a tiny transformer of a class of diffusers; returns its folder.

    Raises:
        PipelineError: the class is not one of `rl_omni.pipeline.TRANSFORMERS`.
    """
    import diffusers
    from diffusers.schedulers.scheduling_flow_match_euler_discrete import FlowMatchEulerDiscreteScheduler
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from transformers import CLIPTextConfig, CLIPTextModelWithProjection, PreTrainedTokenizerFast

    if transformer not in _SETTINGS:
        raise PipelineError(f"there is no tiny {transformer!r}; there are {', '.join(_SETTINGS)}")
    root = Path(folder)
    text = CLIPTextConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=_WIDTH,
        intermediate_size=64,
        projection_dim=_WIDTH,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=4,
        bos_token_id=VOCAB_SIZE - 2,
        eos_token_id=VOCAB_SIZE - 1,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        kind: Any = getattr(diffusers, transformer)
        kind(joint_attention_dim=_WIDTH, **_SETTINGS[transformer]).save_pretrained(root / "transformer")
        CLIPTextModelWithProjection(text).save_pretrained(root / "text_encoder")
    FlowMatchEulerDiscreteScheduler().save_pretrained(root / "scheduler")
    vocabulary = {word: index for index, word in enumerate(("?", "red", "green", "blue"))}
    words = Tokenizer(WordLevel(vocabulary, unk_token="?"))
    words.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="?").save_pretrained(root / "tokenizer")
    index = {
        "_class_name": "DiffusionPipeline",
        "transformer": ["diffusers", transformer],
        "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"],
        "text_encoder": ["transformers", "CLIPTextModelWithProjection"],
        "tokenizer": ["transformers", "PreTrainedTokenizerFast"],
    }
    (root / "model_index.json").write_text(json.dumps(index, indent=2))
    return root


_SPECIAL = ("<pad>", "<eos>", "<unk>", "<vision>", "<image>", "<video>", "</vision>")
_TEMPLATE = (
    "{% for message in messages %}{% if message['content'] is string %}{{ message['content'] }} {% else %}"
    "{% for part in message['content'] %}{% if part['type'] == 'image' %}<vision><image></vision>"
    "{% else %} {{ part['text'] }} {% endif %}{% endfor %}{% endif %}<eos>{% endfor %}"
)


def write_tiny_policy(
    folder: str | Path,
    head: Mapping[str, Any],
    words: Sequence[str],
    *,
    patch_size: int = 4,
    width: int = 32,
    seed: int = 0,
) -> Path:
    """Write an action policy over a random vision-language backbone of the family Qwen3-VL; returns its folder.

    Args:
        folder: Written to.
        head: Head, as `rl_omni.actions.write_policy` takes it.
        words: Words of the instructions; any other is unknown.
        patch_size: Pixels of a patch's side; the backbone sees a token for each two by two of them.
        width: Hidden size.
        seed: Seed of the weights.
    """
    from tokenizers import AddedToken, Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import AutoModel, PreTrainedTokenizerFast, Qwen3VLConfig
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    vocabulary = {word: index for index, word in enumerate((*_SPECIAL, *words))}
    inner = Tokenizer(WordLevel(vocabulary, unk_token="<unk>"))
    inner.add_special_tokens([AddedToken(token, normalized=False) for token in _SPECIAL])
    inner.pre_tokenizer = WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", chat_template=_TEMPLATE
    )
    ids: dict[str, Any] = {
        f"{name}_token_id": 3 + i for i, name in enumerate(("vision_start", "image", "video", "vision_end"))
    }
    config = Qwen3VLConfig(
        text_config={
            "vocab_size": len(vocabulary),
            "hidden_size": width,
            "intermediate_size": 2 * width,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "head_dim": width // 4,
            "max_position_embeddings": 512,
            "bos_token_id": None,
            "eos_token_id": 1,
            "pad_token_id": 0,
            "initializer_range": 0.1,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e4,
                "mrope_section": [width // 16, width // 32, width // 32],
                "mrope_interleaved": True,
            },
        },
        vision_config={
            "depth": 2,
            "hidden_size": width,
            "num_heads": 4,
            "intermediate_size": 2 * width,
            "patch_size": patch_size,
            "out_hidden_size": width,
            "deepstack_visual_indexes": [0],
            "num_position_embeddings": 64,
            "initializer_range": 0.1,
        },
        **ids,
    )
    feature = (2 * patch_size) ** 2
    size = {"shortest_edge": feature, "longest_edge": 64 * feature}
    with TemporaryDirectory() as draft, torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: Any = AutoModel.from_config(config, dtype=torch.float32)
        model.save_pretrained(draft)
        tokenizer.save_pretrained(draft)
        Qwen2VLImageProcessorPil(patch_size=patch_size, merge_size=2, temporal_patch_size=2, size=size).save_pretrained(
            draft
        )
        return write_policy(folder, draft, head, seed=seed)
