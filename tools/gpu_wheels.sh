#!/usr/bin/env bash
# Collect the wheels that benchmarks/gpu.py requires next to torch, for a machine without a network:
#
#   tools/gpu_wheels.sh [FOLDER [PYTHON]]      such as tools/gpu_wheels.sh gpu-wheels 3.12
#
# There: python3 -m pip install --no-index --no-deps --target /tmp/site FOLDER/*.whl
#        PYTHONPATH=/tmp/site:. python3 benchmarks/gpu.py
# A package that is there already may be left out: delete its wheel. modelopt is for one comparison only.
set -euo pipefail
cd "$(dirname "$0")/.."

readonly FOLDER=${1:-gpu-wheels} VERSION=${2:-3.12}
readonly PACKAGES=(
  'megatron-core>=0.16.1,<0.17' 'pydantic>=2.11' safetensors tokenizers pyyaml packaging jinja2 markupsafe numpy
  rich markdown-it-py mdurl pygments
)
mkdir -p "$FOLDER"
platforms=()
for glibc in 17 24 27 28 31 34; do
  platforms+=(--platform "manylinux_2_${glibc}_x86_64")
done
download() {
  .venv/bin/python -m pip download --quiet --no-input --only-binary=:all: --no-deps --dest "$FOLDER" \
    --python-version "$VERSION" --implementation cp "${platforms[@]}" --platform manylinux2014_x86_64 "$@"
}
download "${PACKAGES[@]}"
# Of pydantic, in the versions that it pins.
mapfile -t of_pydantic < <(unzip -p "$FOLDER"/pydantic-2*.whl '*/METADATA' |
  sed -n 's/^Requires-Dist: \([^;]*\)$/\1/p' | tr -d ' ')
download "${of_pydantic[@]}"
du -sh "$FOLDER"
