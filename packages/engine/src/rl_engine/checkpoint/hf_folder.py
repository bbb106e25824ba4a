"""Hugging Face model folders: read one completely or not at all, and write one."""

from __future__ import annotations

import json
import os
import re
import shutil
from fnmatch import fnmatchcase
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rl_csrc.inference.folder_tokens import OMNI, THINKER, FolderTokens, read_folder_tokens, read_model_config
from rl_engine.errors import ModelFolderError, naming
from rl_engine.types import EngineConfig, Head, ModelInit, Mtp, Precision

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from transformers import PreTrainedModel

DTYPES = {
    Precision.FLOAT32: torch.float32,
    Precision.BFLOAT16: torch.bfloat16,
    Precision.FLOAT64: torch.float64,
}

_WEIGHTS = (
    *("*.safetensors", "*.bin", "*.pt", "*.pth", "*.ckpt", "*.gguf", "*.h5", "*.msgpack", "*.onnx", "*.index.json"),
    *("adapter_config.json", "quantize_config.json", "hf_quant_config.json"),
)
"""Files of a model folder that hold weights or describe how others hold them; all others are carried over."""
_TEMPLATES = "additional_chat_templates/*.jinja"


_RANDOM = re.compile(r"^(?!summary|classifier).*(drop|jitter)")
"""Names of a config's rates of dropout and noise; those of heads that are not built here are left out."""
PREFIX = "folder_prefix"
"""Attribute of a config: what the folder's tensor names have before the model's; missing where they have nothing."""
SCORE = "score.weight"
"""The scalar head, as transformers' sequence classifiers name it."""


def trains_narrow(config: EngineConfig) -> bool:
    """Whether activations are narrower than the parameters that the optimizer steps."""
    return config.optimizer is not None and config.precision == Precision.BFLOAT16


def parameter_dtype(config: EngineConfig) -> torch.dtype:
    """Number format of the parameters that the optimizer steps, or of a frozen model."""
    return torch.float32 if trains_narrow(config) else DTYPES[config.precision]


def load_model(
    path: str | Path,
    *,
    init: ModelInit,
    dtype: torch.dtype,
    seed: int,
    head: Head = Head.LM,
    mtp: Mtp = Mtp.REFUSE,
    has_dropout: bool = False,
) -> PreTrainedModel:
    """Build the folder's causal language model, or a sequence classifier with one label on its trunk, on the CPU.

    A scalar head that the folder has not is made of zeros. Layers for multi-token prediction are left out where
    `mtp` allows it. What is random in training is turned off, but with `has_dropout`.

    Raises:
        ModelFolderError: no config, an unknown architecture, no weights, or tensors that are missing, left over or of
            another shape.
    """
    folder = Path(path)
    config = read_config(folder, has_dropout=has_dropout)
    factory = _factory(config, head)
    if init == ModelInit.RANDOM:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = _build(folder, partial(factory.from_config, config, dtype=dtype))
        return _finished(model if head == Head.LM else _with_zero_head(folder, model), has_dropout)
    check_weights(folder, mtp=mtp)
    if block_size(folder) is not None:
        raise ModelFolderError(
            f"The weights of {folder} are quantised (fp8); they are dequantised tensor by tensor, which this model's "
            "tensors do not allow. Give the folder in bfloat16."
        )
    model, info = _build(
        folder, partial(factory.from_pretrained, folder, config=config, dtype=dtype, **_LOADING_OPTIONS)
    )
    if _check_names(folder, head, info):
        model = _with_zero_head(folder, model)
    broken = [name for name, tensor in model.named_parameters() if not torch.isfinite(tensor.sum())]
    if broken:
        raise ModelFolderError(
            f"{folder} has NaN or infinite values in {', '.join(broken[:3])} ({len(broken)} tensors)."
        )
    return _finished(model, has_dropout)


_LOADING_OPTIONS = {
    "output_loading_info": True,
    "ignore_mismatched_sizes": True,  # they are refused here, all at once
    "local_files_only": True,
    "trust_remote_code": False,
    "use_safetensors": True,
}


def _check_names(folder: Path, head: Head, info: Mapping[str, Any]) -> bool:
    """Refuse tensors that are missing, left over or of another shape; returns whether the scalar head is new."""
    ahead = tuple({re.sub(r"(layers\.\d+\.|mtp\.).*", r"\1", name) for name in mtp_names(folder)})  # some are joined
    missing = set(info["missing_keys"])
    unexpected = {name for name in info["unexpected_keys"] if not name.startswith((*ahead, *SPEECH))}
    is_new = head != Head.LM and missing == {SCORE}
    if is_new:
        missing, unexpected = set[str](), {name for name in unexpected if not name.startswith("lm_head.")}
    refuse_tensors(folder, "lacks", missing)
    refuse_tensors(folder, "has, beyond what the architecture takes,", unexpected)
    refuse_tensors(folder, "has with another shape", (key[0] for key in info["mismatched_keys"]))
    return is_new


def check_tensors(path: str | Path, *, head: Head, mtp: Mtp) -> None:
    """Refuse what `load_model` would refuse of a folder's weights but NaN, by the headers of its files.

    Raises:
        ModelFolderError: no weights, or tensors that are missing, left over or of another shape.
    """
    folder = Path(path)
    check_weights(folder, mtp=mtp)
    if block_size(folder) is not None:
        return  # read tensor by tensor, with other names
    config = read_config(folder)
    load = partial(_factory(config, head).from_pretrained, folder, config=config, **_LOADING_OPTIONS)
    try:
        _, info = _build(folder, partial(load, device_map="meta"))
    except ModelFolderError:  # a model that transformers cannot load without memory: loading it raises
        return
    _check_names(folder, head, info)


def empty_model(
    path: str | Path,
    *,
    dtype: torch.dtype | None = None,
    head: Head = Head.LM,
    num_tokens: int | None = None,
    has_dropout: bool = False,
) -> PreTrainedModel:
    """The model that `load_model` builds, without memory for its weights (on the meta device).

    With `num_tokens`, of a vocabulary of so many.

    Raises:
        ModelFolderError: no config, or an unknown architecture.
    """
    folder = Path(path)
    config = read_config(folder, has_dropout=has_dropout)
    factory = _factory(config, head)
    if num_tokens is not None:
        text = config.get_text_config()
        text.vocab_size, text.pad_token_id = num_tokens, None
    with torch.device("meta"):
        return _finished(_build(folder, lambda: factory.from_config(config, dtype=dtype)), has_dropout)


def write_model(path: str | Path, model: PreTrainedModel, weights: dict[str, Tensor], source: str | Path) -> None:
    """Write weights, and the source folder's other files with what training changed; the folder appears complete.

    Args:
        path: The folder.
        model: The trained model, or an empty one like it.
        weights: Its tensors, by the names of a folder.
        source: Folder that it was built from.

    Raises:
        ModelFolderError: a file of `source` cannot be read.
    """

    def write(draft: Path) -> None:
        carry_files(source, draft)
        _save_weights(draft, weights)
        _write_json(draft / "config.json", _changed_config(model, Path(source)))
        if _is_classifier(model) and (padding := padding_id(source)) is not None:
            _write_padding(draft, padding)
        if model.can_generate() and (tokens := folder_tokens(source)).unlisted_id is not None:
            # Others stop at the ids of this file alone.
            file = draft / "generation_config.json"
            values = json.loads(file.read_text()) if file.is_file() else {}
            _write_json(file, values | {"eos_token_id": list(tokens.end_ids)})

    publish(path, write)


def folder_tokens(folder: str | Path) -> FolderTokens:
    """Ids that end a turn: see `rl_csrc.inference.folder_tokens`.

    Raises:
        ModelFolderError: one of the folder's files cannot be read.
    """
    try:
        return read_folder_tokens(folder)
    except ValueError as error:
        raise ModelFolderError(str(error)) from error


def _changed_config(model: PreTrainedModel, source: Path) -> dict[str, Any]:
    """The source's `config.json` with the number format, and with the class and labels of another head."""
    values: dict[str, Any] = json.loads((source / "config.json").read_text())
    values.pop("quantization_config", None)
    dtype, made = str(model.dtype).removeprefix("torch."), model.config.to_dict()
    for section in (values, *(value for value in values.values() if isinstance(value, dict))):
        section.update({key: dtype for key in ("dtype", "torch_dtype") if key in section})
    if not {"dtype", "torch_dtype"} & values.keys():
        values["dtype"] = dtype
    if _is_classifier(model):
        values |= {name: made[name] for name in ("architectures", "id2label", "label2id")}
        values.pop("num_labels", None)
    elif not values.get("architectures") or "Classification" in values["architectures"][0]:
        values |= {"architectures": made["architectures"]}
    return values


def padding_id(folder: str | Path) -> int | None:
    """Id that rows of a sequence classifier are padded with: see `FolderTokens.padding_id`. None without a tokenizer.

    Raises:
        ModelFolderError: the tokenizer has none but the token that ends a turn.
    """
    tokens = folder_tokens(folder)
    found = tokens.padding_id(read_config(Path(folder)).get_text_config().vocab_size)
    if found is None and tokens.texts:
        raise ModelFolderError(
            f"The tokenizer of {folder} has no token to pad with but the one that ends a turn, at which the scalar "
            "head scores a row. Add a pad_token to it."
        )
    return found


def _is_classifier(model: PreTrainedModel) -> bool:
    return "Classification" in type(model).__name__


def _write_padding(folder: Path, token_id: int) -> None:
    """Make `token_id` the padding of a folder's config, and of its tokenizer unless it is."""
    tokens, values = folder_tokens(folder), json.loads((folder / "config.json").read_text())
    for section in (values, values.get("text_config")):
        if section is not None:
            section["pad_token_id"] = token_id
    _write_json(folder / "config.json", values)
    if tokens.ids_by_role.get("pad_token") == token_id:
        return
    for name in ("tokenizer_config.json", "special_tokens_map.json", "tokenizer.json"):
        if not (file := folder / name).is_file():
            continue
        values = json.loads(file.read_text())
        if name != "tokenizer.json":
            values["pad_token"] = tokens.texts[token_id]
        elif values.get("padding"):
            values["padding"] |= {"pad_id": token_id, "pad_token": tokens.texts[token_id]}
        _write_json(file, values)


def _write_json(file: Path, values: dict[str, Any]) -> None:
    with naming(file):
        file.write_text(json.dumps(values, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def publish(path: str | Path, write: Callable[[Path], None]) -> None:
    """Let `write` fill a draft folder, then put that in its place."""
    target = Path(path).absolute()
    draft = target.with_name(f".{target.name}.draft")
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir(parents=True)
    with naming(draft):
        write(draft)
    replace_folder(draft, target)


def carry_files(source: str | Path, target: str | Path) -> None:
    """Copy all files of a model folder but weights and hidden ones; of its subfolders, that of chat templates alone."""
    for file in sorted((*Path(source).glob("*"), *Path(source).glob(_TEMPLATES))):
        is_weight = any(fnmatchcase(file.name, pattern) for pattern in _WEIGHTS)
        if file.is_file() and not file.name.startswith(".") and not is_weight:
            copy = Path(target) / file.relative_to(source)
            copy.parent.mkdir(exist_ok=True)
            with naming(copy):
                shutil.copy2(file, copy)


def replace_folder(draft: Path, target: Path) -> None:
    """Move a finished folder to `target`. At every moment a complete one is at `target` or at `.NAME.previous`."""
    for file in draft.rglob("*"):
        if file.is_file():
            sync_to_disk(file)
    sync_to_disk(draft)
    previous = previous_folder(target)
    if target.exists():
        shutil.rmtree(previous, ignore_errors=True)
        target.rename(previous)
    draft.rename(target)
    sync_to_disk(target.parent)
    shutil.rmtree(previous, ignore_errors=True)


def previous_folder(target: Path) -> Path:
    """Folder that holds the old one while `replace_folder` moves the new one in."""
    return target.with_name(f".{target.name}.previous")


def sync_to_disk(path: Path) -> None:
    """Flush one file or directory."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_config(folder: Path, *, has_dropout: bool = False) -> Any:
    """The folder's transformers config, without what it says of quantised weights (see `block_size`) and dropout.

    Of an omni model, its thinker's, with the prefix of the thinker's tensors as `PREFIX`.

    Args:
        folder: A model folder.
        has_dropout: Leave the rates of `dropout_rates` as they are.

    Raises:
        ModelFolderError: there is none, transformers does not know it, or its weights are quantised in another way.
    """
    from transformers import AutoConfig

    if not folder.is_dir():
        raise ModelFolderError(f"Model folder {folder} does not exist. Download the model first, and give its folder.")
    if (adapter := folder / "adapter_config.json").is_file():  # transformers would load its base model, and add it
        raise ModelFolderError(
            f"{adapter} makes {folder} the folder of an adapter. Merge it into its model first (peft's "
            "merge_and_unload), or remove the adapter's files if they are merged."
        )
    if not (folder / "config.json").is_file():
        raise ModelFolderError(f"{folder} has no config.json, so it is not a Hugging Face model folder.")
    try:
        read_model_config(folder)
    except ValueError as error:
        raise ModelFolderError(str(error)) from error
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:
        raise ModelFolderError(f"transformers cannot read {folder / 'config.json'}: {_one_line(error)}") from error
    if config.model_type in OMNI:  # the rest of it speaks
        config = config.thinker_config
        setattr(config, PREFIX, THINKER)
    if vars(config).pop("quantization_config", None) is not None:
        block_size(folder)
    for section, name, _ in [] if has_dropout else dropout_rates(config):
        setattr(section, name, 0.0)
    return config


def dropout_rates(config: Any) -> list[tuple[Any, str, float]]:
    """Rates of what a transformers config has random in training, above 0: dropout of any kind, routers' jitter.

    Each with the config, or the part of it, that has the rate under that name.
    """
    parts = (config, *(part for part in vars(config).values() if hasattr(part, "model_type")))
    return [
        (part, name, float(rate))
        for part in parts
        for name, rate in vars(part).items()
        if _RANDOM.search(name) and isinstance(rate, int | float) and not isinstance(rate, bool) and rate > 0
    ]


def model_dropout(folder: str | Path) -> str:
    """The rates of `dropout_rates` that the folder asks for, for messages; empty without any, or without a config."""
    if not (Path(folder) / "config.json").is_file():
        return ""
    found = {name: rate for _, name, rate in dropout_rates(read_config(Path(folder), has_dropout=True))}
    return ", ".join(f"{name}={rate:g}" for name, rate in found.items())


def block_size(folder: str | Path) -> tuple[int, int] | None:
    """Rows and columns of the blocks of float8 numbers that share a scale (DeepSeek-V3, 2412.19437, section 3.3.2).

    A weight `NAME` then has its scales in `NAME_scale_inv`. None where weights are not quantised.

    Raises:
        ModelFolderError: they are, in another way.
    """
    quantised = json.loads((Path(folder) / "config.json").read_text()).get("quantization_config")
    if quantised is None:
        return None
    method, size = quantised.get("quant_method"), quantised.get("weight_block_size")
    if method != "fp8" or not size:
        raise ModelFolderError(
            f"The weights of {folder} are quantised ({method}); only fp8 with weight_block_size is read, and "
            "dequantised. Give the folder in bfloat16."
        )
    return size[0], size[1]


def _factory(config: Any, head: Head) -> Any:
    """The class whose `from_config` and `from_pretrained` build the model; `config` is given its one label."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoModelForSequenceClassification
    from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

    if head == Head.LM:  # as causal LMs some multimodal models lose their vision tower, without a word
        sees = hasattr(config, "vision_config") and type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
        return AutoModelForImageTextToText if sees else AutoModelForCausalLM
    config.num_labels = 1
    return _vision_classifier(type(config)) or AutoModelForSequenceClassification


@lru_cache
def _vision_classifier(config_class: type) -> Any:
    """Class of a sequence classifier over a multimodal model's trunk; None where transformers has one, or no trunk."""
    from transformers.conversion_mapping import (
        get_checkpoint_conversion_mapping,
        register_checkpoint_conversion_mapping,
    )
    from transformers.modeling_layers import GenericForSequenceClassification
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
        MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
        MODEL_MAPPING,
    )

    is_multimodal = config_class in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING and config_class in MODEL_MAPPING
    if config_class in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING or not is_multimodal:
        return None
    whole: Any = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[config_class]
    name = whole.__name__.replace("ForConditionalGeneration", "ForSequenceClassification")
    renamed: Any = get_checkpoint_conversion_mapping(whole.__name__)
    if renamed is not None:  # names in older folders
        register_checkpoint_conversion_mapping(name, renamed, overwrite=True)
    trunk: Any = MODEL_MAPPING[config_class]
    made: Any = type(name, (GenericForSequenceClassification, trunk.__bases__[0]), {})
    made.from_config = made._from_config
    return made


def _build(folder: Path, build: Any) -> Any:
    from transformers.utils import logging

    had_bar, verbosity = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()  # what it warns of is an error here, or a scalar head that is meant to be new
    try:
        return build()
    except Exception as error:  # of the model's own code
        reason = f"KeyError: {error}, a value of config.json" if isinstance(error, KeyError) else _one_line(error)
        raise ModelFolderError(f"transformers cannot build a causal LM from {folder}: {reason}") from error
    finally:
        logging.set_verbosity(verbosity)
        if had_bar:
            logging.enable_progress_bar()


def _finished(model: PreTrainedModel, has_dropout: bool) -> PreTrainedModel:
    """A model whose config names the class that it is: the folder's may be another, of the trunk below a new head."""
    model.config.architectures = [type(model).__name__]
    for module in [] if has_dropout else model.modules():
        if isinstance(module, torch.nn.modules.dropout._DropoutNd):  # pyright: ignore[reportPrivateUsage]
            module.p = 0.0
    # Torch's grouped product takes no float64, so experts run one by one there.
    if model.dtype == torch.float64 and hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")
    return model


def _with_zero_head(folder: Path, model: PreTrainedModel) -> PreTrainedModel:
    head = getattr(model, "score", None)
    if not isinstance(head, torch.nn.Linear):
        raise ModelFolderError(
            f"{type(model).__name__} of {folder} has no linear layer named score for its scalar head."
        )
    torch.nn.init.zeros_(head.weight)
    return model


def check_weights(folder: Path, *, mtp: Mtp = Mtp.REFUSE) -> None:
    """Refuse a folder without weights, with a file that cannot be opened, or with layers frozen without being asked.

    Headers alone are read.

    Raises:
        ModelFolderError: names the folder or the file.
    """
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ModelFolderError(
            f"Model folder {folder} has no .safetensors file. Give a complete folder, or init=random for new weights."
        )
    _check_index(folder)
    for file in files:
        with open_shard(file):
            pass
    if mtp == Mtp.REFUSE and (found := mtp_names(folder)):
        raise ModelFolderError(
            f"Model folder {folder} has {len(found)} tensor(s) for multi-token prediction, such as {found[0]}. "
            "mtp=freeze leaves them as they are, also where they are written; mtp=train (fsdp, megatron) trains them."
        )


def _check_index(folder: Path) -> None:
    """Refuse a folder without a file that its index names.

    Raises:
        ModelFolderError: names the files.
    """
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return
    try:
        named = set(json.loads(index.read_text())["weight_map"].values())
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelFolderError(f"{index} is damaged ({error!r}). Download the folder again.") from error
    absent = sorted(name for name in named if not (folder / name).is_file())
    if absent:
        raise ModelFolderError(f"{index} names {', '.join(absent)}, which is not there. Download the folder again.")


def open_shard(file: Path) -> Any:
    """A safetensors file, of which nothing but the header is read.

    Raises:
        ModelFolderError: it cannot be read.
    """
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(file, framework="pt")
    except (SafetensorError, OSError) as error:
        raise ModelFolderError(f"{file} cannot be read ({error}). Download the folder again.") from error


def mtp_names(folder: Path) -> list[str]:
    """Tensors of layers for multi-token prediction: of a module `mtp`, or of layers behind the last with an `eh_proj`.

    DeepSeek-V3 and GLM-4.5 have the latter. transformers leaves them out without a word.
    """
    num_layers, found = read_config(folder).get_text_config().num_hidden_layers, list[str]()
    behind: dict[int, list[str]] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with open_shard(file) as tensors:
            for name in tensors.keys():  # noqa: SIM118
                layer = re.fullmatch(r"model\.layers\.(\d+)\..*", name)
                if name.startswith("mtp."):
                    found.append(name)
                elif layer is not None and int(layer[1]) >= num_layers:
                    behind.setdefault(int(layer[1]), []).append(name)
    for names in behind.values():
        if any(".eh_proj." in name for name in names):
            found += names
    return found


SPEECH = ("talker.", "token2wav.", "code2wav.")
"""Prefixes of an omni model's tensors that are not its thinker's."""


def speech_names(folder: Path) -> list[str]:
    """Tensors of an omni model that speak: neither computed nor trained, and written as they were."""
    if not (folder / "config.json").is_file() or not hasattr(read_config(folder), PREFIX):  # a fake's has none
        return []
    names = list[str]()
    for file in sorted(folder.glob("*.safetensors")):
        with open_shard(file) as tensors:
            names += [name for name in tensors.keys() if name.startswith(SPEECH)]  # noqa: SIM118
    return names


def mtp_copies(folder: Path) -> list[str]:
    """Tensors of those layers that are the model's embedding and head once more, as DeepSeek-V3 is published."""
    return [name for name in mtp_names(folder) if name.endswith((".embed_tokens.weight", ".shared_head.head.weight"))]


def refuse_tensors(folder: Path, what: str, keys: Iterable[str]) -> None:
    """Refuse a folder if there is any name in `keys`.

    Raises:
        ModelFolderError: names the first of them.
    """
    names = sorted(keys)
    if names:
        shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        raise ModelFolderError(
            f"Model folder {folder} {what} {len(names)} tensor(s): {shown}. "
            "Its weights and config.json do not belong together."
        )


def _save_weights(folder: Path, weights: dict[str, Tensor]) -> None:
    from huggingface_hub import split_torch_state_dict_into_shards
    from safetensors.torch import save_file

    split = split_torch_state_dict_into_shards(weights)
    for file, names in split.filename_to_tensors.items():
        with naming(folder / file):
            save_file({name: weights[name].contiguous() for name in names}, folder / file, metadata={"format": "pt"})
        (folder / file).chmod(0o644)  # safetensors writes it for the owner alone; a server may run as somebody else
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2, sort_keys=True))


def _one_line(error: BaseException) -> str:
    """Message of an error, in one line."""
    return f"{' '.join(str(error).split()) or type(error).__name__:.300}"
