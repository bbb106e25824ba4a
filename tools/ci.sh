#!/usr/bin/env bash
# Everything that must hold at the end of a change, cheapest first; stops at the first tier that fails and names it.
# Needs Python 3.11 or newer and a C++ compiler, works on a fresh clone, and leaves nothing behind outside .venv,
# the caches and the record of unsteady tests, which git ignores.
#
#   .ci/run                  all tiers
#   .ci/run types seams      these only
#
# PIP_FIND_LINKS (space-separated) is passed on to uv, so that torch may come from a local folder.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

if [[ -z "${UV_FIND_LINKS:-}" && -n "${PIP_FIND_LINKS:-}" ]]; then
  UV_FIND_LINKS=$(tr -s ' ' ',' <<<"${PIP_FIND_LINKS}")
  export UV_FIND_LINKS
fi
scratch=$(mktemp -d)
trap 'jobs -p | xargs --no-run-if-empty kill 2>/dev/null || true; rm -rf "${scratch}"' EXIT
if ! command -v uv >/dev/null; then
  python3 -m pip install --quiet --target "${scratch}/uv" uv
  PATH="${scratch}/uv/bin:${PATH}"
fi

wanted=("$@")
summary=()
started=${SECONDS}

is_wanted() { ((!${#wanted[@]})) || [[ " ${wanted[*]} " == *" $1 "* ]]; }

# tier NAME COMMAND...: run one tier, remember its time; a failure ends the run with the tier's name.
tier() {
  local name=$1 since=${SECONDS}
  shift
  if ! is_wanted "${name}"; then return; fi
  printf '\n\033[1m== %s\033[0m: %s\n' "${name}" "$*"
  if "$@"; then
    summary+=("$(printf '%-8s %5d s' "${name}" $((SECONDS - since)))")
  else
    printf '\n%s\n' "${summary[@]+"${summary[@]}"}"
    printf 'tier %s FAILED after %d s\n' "${name}" $((SECONDS - since))
    exit 1
  fi
}

# early NAME COMMAND...: start a tier that needs one core only; `tier NAME finish NAME` waits for it and prints its output.
declare -A early_pids=()
early() {
  local name=$1
  shift
  if ! is_wanted "${name}"; then return; fi
  "$@" >"${scratch}/${name}.log" 2>&1 &
  early_pids[${name}]=$!
}

finish() {
  local code=0
  wait "${early_pids[$1]}" || code=$?
  cat "${scratch}/$1.log"
  return "${code}"
}

# The locked environment. A local folder's CPU build of torch fits one Python only, and uv, which locks for all of them,
# would pass over it for the registry's, with gigabytes of CUDA: it is asked for by its whole version.
install() {
  local folder wheel
  for folder in ${UV_FIND_LINKS:+${UV_FIND_LINKS//,/ }}; do
    wheel=$(basename "$(compgen -G "${folder}/torch-*+cpu-*.whl" | head -n 1)")
    if [[ -n "${wheel}" ]]; then wheel=${wheel#torch-} && uv lock --upgrade-package "torch==${wheel%%-*}"; fi
  done
  uv sync --group dev
}

# Three tests at a time on one thread each, a file's tests together: while one waits for a process or a deadline, others
# compute.
# Where no more than five fail, those run once more alone. One that passes then is recorded in tools/unsteady.txt with the
# date; a test's third record in a week fails the tier, as does a second failure.
run_tests() (
  export OMP_NUM_THREADS=1
  if uv run --no-sync pytest -n 3 --dist loadfile --no-loadscope-reorder --durations=40 --durations-min=5; then return; fi
  cp .pytest_cache/v/cache/lastfailed "${scratch}/failed"
  python3 tools/unsteady.py --few "${scratch}/failed" &&
    uv run --no-sync pytest --last-failed --last-failed-no-failures none && python3 tools/unsteady.py "${scratch}/failed"
)

# The CUDA module alone and for one architecture, where nvcc is installed; the CPU module is in the wheels' tier, and
# running this one takes a GPU and is the gpu tests' business.
compile_cuda() {
  RL_CSRC_CUDA=ON uv build --quiet --wheel --no-sources --out-dir "${scratch}" csrc \
    -C build-dir="${scratch}/build" -C build.targets=_cuda -C install.components=cuda \
    -C cmake.define.CMAKE_CUDA_ARCHITECTURES=90a-real &&
    python3 -m zipfile -l "${scratch}"/rl_csrc-*.whl | grep _cuda
}

# The documentation, strictly: a link that leads nowhere is an error. Nothing is fetched but the group's own packages.
build_docs() {
  NO_MKDOCS_2_WARNING=1 uv run --group dev --group docs mkdocs build --strict --quiet --site-dir "${scratch}/site"
}

# Two steps of the recipe for real models, on the model that the job tier made and as much of the data as that can read.
train_gsm8k() {
  local data=../shared/data/gsm8k
  if [[ ! -d "${data}" ]]; then
    echo "not run: ${data} is not there"
    return
  fi
  uv run --no-sync rl-train gsm8k data.path="${data}" model.path="${scratch}/quickstart/model" \
    output_dir="${scratch}/gsm8k" steps=2 data.eval_size=16 rollout.max_new_tokens=64 batch.batch_size=8 \
    batch.group_size=4 batch.mini_batch_size=4
}

tier sync install
tier format uv run --no-sync ruff format --check .
tier lint uv run --no-sync ruff check .
early types uv run --no-sync pyright
early wheels nice uv run --no-sync pytest -p no:cacheprovider -m 'wheels and not integration' tests
tier typos uv run --no-sync typos
tier seams uv run --no-sync lint-imports --no-logo
tier docs build_docs
tier types finish types
tier tests run_tests
tier wheels finish wheels
tier job uv run --no-sync rl-train quickstart steps=2 output_dir="${scratch}/quickstart"
tier gsm8k train_gsm8k
if command -v nvcc >/dev/null; then tier cuda compile_cuda; fi

printf '\n%s\n' "${summary[@]}"
printf 'all tiers passed in %d s\n' $((SECONDS - started))
