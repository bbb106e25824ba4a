"""Settings that cannot work are one error before anything starts."""

import pytest

from rl_rollout.testing import write_tiny_model
from rl_tinker.errors import ConfigError
from rl_tinker.server import check_config
from rl_tinker.types import ServeConfig


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(write_tiny_model(tmp_path_factory.mktemp("models") / "tiny"))


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"server_backend": "vllm"}, "server.backend=vllm.*no option 'max_adapters'.*as embedded does"),
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
