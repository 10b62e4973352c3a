#!/usr/bin/env bash
# Test against packages that cannot be installed next to the others: tools/libraries.sh
#
# OpenEnv requires an older mcp, NeMo-Gym Python 3.12, and trackers an older protobuf; lm_eval is a client
# that nemorl does not import, and servers of object stores have many packages. Each has an environment of its own, .venv-NAME.
#   PYTHON312=/path/to/python3.12   the interpreter of NeMo-Gym
set -euo pipefail
cd "$(dirname "$0")/.."

die() {
  printf '%s\n' "$1" >&2
  exit 1
}

# environment VENV PYTHON PACKAGE...: create the environment, unless it is complete
environment() {
  local venv=$1 python=$2 began=$SECONDS
  shift 2
  if [[ -e $venv/ready && $(<"$venv/ready") == "$*" ]]; then
    return
  fi
  printf 'Installing %s in %s ... ' "$*" "$venv"
  rm -rf "$venv"
  "$python" -m venv "$venv" ||
    die "$python cannot create virtual environments. Set an interpreter: make libraries PYTHON312=/path/to/python3.12"
  if ! "$venv/bin/python" -m pip install --no-input --progress-bar off "$@" >"$venv/install.log" 2>&1; then
    tail -n 15 "$venv/install.log" >&2
    die "pip could not install $*. Its output is in $venv/install.log."
  fi
  echo "$*" >"$venv/ready"
  echo "done in $((SECONDS - began)) s"
}

environment .venv-openenv .venv/bin/python 'openenv==0.10.0'
environment .venv-nemo-gym "${PYTHON312:-python3.12}" 'nemo-gym==0.4.0'
environment .venv-trackers .venv/bin/python wandb==0.31.0 mlflow-skinny==3.17.2 trackio==0.43.0 swanlab==0.10.3 \
  pydantic pyyaml rich jinja2 pytest pytest-xdist hypothesis
environment .venv-lm-eval .venv/bin/python 'lm_eval[api]==0.4.13' transformers
environment .venv-stores .venv/bin/python s3fs==2026.9.0 gcsfs==2026.10.1 'moto[server]==5.2.5' gcp-storage-emulator==2026.7.19
export NEMORL_MOTO_PYTHON=$PWD/.venv-stores/bin/python
export NEMORL_LM_EVAL_PYTHON=$PWD/.venv-lm-eval/bin/python
export NEMORL_OPENENV_PYTHON=$PWD/.venv-openenv/bin/python
export NEMORL_NEMO_GYM_PYTHON=$PWD/.venv-nemo-gym/bin/python
export NEMORL_REQUIRE=openenv,nemo_gym,lm_eval,moto
.venv/bin/pytest tests/environments/test_openenv.py tests/rollout/test_nemo_gym.py tests/serve/test_lm_eval.py \
  tests/weights/test_object_stores.py

# The process of a tracker uses the interpreter of the run, so these tests run in the trackers' environment.
NEMORL_REQUIRE=wandb,mlflow,trackio,swanlab PYTHONPATH=. .venv-trackers/bin/python -m pytest --config-file=/dev/null \
  --rootdir=. -p no:cacheprovider tests/observe/test_tracker_packages.py
