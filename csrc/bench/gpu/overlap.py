"""The LM head's forward with the kernel of one chunk beside the product of the next. Usage: overlap.py [--json FILE].

The op itself does one after the other. Here the kernel runs on a second stream of higher priority, and products are
told to leave it some multiprocessors (cublasSetSmCountTarget). Every variant is checked against the op.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import statistics
from pathlib import Path

import torch
from table import DEVICE, ROWS, VOCAB
from timing import measure

from rl_csrc import _cuda  # pyright: ignore[reportAttributeAccessIssue]  # built with RL_CSRC_CUDA=ON only
from rl_csrc import cuda as ours
from rl_csrc.cuda.kernels import logits_arguments

HOW = (None, 1.0, None, -100, True, False, None, False)


def leave_free(num_multiprocessors: int) -> None:
    """Make products of this thread use all multiprocessors but so many."""
    major = (torch.version.cuda or "").split(".")[0]
    library = ctypes.CDLL(f"libcublas.so.{major}")  # the one that torch has loaded
    there = torch.cuda.get_device_properties(DEVICE).multi_processor_count
    target = there - num_multiprocessors if num_multiprocessors else 0
    status = library.cublasSetSmCountTarget(ctypes.c_void_p(torch.cuda.current_blas_handle()), ctypes.c_int(target))
    if status:
        raise RuntimeError(f"cublasSetSmCountTarget({target}): status {status}")


class Overlapped:
    """Log-probs and entropies `[T]`, with two buffers of float32 logits."""

    def __init__(self, hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, chunk: int) -> None:
        self.hidden, self.weight, self.labels, self.chunk = hidden, weight, labels, chunk
        self.buffers = [torch.empty(chunk, VOCAB, device=DEVICE) for _ in range(2)]
        self.side = torch.cuda.Stream(priority=-1)
        self.scored, self.entropies, self.lse = (torch.empty(ROWS, device=DEVICE) for _ in range(3))

    def run(self) -> None:
        main = torch.cuda.current_stream()
        was_read: list[torch.cuda.Event] = []
        for number, first in enumerate(range(0, ROWS, self.chunk)):
            rows = slice(first, first + self.chunk)
            logits = self.buffers[number % 2]
            if number >= 2:
                main.wait_event(was_read[number - 2])
            torch.mm(self.hidden[rows], self.weight.t(), out_dtype=torch.float32, out=logits)
            self.side.wait_stream(main)
            arguments = logits_arguments(logits, self.labels[rows], 1.0, None, -100, None)
            _cuda.logprobs(
                arguments, self.scored[rows], self.entropies[rows], None, self.lse[rows], self.side.cuda_stream
            )
            was_read.append(self.side.record_event())
        main.wait_stream(self.side)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--json")
    options = parser.parse_args()
    found: dict[str, list[float]] = {}
    for width in (2048, 4096):
        hidden = torch.randn(ROWS, width, device=DEVICE, dtype=torch.bfloat16)
        weight = torch.randn(VOCAB, width, device=DEVICE, dtype=torch.bfloat16) * 0.02
        labels = torch.randint(0, VOCAB, (ROWS,), device=DEVICE)
        wanted = ours.linear_logprobs_forward(hidden, weight, labels, *HOW)[0]
        logits = torch.empty(ROWS, VOCAB, dtype=torch.bfloat16, device=DEVICE)
        runs = {
            "one torch.mm": lambda h=hidden, w=weight, out=logits: torch.mm(h, w.t(), out=out),
            "one after the other": lambda h=hidden, w=weight, y=labels: ours.linear_logprobs_forward(h, w, y, *HOW),
        }
        for name, run in runs.items():
            found[f"H={width}, {name}"] = measure(run, repeats=9)
        del logits
        for chunk in (512, 256):
            overlapped = Overlapped(hidden, weight, labels, chunk)
            for free in (0, 6, 12, 20):
                leave_free(free)
                found[f"H={width}, chunks of {chunk}, {free} left free"] = measure(overlapped.run, repeats=9)
                torch.testing.assert_close(overlapped.scored, wanted, rtol=1e-4, atol=1e-4)
            leave_free(0)
    for name, samples in found.items():
        print(f"{name:44s} {statistics.median(samples):8.3f} ms  (min {min(samples):.3f})")
    if options.json:
        Path(options.json).write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
