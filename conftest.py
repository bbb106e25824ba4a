"""Before any test module is imported."""

import os

# Under `uv run`, Ray would copy the working directory and start every worker with `uv run` anew. It reads this when it
# is imported.
os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
