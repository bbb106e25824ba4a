#!/usr/bin/env bash
# One node of a Ray cluster, for rl-train. Every node runs this script with the same RL_RAY_TOKEN in its environment.
#
#   ray_node.sh head              start Ray's head here; runs until it is ended
#   ray_node.sh worker HEAD       join the head at the address HEAD; runs until it is ended
#   ray_node.sh wait HEAD NODES   return once so many nodes have joined, or fail after WAIT_S seconds
#
# PORT (6379) is the head's; GPUS are those of this node (default: what nvidia-smi lists); WAIT_S is 600.
set -euo pipefail

PORT=${PORT:-6379}
WAIT_S=${WAIT_S:-600}

# Whoever reaches the head's port may run code on the cluster: Ray asks for the token.
if [[ -n "${RL_RAY_TOKEN:-}" ]]; then
  export RAY_AUTH_MODE=token RAY_AUTH_TOKEN="$RL_RAY_TOKEN"
fi

gpus() {
  if command -v nvidia-smi >/dev/null; then nvidia-smi --list-gpus | wc -l; else echo 0; fi
}

case "${1:-}" in
  head)
    exec ray start --head --port "$PORT" --num-gpus "${GPUS:-$(gpus)}" --include-dashboard=false \
      --disable-usage-stats --block
    ;;
  worker)
    # A head that is still starting is asked again: nodes of a cluster come up in any order.
    end=$((SECONDS + WAIT_S))
    until ray start --address "$2:$PORT" --num-gpus "${GPUS:-$(gpus)}" --disable-usage-stats --block; do
      ((SECONDS < end)) || { echo "ray_node.sh: no head at $2:$PORT after $WAIT_S s" >&2; exit 1; }
      sleep 2
    done
    ;;
  wait)
    exec python - "$2:$PORT" "$3" "$WAIT_S" <<'PYTHON'
import sys
import time

import ray

address, wanted, limit_s = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
end, there = time.monotonic() + limit_s, 0
while time.monotonic() < end:
    try:
        if not ray.is_initialized():
            ray.init(address, log_to_driver=False, logging_level="error")
        there = sum(node["Alive"] for node in ray.nodes())
    except Exception as error:
        print(f"ray_node.sh: not yet: {str(error).partition(chr(10))[0]}", file=sys.stderr)
    if there >= wanted:
        print(f"{there} nodes, {ray.cluster_resources().get('GPU', 0):.0f} GPUs")
        sys.exit()
    time.sleep(2)
sys.exit(f"ray_node.sh: {there} of {wanted} nodes after {limit_s:.0f} s")
PYTHON
    ;;
  *)
    sed -n '2,/^set /{/^set /!s/^# \{0,1\}//p}' "$0" >&2
    exit 2
    ;;
esac
