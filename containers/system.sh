#!/usr/bin/env bash
# The part of an image that is not Python: system.sh PACKAGE...
#
# Install Ubuntu's packages, and create the user and the folders. Any user of the host may write to the folders,
# because `docker run --user "$(id -u)"` makes a user the owner of files in a mounted folder.
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
