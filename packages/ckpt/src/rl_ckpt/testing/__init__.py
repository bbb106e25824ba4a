"""For tests: faults to inject into `inproc://`, and the conformance suites that backends must pass.

```python
class TestMine(CheckpointEngineSuite, VersionSuite, ProcessSuite, KillSuite):
    def new_address(self) -> str:
        return f"mine://{new_name()}"
```

`rl_ckpt.testing.servers` has the suite for adapters inside real inference servers.
"""

from rl_ckpt.testing.cuda import FakeCuda, fake_cuda
from rl_ckpt.testing.ends import EndProcess
from rl_ckpt.testing.faults import Fault, Injector, inject
from rl_ckpt.testing.helpers import assert_same, failure, new_name, receive_all, sample_weights, until
from rl_ckpt.testing.kills import KillSuite
from rl_ckpt.testing.processes import ProcessSuite
from rl_ckpt.testing.suite import CheckpointEngineSuite
from rl_ckpt.testing.versions import VersionSuite

__all__ = [
    "CheckpointEngineSuite",
    "EndProcess",
    "FakeCuda",
    "Fault",
    "Injector",
    "KillSuite",
    "ProcessSuite",
    "VersionSuite",
    "assert_same",
    "failure",
    "fake_cuda",
    "inject",
    "new_name",
    "receive_all",
    "sample_weights",
    "until",
]
