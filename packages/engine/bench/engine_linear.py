"""Products of float32 linear layers on a CPU, oneDNN's next to torch's, at the shapes of SmolLM2-135M's layers.

Of the forward pass and of the gradient of the input; in turns, in the processor time of one thread, which other work of
the machine lengthens little.
"""

import time

import torch
from torch import nn

from rl_bench import Role, Run
from rl_engine.layers.onednn_linear import use_onednn

SHAPES, TOKENS, REPETITIONS = ((576, 576), (576, 192), (576, 1536), (1536, 576)), (900, 1772), 9


def main(run: Run) -> None:
    repetitions = 3 if run.quick else REPETITIONS
    torch.set_num_threads(1)
    run.parameters(threads=1, repetitions=repetitions)
    for tokens in TOKENS:
        for inputs, outputs in SHAPES:
            pairs = {"torch": nn.Linear(inputs, outputs, bias=False), "oneDNN": nn.Linear(inputs, outputs, bias=False)}
            use_onednn(nn.Sequential(pairs["oneDNN"]))
            x, grad = torch.randn(1, tokens, inputs, requires_grad=True), torch.randn(1, tokens, outputs)
            seconds: dict[str, list[float]] = {name: [] for name in pairs}
            for turn in range(1 + repetitions):
                for name, layer in pairs.items():
                    start = time.thread_time()
                    torch.autograd.grad(layer.requires_grad_(False)(x), x, grad)
                    if turn:
                        seconds[name].append(1e3 * (time.thread_time() - start))
            for name, role in (("torch", Role.PEER), ("oneDNN", Role.OURS)):
                run.record(f"{tokens} tokens, {inputs} to {outputs}", name, seconds[name], unit="ms", role=role)
