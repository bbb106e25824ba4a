#!/usr/bin/env bash
# Everything that needs a GPU, on a machine that need not have a network, in steps of at most ten minutes, the most useful first.
#
#   .ci/gpu          all steps but those that have passed since the last build here: goes on where it was cut off
#   .ci/gpu STEP...  these, whether they passed or not; .ci/gpu --list prints the steps in order
#   .ci/gpu --dry    no GPU needed: the same commands as far as they start without one (tests are collected, benchmarks imported)
#
#   .ci/gpu pack     where there is a network: wheels of our Python packages, and of what RL_LACKS names, into RL_WHEELS; with
#                    RL_INTERPRETER (a Python of that machine's version) and nvcc that of rl-csrc too, which saves minutes there;
#                    SmolLM2 in pieces of at most 55 MB
#   build            rl-csrc for the GPU's architecture (RL_ARCH, 90a unless told) if no wheel has it; the wheels beside the torch there
#   csrc             rl-csrc's GPU tests: losses, attention, layers, sampling, mapped memory under a graph
#   test             the packages' GPU tests: offload, cuda-ipc, engines, the embedded server
#   rollout trainer_gpu engine_update ckpt kernels engine tq   one `rl-bench NAME --gpu` each, to $OUT/NAME.json
#   gsm8k            SmolLM2 on GSM8K: SFT, GRPO, the benchmark, in one process; stops after RL_MINUTES (9) and goes on when called
#                    again; data in RL_GSM8K (shared/data/gsm8k); results.json after each stage, to $OUT/gsm8k
#   real_model       the steps of that run next to TRL's on the same batch
#   gpu_profile      time by kernel of prefill, decode and a training step (torch.profiler over CUPTI), to $OUT/gpu_profile.json
#   sanitize         compute-sanitizer's memcheck and racecheck on some of rl-csrc's tests
#
# Logs and figures go to $OUT (default: out); copy the JSON files to benchmarks/results/ as NAME-GPU-DATE.json. A step that fails is
# named at the end, and the next one goes on.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1
wheels=${RL_WHEELS:-$PWD/.whl}
out=${OUT:-$PWD/out}
export RL_WORK=${RL_WORK:-/tmp/rl-stack-gpu} PYTHON=${PYTHON:-python3} OUT=${out}
export PYTHONPATH=${RL_WORK}/site:${RL_WORK}/packages:${PYTHONPATH:-}
if [[ -z ${TMPDIR:-} && -w /dev/shm ]]; then export TMPDIR=/dev/shm; fi # a checkpoint of 7 GB waited 20 s for a disk
mkdir -p "${out}" "${RL_WORK}"

export RL_REAL_PIECES=${RL_REAL_PIECES:-${wheels}/models} RL_REAL_MODELS=${RL_REAL_MODELS:-${RL_WORK}/models}
export RL_GSM8K=${RL_GSM8K:-$PWD/shared/data/gsm8k}

benches=(trainer_gpu rollout real_model ckpt engine_update kernels engine tq gpu_profile)
order=(build trainer_gpu rollout gsm8k real_model ckpt engine_update csrc test kernels engine tq gpu_profile sanitize)

pack() {
  local package
  for package in packages/*/ benchmarks/; do uv build --quiet --wheel --no-sources --out-dir "${wheels}" "${package}" || return 1; done
  if [[ -n ${RL_INTERPRETER:-} ]]; then
    RL_CSRC_CUDA=ON CMAKE_ARGS="-DCMAKE_CUDA_ARCHITECTURES=${RL_ARCH:-90a}-real" "${RL_INTERPRETER}" -m pip wheel --quiet --no-deps \
      --wheel-dir "${wheels}" ./csrc || return 1
  fi
  "${PYTHON}" tools/real_models.py --pack "${RL_REAL_PIECES}" || return 1
  # shellcheck disable=SC2086
  "${PYTHON}" -m pip download --quiet --no-deps --only-binary=:all: --python-version "${RL_PYTHON:-3.12}" --implementation cp \
    --platform manylinux_2_28_x86_64 --platform manylinux_2_27_x86_64 --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64 \
    --dest "${wheels}" ${RL_LACKS:-tensordict pyvers cloudpickle msgspec pydantic pydantic-core annotated-types typing-inspection orjson hypothesis sortedcontainers attrs pytest-timeout pytest-xdist execnet megatron-core==0.16.1 aiohttp aiohappyeyeballs aiosignal frozenlist multidict propcache yarl idna math-verify latex2sympy2-extended antlr4-python3-runtime gguf trl==1.16.0 accelerate datasets pyarrow dill pandas multiprocess xxhash python-dateutil six}
}

build() {
  if [[ -n ${RL_DRY:-} ]]; then bash csrc/bench/gpu/device.sh build && return; fi
  rm -f "${RL_WORK}"/passed.*
  { compgen -G "${wheels}/rl_csrc-*.whl" >/dev/null || bash csrc/bench/gpu/device.sh build; } &&
    "${PYTHON}" -m pip install --quiet --no-index --no-deps --no-compile --upgrade --target "${RL_WORK}/packages" "${wheels}"/*.whl &&
    "${PYTHON}" -W ignore -m compileall -q -j 0 "${RL_WORK}/packages" # warnings of others' sources are errors to our tests
}

gpu_tests() { grep -rl --include='test_*.py' 'mark\.gpu' packages/*/tests; }

# Side by side, but for those that look at the memory of the whole GPU.
run_tests() {
  local alone='test_engine_offload|test_rollout_gpu_memory' status=0
  local -a how=("${PYTHON}" -m pytest -m gpu -rs -p no:cacheprovider -p no:benchmark --durations=10 ${RL_DRY:+--collect-only})
  # shellcheck disable=SC2046
  "${how[@]}" -n "${RL_TOGETHER:-5}" $(gpu_tests | grep -Ev "${alone}") 2>&1 | tee "${out}/tests-packages.log" | tail -n "${RL_TAIL:-60}" || status=1
  # shellcheck disable=SC2046
  "${how[@]}" $(gpu_tests | grep -E "${alone}") 2>&1 | tee "${out}/tests-alone.log" | tail -n "${RL_TAIL:-60}" || status=1
  return "${status}"
}

# A dry run takes the same stages with a tiny model, and rows in the format of GSM8K.
gsm8k() {
  local work=${RL_WORK}/gsm8k model=smollm2 size=gpu status
  if [[ -n ${RL_DRY:-} ]]; then
    size=tiny model=tiny && RL_GSM8K=${RL_WORK}/rows && mkdir -p "${RL_GSM8K}" || return 1
    "${PYTHON}" -c 'import sys; from rl_rollout.testing import write_tiny_model; write_tiny_model(sys.argv[1], max_position_embeddings=4096)' \
      "${RL_REAL_MODELS}/tiny" || return 1
    for part in train test; do
      for n in 1 2 3 4 5 6 7 8; do echo "{\"question\": \"${n} + 1 =\", \"answer\": \"Add. #### $((n + 1))\"}"; done >"${RL_GSM8K}/${part}.jsonl"
    done
  else
    "${PYTHON}" tools/real_models.py "${RL_REAL_MODELS}" smollm2 || return 1
  fi
  "${PYTHON}" examples/gsm8k/run.py --model "${RL_REAL_MODELS}/${model}" --data "${RL_GSM8K}" --out "${work}" --size "${size}" \
    --minutes "${RL_MINUTES:-9}" 2>&1 | tee "${out}/gsm8k.log" | tail -n 40
  status=$?
  mkdir -p "${out}/gsm8k" && cp "${work}/results.json" "${work}"/grpo/{metrics.jsonl,learning_curve.png} "${out}/gsm8k" 2>/dev/null
  return "${status}"
}

imported=() # of a dry run: benchmarks, imported together at its end
run_bench() {
  if [[ -n ${RL_DRY:-} ]]; then imported+=("$1") && return; fi
  timeout -s INT -k 20 "${RL_BENCH_S:-570}" "${PYTHON}" -m rl_bench.cli "$1" --gpu --json "${out}/$1.json" 2>&1 | tee "${out}/$1.log" | tail -n 40
}

if [[ ${1:-} == --list ]]; then printf '%s\n' "${order[@]}" && exit 0; fi
if [[ ${1:-} == --dry ]]; then
  export RL_DRY=1
  shift
  if (($# == 0)); then set -- "${order[@]}"; fi
fi
wanted=("$@")
if ((${#wanted[@]} == 0)); then
  for step in "${order[@]}"; do [[ -e ${RL_WORK}/passed.${step} ]] || wanted+=("${step}"); done
fi
failed=()
for step in "${wanted[@]}"; do
  since=${SECONDS}
  case " ${benches[*]} " in
    *" ${step} "*) run_bench "${step}" ;;
    *) case ${step} in
      pack | build | gsm8k) "${step}" ;;
      csrc) bash csrc/bench/gpu/device.sh test ;;
      test) run_tests ;;
      sanitize) bash csrc/bench/gpu/device.sh sanitize ;;
      *) echo "unknown step ${step}; there are pack, ${order[*]}" && exit 2 ;;
    esac ;;
  esac && { [[ -n ${RL_DRY:-} ]] || touch "${RL_WORK}/passed.${step}"; } || failed+=("${step}")
  echo "== ${step} ended after $((SECONDS - since)) s"
done
if ((${#imported[@]})); then "${PYTHON}" -m rl_bench.gpu_rows "${imported[@]}" || failed+=("${imported[@]}"); fi
if ((${#failed[@]})); then echo "FAILED: ${failed[*]}" && exit 1; fi
