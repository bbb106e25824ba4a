"""Code written for TransferQueue 0.1.11, after an import swap."""

import asyncio
import contextlib
import importlib
import inspect
import logging
import os
import pickle
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from importlib import resources
from pathlib import Path
from urllib.request import urlopen

import numpy as np
import pytest
import torch
import yaml
from tensordict import NonTensorStack, TensorDict

import rl_tq_transfer_queue as tq
from rl_tq import SchemaError
from rl_tq.protocol import framing as _stream
from rl_tq.protocol import handshake as _handshake
from rl_tq.protocol.codec import encode
from rl_tq_transfer_queue.utils.logging_utils import get_logger
from rl_tq_transfer_queue.values import codec

SWAP = """
import importlib, sys
names = ("metadata", "sampler", "client", "interface", "dataloader", "controller", "utils", "utils.logging_utils")
for name in names:
    sys.modules[f"{__name__}.{name}"] = importlib.import_module(f"rl_tq_transfer_queue.{name}")
sys.modules[__name__] = importlib.import_module("rl_tq_transfer_queue")
"""


@pytest.fixture
def start():
    """Starts a queue with options of the controller; the client."""

    def start(**controller) -> tq.TransferQueueClient:
        tq.init({"controller": {"polling_mode": True, **controller}})
        return tq.get_client()

    yield start
    tq.close()


def lists(value) -> list:
    return [row.tolist() for row in value.unbind()] if isinstance(value, torch.Tensor) else value.tolist()


def samples(size: int, **fields) -> TensorDict:
    return TensorDict({"x": torch.arange(3 * size).view(size, 3), **fields}, batch_size=[size])


# The names


@pytest.mark.promise("Every public name of the original is there")
def test_every_public_name_of_the_original_is_there():
    original = pytest.importorskip("transfer_queue", reason="TransferQueue is not installed beside rl-tq")
    assert sorted(original.__all__) == sorted(tq.__all__)


@pytest.mark.parametrize("name", [name for name in tq.__all__ if name != "StorageKeyNotFoundError"])
def test_signatures_are_the_originals(name: str):
    original = pytest.importorskip("transfer_queue", reason="TransferQueue is not installed beside rl-tq")
    theirs, ours = getattr(original, name), getattr(tq, name)
    pairs = [(name, theirs, ours)]
    if inspect.isclass(theirs):
        own = [base for base in theirs.__mro__ if base.__module__.startswith("transfer_queue")]
        members = {member: value for base in own for member, value in vars(base).items()}
        pairs += [
            (f"{name}.{member}", getattr(theirs, member), getattr(ours, member, None))
            for member, value in members.items()
            if (member == "__init__" or not member.startswith("_"))
            and (callable(value) or isinstance(value, property | classmethod | staticmethod))
        ]
    for where, their, our in pairs:
        assert our is not None, f"{where} is missing"
        if callable(their) and not inspect.isclass(their):
            # `socket` is the original's own decorator's.
            wanted = [p for p in inspect.signature(their).parameters.values() if p.name != "socket"]
            there = list(inspect.signature(our).parameters.values())
            assert [(p.name, p.kind, p.default) for p in there if p.name != "self"] == [
                (p.name, p.kind, p.default) for p in wanted if p.name not in ("self", "cls")
            ], where


# By key


def test_keys(start):
    start()
    meta = tq.kv_put("a", "train", {"ids": torch.tensor([1, 2])}, {"step": 0})
    assert (meta.keys, meta.tags, meta.fields, len(meta)) == (["a"], [{"step": 0}], ["ids"], 1)
    fields = TensorDict(
        {"ids": torch.nested.nested_tensor_from_jagged(torch.tensor([3, 4, 5, 6]), torch.tensor([0, 1, 4]))}, [2]
    )
    tq.kv_batch_put(["b", "c"], "train", fields, [{"step": 1}, {"step": 2}])
    both = tq.kv_batch_put(["a", "b"], "train", TensorDict({"reward": torch.tensor([0.5, 1.5])}, [2]))
    assert both.fields == ["ids", "reward"]
    tq.kv_put("c", "train", tag={"done": True})
    assert tq.kv_list("train") == {"train": {"a": {"step": 0}, "b": {"step": 1}, "c": {"step": 2, "done": True}}}
    assert lists(tq.kv_batch_get(["c", "a"], "train")["ids"]) == [[4, 5, 6], [1, 2]]
    assert tq.kv_batch_get_by_meta(both, "reward")["reward"].tolist() == [0.5, 1.5]
    assert sorted(tq.kv_batch_get(["a", "c"], "train").keys()) == ["ids"]
    tq.kv_clear(["a", "nobody"], "train")
    assert list(tq.kv_list()["train"]) == ["b", "c"]
    assert tq.kv_list("nowhere") == {}


@pytest.mark.promise("A missing key is an error that names it")
def test_a_missing_key_is_an_error_and_not_a_shorter_batch(start):
    start()
    tq.kv_batch_put(["a", "b"], "p", samples(2))
    with pytest.raises(ValueError, match=r"not found: \['gone'\]"):
        tq.kv_batch_get(["a", "gone", "b"], "p")
    with pytest.raises(ValueError, match=r"\['y'\] are not ready"):
        tq.kv_batch_get(["a", "b"], "p", ["x", "y"])
    with pytest.raises(ValueError, match="at least one"):
        tq.kv_batch_put(["a"], "p")
    with pytest.raises(ValueError, match="batch_size 2"):
        tq.kv_batch_put(["a"], "p", samples(2))


def test_a_dtype_conflict_is_an_error_and_stores_nothing(start):
    client = start()
    tq.kv_batch_put(["a", "b"], "p", samples(2))
    with pytest.raises(SchemaError, match=r"'x' of partition 'p' is torch.int64, and this put brings torch.float32"):
        client.put(TensorDict({"x": torch.zeros(2, 3)}, [2]), partition_id="p")
    assert list(tq.kv_list("p")["p"]) == ["a", "b"]
    assert client.get_meta(["x"], 3, "p", task_name="t").size == 0
    assert client.get_production_status(["x"], "p")[1].tolist() == [[1], [1]]


def test_a_value_may_be_replaced_and_its_memory_is_freed(start):
    client = start()
    for value in (1, 2, 3):
        tq.kv_put("a", "p", {"x": torch.full((value,), value), "y": torch.tensor([value])})
    tq.kv_put("a", "p", {"x": torch.tensor([9])})
    got = tq.kv_batch_get("a", "p")
    assert (lists(got["x"]), lists(got["y"])) == ([[9]], [[3]])
    assert client._queue.stats()["rows"] == 2
    tq.kv_clear("a", "p")
    assert client._queue.stats()["rows"] == 0


def test_any_object_comes_back(start):
    client = start()
    objects = [{"a": (1, 2)}, np.arange(3), None, {"plain": [1, "x", 2.5]}]
    plain = [{"role": "user"}, "text", [1, 2], None]
    data = TensorDict({"o": NonTensorStack(*objects), "j": NonTensorStack(*plain)}, batch_size=[4])
    client.put(data, partition_id="p")
    got = client.get_data(client.get_meta(["o", "j"], 4, "p", task_name="t"))
    assert got.get("j").tolist() == plain
    back = got.get("o").tolist()
    assert back[0] == objects[0]
    assert back[1].tolist() == [0, 1, 2]
    assert back[2:] == objects[2:]


class Mine:
    """A class of the caller's."""


def test_an_object_of_a_class_of_ones_own_is_refused_whole(start):
    client = start()
    with pytest.raises(SchemaError, match=r"field 'o' cannot be stored: a .*Mine cannot be carried, as reading it"):
        client.put(TensorDict({"o": NonTensorStack((1, 2), Mine())}, batch_size=[2]), partition_id="p")
    with pytest.raises(TypeError, match="Mine cannot be carried"):
        client.get_meta(["x"], 1, "p", task_name="t", sampling_config={"mine": Mine()})
    assert client._queue.stats()["rows"] == 0


VALUES = [
    None, True, 1, -(1 << 70), 1.5, float("inf"), "ä", b"\0\xff", [1, [2]], (1, (2, [])), {"a": {1: (2,)}}, {1: 2},
    {1, 2}, frozenset({(1, 2)}), 1 + 2j, torch.float32, torch.Size([2, 3]), np.float32(1.5), np.int64(-3), (),
]  # fmt: skip


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_plain_values_are_carried_as_they_are(value):
    got = codec.decode(codec.encode({"of": [value]}))["of"][0]
    assert got == value
    assert type(got) is type(value)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.bool, torch.int64, torch.float8_e4m3fn, torch.complex64])
def test_tensors_and_arrays_are_carried_as_they_are(dtype):
    for tensor in (torch.ones(2, 3).to(dtype), torch.ones(3, 2).to(dtype).T, torch.zeros(0, 4).to(dtype)):
        got = codec.decode(codec.encode(tensor))
        assert (got.dtype, got.shape) == (dtype, tensor.shape)
        assert got.to(torch.complex128).equal(tensor.to(torch.complex128))
    array = np.arange(6, dtype=">i2").reshape(2, 3)[:, ::2]
    got = codec.decode(codec.encode(array))
    assert got.dtype == array.dtype
    assert got.tolist() == array.tolist()
    with pytest.raises(TypeError, match="numpy.ndarray cannot be carried"):
        codec.encode(np.array([Mine()], dtype=object))


class Evil:
    """What a pickle can do to whoever reads it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


@pytest.mark.promise("Nothing that a peer sends is run")
def test_nothing_that_a_peer_sends_is_run(start, tmp_path: Path):
    """With the key and without: a pickle, a method that is not the controller's, other bytes."""
    start()
    trap = tmp_path / "trap"
    info = tq.interface._session.local._server.info
    bad = pickle.dumps(("list_partitions", (Evil(trap),), {}))
    with socket.create_connection((info.host, info.port), timeout=20.0) as stranger:
        stranger.sendall(bad + bytes(100))
        assert stranger.recv(40, socket.MSG_WAITALL)
        with contextlib.suppress(ConnectionResetError):
            assert stranger.recv(1) == b""
    with socket.create_connection((info.host, info.port), timeout=20.0) as known:
        _handshake.introduce(known, "x", 20.0, info.key.encode())
        for call in (bad, b"", b"\xc1", b"\x91" * 50_000, codec.encode(("__init__", (), {})), codec.encode(["x"])):
            _stream.send(known, encode({"call": call}))
            assert "error" in _stream.receive(known)[0]
        known.sendall(bad)
        with contextlib.suppress(ConnectionResetError):
            assert known.recv(1) == b""
    assert tq.kv_list() == {}
    assert not trap.exists()


def test_nothing_in_a_checkpoint_is_run(start, tmp_path: Path):
    client = start()
    trap = tmp_path / "trap"
    tq.kv_batch_put(["a", "b"], "p", samples(2))
    tq.save_checkpoint(tmp_path / "saved")
    for name in ("controller_state.records", "values.records"):
        path = tmp_path / "saved" / name
        whole = path.read_bytes()
        for bad in (pickle.dumps(Evil(trap)), b"", whole[:-3], whole[:8] + b"\xff" * 8 + whole[16:], whole[:20]):
            path.write_bytes(bad)
            with pytest.raises(ValueError, match="not a file of this version|damaged|not a value|unpack"):
                tq.load_checkpoint(tmp_path / "saved")
        path.write_bytes(whole)
    assert not trap.exists()
    tq.load_checkpoint(tmp_path / "saved")
    assert lists(tq.kv_batch_get(["a"], "p")["x"]) == [[0, 1, 2]]
    assert client.get_partition_list() == ["p"]


def test_nothing_of_the_layer_reads_pickles():
    for path in Path(tq.__file__).parent.rglob("*.py"):
        text = path.read_text()
        for word in ("import pickle", "cloudpickle", "torch.load", "torch.save", "multiprocessing.connection"):
            assert word not in text, f"{path.name} has {word!r}"


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage")
def test_shapes_may_differ_between_puts_and_inside_one(start):
    client = start()
    client.put(TensorDict({"f": torch.ones(2, 4)}, [2]), partition_id="p")
    first = client.get_meta(["f"], 2, "p", mode="force_fetch")
    assert not first.field_schema["f"]["is_nested"]
    assert first.is_ready
    odd = torch.nested.nested_tensor([torch.zeros(2, 3), torch.zeros(1, 5)])
    client.put(TensorDict({"f": torch.full((1, 6), 2.0)}, [1]), partition_id="p")
    client.put(TensorDict({"g": odd}, [2]), partition_id="q")
    meta = client.get_meta(["f"], 3, "p", mode="force_fetch")
    assert meta.get_shapes("f") == [(4,), (4,), (6,)]
    assert [len(row) for row in client.get_data(meta)["f"].unbind()] == [4, 4, 6]
    other = client.get_data(client.get_meta(["g"], 2, "q", task_name="t"))
    assert [tuple(row.shape) for row in other["g"].unbind()] == [(2, 3), (1, 5)]


def test_a_data_parser_runs_before_the_values_are_stored(start):
    def read(fields):
        fields["x"] = fields["x"] + 1
        fields["url"] = [text.upper() for text in fields["url"]]
        return fields

    client = start()
    client.put(samples(2, url=NonTensorStack("a", "b")), partition_id="p", data_parser=read)
    got = client.get_data(client.get_meta(["x", "url"], 2, "p", task_name="t"))
    assert lists(got["x"]) == [[1, 2, 3], [4, 5, 6]]
    assert got.get("url").tolist() == ["A", "B"]


# By index


def test_insert_put_fetch_reset_and_clear(start):
    client = start()
    meta = client.get_meta(["x", "y"], 4, "p", mode="insert")
    assert (meta.size, meta.is_ready, meta.field_names) == (4, False, ["x", "y"])
    client.put(samples(4), meta)
    assert client.check_production_status(["x"], "p")
    assert not client.check_production_status(["x", "y"], "p")
    assert client.get_meta(["x", "y"], 1, "p", task_name="t").size == 0
    client.put(TensorDict({"y": torch.arange(4.0)}, [4]), meta)
    meta.update_custom_meta([{"i": i} for i in range(4)])
    client.set_custom_meta(meta)
    taken = client.get_meta(["y"], 3, "p", task_name="t")
    assert taken.custom_meta == [{"i": 0}, {"i": 1}, {"i": 2}]
    assert client.get_data(taken[1:])["y"].tolist() == [1.0, 2.0]
    assert client.get_consumption_status("t", "p")[1].tolist() == [1, 1, 1, 0]
    assert client.get_meta(["y"], 2, "p", task_name="t").size == 0
    assert client.get_meta(["y"], 4, "p", task_name="other").size == 4
    assert client.reset_consumption("p", "t")
    assert client.get_meta(["y"], 4, "p", task_name="t").global_indexes == meta.global_indexes
    assert client.check_consumption_status("t", "p")
    client.clear_samples(meta[:1])
    with pytest.raises(tq.StorageKeyNotFoundError, match="cleared"):
        client.get_data(meta)
    client.clear_partition("p")
    assert client.get_partition_list() == []


def test_a_waiting_fetch_is_woken_and_holds_up_nobody(start, monkeypatch):
    client = start(polling_mode=False)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(client.get_meta, ["x"], 2, "p", task_name="t")
        client.put(samples(1), partition_id="p")
        assert client.get_partition_list() == ["p"]
        client.put(samples(1), partition_id="p")
        assert waiting.result(60).size == 2
    monkeypatch.setenv("TQ_CONTROLLER_GET_METADATA_TIMEOUT", "0")
    with pytest.raises(TimeoutError, match="Required: 1 .*Available: 0"):
        client.get_meta(["x"], 1, "p", task_name="t")


def test_group_sampler_waits_for_whole_groups(start):
    client = start(sampler=tq.GRPOGroupNSampler(n_samples_per_prompt=3))
    meta = client.get_meta(["x"], 6, "p", mode="insert")
    client.put(samples(5), meta.select_samples([0, 1, 3, 4, 5]))
    taken = client.get_meta(["x"], 3, "p", task_name="t")
    assert taken.global_indexes == meta.global_indexes[3:]
    assert client.get_meta(["x"], 3, "p", task_name="t").size == 0
    client.put(samples(1), meta[2])
    assert client.get_meta(["x"], 3, "p", task_name="t").global_indexes == meta.global_indexes[:3]


def test_rank_aware_and_balanced_samplers_serve_every_rank(start):
    client = start(sampler="RankAwareSampler")
    client.put(samples(4), partition_id="p")

    def ask(rank: int, index: int) -> list[int]:
        config = {"dp_rank": rank, "batch_index": index}
        return client.get_meta(["x"], 2, "p", task_name="t", sampling_config=config).global_indexes

    first, second = ask(0, 0), ask(1, 0)
    assert sorted(first + second) == [0, 1, 2, 3]
    assert (ask(0, 0), ask(1, 0), ask(0, 1)) == (first, second, [])
    tq.close()
    client = start(sampler=tq.SeqlenBalancedSampler(n_samples_per_prompt=1, dp_size=2))
    meta = client.get_meta(["x"], 4, "p", mode="insert")
    meta.update_custom_meta([{"total_lengths": n} for n in (7, 1, 5, 3)])
    client.put(samples(4), meta)
    assert [ask(rank, 0) for rank in (1, 0)] == [[2, 3], [0, 1]]


def test_a_sampler_of_ones_own_sees_what_the_caller_sends(start):
    class Scored(tq.BaseSampler):
        def sample(self, ready_indexes, batch_size, scores=(), *args, **kwargs):
            best = sorted(ready_indexes, key=lambda i: -scores[i])[:batch_size]
            return best, best[:1]

    client = start(sampler=Scored)
    client.put(samples(3), partition_id="p")
    config = {"scores": np.array([1, 9, 5])}
    asks = [client.get_meta(["x"], 2, "p", task_name="t", sampling_config=config).global_indexes for _ in range(2)]
    assert asks == [[1, 2], [2, 0]]


def test_async_twins(start):
    start()

    async def work() -> list[int]:
        await tq.async_kv_batch_put(["a", "b"], "p", samples(2), [{}, {}])
        client = tq.get_client()
        meta = await client.async_get_meta(["x"], 2, "p", task_name="t")
        await tq.async_kv_clear("a", "p")
        assert list((await tq.async_kv_list("p"))["p"]) == ["b"]
        return [*lists((await tq.async_kv_batch_get("b", "p"))["x"]), meta.size]

    assert asyncio.run(work()) == [[3, 4, 5], 2]


# The rest


@pytest.mark.process
def test_streaming_loader(start):
    client = start(sampler=tq.RankAwareSampler)
    config = tq.interface.ControllerHost.get_config(tq.interface._session.local)

    def loader(rank: int) -> tq.StreamingDataLoader:
        dataset = tq.StreamingDataset(
            config=config, batch_size=2, micro_batch_size=1, data_fields=["x"], partition_id="p", task_name="t",
            dp_rank=rank, should_check_consumption_status=True,
        )  # fmt: skip
        return tq.StreamingDataLoader(dataset=dataset)

    produced = threading.Thread(target=lambda: [client.put(samples(1), partition_id="p") for _ in range(4)])
    mine = loader(0)
    first = iter(mine)
    produced.start()
    begun = [next(first) for _ in range(2)]
    produced.join(30)
    rest = list(loader(1))
    assert sorted(meta.global_indexes[0] for _, meta in begun + rest) == [0, 1, 2, 3]
    assert all(lists(data["x"]) == [[0, 1, 2]] for data, _ in begun + rest)
    mine.reset()
    assert [meta.global_indexes for _, meta in mine] == [meta.global_indexes for _, meta in begun]
    assert len(mine.get_buffer()) == 1
    mine.step("q")
    assert mine.get_buffer() == []


def test_checkpoints_bring_everything_back(start, tmp_path: Path):
    client = start()
    tq.kv_batch_put(["a", "b"], "p", samples(2, info=NonTensorStack({"i": 0}, {"i": 1})), [{"step": 1}, {}])
    client.get_meta(["x"], 1, "p", task_name="t")
    tq.save_checkpoint(tmp_path / "saved", metadata={"step": 7})
    tq.save_checkpoint(tmp_path / "saved")
    tq.close()
    client = start()
    tq.load_checkpoint(tmp_path / "saved")
    assert tq.kv_list("p") == {"p": {"a": {"step": 1}, "b": {}}}
    got = tq.kv_batch_get(["b", "a"], "p")
    assert lists(got["x"]) == [[3, 4, 5], [0, 1, 2]]
    assert got.get("info").tolist() == [{"i": 1}, {"i": 0}]
    assert client.get_meta(["x"], 1, "p", task_name="t").global_indexes == [1]
    with pytest.raises(FileNotFoundError, match="not a checkpoint"):
        tq.load_checkpoint(tmp_path)


def test_configuration_is_obeyed_or_refused(start):
    for conf, message in (
        ({"backend": {"storage_backend": "MooncakeStore"}}, "'MooncakeStore': here it is"),
        ({"controler": {}}, r"no \['controler'\] here"),
        ({"controller": {"sampler": "NoSuch"}}, "Could not find sampler 'NoSuch'"),
        ({"backend": {"SimpleStorage": {"ssd_offload": {}}}}, "no .'ssd_offload'. here"),
    ):
        with pytest.raises(ValueError, match=message):
            tq.init(conf)
    with pytest.raises(RuntimeError, match="Call init"):
        tq.kv_list()
    conf = {"metrics": {"enabled": True}, "backend": {"SimpleStorage": {"total_storage_size": 3}}}
    final = tq.init(conf)
    assert final.controller.sampler is tq.SequentialSampler
    tq.kv_batch_put(["a", "b"], "p", samples(2))
    with urlopen(f"http://{tq.get_metrics_endpoint()}/metrics", timeout=30) as answer:
        assert 'rl_tq_partition_rows{partition="p"} 2' in answer.read().decode()
    with pytest.raises(RuntimeError, match="total_storage_size=3"):
        tq.kv_batch_put(["c", "d"], "p", samples(2))


def test_names_the_original_s_recipes_import_are_available(start, monkeypatch, caplog):
    names = set(logging.root.manager.loggerDict)
    monkeypatch.setenv("TQ_LOGGING_LEVEL", "INFO")
    logger = get_logger("a recipe", default_level="ERROR")
    try:
        logger.info("said")
        assert (logger.level, caplog.messages, logger.handlers) == (logging.INFO, ["said"], [])  # pytest's take it
    finally:
        for name in set(logging.root.manager.loggerDict) - names:
            del logging.root.manager.loggerDict[name]
    # Any YAML reader gives what init takes, and what init has where nothing is said.
    conf = yaml.safe_load((resources.files(tq) / "config.yaml").read_text())
    conf["controller"]["polling_mode"] = True
    final = tq.init(conf)
    assert final.controller.sampler is tq.SequentialSampler
    assert {**final, "controller": {**final.controller, "sampler": "SequentialSampler", "zmq_info": None}} == conf
    tq.kv_put("k", "p", {"x": torch.ones(2)}, None)


RAY = """
import ray, torch
import rl_tq_transfer_queue as tq

ray.init("local", num_cpus=1, include_dashboard=False, logging_level="ERROR", namespace="theirs")

@ray.remote(num_cpus=0)
def produce(key):
    tq.init()
    tq.kv_put(key, "train", {"ids": torch.arange(3)}, {"by": key})
    return tq.kv_list("train")["train"][key]

tq.init({"controller": {"polling_mode": True, "sampler": tq.SequentialSampler}})
assert ray.get([produce.remote(key) for key in "ab"], timeout=120) == [{"by": "a"}, {"by": "b"}]
print([row.tolist() for row in tq.kv_batch_get(["a", "b"], "train")["ids"].unbind()])
actor = ray.get_actor("TransferQueueController", namespace="transfer_queue")
print(ray.get(actor.list_partitions.remote(), timeout=60))
tq.close()
ray.shutdown()
"""


@pytest.mark.slow
def test_workers_of_a_real_ray_find_the_queue():
    pytest.importorskip("ray")
    done = subprocess.run([sys.executable, "-c", RAY], capture_output=True, text=True, timeout=280, check=False)
    assert done.stdout.splitlines() == ["[[0, 1, 2], [0, 1, 2]]", "['train']"], done.stderr[-2000:]


EXAMPLES = os.environ.get("TRANSFER_QUEUE_EXAMPLES")


@pytest.mark.slow
@pytest.mark.skipif(not EXAMPLES, reason="TRANSFER_QUEUE_EXAMPLES names no folder of the original's tutorials")
@pytest.mark.parametrize(
    "path", sorted(Path(EXAMPLES).glob("*.py")) if EXAMPLES else [], ids=lambda path: path.stem
)  # fmt: skip
def test_the_originals_own_examples_run(path: Path, tmp_path: Path):
    swap = tmp_path / "swap" / "transfer_queue"
    swap.mkdir(parents=True)
    (swap / "__init__.py").write_text(SWAP)
    paths = os.pathsep.join([str(swap.parent), os.environ.get("PYTHONPATH", "")])
    env = {**os.environ, "PYTHONPATH": paths, "RAY_ADDRESS": "local"}  # a Ray of its own, whatever else runs
    done = subprocess.run(
        [sys.executable, str(path)], env=env, capture_output=True, text=True, timeout=580, check=False
    )  # fmt: skip
    told = done.stdout + done.stderr
    if path.stem == "02_kv_interface":  # puts one field with two dtypes, which passes for success there
        assert "'attention_mask' of partition 'Train' is torch.float32, and this put brings torch.int64" in told
    else:
        assert done.returncode == 0, told[-3000:]


def test_a_failed_save_leaves_the_older_checkpoint_alone(start, tmp_path: Path, monkeypatch):
    start()
    tq.kv_put("a", "p", {"x": torch.tensor([1])})
    tq.save_checkpoint(tmp_path / "ck", metadata={"step": 1})
    before = (tmp_path / "ck" / "metadata.json").read_text()

    def fails(self, *args):
        raise OSError(28, "No space left on device")

    for name in ("save_controller_checkpoint", "save_storage_checkpoint"):
        with monkeypatch.context() as patch:
            patch.setattr(tq.TransferQueueClient, name, fails)
            with pytest.raises(OSError, match="No space left on device: '.*/ck'"):
                tq.save_checkpoint(tmp_path / "ck", metadata={"step": 2})
        assert [file.name for file in tmp_path.iterdir()] == ["ck"]
        assert (tmp_path / "ck" / "metadata.json").read_text() == before
    rename = Path.rename

    def fails_last(self, target):
        if self.name.endswith(".tmp"):
            raise OSError(5, "Input/output error")
        return rename(self, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", fails_last)
        with pytest.raises(OSError, match="Input/output"):
            tq.save_checkpoint(tmp_path / "ck", metadata={"step": 2})
    assert [file.name for file in tmp_path.iterdir()] == ["ck"]
    assert (tmp_path / "ck" / "metadata.json").read_text() == before


def test_a_checkpoint_without_storage_has_it_all_the_same(start, tmp_path: Path, caplog):
    start()
    tq.kv_put("a", "p", {"x": torch.tensor([1])})
    tq.save_checkpoint(tmp_path / "ck", include_storage=False)
    assert "include_storage=False has no effect" in caplog.text
    tq.close()
    start()
    tq.load_checkpoint(tmp_path / "ck")
    assert lists(tq.kv_batch_get("a", "p")["x"]) == [[1]]


def test_a_rank_out_of_range_gets_nothing():
    sampler = tq.SeqlenBalancedSampler(n_samples_per_prompt=1, dp_size=2)
    assert sampler.sample([0, 1, 2, 3], 2, "t", "p", dp_rank=5, batch_index=0) == ([], [])
    assert sampler.sample([0, 1, 2, 3], 2, "t", "p", dp_rank=1, batch_index=0)[0]
    with pytest.raises(ValueError, match="dp_rank -1 must be"):
        sampler.sample([0], 1, "t", "p", dp_rank=-1, batch_index=0)


PATHS = [
    "client",
    "controller",
    "dataloader",
    "dataloader.streaming_dataloader",
    "dataloader.streaming_dataset",
    "interface",
    "metadata",
    "metrics",
    "sampler",
    "sampler.base",
    "sampler.grpo_group_n_sampler",
    "sampler.rank_aware_sampler",
    "sampler.seqlen_balanced_sampler",
    "sampler.sequential_sampler",
    "storage",
    "storage.bootstrap",
    "storage.bootstrap.mooncake_bootstrap",
    "storage.bootstrap.provider",
    "storage.bootstrap.simple_storage_bootstrap",
    "storage.bootstrap.yuanrong_bootstrap",
    "storage.clients",
    "storage.clients.base",
    "storage.clients.mooncake_client",
    "storage.clients.ray_storage_client",
    "storage.clients.yuanrong_client",
    "storage.managers",
    "storage.managers.base",
    "storage.managers.mooncake_manager",
    "storage.managers.ray_storage_manager",
    "storage.managers.simple_storage_manager",
    "storage.managers.yuanrong_manager",
    "storage.simple_storage",
    "utils",
    "utils.accept_probe",
    "utils.common",
    "utils.enum_utils",
    "utils.logging_utils",
    "utils.mooncake_utils",
    "utils.perf_utils",
    "utils.serial_utils",
    "utils.tensor_utils",
    "utils.yuanrong_utils",
    "utils.zmq_utils",
]


@pytest.mark.parametrize("path", PATHS)
def test_the_original_s_paths_can_be_imported(path):
    assert importlib.import_module(f"rl_tq_transfer_queue.{path}").__name__ == f"rl_tq_transfer_queue.{path}"


def test_the_original_s_paths_have_the_public_names():
    from rl_tq_transfer_queue.dataloader.streaming_dataset import StreamingDataset, chunk_batch_fn
    from rl_tq_transfer_queue.sampler.base import BaseSampler
    from rl_tq_transfer_queue.sampler.seqlen_balanced_sampler import SeqlenBalancedSampler
    from rl_tq_transfer_queue.storage.simple_storage import StorageKeyNotFoundError

    assert StreamingDataset is tq.StreamingDataset
    assert callable(chunk_batch_fn)
    assert (BaseSampler, SeqlenBalancedSampler) == (tq.BaseSampler, tq.SeqlenBalancedSampler)
    assert StorageKeyNotFoundError is tq.StorageKeyNotFoundError
    with pytest.raises(
        ImportError, match=r"SimpleStorageUnit of transfer_queue.storage.simple_storage has no counterpart"
    ):
        from rl_tq_transfer_queue.storage.simple_storage import SimpleStorageUnit  # noqa: F401
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("rl_tq_transfer_queue.storage.redis")
