"""Helpers of session tests: weights of many kinds, comparisons, errors as values."""

from __future__ import annotations

import asyncio
import functools
import itertools
import os
import socket
import sys
from abc import ABC, abstractmethod
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from rl_ckpt import connect, tree_digest
from rl_ckpt.errors import SyncAbortedError
from rl_ckpt.session import capabilities
from rl_ckpt.tensors.source import aliases_of
from rl_ckpt.tensors.spec import as_bytes
from rl_ckpt.types import Capability, ReceiverState

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Mapping

    from torch import Tensor

    from rl_ckpt.base import WeightReceiver, WeightSender
    from rl_ckpt.types import SyncReport

E = TypeVar("E", bound=BaseException)
T = TypeVar("T")

_names = itertools.count()


def new_name() -> str:
    """A name for a session that no other process and no other call uses."""
    return f"test-{os.getpid()}-{next(_names)}"


def new_port() -> int:
    """A TCP port of 127.0.0.1 that an end can listen on, and that no other caller gets before it does.

    It stays bound by this process, not listened on. So who asks the kernel for any free port gets another one, as long
    as this process lives; and who sets SO_REUSEADDR and names this one can have it.
    """
    holder = socket.socket()
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    holder.bind(("127.0.0.1", 0))
    port = int(holder.getsockname()[1])
    if sys.platform == "linux":
        holder.detach()
    else:  # elsewhere nobody could bind it a second time
        holder.close()
    return port


def sample_weights(seed: int = 0) -> dict[str, Tensor]:
    """Tensors of many kinds: empty, scalar, strided (also of one element), tied, conjugate; 8 to 64 bits; int, bool."""
    generator = torch.Generator().manual_seed(seed)

    def rand(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    alias = rand(17, 9)
    return {
        "embed.weight": alias,
        "norm.weight": rand(33, dtype=torch.bfloat16),
        "empty": torch.empty(0, 5),
        "scale": torch.tensor(1.5 + seed),
        "strided": rand(8, 12)[::2, 1::3],
        "one": rand(3, 4)[::3, ::4],
        "transposed": rand(6, 10, dtype=torch.float16).t(),
        "fp8": rand(7, 5).to(torch.float8_e4m3fn),
        "fp8_transposed": rand(7, 5).to(torch.float8_e5m2).t(),
        "double": rand(3, dtype=torch.float64),
        "ids": torch.randint(-9, 9, (11,), generator=generator),
        "mask": torch.rand(13, generator=generator) > 0.5,
        "complex": torch.complex(rand(4), rand(4)).conj(),
        "expanded": rand(1, 6).expand(5, 6),
        "parameter": torch.nn.Parameter(rand(4, 4)),
        "lm_head.weight": alias,
    }


def assert_same(got: dict[str, Tensor], sent: dict[str, Tensor]) -> None:
    """Compare names, order, dtypes, shapes and every bit. Tied tensors may come right after the first of them."""
    aliases = aliases_of(sent.items())
    alias = {name for names in aliases.values() for name in names}
    together = [name for first in sent if first not in alias for name in (first, *aliases.get(first, ()))]
    assert list(got) in (list(sent), together), f"names {list(got)} differ from {list(sent)}"
    for name, tensor in sent.items():
        assert (got[name].dtype, got[name].shape) == (tensor.dtype, tensor.shape), name
        assert torch.equal(as_bytes(got[name]), as_bytes(tensor)), name


async def receive_all(engine: WeightReceiver) -> dict[str, Tensor]:
    """Clones of every tensor of one sync."""
    return {name: tensor.clone() async for name, tensor in engine.receive_weights()}


async def sync(
    sender: WeightSender, receiver: WeightReceiver, weights: Mapping[str, Tensor], version: int
) -> tuple[dict[str, Tensor], SyncReport]:
    """Run one sync; clones of the tensors, and the sender's report."""
    return await asyncio.gather(receive_all(receiver), sender.send_weights(weights.items(), version=version))


async def exhaust(iterator: AsyncIterator[tuple[str, Tensor]]) -> None:
    """Iterate to the end."""
    async for _ in iterator:
        pass


async def failure(kind: type[E], awaitable: Awaitable[object]) -> E:
    """The error of a call that must fail with this kind of error."""
    try:
        result = await awaitable
    except kind as error:
        return error
    raise AssertionError(f"expected {kind.__name__}, got the result {result!r}")


def refusal(kind: type[E], call: Callable[[], object]) -> E:
    """The error of a plain call that must fail with this kind of error."""
    try:
        result = call()
    except kind as error:
        return error
    raise AssertionError(f"expected {kind.__name__}, got the result {result!r}")


async def works(sender: WeightSender, receiver: WeightReceiver, version: int) -> SyncReport:
    """Run one sync, which must succeed."""
    weights = sample_weights(version)
    got, report = await sync(sender, receiver, weights, version)
    assert_same(got, weights)
    assert (receiver.version, receiver.state) == (version, ReceiverState.COMMITTED)
    return report


def blank(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Contiguous tensors of the same names, dtypes and shapes with other bits."""
    return {
        name: torch.full(tensor.shape, 1, dtype=torch.uint8).to(tensor.dtype)
        if tensor.dtype.itemsize > 1
        else torch.ones(tensor.shape, dtype=torch.uint8).view(tensor.dtype)
        for name, tensor in weights.items()
    }


def step(weights: Mapping[str, Tensor], every: int = 100) -> dict[str, Tensor]:
    """The weights after a small update: other bits in one element of `every`."""
    fresh = {name: tensor.clone().contiguous() for name, tensor in weights.items()}
    for tensor in fresh.values():
        as_bytes(tensor)[:: every * tensor.itemsize] ^= 1
    return fresh


def staged_weights(seed: int) -> dict[str, Tensor]:
    """Weights of many kinds, each contiguous, and a wide one."""
    weights = {name: tensor.detach().clone().contiguous() for name, tensor in sample_weights(seed).items()}
    weights["wide"] = torch.randn(400, 30, generator=torch.Generator().manual_seed(seed))
    return weights


def staged_targets(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Targets of the same names, dtypes and shapes; one is not contiguous, and two are one."""
    blank = {name: torch.zeros_like(tensor) for name, tensor in weights.items()}
    blank["wide"] = torch.zeros(30, 400).t()
    blank["lm_head.weight"] = blank["embed.weight"]
    return blank


async def until(condition: Callable[[], bool], timeout_s: float = 120.0) -> None:
    """Wait for something that another thread does, at most `timeout_s` seconds."""
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110  # there is no event: the state of an end is a plain property
            await asyncio.sleep(0.01)


class Suite(ABC):
    """A suite whose ends all run in this process, on one event loop or in threads."""

    short_s = 0.4
    """Timeout of waits that the suite lets pass, seconds."""
    long_s = 120.0
    """Timeout of waits that must not pass, seconds."""
    token: str | None = None
    """Token of the sessions, where the backend wants one."""

    @abstractmethod
    def new_address(self) -> str:
        """A URL that is not in use."""

    def run(self, work: Callable[[Pair], Awaitable[T]], **options: Any) -> T:
        """Run a coroutine function with a fresh address, and close every end that it opened."""

        async def main() -> T:
            async with AsyncExitStack() as stack:
                return await work(Pair(self.new_address(), self.long_s, self.token, options, stack))

        return asyncio.run(main())


class Pair:
    """Opens ends of one session, which are closed with the stack."""

    def __init__(
        self, address: str, timeout_s: float, token: str | None, options: dict[str, Any], stack: AsyncExitStack
    ) -> None:
        self.address = address
        self._token = token
        self._timeout_s = timeout_s
        self._options = options
        self._stack = stack
        self.capabilities = capabilities(address)
        """Capabilities that the backend declares."""

    async def send_end(self, *, timeout_s: float | None = None) -> WeightSender:
        """The sender, prepared."""
        timeout_s = timeout_s or self._timeout_s
        engine = connect(self.address, role="send", timeout_s=timeout_s, token=self._token, **self._options)
        await self._stack.enter_async_context(engine)
        await engine.prepare()
        return engine

    async def receive_end(self, *, timeout_s: float | None = None, **options: Any) -> WeightReceiver:
        """A receiver."""
        timeout_s = timeout_s or self._timeout_s
        engine = connect(self.address, role="receive", timeout_s=timeout_s, token=self._token, **options)
        return await self._stack.enter_async_context(engine)

    def peers(self, num_peers: int) -> int | None:
        """Argument `num_peers` of `send_weights`: None where the sender does not know its receivers."""
        return num_peers if Capability.VOTES in self.capabilities else None

    def require_receipts(self, report: SyncReport, num_tensors: int, num_peers: int) -> None:
        """Check the receipts, where the sender hears of its receivers."""
        expected = [(report.version, report.digest, num_tensors)] * (self.peers(num_peers) or 0)
        assert [(r.version, r.digest, r.num_tensors) for r in report.receipts] == expected
        assert report.lost == ()

    async def hears_of_it(self, sending: Awaitable[object], cause: type[BaseException] | None = None) -> None:
        """A receiver has refused the sync: it is off for the sender as well, where that hears of receivers."""
        if Capability.VOTES in self.capabilities:
            error = await failure(SyncAbortedError, sending)
            assert cause is None or isinstance(error.__cause__, cause), repr(error.__cause__)
        else:
            await sending

    async def exchange(
        self,
        sender: WeightSender,
        receivers: Mapping[WeightReceiver, dict[str, Tensor]],
        weights: Mapping[str, Tensor],
        version: int,
        *,
        strict: bool = True,
    ) -> SyncReport:
        """Run one sync into the tensors of every receiver, which then hold it and say so."""
        num_peers = self.peers(len(receivers))
        sending = asyncio.ensure_future(sender.send_weights(weights.items(), version=version, num_peers=num_peers))
        if num_peers is None:
            await sending  # or a receiver would find an older one that it has refused
        report, versions = await asyncio.gather(
            sending,
            asyncio.gather(*(receiver.receive_into(into, strict=strict) for receiver, into in receivers.items())),
        )
        assert versions == [version] * len(receivers)
        for into in receivers.values():
            assert_same({name: into[name] for name in weights}, dict(weights))
        assert report.digest == tree_digest(weights)
        self.require_receipts(report, len(weights), len(receivers))
        return report


AnySuite = TypeVar("AnySuite", bound=Suite)


def with_pair(**options: Any) -> Callable[[Callable[[AnySuite, Pair], Awaitable[None]]], Callable[[AnySuite], None]]:
    """Decorator that makes a test of a coroutine method: `Suite.run` gives it a `Pair` of ends with `options`."""

    def decorate(work: Callable[[AnySuite, Pair], Awaitable[None]]) -> Callable[[AnySuite], None]:
        def test(self: AnySuite) -> None:
            self.run(lambda pair: work(self, pair), **options)

        return named_after(work, test)

    return decorate


def named_after(work: Callable[..., object], test: T) -> T:
    """A test under the name and docstring of the coroutine function that it runs, but without its parameters."""
    functools.update_wrapper(test, work)  # pyright: ignore[reportArgumentType]
    del test.__wrapped__  # pyright: ignore[reportAttributeAccessIssue]  # or pytest would look for fixtures of its parameters
    return test
