#!/usr/bin/env bash
# Make a stand-in for a base image of NVIDIA, for machines that reach no registry: base.sh cuda|ngc
#
# Ubuntu 24.04 from its archive, as NVIDIA's images have it, and instead of NVIDIA's software empty packages of the
# names that the Dockerfiles install. Tests what a Dockerfile does, and nothing of CUDA. Prints the image's name.
# Requires root, buildah and debootstrap.
set -euo pipefail
cd "$(dirname "$0")"

readonly KIND=${1:?give cuda or ngc} CACHE=${CACHE:-/var/tmp/nemorl-images}
readonly ARCHIVE=${ARCHIVE:-http://archive.ubuntu.com/ubuntu} CERTIFICATES=/etc/ssl/certs/ca-certificates.crt
# What the target `vllm` of Dockerfile.cuda installs from NVIDIA's archive, which the real base has.
readonly CUDA=(cuda-cudart-dev-13-0 cuda-cuobjdump-13-0 cuda-nvcc-13-0 cuda-nvrtc-dev-13-0 libcublas-dev-13-0
  libcurand-dev-13-0)
# Versions of NVIDIA's PyTorch image 26.09. torch is the index's under that version.
readonly TORCH=2.13.0 NVIDIA_TORCH=2.14.0a0+nv26.9 NVIDIA=(transformer-engine==2.19.0 apex==0.1 flash-attn==2.8.3)

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

ubuntu() {
  local rootfs=$CACHE/noble
  if [[ ! -f $CACHE/noble.tar ]]; then
    rm -rf "$rootfs"
    # Debian's debootstrap has no script and no key for Ubuntu; apt in the image verifies with Ubuntu's own.
    debootstrap --no-check-gpg --variant=minbase --components=main,universe noble "$rootfs" "$ARCHIVE" \
      /usr/share/debootstrap/scripts/gutsy
    tar --create --file "$CACHE/noble.tar" --directory "$rootfs" .
  fi
}

# empty_debs FOLDER NAME...: an archive for apt with packages that contain nothing
empty_debs() {
  local folder=$1 name
  shift
  mkdir -p "$folder"
  for name in "$@"; do
    mkdir -p "$folder/$name/DEBIAN"
    printf 'Package: %s\nVersion: 13.0\nArchitecture: all\nMaintainer: nemorl\nDescription: stand-in\n' "$name" \
      >"$folder/$name/DEBIAN/control"
    dpkg-deb --build "$folder/$name" "$folder/$name.deb" >/dev/null
    {
      cat "$folder/$name/DEBIAN/control"
      printf 'Filename: ./%s.deb\nSize: %s\nSHA256: %s\n\n' "$name" "$(stat -c %s "$folder/$name.deb")" \
        "$(sha256sum "$folder/$name.deb" | cut -d ' ' -f 1)"
    } >>"$folder/Packages"
    rm -r "${folder:?}/$name"
  done
}

main() {
  # One that exists is kept, because the layers built on it are reused only with the same base.
  if buildah inspect --type image "localhost/stand-in:$KIND" >/dev/null 2>&1; then
    echo "localhost/stand-in:$KIND"
    return
  fi
  mkdir -p "$CACHE"
  ubuntu >&2
  empty_debs "$work/debs" "${CUDA[@]}"
  # The host's certificates, in case its proxy has some of its own.
  mkdir "$work/certificates"
  cp "$CERTIFICATES" "$work/certificates/host.crt"
  cp empty_distribution.py "$work"
  ln "$CACHE/noble.tar" "$work/noble.tar" 2>/dev/null || cp "$CACHE/noble.tar" "$work/noble.tar"
  buildah bud --isolation chroot --quiet --file Dockerfile --target "$KIND" --build-arg TORCH="$TORCH" \
    --build-arg NVIDIA_TORCH="$NVIDIA_TORCH" --build-arg NVIDIA="${NVIDIA[*]}" \
    --tag "localhost/stand-in:$KIND" "$work" >&2
  echo "localhost/stand-in:$KIND"
}

main
