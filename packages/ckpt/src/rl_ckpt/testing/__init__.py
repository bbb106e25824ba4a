"""For tests: faults to inject into `inproc://`, and the conformance suites that backends must pass.

```python
class TestMine(CheckpointEngineSuite, VersionSuite, ProcessSuite, KillSuite):
    def new_address(self) -> str:
        return f"mine://{new_name()}"
```
"""

import sys
from pkgutil import iter_modules

# a failed assertion shows its values in modules that are imported after this
if (_pytest := sys.modules.get("pytest")) is not None:
    _pytest.register_assert_rewrite(*(f"{__name__}.{module.name}" for module in iter_modules(__path__)))

from rl_ckpt.testing.ends import EndProcess
from rl_ckpt.testing.faults import Fault, Injector, inject
from rl_ckpt.testing.helpers import assert_same, failure, new_name, new_port, receive_all, sample_weights, until
from rl_ckpt.testing.kills import KillSuite
from rl_ckpt.testing.processes import ProcessSuite
from rl_ckpt.testing.suite import CheckpointEngineSuite
from rl_ckpt.testing.versions import VersionSuite

__all__ = [
    "CheckpointEngineSuite",
    "EndProcess",
    "Fault",
    "Injector",
    "KillSuite",
    "ProcessSuite",
    "VersionSuite",
    "assert_same",
    "failure",
    "inject",
    "new_name",
    "new_port",
    "receive_all",
    "sample_weights",
    "until",
]
