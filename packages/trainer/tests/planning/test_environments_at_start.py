"""What a shell or a scheduler leaves in the environment: it works, or is one clear error at once."""

import os
import resource
import socket
import tempfile
from types import SimpleNamespace

import pytest

from rl_trainer.errors import InputError, PlacementError
from rl_trainer.runtime import limits
from rl_trainer.runtime.limits import check_limits
from rl_trainer.runtime.network import check_ray_address, without_launcher

LEFT_OVER = {
    "RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "10.255.255.1", "MASTER_PORT": "29500",
    "GROUP_RANK": "0", "TORCHELASTIC_USE_AGENT_STORE": "True",
}  # fmt: skip


def test_ranks_of_another_job_are_hidden_and_come_back(monkeypatch):
    for name, value in LEFT_OVER.items():
        monkeypatch.setenv(name, value)
    with without_launcher():
        assert not LEFT_OVER.keys() & os.environ.keys()
    assert LEFT_OVER.items() <= os.environ.items()


def test_a_run_under_torchrun_is_refused(monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job")
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(InputError, match="torchrun has started 4 of this command"), without_launcher():
        pass


@pytest.mark.parametrize("scheme", ["", "ray://"])
def test_an_address_without_ray_is_refused_at_once(monkeypatch, scheme):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    monkeypatch.setenv("RAY_ADDRESS", f"{scheme}127.0.0.1:{port}")
    with pytest.raises(PlacementError, match=rf"RAY_ADDRESS={scheme}127.0.0.1:{port}: no Ray answers there"):
        check_ray_address()


def test_an_address_at_which_something_listens_passes(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{server.getsockname()[1]}")
        check_ray_address()


@pytest.mark.parametrize("address", ["auto", "local"])
def test_addresses_by_name_are_rays_business(monkeypatch, address):
    monkeypatch.setenv("RAY_ADDRESS", address)
    check_ray_address()


def test_a_long_tmpdir_is_named(monkeypatch, tmp_path):
    folder = tmp_path / ("a" * 100)
    folder.mkdir()
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(folder))
    with pytest.raises(PlacementError, match=r"TMPDIR=.*aaa has \d+ characters, too many for the sockets"):
        check_limits()


def test_rays_own_folder_counts_in_place_of_tmpdir(limit, monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(tmp_path / ("a" * 100)))
    monkeypatch.setenv("RAY_TMPDIR", "/tmp")
    check_limits()


@pytest.fixture
def limit(monkeypatch):
    """Set a limit of this process, soft and hard, as far as `resource` reports it."""
    monkeypatch.setattr(tempfile, "gettempdir", lambda: "/tmp")
    values = {resource.RLIMIT_FSIZE: (resource.RLIM_INFINITY, resource.RLIM_INFINITY)}
    monkeypatch.setattr(resource, "getrlimit", lambda which: values.get(which, (10**6, 10**6)))
    monkeypatch.setattr(resource, "setrlimit", lambda which, both: values.update({which: both}))
    return values


def test_too_few_open_files_are_named(limit):
    limit[resource.RLIMIT_NOFILE] = (64, 64)
    with pytest.raises(PlacementError, match="ulimit -n is 64 open files"):
        check_limits()


def test_a_soft_limit_of_open_files_is_raised(limit):
    limit[resource.RLIMIT_NOFILE] = (256, 4096)
    check_limits()
    assert limit[resource.RLIMIT_NOFILE] == (4096, 4096)


def test_too_few_processes_are_named(limit, monkeypatch):
    monkeypatch.setattr(os, "getuid", lambda: 1000)
    limit[resource.RLIMIT_NPROC] = (60, 60)
    with pytest.raises(PlacementError, match="ulimit -u is 60 processes"):
        check_limits()


def test_shared_memory_that_cannot_be_written_is_named(limit, monkeypatch, tmp_path):
    monkeypatch.setattr(limits, "_SHARED_MEMORY", tmp_path / "missing")
    with pytest.raises(PlacementError, match="missing cannot be written"):
        check_limits()


def test_a_small_limit_of_file_sizes_is_named(limit):
    limit[resource.RLIMIT_FSIZE] = (2**20, 2**20)
    with pytest.raises(PlacementError, match=r"ulimit -f is 1024 KiB per file; Ray's object store .* 262144 KiB"):
        check_limits()


def test_a_temporary_folder_that_is_full_is_named(limit, monkeypatch, tmp_path):
    monkeypatch.setenv("RAY_TMPDIR", "/tmp")
    monkeypatch.setattr(limits.shutil, "disk_usage", lambda folder: SimpleNamespace(free=2**20))
    with pytest.raises(PlacementError, match="RAY_TMPDIR=/tmp has 1 MiB free; Ray's sockets and logs need 32"):
        check_limits()
