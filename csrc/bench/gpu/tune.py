"""Time the variants of tune.cu beside each other on the issue's shape. Usage: tune.py LIBRARY [--json FILE]."""

from __future__ import annotations

import argparse
import ctypes
import json
from pathlib import Path

import torch
from timing import measure

ROWS, VOCAB = 8192, 151936


def main() -> None:
    """Print one line per variant, best last within its family."""
    parser = argparse.ArgumentParser()
    parser.add_argument("library")
    parser.add_argument("--json")
    options = parser.parse_args()
    library = ctypes.CDLL(options.library)
    library.rl_tune_name.restype = ctypes.c_char_p
    logits = torch.empty(ROWS, VOCAB, dtype=torch.float32, device="cuda")
    logits.normal_(0, 3)
    half = logits[: ROWS // 2].view(torch.bfloat16).view(ROWS, VOCAB).normal_(0, 3)
    labels = torch.randint(0, VOCAB, (ROWS,), device="cuda")
    mask = torch.ones(ROWS, dtype=torch.bool, device="cuda")
    scratch = torch.zeros(6 * ROWS, device="cuda")
    scratch[3 * ROWS : 4 * ROWS] = 1e-4
    found = {}
    for i in range(library.rl_tune_count()):
        name = library.rl_tune_name(i).decode()
        is_wide = "f32" in name
        data, dtype = (logits, 0) if is_wide else (half, 1)
        stride = 2 * VOCAB if is_wide else VOCAB

        def run(
            i: int = i, data: torch.Tensor = data, name: str = name, dtype: int = dtype, stride: int = stride
        ) -> None:
            status = library.rl_tune_run(
                i, ctypes.c_void_p(data.data_ptr()), ctypes.c_int64(ROWS), ctypes.c_int64(VOCAB), dtype, 1,
                ctypes.c_void_p(labels.data_ptr()), ctypes.c_void_p(scratch.data_ptr()),
                ctypes.c_void_p(mask.data_ptr()), ctypes.c_void_p(data.data_ptr()), ctypes.c_int64(stride),
                ctypes.c_void_p(torch.cuda.current_stream().cuda_stream),
            )  # fmt: skip
            if status:
                raise RuntimeError(f"{name}: cudaError {status}")

        fresh = (lambda: logits.normal_(0, 3)) if is_wide else (lambda: half.normal_(0, 3))
        prepare = fresh if "stream" in name or "fused" in name or "backward" in name else None
        try:
            samples = measure(run, repeats=11, warmup=1, prepare=prepare)
        except RuntimeError as error:
            print(error)
            continue
        found[name] = samples
        print(f"{name:30s} {sorted(samples)[len(samples) // 2]:8.4f} ms  (min {min(samples):.4f})", flush=True)
    if options.json:
        Path(options.json).write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
