#!/usr/bin/env bash
# Type-check the packages that the given files belong to: tools/types.sh packages/tq/src/rl_tq/base.py ...
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
mapfile -t folders < <(printf '%s\n' "$@" | sed -E 's#((csrc|packages/[^/]+)/src)/.*#\1#' | sort -u)
uv run --no-sync pyright "${folders[@]}"
