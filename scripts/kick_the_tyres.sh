#!/usr/bin/env bash
# Does it work here? Build, doctor, every experiment at smoke size, a bundle of them, its verification.
#   scripts/kick_the_tyres.sh [key=value ...]     e.g. device=cpu
# A few minutes, most of them compiling; no number of it means anything. Leaves build/tyres/.
set -euo pipefail
. "$(dirname "$0")/lib.sh"

PERF_FOLDER=build/tyres
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
  complain "not everything works here: the table above says which (exit status $status)"
  exit "$status"
fi
mapfile -t runs < <(find "$perf" -name run.json -printf '%h\n' | sort)
"$python" -m experiments.bundle pack "${runs[@]}" --out "$perf/bundle.zip"
"$python" -m experiments.bundle verify "$perf/bundle.zip"
say "everything works here: open build/pages/index.html"
