"""What one call exchanges between ranks does not depend on how many micro-batches it is cut into."""

import pytest

from rl_engine import EngineConfig, create_engine
from rl_engine.batch.plan import MicroBatchResults
from rl_engine.distributed.world import World
from rl_engine.losses import sft_loss
from rl_engine.testing import ragged_batch, write_tiny_model

pytestmark = pytest.mark.process

DATA = ragged_batch([[5, 6, 7], [8], [3] * 9], [[9, 10], [11, 12, 13], [1, 2, 3, 4, 5]])


@pytest.mark.process
@pytest.mark.parametrize("backend", ["fsdp", "megatron", "torchtitan"])
def test_metrics_are_read_and_reduced_once(tmp_path, monkeypatch, backend):
    calls = []
    for owner, name in ((World, "exchange"), (MicroBatchResults, "metric_values")):
        method = getattr(owner, name)
        monkeypatch.setattr(
            owner, name, lambda *given, method=method, name=name, **more: calls.append(name) or method(*given, **more)
        )
    write_tiny_model(tmp_path)
    seen = []
    for budget in (4096, 15):
        engine = create_engine(backend, EngineConfig(model_path=str(tmp_path), max_tokens_per_gpu=budget))
        engine.initialize()
        calls.clear()
        count = engine.forward_backward_batch(DATA, sft_loss).num_micro_batches
        seen.append((count, calls.count("exchange"), calls.count("metric_values")))
        engine.close()
    (few, exchanges, reads), more = seen
    assert (few, reads) == (1, 1)
    assert more == (2, exchanges, 1)
