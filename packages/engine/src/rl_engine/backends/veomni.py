"""The `veomni` backend: refused, with what stands in its way looked up in the environment at hand.

VeOmni 0.1.12 was tried on torch 2.13 with transformers 5.23: `import veomni` fails, because it takes a name from
transformers that is no longer there; beside that it wants an older `datasets` than torchtitan, and torchvision (for
timm), which has to match torch's own build.
"""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

from rl_engine.errors import BackendError

if TYPE_CHECKING:
    from typing import NoReturn

    from rl_engine.types import EngineConfig

TRIED = "0.1.12"
_MODULE = "transformers.models.qwen2_5_omni.modeling_qwen2_5_omni"
_NAME = "Qwen2_5OmniThinkerCausalLMOutputWithPast"  # veomni.utils.model_outputs takes it from there at import
_NEWEST_DATASETS = (2, 21)


def create(config: EngineConfig) -> NoReturn:
    """The registry's entry.

    Raises:
        BackendError: always.
    """
    raise BackendError(
        f"The veomni backend does not run: {'; '.join(blockers())}. "
        "Use fsdp for any Hugging Face model (sp for long rows), or megatron for expert parallelism."
    )


def blockers() -> list[str]:
    """What keeps VeOmni from running here, one clause each, the adapter that is not written last."""
    found: list[str] = []
    transformers, datasets, torchvision = (_version(name) for name in ("transformers", "datasets", "torchvision"))
    if transformers is None:
        found.append("transformers is not installed")
    elif not hasattr(import_module(_MODULE), _NAME):
        found.append(f"VeOmni {TRIED} imports {_NAME}, which transformers {transformers} has not")
    if torchvision is None:
        found.append("it needs torchvision, which is not installed")
    if datasets is not None and tuple(map(int, datasets.split(".")[:2])) > _NEWEST_DATASETS:
        found.append(f"it needs datasets 2.20 to 2.21, and {datasets} is installed")
    return [*found, "rl-engine has no adapter to its models"]


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
