"""What the fakes say of their layout: one rank, which takes every tensor whole."""

from rl_ckpt import ShardSpec
from rl_ckpt.adapters.layout import answer_request, write_answer


def tell_layout(url):
    weights, answer = answer_request(url, 0)
    specs = [
        ShardSpec(name=name, shape=tuple(tensor.shape), offsets=(0,) * tensor.ndim, sizes=tuple(tensor.shape))
        for name, tensor in weights.items()
    ]
    write_answer(answer, specs)
