"""Settings that cannot work are one error before anything starts."""

import pytest

from rl_rollout.testing import write_tiny_model
from rl_tinker.cli import parse_config
from rl_tinker.errors import ConfigError
from rl_tinker.server import check_config
from rl_tinker.types import ServeConfig


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(write_tiny_model(tmp_path_factory.mktemp("models") / "tiny"))


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"server_backend": "sglang"}, "server.backend=sglang.*no option 'max_adapters'.*as embedded and vllm do"),
        ({"max_rank": 600}, "max_rank=600 must be at most 512"),
        ({"server_options": {"max_rank": 8}}, "server.options.max_rank follows from max_rank; give max_rank=N"),
        ({"server_options": {"comand": "x"}}, "no option 'comand'"),
        ({"server_backend": "vlm"}, "server.backend=vlm.*no rollout backend .vlm."),
        ({"server_tp": 2}, "server.tp=2.*computes on one device"),
        ({"server_replicas": 0}, "server.replicas=0 must be 1 or more"),
        ({"host": "0.0.0.0"}, "reachable from outside; give keys=FILE"),
    ],
)
def test_what_cannot_serve_is_refused_by_its_key(folder, tmp_path, settings, told):
    check_config(ServeConfig(model_path=folder, output_dir=str(tmp_path)))
    with pytest.raises(ConfigError, match=told):
        check_config(ServeConfig(**{"model_path": folder, "output_dir": str(tmp_path)} | settings))


def test_arguments_are_keys_and_options_of_the_sampler():
    given = ["model.path=m", "server.backend=vllm", "port=0", "server.options.command=a b", 'server.options.x={"y": 1}']
    wanted = {"command": "a b", "x": {"y": 1}}
    assert parse_config(given) == ServeConfig(model_path="m", server_backend="vllm", port=0, server_options=wanted)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (["model.path=m", "server.replica=2"], "unknown key 'server.replica'; the nearest is 'server.replicas'"),
        (["model.path=m", "port=a"], "port=a: Expected `int`"),
        (["model.path=m", "server.options.x=1", "server.options.x=2"], "'server.options.x' is given twice"),
        (["model.path=m", "server.options=1"], "unknown key 'server.options'"),
        (["model.path"], "is not key=value"),
        (["port=1"], "model.path must be given"),
    ],
)
def test_wrong_arguments_are_a_sentence(given, told):
    with pytest.raises(ConfigError, match=told):
        parse_config(given)
