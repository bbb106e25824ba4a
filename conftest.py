"""Before any test module is imported."""

import os

from hypothesis import HealthCheck, settings

# Under `uv run`, Ray would copy the working directory and start every worker with `uv run` anew. It reads this when it
# is imported.
os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")

# How long an example takes says more about the machine's other work than about the code.
settings.register_profile("workspace", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("workspace")
