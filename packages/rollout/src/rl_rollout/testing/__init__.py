"""Test kit: a fake server, a fake weight receiver, tiny models on disk, and the conformance suite.

A backend passes the suite like this:

    @pytest.fixture(scope="module")
    def served(tmp_path_factory):
        folder = write_tiny_model(tmp_path_factory.mktemp("model"), max_position_embeddings=4096)
        with asyncio.Runner() as runner:
            server = create_server("mine", ServerConfig(model_path=str(folder)))
            runner.run(server.start())
            yield Served(server=server, run=runner.run, model_path=str(folder), max_model_len=4096)
            runner.run(server.stop())

    class TestMine(ServerConformance):
        pass
"""

from rl_rollout.testing.conformance import Served, ServerConformance
from rl_rollout.testing.fake import FakeReceiver, FakeServer
from rl_rollout.testing.tiny_models import (
    encoded_tone,
    load_weights,
    write_tiny_model,
    write_tiny_omni_model,
    write_tiny_vl_model,
)

__all__ = [
    "FakeReceiver",
    "FakeServer",
    "Served",
    "ServerConformance",
    "encoded_tone",
    "load_weights",
    "write_tiny_model",
    "write_tiny_omni_model",
    "write_tiny_vl_model",
]
