import multiprocessing
import socket
from importlib import import_module
from pathlib import Path

import pytest
import torch
import torch.distributed as dist


def pytest_collection_modifyitems(items):
    """Mark `process` what asks for ranks (`seen` asks for them by name), and what imports megatron-core for seconds."""
    for item in items:
        asks_for_ranks = not {"rank_server", "seen"}.isdisjoint(getattr(item, "fixturenames", ()))
        if asks_for_ranks or "megatron" in item.nodeid:
            item.add_marker("process")


@pytest.fixture(autouse=True, scope="session")
def one_thread():
    """Tiny models: threads only wait for each other, long so on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def cuda_stand_in():
    """megatron-core asks for a CUDA device: its calls are answered where there is none."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(Path(__file__).parent / "support" / "megatron_on_cpu")
        with import_module("megatron_on_cpu").cuda_stand_in():
            yield


@pytest.fixture(autouse=True)
def megatron_on_a_cpu(request):
    """For every test whose file or parameters name the backend."""
    if "megatron" in request.node.nodeid:
        request.getfixturevalue("cuda_stand_in")


@pytest.fixture(autouse=True)
def no_group_left():
    """An engine that a test did not close keeps its process group, which the next test would find."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture(scope="session")
def start_ranks(rank_server):
    """`start_ranks(script, folder, size, *arguments)`: one process per rank; what rank 0 left in FOLDER/seen.pt."""

    def start(script, folder, size, *arguments):
        codes, errors = rank_server(script, folder, size, *arguments)
        assert codes == [0] * size, "\n\n".join(error[-8000:] for error in errors)
        return {"folder": folder} | torch.load(folder / "seen.pt", weights_only=True)

    return start


@pytest.fixture(scope="module")
def two(request, tmp_path_factory, start_ranks):
    """What the module's `run_ranks(start_ranks, folder, size)` found on two ranks."""
    return request.module.run_ranks(start_ranks, tmp_path_factory.mktemp("two"), 2)


@pytest.fixture(scope="module")
def four(request, tmp_path_factory, start_ranks):
    """As `two`, on four ranks."""
    return request.module.run_ranks(start_ranks, tmp_path_factory.mktemp("four"), 4)


@pytest.fixture(scope="session")
def rank_server():
    """`rank_server(script, folder, size, *arguments)`: exit codes and stderr of one process per rank."""
    here, there = multiprocessing.Pipe()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.setenv("CUDA_VISIBLE_DEVICES", "")  # NCCL takes no two ranks on one GPU
        patch.syspath_prepend(Path(__file__).parent / "support")
        server = multiprocessing.get_context("spawn").Process(target=import_module("rank_server").serve, args=(there,))
        server.start()
    there.close()

    def run(script, folder, size, *arguments):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            shared = {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(probe.getsockname()[1])}
        errors = [folder / f"rank-{rank}.stderr" for rank in range(size)]
        here.send(
            (
                str(script),
                [str(folder), *arguments],
                [shared | {"RANK": str(rank)} for rank in range(size)],
                list(map(str, errors)),
            )
        )
        assert here.poll(600), "the ranks' server does not answer"
        return here.recv(), [error.read_text() for error in errors]

    yield run
    here.close()
    server.kill()
    server.join()
