"""Tiny pipelines with random weights for tests and examples, saved as diffusers saves them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from rl_omni.errors import PipelineError

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
