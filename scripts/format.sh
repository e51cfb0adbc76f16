#!/usr/bin/env bash
# Formats Python and C++ in place and applies ruff's safe fixes.    scripts/format.sh BIN
set -euo pipefail
# shellcheck source=scripts/lib.sh
. "$(dirname "$0")/lib.sh"

bin=$1
mapfile -t native < <(native_sources)
"$bin/python" -m ruff check --fix --quiet . || true
"$bin/python" -m ruff format --quiet .
"$bin/clang-format" -i "${native[@]}"
