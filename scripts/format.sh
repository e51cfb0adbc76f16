#!/usr/bin/env bash
# Formats Python and C++ in place and applies ruff's safe fixes.    scripts/format.sh BIN
set -euo pipefail
bin=$1
mapfile -t native < <(git ls-files --cached --others --exclude-standard -- '*.cpp' '*.h' '*.cu' '*.cuh')
"$bin/python" -m ruff check --fix --quiet . || true
"$bin/python" -m ruff format --quiet .
"$bin/clang-format" -i "${native[@]}"
