#!/usr/bin/env bash
# Resolve the locks of the images in a clean environment: containers/lock.sh
#
#   locks/build.txt   packages that build wheels in the images
#   locks/base.txt    nemorl, and torch for CUDA
#   locks/vllm.txt    the same, and vLLM
#
#   PYTHON=/path/to/python3.12   the Python of the images
#   BEFORE=2026-11-21            ignore newer packages: the same day gives the same locks
set -euo pipefail
cd "$(dirname "$0")/.."

readonly PYTHON=${PYTHON:-python3.12} BEFORE=${BEFORE:-2026-11-21}
readonly UV=0.13.9 TORCH=2.13.0 VLLM=0.32.0 MEGATRON=0.16.1 LOCKS=containers/locks
export UV_PYTHON_DOWNLOADS=never UV_NO_CONFIG=1

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"$PYTHON" -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet "uv==$UV"

# resolve NAME ARGUMENTS...: writes locks/NAME.txt
resolve() {
  local name=$1
  shift
  echo "Resolving $LOCKS/$name.txt"
  rm -f "$LOCKS/$name.txt" # otherwise uv prefers its versions
  "$work/venv/bin/uv" pip compile --quiet --python "$work/venv/bin/python" --python-version 3.12 \
    --python-platform x86_64-manylinux_2_28 --exclude-newer "$BEFORE" --generate-hashes --no-annotate \
    --custom-compile-command "containers/lock.sh" --output-file "$LOCKS/$name.txt" "$@" >/dev/null
}

printf '%s\n' "torch==$TORCH" "vllm==$VLLM" "megatron-core==$MEGATRON" >"$work/pins"
resolve vllm --extra trackers --extra data --extra vllm --constraints "$work/pins" pyproject.toml

# The others use its versions, so that the target vllm only adds packages.
sed -n 's/^\([^ #]*==[^ ]*\).*/\1/p' "$LOCKS/vllm.txt" >"$work/agreed"
resolve base --extra trackers --extra data --constraints "$work/agreed" pyproject.toml
printf '%s\n' pip setuptools >"$work/build.in"
resolve build --constraints "$work/agreed" "$work/build.in"
