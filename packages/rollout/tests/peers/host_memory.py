"""Stands in for memory of a GPU that keeps its address: `rl_csrc.cuda.mapped.MappedMemory`."""

import torch


class HostMemory:
    """Memory at an address that stays, on the host; what is given back is lost."""

    def __init__(self, num_bytes):
        self.whole = torch.full((num_bytes,), 255, dtype=torch.uint8)
        self.is_there = True
        self.calls = []

    def tensor(self, offset, shape, dtype):
        size = torch.Size(shape).numel() * dtype.itemsize
        return self.whole[offset : offset + size].view(dtype).view(shape)

    def take(self):
        if not self.is_there:
            self.calls.append("take")
        self.is_there = True

    @torch.inference_mode()  # the cache's tensors are made within
    def give_back(self):
        self.calls.append("give back")
        self.whole.fill_(255)  # NaN, in all dtypes of weights
        self.is_there = False

    def close(self):
        self.calls.append("close")
