#!/usr/bin/env bash
# Test an image on this machine without a container engine: containers/test_image.sh IMAGE
#
# As the image's user: `nemorl doctor`. As a user id that the image does not have, with a folder of the host, as
# `docker run --user "$(id -u)" --volume "$PWD:/workspace"`: the quickstart, and a run over two containers that form
# one Ray cluster. buildah starts the containers in the network of the host.
#
#   STEPS=4   steps of the quickstart's two runs, instead of all
set -euo pipefail

readonly IMAGE=${1:?give an image} ISOLATION=${ISOLATION:-chroot} UNKNOWN=23456 PORT=${PORT:-26379}
readonly SECONDS_TO_JOIN=60
work=$(mktemp -d)
containers=()
ray_pids=()

end() {
  local pid
  for pid in "${ray_pids[@]}"; do
    kill -- "-$pid" 2>/dev/null || true
  done
  ((${#containers[@]} == 0)) || buildah rm "${containers[@]}" >/dev/null
  rm -rf "$work"
}
trap end EXIT

# container: start one and print its name
container() {
  buildah from --pull-never "$IMAGE"
}

# inside CONTAINER USER COMMAND...: with the environment and the working folder of the image
inside() {
  local name=$1 user=$2
  shift 2
  # A host name for each container, as Docker gives it.
  buildah run --isolation "$ISOLATION" --hostname "$name" --user "$user" --volume "$work:/workspace" "$name" -- "$@"
}

main() {
  local first second
  chown "$UNKNOWN:$UNKNOWN" "$work"
  chmod 755 "$work" # the image's user works there too

  echo "-- doctor"
  first=$(container)
  containers=("$first")
  inside "$first" 10001:10001 nemorl doctor --brief
  buildah rm "$first" >/dev/null # caches of its user are in the home of both

  first=$(container)
  containers=("$first")
  second=$(container)
  containers+=("$second")
  echo "-- quickstart as user $UNKNOWN"
  inside "$first" "$UNKNOWN:$UNKNOWN" nemorl models create arithmetic models/arithmetic
  local steps=() experiment
  [[ -z ${STEPS:-} ]] || steps=("algorithm.num_steps=$STEPS")
  for experiment in sft grpo; do
    inside "$first" "$UNKNOWN:$UNKNOWN" nemorl train "quickstart/$experiment" "${steps[@]}"
  done

  echo "-- a run over two containers"
  set -m
  inside "$first" "$UNKNOWN:$UNKNOWN" ray start --head --block --port "$PORT" --node-ip-address 127.0.0.1 \
    --num-cpus 2 --include-dashboard false --temp-dir /tmp/first >"$work/head.log" 2>&1 &
  ray_pids+=("$!")
  sleep 20
  inside "$second" "$UNKNOWN:$UNKNOWN" ray start --block --address "127.0.0.1:$PORT" --node-ip-address 127.0.0.2 \
    --num-cpus 2 >"$work/node.log" 2>&1 &
  ray_pids+=("$!")
  set +m
  local deadline=$((SECONDS + SECONDS_TO_JOIN))
  until inside "$first" "$UNKNOWN:$UNKNOWN" env RAY_ADDRESS="127.0.0.1:$PORT" ray status 2>/dev/null | grep -q '4.0 CPU'; do
    ((SECONDS < deadline)) || {
      cat "$work/head.log" "$work/node.log" >&2
      return 1
    }
    sleep 2
  done
  inside "$first" "$UNKNOWN:$UNKNOWN" env RAY_ADDRESS="127.0.0.1:$PORT" nemorl train \
    quickstart/grpo run_dir=runs/two algorithm.num_steps=2 cluster.num_nodes=2
  grep -h '"node' "$work"/runs/two/*.json 2>/dev/null | head -3 || true
}

main
