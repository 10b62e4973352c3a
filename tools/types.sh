#!/usr/bin/env bash
# Run mypy on the complete library and on the benchmarks. mypy finds modules by folder, so algorithms/, environments/ and slurm/ at the
# root are linked to where they import as nemorl.algorithms and so on.
set -euo pipefail
cd "$(dirname "$0")/.."
tree=build/types
rm -rf "$tree"
mkdir -p "$tree/nemorl"
for part in nemorl/* algorithms environments slurm; do
  ln -s "$PWD/$part" "$tree/nemorl/$(basename "$part")"
done
benchmarks=(benchmarks/*.py)
benchmarks=("${benchmarks[@]#benchmarks/}")
benchmarks=("${benchmarks[@]%.py}")
MYPYPATH="$tree:benchmarks" exec "${MYPY:-mypy}" --package nemorl "${benchmarks[@]/#/--module=}" "$@"
