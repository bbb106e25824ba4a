"""Vision-language-action policy: a vision-language backbone of transformers and an action head, and its folder."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file, save_file

from rl_omni.actions.heads import ActionHead, create_head
from rl_omni.errors import PipelineError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

_INDEX = "model_index.json"


def check_policy(folder: str | Path) -> dict[str, Any]:
    """Check a policy's folder by its JSON files; returns the settings of its head.

    A folder has `model_index.json`, `backbone/` (model and image processor), `tokenizer/` and `head/`.

    Raises:
        PipelineError: a file is missing or damaged, or the backbone is not of Qwen's vision-language families.
    """
    root = Path(folder)
    if _read(root / _INDEX).get("_class_name") != "ActionPolicy":
        raise PipelineError(f"{root}/{_INDEX} is of no ActionPolicy; rl_omni.actions.write_policy makes a folder")
    backbone = _read(root / "backbone/config.json")
    if "image_token_id" not in backbone or "spatial_merge_size" not in backbone.get("vision_config", {}):
        raise PipelineError(
            f"{root}/backbone is a {backbone.get('model_type')!r} without image_token_id and "
            "vision_config.spatial_merge_size; use a model of the families Qwen2-VL, Qwen2.5-VL or Qwen3-VL"
        )
    return _read(root / "head/config.json")


def _read(file: Path) -> dict[str, Any]:
    try:
        return json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise PipelineError(f"{file} cannot be read: {error}; give a folder of rl_omni.actions.write_policy") from error


class ActionPolicy(torch.nn.Module):
    """Policy whose action head reads the backbone's hidden state of the prompt's last token."""

    def __init__(self, backbone: Any, processor: Any, head: ActionHead) -> None:
        super().__init__()
        self.backbone, self.head = backbone, head
        self.value: torch.nn.Linear | None = None  # of a critic
        self._processor = processor
        config = backbone.config
        self._image: int = config.image_token_id
        self._merged: int = config.vision_config.spatial_merge_size**2
        self._vocab_size: int = config.get_text_config().vocab_size

    def check_prompt(self, prompt: Sequence[int]) -> None:
        """Check a prompt.

        Raises:
            PipelineError: it has not exactly one image, an id is outside the vocabulary, or the image ends it.
        """
        if prompt.count(self._image) != 1 or prompt[-1] == self._image:
            raise PipelineError(
                f"the prompt has {prompt.count(self._image)} image placeholders ({self._image}); it needs one, and an "
                "instruction after it"
            )
        if not all(0 <= token < self._vocab_size for token in prompt):
            raise PipelineError(
                f"the prompt has ids up to {max(prompt)}; the vocabulary ends at {self._vocab_size - 1}"
            )

    def hidden(self, prompts: Sequence[Sequence[int]], pictures: Sequence[Tensor]) -> Tensor:
        """Hidden state of the last token of each prompt, (B, N) float32.

        Args:
            prompts: B prompts of token ids, each with one image placeholder.
            pictures: B pictures, (3, H, W) uint8 each.
        """
        device = self.backbone.device
        images = [picture.cpu().numpy() for picture in pictures]
        pixels = self._processor(images, input_data_format="channels_first", return_tensors="pt")
        grid = pixels["image_grid_thw"]
        rows: list[Tensor] = []
        for prompt, size in zip(prompts, grid.prod(-1).tolist(), strict=True):
            ids = [[token] * (size // self._merged if token == self._image else 1) for token in prompt]
            rows.append(torch.tensor([token for each in ids for token in each]))
        lengths = torch.tensor([len(row) for row in rows], device=device)
        ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True).to(device)
        mask = torch.arange(ids.shape[1], device=device) < lengths[:, None]
        output = self.backbone(
            input_ids=ids,
            attention_mask=mask.long(),
            pixel_values=pixels["pixel_values"].to(device),
            image_grid_thw=grid.to(device),
            mm_token_type_ids=((ids == self._image) & mask).int(),
        )
        return output.last_hidden_state[torch.arange(len(rows), device=device), lengths - 1].float()


def load_policy(folder: str | Path, device: torch.device | str = "cpu") -> ActionPolicy:
    """Load a policy's folder in float32.

    Raises:
        PipelineError: as `check_policy`, or a component cannot be loaded.
    """
    from transformers import AutoImageProcessor, AutoModel

    root, settings = Path(folder), check_policy(folder)
    head = create_head(settings)
    load: Any = AutoImageProcessor.from_pretrained
    try:
        backbone: Any = AutoModel.from_pretrained(
            root / "backbone", dtype=torch.float32, use_safetensors=True, trust_remote_code=False
        )
        processor = load(root / "backbone", local_files_only=True, trust_remote_code=False)
        head.load_state_dict(load_file(root / "head/model.safetensors"))
    except (ImportError, OSError, ValueError, RuntimeError) as error:
        raise PipelineError(f"{root} cannot be loaded: {error}") from error
    if (size := backbone.config.get_text_config().hidden_size) != head.hidden_size:
        raise PipelineError(f"{root}/head has hidden_size {head.hidden_size}, and the backbone has {size}")
    return ActionPolicy(backbone, processor, head).to(device).eval()


def load_value(folder: str | Path, hidden_size: int) -> torch.nn.Linear:
    """Load the value layer of a saved critic; zeros where the folder has none."""
    layer, file = torch.nn.Linear(hidden_size, 1), Path(folder) / "value/model.safetensors"
    zeros = {"weight": torch.zeros(1, hidden_size), "bias": torch.zeros(1)}
    layer.load_state_dict(load_file(file) if file.is_file() else zeros)
    return layer


def write_policy(folder: str | Path, backbone: str | Path, head: Mapping[str, Any], *, seed: int = 0) -> Path:
    """Write a policy's folder: a vision-language model's folder, and a new head.

    Args:
        folder: Written to.
        backbone: Hugging Face folder of a vision-language model with tokenizer and image processor.
        head: `kind` (`bins` or `flow`), `chunk_size`, `action_size`, and `num_bins`, or `num_steps` and `noise`.
        seed: Seed of the head.

    Raises:
        PipelineError: the head or the backbone is not supported.
    """
    from transformers import AutoModel, AutoTokenizer

    root, source = Path(folder), Path(backbone)
    tokenizer: Any = AutoTokenizer.from_pretrained(source, trust_remote_code=False)
    tokenizer.save_pretrained(root / "tokenizer")
    model: Any = AutoModel.from_pretrained(source, use_safetensors=True, trust_remote_code=False)
    model.save_pretrained(root / "backbone")
    for file in source.glob("preprocessor_config.json"):
        shutil.copy(file, root / "backbone")
    settings = {**head, "hidden_size": model.config.get_text_config().hidden_size}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        made = create_head(settings)
    (root / "head").mkdir(exist_ok=True)
    save_file(dict(made.state_dict()), root / "head/model.safetensors")
    (root / "head/config.json").write_text(json.dumps(settings, indent=2))
    names = {"backbone": ["transformers", type(model).__name__], "head": ["rl_omni", type(made).__name__]}
    names["tokenizer"] = ["transformers", type(tokenizer).__name__]
    (root / _INDEX).write_text(json.dumps({"_class_name": "ActionPolicy", **names}, indent=2))
    check_policy(root)
    return root


def save_policy(folder: str | Path, source: str | Path, tensors: Mapping[str, Tensor]) -> None:
    """Write a policy's folder with the weights of `tensors`, everything else as in `source`."""
    root = Path(folder)
    shutil.copytree(source, root, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.safetensors", "*.index.json"))
    for part in {name.partition(".")[0] for name in tensors}:
        own = {n.removeprefix(f"{part}."): t for n, t in tensors.items() if n.startswith(f"{part}.")}
        plain = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in own.items()}
        (root / part).mkdir(exist_ok=True)
        save_file(plain, root / part / "model.safetensors", {"format": "pt"})
