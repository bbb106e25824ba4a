"""What the tests of rl-ckpt share with processes that they start."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "support"))  # importable here and in children of the fork server
