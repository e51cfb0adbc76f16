#!/usr/bin/env bash
# Checks that everything works on this machine: builds, runs the doctor and every experiment at smoke
# size, bundles the runs and verifies the bundle.
#   scripts/smoke_test.sh [key=value ...]     e.g. device=cpu
# Takes a few minutes, mostly for compiling. Its numbers are meaningless. Writes build/smoke/.
set -euo pipefail
. "$(dirname "$0")/lib.sh"

PERF_FOLDER=build/smoke
perf=$PERF_FOLDER
export PERF_FOLDER
rm -rf "$perf"
if [ -z "${EMBLIB_PYTHON:-}" ]; then
  make --no-print-directory native
fi
python=$(find_python)
status=0
scripts/nightly.sh timing=smoke rerun=all "$@" || status=$?
if ((status)); then
  complain "some experiments failed: see the table above (exit status $status)"
  exit "$status"
fi
mapfile -t runs < <(find "$perf" -name run.json -printf '%h\n' | sort)
"$python" run.py bundle pack "${runs[@]}" --out "$perf/bundle.zip"
"$python" run.py bundle verify "$perf/bundle.zip"
say "everything works here: open build/pages/index.html"
