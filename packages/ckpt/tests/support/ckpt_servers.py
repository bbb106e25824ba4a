"""What an adapter must guarantee inside the real server: what it serves after a sync, and after a sync that failed."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import threading
import time
import urllib.request
from abc import ABC, abstractmethod
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import torch

import rl_ckpt
from rl_ckpt.errors import DigestError, SyncAbortedError
from rl_ckpt.testing.helpers import new_name, new_port, refusal

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable, Sequence
    from pathlib import Path

    from torch import Tensor, nn

    from rl_ckpt.base import WeightSender
    from rl_ckpt.types import SyncReport

PROMPT = (3, 17, 41, 5, 9, 77)


def tiny_model(seed: int, *, has_aliases: bool = False) -> nn.Module:
    """Qwen3 in float32, with weights so large that another seed has quite other log-probs. Needs transformers."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=128,
        tie_word_embeddings=has_aliases,
        initializer_range=0.3,
    )
    return Qwen3ForCausalLM(config).float().eval()


def logprobs_of(model: nn.Module) -> Tensor:
    """What transformers computes of each token of `PROMPT`, given those before: float32 [5]."""
    with torch.no_grad():
        logits = model(torch.tensor([PROMPT])).logits[0]
    return torch.log_softmax(logits, -1)[range(len(PROMPT) - 1), PROMPT[1:]]


class ServedModel(ABC):
    """An inference server in a process of its own, spoken to over HTTP.

    Args:
        command: Starts it; its port is appended.
        settings: Environment variables beside those of this process.
        log: Where its output goes.
    """

    def __init__(self, command: Sequence[str], settings: dict[str, str], log: Path) -> None:
        self.port = new_port()
        self.log = log
        with log.open("w") as output:
            self.process = subprocess.Popen(
                [*command, "--port", str(self.port)],
                env={**os.environ, **settings},
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    @property
    def address(self) -> str:
        """The server's URL."""
        return f"http://127.0.0.1:{self.port}"

    def wait(self, timeout_s: float) -> None:
        """Until it answers; an error shows the end of its log."""
        end = time.monotonic() + timeout_s
        while time.monotonic() < end and self.process.poll() is None:
            with suppress(OSError):
                self.get("/health")
                return
            time.sleep(0.5)
        raise AssertionError(f"the server did not come up in {timeout_s} s: {self.log.read_text()[-4000:]}")

    def get(self, path: str) -> bytes:
        """Body of the answer."""
        with urllib.request.urlopen(self.address + path, timeout=60) as answer:
            return answer.read()

    def post(self, path: str, **body: Any) -> Any:
        """The answer, from JSON. A status that is not 2xx raises `urllib.error.HTTPError`."""
        request = urllib.request.Request(
            self.address + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=120) as answer:
            return json.loads(answer.read() or b"null")

    def serves(self, model: nn.Module) -> bool:
        """Whether the server computes with these weights."""
        return torch.allclose(self.logprobs(), logprobs_of(model), atol=1e-4)

    def close(self) -> None:
        """End it."""
        self.process.terminate()
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(60)

    @abstractmethod
    def logprobs(self) -> Tensor:
        """Of the tokens of `PROMPT`, as `logprobs_of` returns them, computed now."""

    @abstractmethod
    def join(self, url: str, token: str | None) -> None:
        """Tell the server which session it is in from now on."""

    @abstractmethod
    def sync(
        self, sender: WeightSender, weights: Iterable[tuple[str, Tensor]], version: int, *, num_peers: int = 1
    ) -> SyncReport:
        """One update as a trainer does it; if it fails, the sender's error is raised when the server serves again."""


class FlippingProxy:
    """Stands between the ends of a `tcp://` session and, when it is armed, flips one bit of the payload.

    Args:
        port: Of the sender, on this machine.
    """

    def __init__(self, port: int) -> None:
        self.is_armed = False
        """Set it: the next bytes that are surely payload lose a bit."""
        self.has_struck = False
        """Whether that has happened."""
        self._to = port
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._server.getsockname()[1]
        self._sockets = [self._server]
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def close(self) -> None:
        """Hang up on both ends."""
        for end in self._sockets:
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(30)
        for end in self._sockets:
            end.close()

    def _accept(self) -> None:
        while True:
            try:
                receiver, _ = self._server.accept()
            except OSError:
                return
            self._sockets.append(receiver)
            with suppress(ConnectionRefusedError):  # after the last test of the session, the server still dials
                sender = socket.create_connection(("127.0.0.1", self._to))
                self._sockets.append(sender)
                for way in ((receiver, sender, False), (sender, receiver, True)):
                    self._threads.append(threading.Thread(target=self._forward, args=way))
                    self._threads[-1].start()

    def _forward(self, source: socket.socket, target: socket.socket, is_down: bool) -> None:
        with suppress(OSError):
            while data := bytearray(source.recv(1 << 16)):
                if is_down and self.is_armed and len(data) == 1 << 16:  # no control message is that long here
                    data[1 << 15] ^= 1
                    self.is_armed, self.has_struck = False, True
                target.sendall(data)
        for end in (source, target):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


@contextmanager
def session(served: ServedModel, url: str, *, seen_as: str | None = None, token: str | None = None) -> Generator[Any]:
    """A sender in this process whose receiver is the server, which is told `seen_as` in place of the URL."""
    with rl_ckpt.connect(url, role="send", timeout_s=60, token=token) as sender:
        asyncio.run(sender.prepare())
        served.join(seen_as or url, token)
        yield sender


@contextmanager
def vetoed(url: str, sender: WeightSender) -> Generator[Future[Any]]:
    """Another receiver of the session, which takes everything and says no when the server has said yes."""

    def veto() -> None:
        deadline = time.monotonic() + 60
        while not any(peer.staged for peer in sender._peers.members.admitted) and time.monotonic() < deadline:  # pyright: ignore
            time.sleep(0.01)
        raise RuntimeError("no")

    with rl_ckpt.connect(url, role="receive", timeout_s=60) as other, ThreadPoolExecutor(1) as pool:
        other.attest_with(veto)
        yield pool.submit(lambda: dict(other.recv(clone=True)))


class ServedSuite:
    """On a server that was started with `tiny_model(0)`.

    A subclass has the class-scoped pytest fixture `served`: the server, and whether its embeddings are tied.
    """

    def test_a_first_sync_that_fails_late_restores_the_start_weights(self, served: tuple[ServedModel, bool]) -> None:
        """The model was touched: another receiver votes no when the server has voted yes."""
        server, has_aliases = served
        old, new = tiny_model(0, has_aliases=has_aliases), tiny_model(1, has_aliases=has_aliases)
        assert server.serves(old)
        assert not server.serves(new)
        url = f"uds://{new_name()}"
        with session(server, url) as sender:
            with vetoed(url, sender) as taking:
                refusal(SyncAbortedError, lambda: server.sync(sender, new.named_parameters(), 1, num_peers=2))
                assert repr(taking.exception(timeout=60)) == "RuntimeError('no')"
            assert server.serves(old)

    def test_the_model_computes_with_what_was_sent(self, served: tuple[ServedModel, bool]) -> None:
        """And the receipt attests all of it."""
        server, has_aliases = served
        with session(server, f"uds://{new_name()}") as sender:
            for version in (1, 2):
                new = tiny_model(version, has_aliases=has_aliases)
                weights = new.state_dict()  # with lm_head, tied or not
                report = server.sync(sender, weights.items(), version)
                assert server.serves(new)
                (receipt,) = report.receipts
                assert receipt.is_attested
                assert receipt.num_bound == receipt.num_expected == len(weights)
                assert receipt.digest == rl_ckpt.tree_digest(weights)

    def test_a_bit_flipped_in_flight_leaves_the_version_before(self, served: tuple[ServedModel, bool]) -> None:
        """And the server takes the next one."""
        server, has_aliases = served
        first, second = tiny_model(3, has_aliases=has_aliases), tiny_model(4, has_aliases=has_aliases)
        port = new_port()
        proxy = FlippingProxy(port)
        try:
            seen_as = f"tcp://127.0.0.1:{proxy.port}"
            with session(server, f"tcp://127.0.0.1:{port}", seen_as=seen_as, token="known to both") as sender:
                server.sync(sender, first.named_parameters(), 1)
                assert server.serves(first)
                proxy.is_armed = True
                error = refusal(SyncAbortedError, lambda: server.sync(sender, second.named_parameters(), 2))
                assert proxy.has_struck
                assert isinstance(error.__cause__, DigestError)
                assert server.serves(first)
                server.sync(sender, second.named_parameters(), 2)
                assert server.serves(second)
        finally:
            proxy.close()

    def test_a_sync_that_fails_after_the_model_was_loaded_is_undone(self, served: tuple[ServedModel, bool]) -> None:
        """In a new session, as after a trainer's restart."""
        server, has_aliases = served
        first, second = tiny_model(5, has_aliases=has_aliases), tiny_model(6, has_aliases=has_aliases)
        with session(server, f"shm://{new_name()}") as sender:
            server.sync(sender, first.named_parameters(), 1)
        url = f"shm://{new_name()}"
        with session(server, url) as sender:
            with vetoed(url, sender) as taking:
                refusal(SyncAbortedError, lambda: server.sync(sender, second.named_parameters(), 1, num_peers=2))
                assert repr(taking.exception(timeout=60)) == "RuntimeError('no')"
            assert server.serves(first)
            server.sync(sender, second.named_parameters(), 1)
            assert server.serves(second)

    def test_a_version_that_does_not_fit_the_model_is_undone(self, served: tuple[ServedModel, bool]) -> None:
        """A tensor of another shape, or of a name that the model's loader does not know, deep in a layer."""
        server, has_aliases = served
        first, second = tiny_model(7, has_aliases=has_aliases), tiny_model(8, has_aliases=has_aliases)
        weights = second.state_dict()
        misfit = {**weights, "model.layers.1.self_attn.k_proj.weight": torch.ones(3, 64)}
        items = list(weights.items())
        unknown = dict([*items[:9], ("model.layers.1.unknown.weight", torch.ones(64, 64)), *items[9:]])
        with session(server, f"uds://{new_name()}") as sender:
            server.sync(sender, first.named_parameters(), 1)
            for wrong in (misfit, unknown):
                refusal(SyncAbortedError, lambda wrong=wrong: server.sync(sender, wrong.items(), 2))
                assert server.serves(first)
            server.sync(sender, second.named_parameters(), 2)
            assert server.serves(second)
