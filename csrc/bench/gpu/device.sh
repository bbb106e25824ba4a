#!/usr/bin/env bash
# Build csrc for one GPU architecture on the machine this runs on, then do what the arguments say, in order:
#   build | test [pytest arguments in RL_TESTS] | sanitize
# With RL_DRY=1 no device is needed: nothing is built, tests are collected.
# Results go to $OUT (default: ./out). Needs nvcc, torch, pybind11, scikit-build-core, pytest. Builds outside the checkout.
set -uo pipefail
root=$(cd "$(dirname "$0")/../.." && pwd)
arch=${RL_ARCH:-90a}
out=${OUT:-$PWD/out}
work=${RL_WORK:-/tmp/rl-csrc-gpu}
site=$work/site
python=${PYTHON:-python3}
markers=$'gpu: a CUDA device\nslow: longer than a second\ncore: the others\nprocess: starts processes\npromise: a sentence of a README'
mkdir -p "$out" "$work"
export PYTHONPATH=$site:${PYTHONPATH:-} PYTHONUNBUFFERED=1
# tests side by side where pytest-xdist is; pytest-benchmark would warn of it, which is an error here
together=$("$python" -c 'import importlib.util as u; print("-n 5 -p no:benchmark" if u.find_spec("xdist") else "")')

build() {
  if [ -n "${RL_DRY:-}" ]; then return; fi
  rm -rf "$work/csrc" "$site" && cp -r "$root" "$work/csrc" && rm -rf "$work/csrc/build"
  if [ "${RL_CUDA_ONLY:-0}" = 0 ] && (cd "$work" && RL_CSRC_CUDA=ON CMAKE_ARGS="-DCMAKE_CUDA_ARCHITECTURES=$arch-real" "$python" -m pip install -q \
      --no-build-isolation --no-deps --no-index --target "$site" ./csrc >"$out/build.log" 2>&1); then
    echo "built with pip in ${SECONDS}s"
    return
  fi
  [ -f "$out/build.log" ] && tail -15 "$out/build.log"
  echo "the CUDA module alone, with a stand-in for _cpu"
  mkdir -p "$site" && cp -r "$work/csrc/src/rl_csrc" "$site/" && cd "$work/csrc" || exit 1
  local objects=() includes
  includes=$("$python" -m pybind11 --includes)
  for source in native/cuda/*.cu native/cuda/*.cpp native/tensor_arg.cpp native/buffers/exchange.cpp; do
    # shellcheck disable=SC2086
    nvcc -std=c++20 -O3 -gencode=arch=compute_$arch,code=sm_$arch -Iinclude -Inative -Xcompiler -fPIC $includes \
      -c "$source" -o "$source.o" &
    objects+=("$source.o")
  done
  wait
  nvcc -shared -cudart static "${objects[@]}" -o "$site/rl_csrc/_cuda$("$python" -c 'import sysconfig; print(sysconfig.get_config_var("EXT_SUFFIX"))')" || exit 1
  printf 'compiler = "none: stand-in"\ndef __getattr__(name): raise AttributeError(name)\n' >"$site/rl_csrc/_cpu.py"
  cd - >/dev/null || exit 1
}

run_tests() {
  # shellcheck disable=SC2086
  (cd "$root" && "$python" -m pytest -q -p no:cacheprovider --import-mode=importlib -c /dev/null --rootdir "$root" \
    -o markers="$markers" -W error -m gpu $together --durations=8 ${RL_DRY:+--collect-only} ${RL_TESTS:-$(cd "$root" && find tests -name 'test_csrc_cuda_*.py')}) 2>&1 | tee "$out/tests.log" | tail -"${RL_TAIL:-60}"
}

sanitize() {
  local chosen='(1001 and bfloat16) or (40000 and ppo) or (hold and gae) or bucket or (digest and 1000) or (delta and 0.01) or (moments and 1000) or (group_norm and 64)'
  local tool failed=0
  for tool in memcheck racecheck; do
    echo "compute-sanitizer $tool"
    local under=(timeout "${RL_SANITIZE_S:-200}" compute-sanitizer --tool "$tool" --error-exitcode 9)
    if [ -n "${RL_DRY:-}" ]; then under=(); fi
    (cd "$root" && PYTORCH_NO_CUDA_MEMORY_CACHING=1 "${under[@]}" "$python" -m pytest -q -x ${RL_DRY:+--collect-only} -p no:cacheprovider --import-mode=importlib -c /dev/null --rootdir "$root" \
      -o markers="$markers" -m gpu -k "$chosen" tests/ops/test_csrc_cuda_{logprobs,policy_loss}.py tests/buffers/test_csrc_cuda_buffers.py 2>&1 |
      tee "$out/$tool.log" | tail -12) || failed=1
  done
  return $failed
}

status=0
for step in "$@"; do
  case $step in
    build) build || exit 1 ;;
    test) run_tests ;;
    sanitize) sanitize ;;
    *) echo "unknown step $step" && exit 2 ;;
  esac && echo "== $step done at ${SECONDS}s" || { status=1 && echo "== $step FAILED at ${SECONDS}s"; }
done
exit $status
