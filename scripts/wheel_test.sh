#!/usr/bin/env bash
# Installs a package into a new environment outside of the source tree, and uses it there.
#   scripts/wheel_test.sh PACKAGE [TORCH]
#   PACKAGE   a wheel, or a source distribution (.tar.gz), which pip then builds
#   TORCH     what to install as torch, e.g. torch==2.10.0 (its CPU build, if uv is there);
#             without it the torch that PYTHON has
#   PYTHON=python3.12    (default python3)
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
package=$(realpath "${1:?usage: scripts/wheel_test.sh PACKAGE [TORCH]}")
torch=${2-}
PYTHON=${PYTHON:-python3}

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
unset PYTHONPATH
options=()
"$PYTHON" -m venv "$folder/env"
python=$folder/env/bin/python
if [ -z "$torch" ]; then
  options=(--no-deps) # pip would complete the requirements of that torch, and they take gigabytes
  packages=$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
  # As a folder of packages with its own .pth files, where an environment on top of another names that one.
  "$PYTHON" -c 'import pathlib, torch
print(f"import site; site.addsitedir({str(pathlib.Path(torch.__file__).parents[1])!r})")' \
    > "$packages/torch_of_python.pth"
  "$python" -m pip uninstall -qqy setuptools # it would hide that of PYTHON, which torch may need
elif command -v uv > /dev/null; then
  uv pip install -q --python "$python" --torch-backend=cpu "$torch"
else
  "$python" -m pip --disable-pip-version-check install -q "$torch"
fi
"$python" -m pip --disable-pip-version-check install -q "${options[@]}" "$package"
cd "$folder"
for isa in baseline avx512; do # the lowest instruction set, and the highest of this machine
  EMBLIB_ISA=$isa "$python" "$here/wheel_smoke.py"
done
