#!/usr/bin/env bash
# Decides whether the CUDA library is built: prints ON or OFF, then the reason.
#   EMBLIB_CUDA=AUTO|ON|OFF scripts/cuda_choice.sh STATE
# AUTO builds it only if it can run: with nvcc, a CUDA build of torch and an NVIDIA GPU. Compiling the
# kernels takes most of the build time, and a machine without a GPU gains nothing from it.
set -euo pipefail
here=$(dirname "$0")
# shellcheck source=scripts/gpu.sh
. "$here/gpu.sh"
# shellcheck source=scripts/compiler.sh
. "$here/compiler.sh"

case ${EMBLIB_CUDA:-AUTO} in
  ON | OFF) echo "$EMBLIB_CUDA EMBLIB_CUDA=$EMBLIB_CUDA" ;;
  AUTO)
    split_compiler "${CUDACXX:-nvcc}"
    if ! "${compiler[@]}" --version > /dev/null 2>&1; then
      echo "OFF no CUDA compiler (nvcc) on PATH"
    elif [ ! -s "$1/torch_cuda" ]; then
      echo "OFF torch is a CPU build"
    elif ! have_gpu; then
      echo "OFF no NVIDIA GPU found"
    else
      echo "ON nvcc, torch for CUDA $(cat "$1/torch_cuda") and a GPU found"
    fi
    ;;
  *)
    echo "error: EMBLIB_CUDA must be AUTO, ON or OFF, got '$EMBLIB_CUDA'" >&2
    exit 2
    ;;
esac
