"""The public surface, and what importing it does not bring in."""

import subprocess
import sys

import pytest

import rl_rollout
from rl_rollout import BackendError, ConfigError, ModelFolderError, ServerConfig, connect_server, create_server, errors

PUBLIC = [
    "BackendError",
    "Capabilities",
    "CkptReceiver",
    "ConfigError",
    "FinishReason",
    "GenerateRequest",
    "GenerationError",
    "ModelFolderError",
    "OverloadedError",
    "RequestError",
    "RequestTimeoutError",
    "RolloutError",
    "RolloutServer",
    "Router",
    "SamplingParams",
    "ServerAddress",
    "ServerConfig",
    "ServerGroup",
    "ServerLostError",
    "ServerParallel",
    "ServerStartError",
    "Subprocess",
    "TokenChunk",
    "TokenOutput",
    "UnsupportedError",
    "WeightReceiver",
    "WeightUpdateError",
    "connect_server",
    "create_process",
    "create_receiver",
    "create_router",
    "create_server",
    "launch_server",
    "placeholder_repeats",
]


def test_public_names():
    assert rl_rollout.__all__ == PUBLIC
    assert all(getattr(rl_rollout, name).__doc__ for name in PUBLIC)


def test_every_error_is_in_the_tree_and_specialises_a_builtin():
    found = [each for each in vars(errors).values() if isinstance(each, type) and issubclass(each, errors.RolloutError)]
    for error in set(found) - {errors.RolloutError}:
        builtin = error.__mro__[2]
        assert f"{error.__name__} ({builtin.__name__})" in (errors.__doc__ or "")


@pytest.mark.process
def test_importing_brings_in_nothing_heavy():
    code = "import sys, rl_rollout; print(sorted({m.split('.')[0] for m in sys.modules}))"
    modules = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    for heavy in ("torch", "transformers", "aiohttp", "ray", "rl_ckpt", "rl_csrc"):
        assert f"'{heavy}'" not in modules


def test_an_unknown_backend_lists_what_is_installed():
    with pytest.raises(BackendError, match="'nope'; installed here: .*embedded"):
        create_server("nope", ServerConfig(model_path="x"))


def test_a_backend_that_cannot_be_imported_prints_the_pip_line(monkeypatch, qwen3_folder):
    monkeypatch.delitem(sys.modules, "rl_rollout.backends.embedded.embedded_server", raising=False)
    monkeypatch.setitem(sys.modules, "rl_rollout.backends.embedded.model.model_runner", None)
    with pytest.raises(BackendError, match=r"pip install 'rl-rollout\[embedded\]'") as caught:
        create_server("embedded", ServerConfig(model_path=str(qwen3_folder)))
    assert isinstance(caught.value.__cause__, ImportError)


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"host": "0.0.0.0"}, "api_token"),
        ({"max_num_seqs": 0}, "max_num_seqs=0"),
        ({"timeout_s": 0.0}, "timeout_s"),
        ({"port": -1}, "port=-1"),
    ],
)
def test_a_config_that_cannot_be_served_is_refused_first(fields, told):
    with pytest.raises(ConfigError, match=told):
        create_server("embedded", ServerConfig(model_path="nowhere", **fields))


def test_a_folder_that_is_none(tmp_path):
    with pytest.raises(ModelFolderError, match="does not exist"):
        create_server("embedded", ServerConfig(model_path=str(tmp_path / "missing")))
    with pytest.raises(ModelFolderError, match=r"no config\.json"):
        create_server("embedded", ServerConfig(model_path=str(tmp_path)))


def test_an_address_that_is_none():
    with pytest.raises(ConfigError, match="http://"):
        connect_server("localhost:8000")
