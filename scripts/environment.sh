#!/usr/bin/env bash
# Creates the Python environment of the Makefile: venv, torch, build tools, dependencies.
#   VENV PYTHON TORCH EXTRAS scripts/environment.sh STATE
# Writes STATE/bin (where the environment's python is) and STATE/constraints (its torch, which no
# later resolution may replace: another torch is gigabytes, and the libraries link to this one).
set -euo pipefail
state=$1

say() { echo "emblib: $*"; }
fail() { echo "error: $*" >&2; exit 1; }
torch_of() {
  "$1" -c 'import torch; v = torch.__version__; n = v.split("+")[0].split(".")
assert (int(n[0]), int(n[1])) >= (2, 10), v
print(v)' 2>/dev/null
}

command -v "$PYTHON" >/dev/null || fail "no '$PYTHON' on PATH; give one: make PYTHON=/path/to/python3.11"
"$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
  fail "emblib needs Python >= 3.11, $PYTHON is $("$PYTHON" -V 2>&1); e.g. make PYTHON=python3.12"

if [ -z "$VENV" ]; then
  python=$("$PYTHON" -c 'import sys; print(sys.executable)')
else
  python=$VENV/bin/python
  if [ ! -x "$python" ]; then
    if found=$(torch_of "$PYTHON"); then
      say "creating $VENV over the environment of $PYTHON, which has torch $found"
      "$PYTHON" -m venv --system-site-packages "$VENV"
      # A venv made from a venv sees the packages of neither but the base's: name the parent's.
      "$PYTHON" -c 'import sysconfig; print(sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), sep="\n")' |
        sort -u > "$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/parent_environment.pth"
      # The one that comes with a venv would hide the parent's, which torch may need.
      "$python" -m pip uninstall -qqy setuptools
    else
      say "creating $VENV with $("$PYTHON" -V)"
      "$PYTHON" -m venv "$VENV" || fail "could not create $VENV (on Debian: apt-get install python3-venv)"
    fi
  fi
fi
pip() { "$python" -m pip --disable-pip-version-check "$@"; }

if ! torch_of "$python" >/dev/null; then
  say "installing $TORCH"
  pip install -qq "$TORCH"
  torch_of "$python" >/dev/null || fail "$TORCH does not import, or is older than 2.10"
fi
mkdir -p "$state"
echo "torch==$(torch_of "$python")" > "$state/constraints"
dirname "$python" > "$state/bin"

say "installing build tools and dependencies beside $(cat "$state/constraints")"
mapfile -t needs < <("$python" - "$EXTRAS" <<'PY'
import sys, tomllib
with open("pyproject.toml", "rb") as file:
    project = tomllib.load(file)
needs = project["build-system"]["requires"] + project["project"]["dependencies"]
for extra in filter(None, sys.argv[1].split(",")):
    needs += project["project"]["optional-dependencies"][extra]
print(*(need for need in needs if not need.startswith("torch>=")), sep="\n")
PY
)
pip install -qq -c "$state/constraints" "${needs[@]}"
touch "$state/environment"
