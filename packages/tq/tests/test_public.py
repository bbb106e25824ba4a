import ast
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import rl_tq
from rl_csrc.ipc import limit_sends
from rl_tq.registry import GROUP


def test_public_names():
    assert sorted(rl_tq.__all__) == [
        "AddressError", "BatchMeta", "Credit", "LeaseLostError", "MissingDataError", "PartitionOptions",
        "PerGroup", "PolicyError", "QueueFullError", "RestoreReport", "RowMeta", "Sampler", "SchemaError",
        "ServerLostError",
        "StaleReferenceError", "StaleVersionError", "Storage", "StorageError", "TransferQueue", "TransferQueueError",
        "WaitTimeoutError", "connect", "create_policy", "policies", "serve",
    ]  # fmt: skip
    assert all(hasattr(rl_tq, name) for name in rl_tq.__all__)


def test_errors_are_what_they_specialise():
    assert issubclass(rl_tq.WaitTimeoutError, TimeoutError)
    assert issubclass(rl_tq.ServerLostError, ConnectionError)
    assert issubclass(rl_tq.StaleReferenceError, LookupError)


@pytest.mark.process
def test_importing_is_light():
    code = "import rl_tq, sys; print([m for m in ('torch', 'tensordict', 'numpy', 'ray') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


@pytest.mark.process
def test_nothing_pickles():
    """What arrives from another process is data, and never code."""
    package = Path(rl_tq.__file__).parent
    sources = [path for path in package.rglob("*.py") if {"testing"}.isdisjoint(path.relative_to(package).parts)]
    imported = {
        name
        for path in sources
        for node in ast.walk(ast.parse(path.read_text()))
        for name in (
            [alias.name for alias in node.names] if isinstance(node, ast.Import)
            else [node.module] if isinstance(node, ast.ImportFrom)
            else []
        )
    }  # fmt: skip
    assert "msgspec" in imported
    assert not {
        name for name in imported if name and name.split(".")[0] in ("pickle", "cloudpickle", "marshal", "dill")
    }


@pytest.mark.parametrize("timeout_s", [0, -1.0, 1.1e6, float("inf"), float("nan")])
def test_a_deadline_that_is_none_is_refused(timeout_s):
    for scheme in ("inproc", "shm", "tcp"):
        with pytest.raises(ValueError, match="must be more than 0 seconds, and 1000000 .* at most"):
            rl_tq.serve(f"{scheme}://", timeout_s=timeout_s)
        with pytest.raises(ValueError, match="must be more than 0 seconds, and 1000000 .* at most"):
            rl_tq.connect(f"{scheme}://nobody", timeout_s=timeout_s)


@pytest.mark.parametrize("scheme", ["inproc", "shm", "tcp"])
def test_an_overlong_deadline_is_capped_and_the_server_survives(scheme):
    with rl_tq.serve(f"{scheme}://", timeout_s=1e6) as queue, rl_tq.connect(queue.address, timeout_s=1e6) as client:
        claim = {"partition": "train", "columns": ["x"], "batch_size": 1, "task": "actor"}
        client.put({"x": torch.zeros(2)}, partition="train")
        meta = client.get_meta(**claim, lease_s=1e6)
        for seconds in (1.1e6, float("inf"), float("nan")):
            with pytest.raises(ValueError, match="lease_s is .* at most"):
                client.get_meta(**claim, lease_s=seconds)
            with pytest.raises(ValueError, match="lease_s is .* at most"):
                client.extend(meta, seconds)
            with pytest.raises(ValueError, match="timeout_s is .* at most"):
                client.get_meta(**claim, timeout_s=seconds)
        client.ack(meta)
        assert client.stats()["rows"] == 2


def test_a_server_outlives_invalid_deadlines(monkeypatch):
    with rl_tq.serve("shm://") as queue, rl_tq.connect(queue.address) as client:
        client.put({"x": torch.zeros(1)}, partition="train")
        monkeypatch.setattr("rl_tq.client.client.check_seconds", lambda *_, **__: None)
        client.get_meta(partition="train", columns=["x"], batch_size=1, task="actor", lease_s=1e10)
        assert queue.stats()["rows"] == 1


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"max_rows": 1.5}, "max_rows is 1.5: it must be an integer, or None"),
        ({"keep_steps": float("nan")}, "keep_steps is nan: it must be an integer"),
        ({"max_bytes": "5"}, "max_bytes is '5': it must be an integer, or None"),
        ({"tasks": "actor"}, "tasks is the string 'actor': give a list of names"),
    ],
)
def test_options_of_another_kind_are_refused(options, told):
    with rl_tq.serve("inproc://") as queue, pytest.raises(ValueError, match=told):
        queue.configure("train", **options)


@pytest.mark.parametrize("version", [float("nan"), 1.5, True])
def test_a_weight_version_is_an_integer(version):
    with rl_tq.serve("inproc://") as queue, pytest.raises(ValueError, match="it must be an integer"):
        queue.advance("train", version)


def test_the_shortest_deadline_is_one_for_sends_too():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        limit_sends(ours, 1e-9)
        with pytest.raises(BlockingIOError):
            ours.sendall(bytes(1 << 24))


def test_unknown_storage_lists_what_is_there():
    with pytest.raises(
        rl_tq.StorageError,
        match=r"'pigeon'; installed are \['file', 'inproc', 'nixl', 'ray', 'shm', 'tcp', 'zmq'\]",
    ):
        rl_tq.serve("pigeon://x")


def test_storage_that_cannot_be_imported_names_its_package(monkeypatch: pytest.MonkeyPatch):
    from importlib.metadata import EntryPoint

    broken = EntryPoint(name="far", value="no_such_module_of_ours", group=GROUP)
    monkeypatch.setattr("rl_tq.registry.entry_points", lambda group: [broken])
    with pytest.raises(rl_tq.StorageError, match=r"'far' cannot be imported.*pip install the dist") as caught:
        rl_tq.connect("far://x")
    assert isinstance(caught.value.__cause__, ImportError)


@pytest.mark.parametrize("address", ["my-run", "://x", ""])
def test_addresses_need_a_scheme(address: str):
    with pytest.raises(rl_tq.AddressError, match="SCHEME://NAME"):
        rl_tq.serve(address)


@pytest.mark.parametrize("scheme", ["inproc", "shm"])
def test_names(scheme: str):
    with pytest.raises(rl_tq.AddressError, match="names no queue"):
        rl_tq.connect(f"{scheme}://")
    with pytest.raises(rl_tq.ServerLostError, match=f"no process serves {scheme}://tq-test-nobody"):
        rl_tq.connect(f"{scheme}://tq-test-nobody")
    with rl_tq.serve(f"{scheme}://tq-test-taken") as queue:
        assert queue.address == f"{scheme}://tq-test-taken"
        with pytest.raises(rl_tq.AddressError, match="tq-test-taken"):
            rl_tq.serve(queue.address)
    rl_tq.serve(f"{scheme}://tq-test-taken").close()


def test_a_name_must_fit_into_a_socket_address():
    with pytest.raises(rl_tq.AddressError, match="at most"):
        rl_tq.serve("shm://" + "x" * 120)
