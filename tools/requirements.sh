#!/usr/bin/env bash
# Renews requirements.lock: every dependency of the packages, transitive ones too, with hashes and without the name of a
# host. `tests/test_requirements.py` holds it current. The lock is made in a copy, without local wheels: the CUDA build
# of torch and the CPU build have different dependencies, and the registry's is what a user gets.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
scratch=$(mktemp -d)
trap 'rm -rf "${scratch}"' EXIT
git ls-files '*pyproject.toml' '*README.md' | tar --create --files-from - | tar --extract --directory "${scratch}"
env -u UV_FIND_LINKS uv lock --quiet --project "${scratch}"
uv export --quiet --project "${scratch}" --frozen --no-emit-workspace --no-header --no-annotate --all-packages --all-extras --no-dev \
  --output-file "${scratch}/requirements.lock" >/dev/null
mv "${scratch}/requirements.lock" requirements.lock
