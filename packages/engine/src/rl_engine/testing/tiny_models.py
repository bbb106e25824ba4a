"""A tiny random Qwen3 folder with a character tokenizer, for tests that want an ordinary model folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

CHARACTERS = "0123456789+-*/=() .,?abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ\n"
SPECIAL = ("<pad>", "<eos>", "<user>", "<assistant>")
CHAT_TEMPLATE = (
    "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}<eos>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def write_tiny_model(path: str | Path, seed: int = 0, **config: Any) -> Path:
    """Write a random Qwen3 causal LM (about 30 k parameters) and its tokenizer as a Hugging Face folder.

    Args:
        path: Folder to make.
        seed: Of the weights.
        **config: Overrides of `transformers.Qwen3Config`, such as `hidden_size`.

    Returns:
        The folder. Its tokenizer has one token per character of `CHARACTERS`, `<pad>`, `<eos>` and two chat roles.
    """
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    folder = Path(path)
    sizes: dict[str, Any] = {
        "vocab_size": len(CHARACTERS) + len(SPECIAL),
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 512,
        "tie_word_embeddings": True,
        "pad_token_id": 0,
        "eos_token_id": 1,
        "bos_token_id": None,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(Qwen3Config(**(sizes | config)))
    model.save_pretrained(folder)
    _tokenizer().save_pretrained(folder)
    return folder


def _tokenizer() -> Any:
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: index for index, token in enumerate((*SPECIAL, *CHARACTERS))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<eos>",
        additional_special_tokens=["<user>", "<assistant>"],
        chat_template=CHAT_TEMPLATE,
    )
