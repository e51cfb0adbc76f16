#!/usr/bin/env bash
# Builds the wheel of this processor in the manylinux container, repairs it and tests it there with the
# oldest torch ([tool.cibuildwheel] of pyproject.toml). Needs docker or podman.
#   CUDA=13-0 scripts/wheel_build.sh FOLDER
#   CUDA   also the CUDA library, by this release of NVIDIA's compiler; the version then ends in +cu130
set -euo pipefail
cd "$(dirname "$0")/.."
folder=${1:?usage: scripts/wheel_build.sh FOLDER}
work=build/wheel
rm -rf "$work"
mkdir -p "$work"
cp -r csrc emblib scripts pyproject.toml README.md LICENSE "$work"
rm -f "$work"/emblib/*.so
python3 scripts/pypi_readme.py "$work"
if [ -n "${CUDA:-}" ]; then
  sed -i "s/^__version__ = \"\(.*\)\"/__version__ = \"\1+cu${CUDA//-/}\"/" "$work/emblib/__init__.py"
  repository=https://developer.download.nvidia.com/compute/cuda/repos/rhel8/x86_64/cuda-rhel8.repo
  export CIBW_BEFORE_ALL="dnf config-manager --add-repo $repository &&
    dnf install -y cuda-nvcc-$CUDA cuda-cudart-devel-$CUDA cuda-cccl-$CUDA"
  export CIBW_ENVIRONMENT="EMBLIB_CUDA=ON CUDACXX=/usr/local/cuda-${CUDA/-/.}/bin/nvcc"
fi
python -m pip --disable-pip-version-check install -q 'cibuildwheel~=4.3'
python -m cibuildwheel "$work" --output-dir "$folder"
