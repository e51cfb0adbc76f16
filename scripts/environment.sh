#!/usr/bin/env bash
# Creates the Python environment of the Makefile: venv, torch, build tools; called again with `extras`, all
# other dependencies, while the native libraries are compiled.
#   VENV PYTHON TORCH TORCH_VERSION EXTRAS EMBLIB_CUDA scripts/environment.sh STATE [extras]
# Writes STATE/bin (the folder of the environment's python), STATE/constraints (its torch, which no later
# resolution may replace: another torch is gigabytes, and the libraries link to this one) and
# STATE/torch_cuda (the CUDA version of that torch, empty for a CPU build).
set -euo pipefail
state=$1
here=$(dirname "$0")
# shellcheck source=scripts/gpu.sh
. "$here/gpu.sh"
# shellcheck source=scripts/compiler.sh
. "$here/compiler.sh"

say() { echo "emblib: $*"; }
fail() { echo "error: $*" >&2; exit 1; }
torch_of() {
  "$1" -c 'import torch; v = torch.__version__; n = v.split("+")[0].split(".")
assert (int(n[0]), int(n[1])) >= (2, 10), v
print(v)' 2>/dev/null
}

# The requirement that only the installed torch meets. torch.__version__ may have a local version that the
# distribution lacks: PyPI's torch 2.13.0 calls itself 2.13.0+cu130, and no distribution has that name.
torch_requirement() {
  "$python" -c 'import sys, importlib.metadata as metadata
try:
    print("torch==" + metadata.version("torch"))
except metadata.PackageNotFoundError:
    sys.exit(1)'
}

# Packages are compiled as they are imported: pip would compile all 11,000 files, most of them for nothing.
pip_install() { "$python" -m pip --disable-pip-version-check install -qq --no-compile "$@"; }

# Install what pyproject.toml requires for a build, or the extras. numpy belongs to the former: torch imports
# it where it is, and would find half of it while the extras are installed.
install_needs() {
  local text needs
  text=$("$python" - "$1" "$EXTRAS" <<'PY'
import re, sys, tomllib
with open("pyproject.toml", "rb") as file:
    project = tomllib.load(file)
build = project["build-system"]["requires"] + project["project"]["dependencies"]
names = filter(None, sys.argv[2].split(","))
extras = [need for name in names for need in project["project"]["optional-dependencies"][name]]
numpy = [need for need in extras if re.match(r"numpy\b", need)]
needs = build + numpy if sys.argv[1] == "build" else [need for need in extras if need not in numpy]
print(*(need for need in needs if not need.startswith("torch>=")), sep="\n")
PY
)
  mapfile -t needs <<< "$text"
  [ -z "$text" ] || pip_install -c "$state/constraints" "${needs[@]}"
}

if [ "${2:-}" = extras ]; then
  python=$(cat "$state/bin")/python
  install_needs extras
  touch "$state/environment"
  exit
fi

# Check everything that a build needs and pip cannot install, before downloading anything.
preflight() {
  command -v "$PYTHON" >/dev/null || fail "no '$PYTHON' on PATH; name one: make PYTHON=/path/to/python3.11"
  "$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
    fail "emblib needs Python >= 3.11, $PYTHON is $("$PYTHON" -V 2>&1); e.g. make PYTHON=python3.12"
  if [ -n "$VENV" ] && [ ! -x "$VENV/bin/python" ]; then
    "$PYTHON" -c 'import ensurepip, venv' 2>/dev/null ||
      fail "$PYTHON cannot create environments (on Debian: apt-get install python3-venv)"
  fi
  local compiler
  split_compiler "${CXX:-c++}"
  command -v "${compiler[0]-}" >/dev/null ||
    fail "no C++ compiler '${compiler[*]}' on PATH; install one (on Debian: apt-get install g++) or name it: make CXX=clang++"
  printf '#include <bit>\n#include <concepts>\nint main() { return std::popcount(0u); }\n' |
    "${compiler[@]}" -std=c++20 -x c++ -fsyntax-only - 2>/dev/null ||
    fail "'${compiler[*]}' does not compile C++20; install a newer one or name it: make CXX=g++-12"
  if [ "${EMBLIB_CUDA:-AUTO}" = ON ]; then
    split_compiler "${CUDACXX:-nvcc}"
    "${compiler[@]}" --version >/dev/null 2>&1 ||
      fail "EMBLIB_CUDA=ON needs nvcc: put it on PATH, name it with CUDACXX=, or unset EMBLIB_CUDA"
  fi
}
preflight

if [ -z "$VENV" ]; then
  python=$("$PYTHON" -c 'import sys; print(sys.executable)')
else
  python=$VENV/bin/python
  # The file says that a run was interrupted while it created the environment.
  if [ ! -x "$python" ] || [ -e "$state/creating" ]; then
    mkdir -p "$state"
    touch "$state/creating"
    if found=$(torch_of "$PYTHON"); then
      say "creating $VENV over the environment of $PYTHON, which has torch $found"
      "$PYTHON" -m venv --system-site-packages "$VENV"
      # A venv created from a venv sees the packages of the base only: add the parent's explicitly.
      "$PYTHON" -c 'import sysconfig; print(sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), sep="\n")' |
        sort -u > "$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/parent_environment.pth"
      # The setuptools of the new venv would hide the parent's, which torch may need.
      "$python" -m pip uninstall -qqy setuptools
    else
      say "creating $VENV with $("$PYTHON" -V)"
      "$PYTHON" -m venv "$VENV" || fail "could not create $VENV (on Debian: apt-get install python3-venv)"
    fi
    rm "$state/creating"
  fi
  if ! "$python" -m pip --version >/dev/null 2>&1; then # such as an environment of uv
    "$python" -m ensurepip --upgrade --default-pip >/dev/null ||
      fail "$VENV has no pip; install it there, or let make create an environment: make VENV=dir"
  fi
fi
# PyTorch's CPU builds are named VERSION+cpu. Not every registry has them; uv knows PyTorch's own index.
install_cpu_torch() {
  pip_install "$1+cpu" 2>/dev/null && return
  [ -z "${PIP_NO_INDEX:-}" ] || return
  command -v uv >/dev/null || pip_install uv 2>/dev/null || return
  if command -v uv >/dev/null; then
    uv pip install -q --python "$python" --torch-backend=cpu "$1"
  else
    "$python" -m uv pip install -q --python "$python" --torch-backend=cpu "$1"
  fi 2>/dev/null
}

install_torch() {
  local torch=torch==$TORCH_VERSION
  if [ -n "${TORCH:-}" ]; then
    say "installing $TORCH (TORCH)"
    pip_install "$TORCH"
  elif have_gpu || [ "$(uname -s)" != Linux ]; then
    say "installing $torch; for another build: make TORCH=..."
    pip_install "$torch"
  else
    say "no NVIDIA GPU found: installing the CPU build of $torch; for another build: make TORCH=..."
    if ! install_cpu_torch "$torch"; then
      say "found no CPU build: installing the registry's default build, several GB with CUDA"
      pip_install "$torch"
    fi
  fi
  torch_of "$python" >/dev/null || fail "${TORCH:-$torch} does not import, or is older than 2.10"
}

if ! torch_of "$python" >/dev/null; then install_torch; fi
mkdir -p "$state"
torch_requirement > "$state/constraints.new" ||
  fail "$python imports a torch that pip does not know, so pip would install another one over it; \
install torch with pip (pip install torch==$TORCH_VERSION), or name an environment without it: make PYTHON=..."
mv "$state/constraints.new" "$state/constraints"
dirname "$python" > "$state/bin"

say "installing build tools and dependencies for $(cat "$state/constraints")"
install_needs build
# After numpy, without which torch warns as it is imported.
"$python" -c 'import torch; print(torch.version.cuda or "", end="")' > "$state/torch_cuda"
touch "$state/torch"
