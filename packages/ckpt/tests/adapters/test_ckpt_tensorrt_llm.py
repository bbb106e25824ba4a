"""TensorRT-LLM's workers take syncs: the extension and the launcher, over stand-ins of the modules that they import.

The stand-ins are written from the sources of TensorRT-LLM 1.2 to 1.4; the real one was never run.
"""

import asyncio
import functools
import json
import os
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from types import ModuleType, SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import rl_ckpt
from rl_ckpt.adapters.layout import read_layouts, write_layout_request
from rl_ckpt.adapters.tensorrt_llm import EXTENSION, KEY_VARIABLE, __main__, update_message
from rl_ckpt.testing import new_name

RANKS = 2
HEADS, HIDDEN = 8, 6


def weights_of(seed):
    generator = torch.Generator().manual_seed(seed)
    shapes = {"qkv.q": (HEADS, HIDDEN), "qkv.k": (HEADS, HIDDEN), "o.weight": (HIDDEN, HEADS), "norm.weight": (HIDDEN,)}
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


class Linear(nn.Module):
    """A layer that takes its part to the device before it copies it, where `clone` stands for the way there."""

    def __init__(self, rank, keys, axis, shape):
        super().__init__()
        self.rank, self.keys, self.axis = rank, keys, axis
        self.weight = nn.Parameter(torch.zeros(shape), requires_grad=False)

    def load_weights(self, weights):
        rows = len(self.weight) // len(self.keys)
        for number, key in enumerate(self.keys):
            if key in weights:
                part = weights[key].chunk(RANKS, self.axis)[self.rank].clone()
                self.weight[number * rows : (number + 1) * rows].data.copy_(part)


class Model(nn.Module):
    """One rank of two. Its `forward` stands for what it would answer."""

    def __init__(self, rank):
        super().__init__()
        self.qkv = Linear(rank, ("q", "k"), 0, (HEADS, HIDDEN))
        self.o = Linear(rank, ("weight",), 1, (HIDDEN, HEADS // RANKS))
        self.norm = nn.RMSNorm(HIDDEN)
        self.norm.weight.requires_grad_(False)
        self.num_prepared = self.num_finished = 0
        self.breaks = False
        """Whether the next load fails in the middle."""

    def pre_reload_weights(self):
        self.num_prepared += 1

    def post_load_weights(self):
        self.num_finished += 1

    def load_weights(self, weights):
        for name, layer in (("qkv", self.qkv), ("o", self.o)):
            own = {
                key.removeprefix(f"{name}."): tensor for key, tensor in weights.items() if key.startswith(f"{name}.")
            }
            layer.load_weights(own)
            if self.breaks:
                self.breaks = False
                raise RuntimeError("out of memory on the device")
        if "norm.weight" in weights:
            self.norm.weight.data.copy_(weights["norm.weight"][:])

    def holds(self, weights):
        other = Model(self.qkv.rank)
        other.load_weights(weights)
        return all(torch.equal(a, b) for a, b in zip(self.parameters(), other.parameters(), strict=True))


class Engine:
    def __init__(self, model):
        reload = SimpleNamespace(reload=lambda model, weights, allow_partial_loading: model.load_weights(weights))
        self.model_engine = SimpleNamespace(model=model, model_loader=reload)
        self.stands_still = threading.Lock()
        self.num_resets = self.num_stops = 0

    @contextmanager
    def control_action(self):
        self.num_stops += 1
        assert self.stands_still.acquire(blocking=False), "it would wait for itself"
        try:
            yield
        finally:
            self.stands_still.release()

    def reset_prefix_cache(self):
        assert self.stands_still.locked()
        self.num_resets += 1


def standing_still(function):
    @functools.wraps(function)
    def wrapper(self, *args):
        with self.engine.control_action():
            return function(self, *args)

    return wrapper


class WorkerExtension:
    """TensorRT-LLM's own: handles by the id of a device, and None to finish."""

    @standing_still
    def update_weights(self, ipc_handles=None):
        model, latch = self.engine.model_engine.model, "first_pre_reload_weights"
        if not hasattr(model, latch):
            model.pre_reload_weights()
            setattr(model, latch, True)
        if ipc_handles is None:
            model.post_load_weights()
            self.engine.reset_prefix_cache()
            delattr(model, latch)
            return
        if (device := device_uuid(self.device_id)) not in ipc_handles:
            raise ValueError(f"Device UUID {device} not found in ipc_handles")
        weights = {}
        for name, (build, args) in ipc_handles[device]:
            args = list(args)
            args[6] = self.device_id
            weights[name] = build(*args)
        self.engine.model_engine.model_loader.reload(model, weights, allow_partial_loading=True)


def device_uuid(device_id):
    return f"GPU-{device_id}"


@pytest.fixture
def extension(monkeypatch):
    """The class that TensorRT-LLM would find by the name it is given."""
    utils = ModuleType("tensorrt_llm.llmapi.rlhf_utils")
    utils.WorkerExtension, utils.get_device_uuid = WorkerExtension, device_uuid
    package, llmapi = ModuleType("tensorrt_llm"), ModuleType("tensorrt_llm.llmapi")
    llmapi.rlhf_utils = utils
    for module in (package, llmapi, utils):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.delitem(sys.modules, EXTENSION.rpartition(".")[0], raising=False)
    place, _, name = EXTENSION.rpartition(".")
    return getattr(__import__(place, fromlist=[name]), name)


class Server:
    """The workers of one server, as its /update_weights calls them: all at once, with the same argument."""

    def __init__(self, extension, folder):
        class Worker:
            def __init__(self, rank):
                self.engine, self.device_id, self.global_rank, self._hf_model_dir = (
                    Engine(Model(rank)),
                    rank,
                    rank,
                    folder,
                )

        taken = [name for name in dir(extension) if not name.startswith("__") and hasattr(Worker, name)]
        assert not taken, "TensorRT-LLM refuses an extension that a worker has names of"
        self.workers = [type("Extended", (Worker, extension), {})(rank) for rank in range(RANKS)]
        self.models = [worker.engine.model_engine.model for worker in self.workers]
        self.folder, self.url = folder, f"inproc://{new_name()}"
        self.pool = ThreadPoolExecutor(RANKS)
        for model in self.models:
            model.load_weights(weights_of(0))

    def post(self, body):
        assert body.keys() == {"weights"}
        assert all(isinstance(text, str) for each in body["weights"].items() for text in each)
        return [self.pool.submit(worker.update_weights, body["weights"]) for worker in self.workers]

    def sync(self, sender, weights, version, wanted=None, timeout_s=30):
        """Send a version; returns the reason of every worker that failed."""
        files = [self.folder / f"failed-{rank}" for rank in range(RANKS)]
        for file in files:
            file.unlink(missing_ok=True)
        answers = self.post(
            update_message(url=self.url, version=wanted or version, timeout_s=timeout_s, folder=str(self.folder))
        )
        report = None
        with suppress(rl_ckpt.SyncAbortedError, rl_ckpt.PeerTimeoutError):
            report = sender.send(weights.items(), version=version, num_peers=RANKS)
        for answer in answers:
            assert answer.result(60) is None, "a failure must not be the answer of one worker"
        told = [file.read_text() for file in files if file.exists()]
        assert (report is None) == bool(told)
        return told

    def answered(self, may_fail=False, **fields):
        """Have all workers answer a message; returns the reason of every one that failed."""
        for file in self.folder.glob("failed-*"):
            file.unlink()
        for answer in self.post(update_message(folder=str(self.folder), **fields)):
            assert answer.result(60) is None
        told = [file.read_text() for file in self.folder.glob("failed-*")]
        assert may_fail or not told, told
        return told

    def holds(self, weights):
        return all(model.holds(weights) for model in self.models)


@pytest.fixture
def server(extension, tmp_path):
    save_file(weights_of(0), tmp_path / "model.safetensors")
    server = Server(extension, tmp_path)
    yield server
    server.pool.shutdown()
    for worker in server.workers:
        if worker._rl_ckpt is not None:
            worker._rl_ckpt._installer.detach()


@pytest.fixture
def sender(server):
    with rl_ckpt.connect(server.url, role="send", timeout_s=30) as sender:
        yield sender


@pytest.mark.promise(
    "A worker of TensorRT-LLM takes its part of a version and vouches for it (a stand-in of the worker)"
)
def test_every_worker_takes_its_part_and_vouches_for_it(server, sender):
    for version in (1, 2):
        assert server.sync(sender, weights_of(version), version) == []
        assert server.holds(weights_of(version))
    for worker, model in zip(server.workers, server.models, strict=True):
        assert (model.num_prepared, model.num_finished, worker.engine.num_resets) == (2, 2, 4)
        assert not hasattr(model, "first_pre_reload_weights")


def test_a_loader_that_loses_data_is_found_and_undone(server, sender):
    assert server.sync(sender, weights_of(1), 1) == []
    layer = server.models[1].o
    load = layer.load_weights

    def loses_a_bit(weights):
        load(weights)
        layer.weight[2, 1] += 1
        layer.load_weights = load

    layer.load_weights = loses_a_bit
    told = server.sync(sender, weights_of(2), 2)
    assert any("its loader lost or changed some" in text for text in told)
    assert server.holds(weights_of(1))
    assert server.sync(sender, weights_of(3), 3) == []
    assert server.holds(weights_of(3))


@pytest.mark.promise(
    "A load that breaks in a worker of TensorRT-LLM is undone on all of them (a stand-in of the worker)"
)
@pytest.mark.parametrize("num_before", [0, 1])
def test_a_load_that_breaks_is_undone_on_all_workers(server, sender, num_before):
    """With the version before, or with what is on disk."""
    if num_before:
        assert server.sync(sender, weights_of(1), 1) == []
    server.models[0].breaks = True
    told = server.sync(sender, weights_of(2), 2)
    assert any("out of memory on the device" in text for text in told)
    assert server.holds(weights_of(num_before))
    assert not any(hasattr(model, "first_pre_reload_weights") for model in server.models)
    assert not any("must not serve" in text for text in told)
    assert server.sync(sender, weights_of(3), 3) == []
    assert server.holds(weights_of(3))


def test_an_incomplete_or_mismatched_sync_changes_nothing(server, sender):
    without = {name: tensor for name, tensor in weights_of(1).items() if name != "qkv.k"}
    shorter = {name: tensor for name, tensor in weights_of(1).items() if not name.startswith("norm")}
    assert any("TensorError: 1 parameters of the model got" in text for text in server.sync(sender, shorter, 1))
    assert server.holds(weights_of(0))
    told = server.sync(sender, weights_of(2), 2, wanted=7)
    assert any("version 2 came, and 7 was asked for" in text for text in told)
    assert server.holds(weights_of(0))
    assert server.sync(sender, weights_of(3), 3) == []
    told = server.sync(sender, without, 4)
    assert any("1 of the 4 tensors that the engine holds did not come" in text for text in told)
    assert server.holds(weights_of(3))


def test_a_model_that_cannot_go_back_refuses(server, sender):
    (server.folder / "model.safetensors").unlink()
    server.models[0].breaks = True
    told = server.sync(sender, weights_of(1), 1)
    assert any("must not serve: " in text and "no model*.safetensors" in text for text in told)
    with pytest.raises(rl_ckpt.UsageError, match="mixed since a failed sync"):
        server.models[0](None)
    assert server.sync(sender, weights_of(2), 2) == []
    assert server.holds(weights_of(2))


class ShardedTrainer:
    """Two ranks of a trainer, each with half of the rows of every tensor, and what the workers have told of theirs."""

    def __init__(self, server):
        self.server, folder = server, server.folder / "layout"
        folder.mkdir()
        told = {name: ("float32", tuple(tensor.shape)) for name, tensor in weights_of(0).items()}
        server.answered(url=write_layout_request(folder, told))
        targets, name = read_layouts(folder, RANKS), new_name()
        self.plan = rl_ckpt.ShardPlan([list(self.specs(rank)) for rank in range(2)], targets)
        self.senders = [
            rl_ckpt.ShardedSender(self.plan, rank, lambda to, r=rank: f"inproc://{name}-{r}-{to}", timeout_s=30)
            for rank in range(2)
        ]

    def specs(self, rank):
        for name, tensor in weights_of(0).items():
            yield rl_ckpt.ShardSpec.on_mesh(
                name, tuple(tensor.shape), mesh=(2,), placements=(0,), coordinate=(rank,)
            )  # fmt: skip

    async def open(self):
        addresses = [await sender.prepare() for sender in self.senders]
        return rl_ckpt.join_addresses(addresses, self.plan.num_targets).to_json()

    async def send(self, weights, version):
        shares = await asyncio.gather(
            *(
                sender.stage(
                    lambda r=r: [(spec, spec.of(weights[spec.name])) for spec in self.specs(r)], version=version
                )
                for r, sender in enumerate(self.senders)
            ),
            return_exceptions=True,
        )
        if failed := [share for share in shares if isinstance(share, BaseException)]:
            await asyncio.gather(*(sender.abort(str(failed[0])) for sender in self.senders))
            raise failed[0]
        digest = rl_ckpt.join_digest(shares)
        return [await sender.commit(digest, version) for sender in self.senders]

    async def close(self):
        for sender in self.senders:
            await sender.close()


@pytest.mark.promise("Slices land while TensorRT-LLM goes on, and each worker takes its own (a stand-in of the worker)")
@pytest.mark.process
def test_slices_land_while_serving_and_workers_take_their_own(server):
    trainer = ShardedTrainer(server)
    assert server.holds(weights_of(0)), "a layout is told by a dry run"
    with asyncio.Runner() as runner, ThreadPoolExecutor(1) as pool:
        address = runner.run(trainer.open())
        landed = [server.folder / f"landed-{rank}" for rank in range(RANKS)]

        def sync(version, breaks=False):
            for file in landed:
                file.unlink(missing_ok=True)
            server.answered(url=address, timeout_s=30)
            sending = pool.submit(runner.run, trainer.send(weights_of(version), version))
            deadline = time.monotonic() + 30
            while not all(file.exists() for file in landed):
                assert time.monotonic() < deadline
                assert not any(worker.engine.stands_still.locked() for worker in server.workers)
                time.sleep(0.001)
            assert not server.holds(weights_of(version))
            server.models[0].breaks = breaks
            return server.answered(url=address, version=version, may_fail=breaks), sending

        for version in (1, 2):
            told, sending = sync(version)
            assert told == []
            receipts = [receipt for report in sending.result(60) for receipt in report.receipts]
            assert all(receipt.is_attested for receipt in receipts)
            assert sum(report.num_bytes for report in sending.result()) == 4 * num_taken(server)
            assert server.holds(weights_of(version))
        told, sending = sync(3, breaks=True)
        assert any("out of memory on the device" in text for text in told)
        assert sending.exception(60) is not None
        assert server.holds(weights_of(2))
        assert sync(4)[1].result(60)
        assert server.holds(weights_of(4))
        assert [model.num_finished for model in server.models] == [1, 1]  # of the first, which came whole
        assert all(worker.engine.num_resets >= 4 for worker in server.workers)
        runner.run(trainer.close())


def num_taken(server):
    """Elements that the workers compute with."""
    return sum(parameter.numel() for model in server.models for parameter in model.parameters())


def test_handles_and_questions_are_answered_as_before(server):
    """A probe changes nothing; TensorRT-LLM's own handles go to its own extension."""
    for answer in server.post(update_message()):
        assert answer.result(60) is None
    assert server.holds(weights_of(0))
    worker, weights = server.workers[1], weights_of(4)
    worker.update_weights(
        {"GPU-1": [(name, (lambda t, *_: t, (tensor, *[0] * 6))) for name, tensor in weights.items()]}
    )
    worker.update_weights(None)
    assert server.models[1].holds(weights)
    with pytest.raises(ValueError, match="GPU-1 not found"):
        worker.update_weights({"GPU-7": []})


@pytest.mark.process
def test_workers_stand_still_together_also_where_one_cannot_join(server, monkeypatch):
    """A worker that did not would be waited for, and wait in the next update for those that had gone on."""

    def join(*_, **__):
        raise rl_ckpt.AddressError("no such place")

    receiver = extension_module().Receiver(server.workers[0])
    server.workers[0]._rl_ckpt = receiver
    monkeypatch.setattr(receiver._installer, "join", join)
    with rl_ckpt.connect(server.url, role="send", timeout_s=2) as sender:
        told = server.sync(sender, weights_of(1), 1, timeout_s=2)
    assert any("no such place" in text for text in told)
    assert [worker.engine.num_stops for worker in server.workers] == [1, 1]


def extension_module():
    return sys.modules[EXTENSION.rpartition(".")[0]]


def test_an_unknown_update_weights_kind_is_refused_before_a_call(server, sender, monkeypatch):
    monkeypatch.delattr(WorkerExtension.update_weights, "__wrapped__")
    told = server.sync(sender, weights_of(1), 1)
    assert any("use 1.2 to 1.4" in text for text in told)


class AsyncLLM:
    """What the launcher makes, noted."""

    made = None

    def __init__(self, **settings):
        type(self).made, self.settings, self.is_set_up = self, settings, False

    async def setup_async(self):
        self.is_set_up = True


class PlainServer:
    """TensorRT-LLM's HTTP server up to 1.2, which signs nothing."""

    called = None

    def __init__(self, generator, model, tool_parser, server_role, metadata_server_cfg):
        assert generator.is_set_up
        self.model, self.key = model, None

    async def __call__(self, host, port):
        PlainServer.called = host, port, self.model, self.key


class SigningServer(PlainServer):
    """The one from 1.3 on, which has no /update_weights unless it is asked for."""

    def __init__(self, *positional, enable_rl_control_endpoints=False, rl_control_api_key=None, **named):
        super().__init__(*positional, **named)
        self.key = rl_control_api_key if enable_rl_control_endpoints else "no route"


@pytest.fixture
def launch(monkeypatch):
    """Run the launcher; returns what the engine was made with, and what the server was called with."""
    monkeypatch.setattr(os, "environ", dict(os.environ))

    def launch(*words, server=SigningServer, **members):
        package, served = ModuleType("tensorrt_llm"), ModuleType("tensorrt_llm.serve")
        package.AsyncLLM, served.OpenAIServer = AsyncLLM, server
        package.llmapi = ModuleType("tensorrt_llm.llmapi")
        vars(package.llmapi).update(members)
        for module in (package, served, package.llmapi):
            monkeypatch.setitem(sys.modules, module.__name__, module)
        __main__.main(words)
        return AsyncLLM.made.settings, PlainServer.called

    return launch


def test_the_launcher_starts_the_engine_that_takes_weights(launch, tmp_path):
    file = tmp_path / "more.yaml"
    file.write_text("kv_cache_config: {free_gpu_memory_fraction: 0.4}\n")
    words = ("/model", "--host", "127.0.0.1", "--port", "81", "--max_seq_len", "64", "--max_batch_size", "4")
    os.environ[KEY_VARIABLE] = "secret"
    settings, called = launch(*words, "--tp_size", "2", "--extra_llm_api_options", str(file))
    assert settings == {
        "model": "/model",
        "backend": "pytorch",
        "tensor_parallel_size": 2,
        "max_seq_len": 64,
        "max_batch_size": 4,
        "ray_worker_extension_cls": EXTENSION,
        "kv_cache_config": {"free_gpu_memory_fraction": 0.4},
    }
    assert called == ("127.0.0.1", 81, "/model", "secret")
    assert os.environ["TRT_LLM_DISABLE_LOAD_WEIGHTS_IN_PARALLEL"] == "1"
    assert launch("/model", server=PlainServer)[1] == ("localhost", 8000, "/model", None)
    assert launch("/model", "--sleeps")[0]["enable_sleep"] is True
    assert launch("/model", "--sleeps", SleepConfig=dict)[0]["sleep_config"] == {}


def test_the_launcher_reports_impossible_plans_before_loading(launch, tmp_path, monkeypatch):
    AsyncLLM.made = None
    os.environ.pop(KEY_VARIABLE, None)
    with pytest.raises(SystemExit, match=f"set the variable {KEY_VARIABLE}"):
        launch("/model")
    file = tmp_path / "more.yaml"
    file.write_text("pipeline_parallel_size: 2\nmax_seq_len: 9\n")
    with pytest.raises(SystemExit, match="more.yaml sets max_seq_len, pipeline_parallel_size, which arguments set"):
        launch("/model", "--max_seq_len", "8", "--extra_llm_api_options", str(file), server=PlainServer)
    monkeypatch.setitem(sys.modules, "tensorrt_llm", None)
    with pytest.raises(SystemExit, match=r"cannot be imported .* 1\.2 and later"):
        asyncio.run(__main__.serve(SimpleNamespace()))
    assert AsyncLLM.made is None


def test_a_message_is_text_under_one_key():
    assert json.loads(update_message(url="shm://a", version=3)["weights"]["rl_ckpt"]) == {
        "url": "shm://a",
        "version": 3,
    }
