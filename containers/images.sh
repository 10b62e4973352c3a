#!/usr/bin/env bash
# Build the images with buildah and test them: containers/images.sh [IMAGE...]
#
#   cuda cuda-vllm ngc ngc-vllm trtllm   by default all
#
#   CUDA= NGC= TRTLLM=   base images instead of the defaults of the Dockerfiles; `stand-in`, the default here, makes
#                        bases without NVIDIA's software (stand_in/base.sh)
#   VLLM_DEVICE=empty    for ngc-vllm: package vLLM without compiling its kernels, as a stand-in has no CUDA compiler
#   ISOLATION=chroot     how buildah runs commands
#
# Requires root and buildah. Writes a report of sizes, layers and tests to stdout.
set -euo pipefail
cd "$(dirname "$0")/.."

readonly ISOLATION=${ISOLATION:-chroot} BASE_OF_CUDA=${CUDA:-stand-in} BASE_OF_NGC=${NGC:-stand-in}
readonly BASE_OF_TRTLLM=${TRTLLM:-$BASE_OF_NGC} VLLM_DEVICE=${VLLM_DEVICE:-empty}

# base_of KIND NAME: the image, built if it is a stand-in
base_of() {
  if [[ $2 == stand-in ]]; then
    containers/stand_in/base.sh "$1"
  else
    echo "$2"
  fi
}

build() {
  local image=$1 file=containers/Dockerfile.ngc target=nemorl arguments=()
  case $image in
  cuda*)
    file=containers/Dockerfile.cuda
    arguments=(--build-arg "BASE=$(base_of cuda "$BASE_OF_CUDA")")
    ;;
  trtllm) arguments=(--build-arg "TENSORRT_LLM=$(base_of ngc "$BASE_OF_TRTLLM")") ;;
  *) arguments=(--build-arg "VLLM_TARGET_DEVICE=$VLLM_DEVICE") ;;
  esac
  [[ $image == cuda* ]] || arguments+=(--build-arg "PYTORCH=$(base_of ngc "$BASE_OF_NGC")")
  case $image in
  *-vllm) target=vllm ;;
  trtllm) target=trtllm ;;
  esac
  # The format of Docker has health checks. Layers are kept for the next image.
  buildah bud --isolation "$ISOLATION" --format docker --layers --file "$file" --target "$target" \
    --build-arg "REVISION=$(git rev-parse HEAD)" --build-arg "CREATED=$(date -u +%FT%TZ)" "${arguments[@]}" \
    --tag "localhost/nemorl:$image" .
}

# report IMAGE: size and layers
report() {
  buildah images --format '{{.Name}}:{{.Tag}}  {{.Size}}' "localhost/nemorl:$1"
  buildah inspect --type image --format '{{range .OCIv1.RootFS.DiffIDs}}{{.}}
{{end}}' "localhost/nemorl:$1" | grep -c sha256 | sed 's/$/ layers/'
}

main() {
  local image
  (($# > 0)) || set -- cuda cuda-vllm ngc ngc-vllm trtllm
  for image in "$@"; do
    echo "== $image: build"
    build "$image"
    report "$image"
    echo "== $image: test"
    containers/test_image.sh "localhost/nemorl:$image"
  done
}

main "$@"
