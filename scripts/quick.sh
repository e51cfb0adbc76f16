#!/usr/bin/env bash
# Check a change in about a minute: linters on the changed files, the house rules, and the tests that
# belong to the changed files (scripts/tests_of.py), as many as a minute of two processors has room for,
# without slow ones.   scripts/quick.sh BIN [PYTEST_ARGS]
set -uo pipefail
cd "$(dirname "$0")/.." || exit 1
bin=$1
shift
status=0
if ! git rev-parse --quiet --verify HEAD > /dev/null 2>&1; then
  echo "error: make quick looks at what differs from the last commit; without git: make lint test" >&2
  exit 1
fi
mapfile -t changed < <(
  { git diff --name-only --diff-filter=d HEAD; git ls-files --others --exclude-standard; } | sort -u
)
python=()
native=()
for name in "${changed[@]}"; do
  case $name in
    *.py) python+=("$name") ;;
    *.cpp | *.h | *.cu | *.cuh) native+=("$name") ;;
  esac
done
if ((${#python[@]})); then
  "$bin/python" -m ruff check --quiet "${python[@]}" || status=1
  "$bin/python" -m ruff format --quiet --diff "${python[@]}" || status=1
fi
if ((${#native[@]})); then
  "$bin/clang-format" --dry-run -Werror "${native[@]}" || status=1
fi
mapfile -t tests < <("$bin/python" scripts/tests_of.py --seconds 75) # the house rules take another 20
echo "emblib: house rules, and ${tests[*]:-no other tests}"
"$bin/python" -m pytest -q -n 2 -m "not slow" -o console_output_style=classic \
  tests/test_house_rules.py "${tests[@]}" "$@" || status=1
exit $status
