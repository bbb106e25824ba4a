"""Test kit: the conformance suites that backends must pass.

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

from rl_ckpt.testing.aliases import AliasSuite
from rl_ckpt.testing.ends import EndProcess
from rl_ckpt.testing.helpers import assert_same, failure, new_name, new_port, receive_all, sample_weights, until
from rl_ckpt.testing.into import IntoSuite
from rl_ckpt.testing.processes import KillSuite, ProcessSuite
from rl_ckpt.testing.suite import CheckpointEngineSuite, SessionSuite
from rl_ckpt.testing.versions import DeltaSuite, VersionSuite
from rl_ckpt.testing.views import ViewSuite
from rl_ckpt.testing.votes import VoteSuite

__all__ = [
    "AliasSuite",
    "CheckpointEngineSuite",
    "DeltaSuite",
    "EndProcess",
    "IntoSuite",
    "KillSuite",
    "ProcessSuite",
    "SessionSuite",
    "VersionSuite",
    "ViewSuite",
    "VoteSuite",
    "assert_same",
    "failure",
    "new_name",
    "new_port",
    "receive_all",
    "sample_weights",
    "until",
]
