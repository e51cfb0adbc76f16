#!/usr/bin/env bash
# Runs every linter and formatter check, also after a failure.    scripts/lint.sh BIN
set -uo pipefail
# shellcheck source=scripts/lib.sh
. "$(dirname "$0")/lib.sh"

bin=$1
status=0
check() {
  echo "emblib: $1"
  shift
  "$@" || status=1
}
mapfile -t native < <(native_sources)
check "ruff check" "$bin/python" -m ruff check --quiet .
check "ruff format" "$bin/python" -m ruff format --quiet --diff .
check "clang-format" "$bin/clang-format" --dry-run -Werror "${native[@]}"
check "mypy" "$bin/python" -m mypy --no-error-summary
exit $status
