"""Warm-up: the small model of the quickstart and the calculator's recipe, a tiny Qwen3 with a tokenizer of characters.

The result is an ordinary Hugging Face folder, loaded by the same code as any other. The little supervision it gets is
`rl-sft`, rl-engine's own command, in a process of its own; nothing here knows how a model is trained. What that gives
for the quickstart as it is shipped is next to its recipe, in float16: a run of it does not wait for a minute.
`python -m rl_trainer.data.warmup` makes that file anew.
"""

from __future__ import annotations

import json
import random
import sys
from dataclasses import asdict
from hashlib import blake2b
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from rl_engine.errors import naming
from rl_rollout.registry import create_process
from rl_trainer.errors import InputError, TrainerError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rl_trainer.config.schema import WarmupConfig
    from rl_trainer.data import Row

SHIPPED = Path(__file__).parents[1] / "recipes" / "quickstart.safetensors"
"""The quickstart's model after its warm-up; its metadata have the digest of what it was made of."""
_SPECIAL = ("<pad>", "<eos>", "<unk>", "<|system|>", "<|user|>", "<|assistant|>")
_CHARACTERS = ("\n", *map(chr, range(32, 127)))
_CALL = ("<tool_call>", '{"name": "calculator", "arguments": {"expression": "', '"}}', "</tool_call>")
"""Pieces of a calculator call in Hermes format besides its expression; a token each, as a tokenizer of
usual size would have it."""
_WIDTH = 7
"""Characters that the calculator's results, and answers, are right-aligned to: what always has to be copied from the
same distance is soon learned."""
_CONTEXT = 2048
_NUM_TOKENS = 1024
"""Tokens at most of a tokenizer that has words."""
_WORDS = r"[A-Z]?[a-z]+|[A-Z]|[0-9]|[^A-Za-z0-9]+"
"""Pieces that a token is within: words, capitals, digits, and what is between them."""
_INITIALIZER_RANGE = 0.06  # a narrow model finds the rule in 130 steps so; with the usual 0.02 in 330
_LOG_EVERY = 5  # steps that the accuracy is averaged over: few, because it rises fast once the rule is found
_CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>' }}"
    "{% if message['role'] == 'tool' %}{{ message['content'].rjust(" + str(_WIDTH) + ") }}"
    "{% else %}{{ message['content'] }}{% endif %}"
    "{% if message['role'] == 'assistant' %}{{ '<eos>' }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def make_small_model(
    folder: Path,
    config: WarmupConfig,
    rows: Sequence[Row],
    *,
    seed: int,
    timeout_s: float,
    on_line: Callable[[str], None],
) -> Path:
    """Build the model under `folder` and teach it a little, or take the one that is shipped; returns its folder.

    `folder` gets `untrained/`, `sft.jsonl` and `model/`. The ground truths of `rows` are the answers to imitate; with
    `config.calculator_share` a prompt is the expression that the calculator is asked. A row may have whole chats to
    imitate instead, in `demonstrations`; the tokenizer then has their words.

    Raises:
        InputError: there are no rows.
        TrainerError: `rl-sft` failed, or was not done in time; carries its last lines.
    """
    if not rows:
        raise InputError(
            "model.warmup has no rows to imitate, since they are streamed or come from an environment; set model.path, "
            "or a data.format that reads its rows"
        )
    untrained, data, model = folder / "untrained", folder / "sft.jsonl", folder / "model"
    choose, width = random.Random(seed), _WIDTH if config.calculator_share else 0
    given: list[Any] = [chat for row in rows[: config.num_rows] for chat in row.get("demonstrations", ())]
    texts = [message["content"] for chat in given for message in chat]
    chats = given or [
        demonstration(row, has_call=choose.random() < config.calculator_share, width=width)
        for row in rows[: config.num_rows]
    ]
    with naming(untrained):
        num_tokens = write_tokenizer(untrained, has_calculator=config.calculator_share > 0, texts=texts)
        write_config(untrained, config, num_tokens)
    with naming(data):
        data.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
    if digest_of(config, data, seed) == _shipped_digest():
        _unpack(model, config)
        return model
    settings = {
        "model.path": untrained,
        "init": "random",
        "data.path": data,
        "output_dir": model,
        "steps": config.steps,
        "batch_size": config.batch_size,
        "lr": config.lr,
        "seed": seed,
        "target_sequence_accuracy": config.target_accuracy,
        "log_every": _LOG_EVERY,
    }
    _run(
        [sys.executable, "-m", "rl_engine.finetune.cli", *(f"{k}={v}" for k, v in settings.items())], timeout_s, on_line
    )
    return model


def digest_of(config: WarmupConfig, data: Path, seed: int) -> str:
    """Digest of what a model is made of: its size and training, the demonstrations, the seed."""
    about = json.dumps([asdict(config), seed], sort_keys=True).encode()
    return blake2b(about + data.read_bytes(), digest_size=16).hexdigest()


def _shipped_digest() -> str | None:
    from safetensors import safe_open

    if not SHIPPED.is_file():
        return None
    with safe_open(SHIPPED, framework="numpy") as file:
        return file.metadata()["made_of"]


def _unpack(folder: Path, config: WarmupConfig) -> None:
    """The shipped model as the folder that `rl-sft` would have written."""
    from safetensors.numpy import load_file, save_file

    with naming(folder):
        write_config(folder, config, write_tokenizer(folder))
    weights = {name: array.astype("float32") for name, array in load_file(SHIPPED).items()}
    with naming(folder / "model.safetensors"):
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def ship() -> None:
    """Make the quickstart's model, and write it to `SHIPPED`."""
    from safetensors.numpy import load_file, save_file

    from rl_trainer.config import load_config
    from rl_trainer.data import load_datasets

    config = load_config("quickstart")
    assert config.model.warmup is not None, "the recipe has one"
    rows = load_datasets(config.data, seed=config.seed).train
    SHIPPED.unlink(missing_ok=True)
    with TemporaryDirectory() as folder:
        made = make_small_model(
            Path(folder), config.model.warmup, rows, seed=config.seed, timeout_s=3600.0, on_line=print
        )
        made_of = digest_of(config.model.warmup, Path(folder) / "sft.jsonl", config.seed)
        weights = {name: array.astype("float16") for name, array in load_file(made / "model.safetensors").items()}
    save_file(weights, SHIPPED, metadata={"made_of": made_of})


def demonstration(row: Row, *, has_call: bool, width: int = 0) -> list[dict[str, str]]:
    """The chat that answers a row at once, or by asking the calculator first; the answer has `width` characters."""
    result = str(row["reward_model"]["ground_truth"])
    messages: list[dict[str, str]] = list(row["prompt"])
    if has_call:
        start, call, close, end = _CALL
        expression = messages[-1]["content"]
        messages.append({"role": "assistant", "content": f"{start}{call}{expression}{close}{end}"})
        messages.append({"role": "tool", "content": result})
    return [*messages, {"role": "assistant", "content": result.rjust(width)}]


def _run(command: Sequence[str], timeout_s: float, on_line: Callable[[str], None]) -> None:
    def take(line: str) -> bool:
        on_line(line.rstrip())
        return False

    process = create_process(command, name="rl-sft", on_line=take)
    process.start()
    try:
        code = process.wait(timeout_s)
    finally:  # an interrupt too, which the process has not heard of
        process.kill()
    if code != 0:
        raise TrainerError(
            process.with_output(f"rl-sft did not finish within {timeout_s:g} s" if code is None else "rl-sft failed")
        )


def write_config(folder: Path, config: WarmupConfig, num_tokens: int = _NUM_TOKENS) -> None:
    """Write the `config.json` of a small Qwen3 with so many tokens."""
    num_heads = 4
    values: dict[str, Any] = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": num_tokens,
        "hidden_size": config.hidden_size,
        "intermediate_size": 3 * config.hidden_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_heads // 2,
        "head_dim": config.hidden_size // num_heads,
        "max_position_embeddings": _CONTEXT,
        "initializer_range": _INITIALIZER_RANGE,
        "tie_word_embeddings": True,
        "pad_token_id": 0,
        "eos_token_id": 1,
        "bos_token_id": None,
        "dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(values, indent=2) + "\n")


def _vocabulary(*, has_calculator: bool) -> dict[str, int]:
    tokens = (*_SPECIAL, *_CHARACTERS, *(("<|tool|>", *_CALL) if has_calculator else ()))
    return {token: index for index, token in enumerate(tokens)}


def write_tokenizer(folder: Path, *, has_calculator: bool = False, texts: Sequence[str] = ()) -> int:
    """Write a tokenizer with one token per printable ASCII character, and a chat template; returns how many it has.

    With `has_calculator` it has tokens for the tool's turn and for the pieces of a call as well; with `texts` byte pair
    encoding adds the words that they use, and the tool's turn.

    Raises:
        InputError: the `tokenizers` package is not installed (pip line).
    """
    try:
        from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    except ImportError as error:
        raise InputError(
            "the quickstart's model needs tokenizers: pip install 'rl-post-trainer[quickstart]'"
        ) from error
    special = [*_SPECIAL, *(["<|tool|>"] if has_calculator or texts else [])]
    if texts:
        tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
        tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(_WORDS), "isolated")
        trainer = trainers.BpeTrainer(
            vocab_size=_NUM_TOKENS, initial_alphabet=[*_CHARACTERS], special_tokens=special, show_progress=False
        )
        tokenizer.train_from_iterator(texts, trainer)
    else:
        vocabulary = _vocabulary(has_calculator=has_calculator)
        tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
        tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
        tokenizer.add_special_tokens(special)
        tokenizer.add_tokens(list(_CALL) if has_calculator else [])
    tokenizer.decoder = decoders.Fuse()
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    values = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<eos>",
        "pad_token": "<pad>",
        "unk_token": "<unk>",
        "clean_up_tokenization_spaces": False,
        "model_max_length": _CONTEXT,
        "chat_template": _CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(values, indent=2) + "\n")
    return tokenizer.get_vocab_size()


if __name__ == "__main__":
    ship()
