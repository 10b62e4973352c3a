#!/usr/bin/env bash
# The part of an image that is not Python: system.sh PACKAGE...
#
# Installs Ubuntu's packages, makes the user, and the folders that any user of the host may write to, since
# `docker run --user "$(id -u)"` is how files in a mounted folder come to belong to a person.
set -euo pipefail

readonly ID=10001

export DEBIAN_FRONTEND=noninteractive
apt-get update
apt-get install --yes --no-install-recommends "$@"
rm -rf /var/lib/apt/lists/*

groupadd --gid "$ID" nemorl
useradd --uid "$ID" --gid "$ID" --no-log-init --no-create-home --home-dir /home/nemorl --shell /bin/bash nemorl
mkdir -p /home/nemorl /workspace
chown "$ID:$ID" /home/nemorl /workspace
chmod 1777 /home/nemorl /workspace
