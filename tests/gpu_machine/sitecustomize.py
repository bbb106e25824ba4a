"""Makes a Python look like that of a GPU's machine: without the modules of RL_HIDDEN, with empty ones for RL_STUBS.

Both are names with commas between them. This folder goes in front of PYTHONPATH.
"""

import os
import sys
from importlib.machinery import ModuleSpec
from unittest.mock import MagicMock


class Filtered:
    """A finder that knows nothing of some modules."""

    def __init__(self, finder, hidden):
        self.finder, self.hidden = finder, hidden

    def find_spec(self, name, path=None, target=None):
        return None if name.partition(".")[0] in self.hidden else self.finder.find_spec(name, path, target)

    def __getattr__(self, name):
        return getattr(self.finder, name)


class Later(list):
    """Finders that are added later, as by editable installations, are filtered too."""

    def append(self, finder):
        super().append(Filtered(finder, hidden))


hidden = frozenset(os.environ["RL_HIDDEN"].split(","))
sys.meta_path = Later(Filtered(finder, hidden) for finder in sys.meta_path)
for stub in filter(None, os.environ.get("RL_STUBS", "").split(",")):
    sys.modules[stub] = MagicMock(__spec__=ModuleSpec(stub, None), __path__=[])
