"""Test helpers for backends and for code that uses an engine: a fake, a conformance suite, a tiny model folder.

A backend passes when a subclass of `EngineConformance` that builds it is green:

    class TestMyBackend(EngineConformance):
        def make_engine(self, folder, **changes):
            return create_engine("mine", EngineConfig(model_path=str(write_tiny_model(folder)), **changes))
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from rl_engine.batch.micro_batches import CostModel
from rl_engine.batch.packed import ragged, ragged_batch
from rl_engine.checkpoint.hf_folder import DTYPES, publish
from rl_engine.errors import ConfigError
from rl_engine.layers.logprobs import score_logits
from rl_engine.model.export import WeightExport
from rl_engine.model.module_engine import ModuleBackend, ModuleEngine
from rl_engine.model.scorer import Scorer
from rl_engine.model.settings import check_candidates
from rl_engine.testing.conformance import EngineConformance

if TYPE_CHECKING:
    from rl_engine.batch.packed import PackedRows
    from rl_engine.distributed.world import World
    from rl_engine.layers.logprobs import HeadLoss
    from rl_engine.model.module_engine import EngineParts
    from rl_engine.model.scorer import BuiltModel
    from rl_engine.types import EngineConfig, ModelOutput

__all__ = ["EngineConformance", "FakeEngine", "ragged", "ragged_batch", "write_tiny_model"]


class FakeEngine(ModuleEngine):
    """A whole engine around a table of logits: a token depends on the one before alone. One process, CPU, no folder."""

    def __init__(self, config: EngineConfig, *, vocab_size: int = 32) -> None:
        super().__init__(_FakeBackend(config, vocab_size))


class _FakeBackend(ModuleBackend):
    def __init__(self, config: EngineConfig, vocab_size: int) -> None:
        super().__init__(config)
        self._vocab_size = vocab_size

    def check_weights(self) -> None:
        """It draws them."""

    def check(self, world_size: int) -> str | None:
        if world_size != 1:
            raise ConfigError(f"FakeEngine is one process; it cannot run on {world_size} ranks.")
        check_candidates(self.config.num_candidates, self._vocab_size)
        return "a fake has no layers to spare"

    @property
    def needs_group(self) -> bool:
        return False

    def build(self, world: World) -> tuple[BigramScorer, None]:
        return BigramScorer(self.config, self._vocab_size), None

    def parts(self, built: BuiltModel) -> EngineParts:
        return replace(super().parts(built), export=_TableExport(built))


class _TableExport(WeightExport):
    def _write(self, path: str | Path, weights: dict[str, Tensor]) -> None:
        from safetensors.torch import save_file

        publish(path, lambda draft: save_file(weights, draft / "model.safetensors"))


class BigramScorer(Scorer):
    """Scores tokens by a row of logits for each token before them."""

    def __init__(self, config: EngineConfig, vocab_size: int) -> None:
        """Draw the table."""
        generator = torch.Generator().manual_seed(config.seed)
        table = torch.randn(vocab_size, vocab_size, generator=generator, dtype=DTYPES[config.precision])
        super().__init__(nn.Embedding.from_pretrained(table, freeze=config.optimizer is None))
        self._wanted, self._vocab_size = config, vocab_size

    def forward(self, rows: PackedRows, head_loss: HeadLoss | None = None) -> ModelOutput:
        """See `Scorer`."""
        return score_logits(self.model(rows.token_ids[rows.score_index]), rows, self._wanted)

    @property
    def config(self) -> Any:
        """See `Scorer`."""
        return SimpleNamespace(vocab_size=self._vocab_size, get_text_config=SimpleNamespace)

    def cost(self) -> CostModel:
        """See `Scorer`."""
        return CostModel(per_token=1.0, per_pair=0.0, per_score=1.0, windows=())

    def named_weights(self) -> dict[str, Tensor]:
        """See `Scorer`."""
        return {"bigram.weight": next(self.model.parameters())}


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
        seed: Seed of the weights.
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
