import pytest

from rl_engine import EngineConfig, create_engine
from rl_engine.testing import EngineConformance, FakeEngine, write_tiny_model

pytestmark = pytest.mark.contract


class TestFakeEngine(EngineConformance):
    def make_engine(self, folder, **changes):
        return FakeEngine(EngineConfig(model_path=str(folder), **changes), vocab_size=self.vocab_size)


@pytest.mark.process
class TestFsdpEngine(EngineConformance):
    def make_engine(self, folder, **changes):
        return create_engine("fsdp", EngineConfig(model_path=str(write_tiny_model(folder)), **changes))
