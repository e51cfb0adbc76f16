#!/usr/bin/env bash
# The first hour with a GPU: tests, sanitizers, kernel times and their model, the headline experiments,
# and one bundle.
#   scripts/gpu_day.sh [key=value ...]     options of the experiments, e.g. timing=quick
#   EXPERIMENTS="a b"     instead of the headline experiments
#   SANITIZED="a b"       test files that run under compute-sanitizer
#   FORCE=1               time kernels and experiments although tests failed
# Everything is written to build/gpu-day (PERF_FOLDER). A step that fails does not stop the next one, except
# that nothing is timed after failed tests. Exit status: the worst.
set -euo pipefail
. "$(dirname "$0")/lib.sh"

PERF_FOLDER=${PERF_FOLDER:-build/gpu-day}
perf=$PERF_FOLDER
export PERF_FOLDER
if [ -z "${EMBLIB_PYTHON:-}" ]; then
  EMBLIB_CUDA=ON make --no-print-directory native
fi
python=$(find_python)
mkdir -p "$perf"
perf=$(cd "$perf" && pwd)
worst=0
summary=$perf/summary.md
printf '| step | exit status | took |\n| --- | ---: | ---: |\n' > "$summary"

# Run a step; its output goes to NAME.txt and its status to the summary.
step() { # NAME command...
  local name=$1 status=0 began=$SECONDS
  shift
  say "$name: output in $perf/$name.txt"
  "$@" > "$perf/$name.txt" 2>&1 || status=$?
  echo "| $name | $status | $((SECONDS - began)) s |" >> "$summary"
  if ((status == 130)); then exit 130; fi
  if ((status > worst)); then worst=$status; fi
  if ((status)); then
    complain "$name ended with exit status $status:"
    tail -n 5 "$perf/$name.txt" >&2
  fi
  return "$status"
}
skip() { # NAME reason
  echo "| $1 | skipped: $2 | |" >> "$summary"
  say "$1: skipped: $2"
}

step machine "$python" run.py doctor || true
passed=1
step tests "$python" -m pytest -q -k cuda || passed=0

sanitized=${SANITIZED:-tests/ops/test_tbe.py tests/ops/test_tt.py tests/dynamic/test_hash_table.py}
if command -v compute-sanitizer > /dev/null; then
  for tool in memcheck racecheck; do
    # shellcheck disable=SC2086  # a list of files
    step "$tool" compute-sanitizer --tool "$tool" --error-exitcode 9 --target-processes all \
      "$python" -m pytest -q -x -k cuda $sanitized || true
  done
else
  skip sanitizers "compute-sanitizer, of the CUDA toolkit, is not on the PATH"
fi

if ((passed)) || [ -n "${FORCE:-}" ]; then
  step kernels "$python" -m experiments.kernel_times --out "$perf/kernels.md" || true
  if command -v ncu > /dev/null; then
    step ncu ncu --target-processes all --kernel-name-base demangled -k 'regex:(pool|short_bags|long_bags|update)_kernel' \
      --launch-count 16 --section SpeedOfLight --section Occupancy --csv \
      "$python" -m experiments.kernel_times --steps 2 --out "$perf/under_ncu.md" || true
  else
    skip ncu "ncu, of the CUDA toolkit, is not on the PATH"
  fi
  export EXPERIMENTS=${EXPERIMENTS:-selftest_aa tbe_vs_torch peers tt_vs_tbe cache_hit_rate dynamic_vs_static}
  PERF_FOLDER=$perf/runs step experiments scripts/nightly.sh device=cuda "$@" || true
  mapfile -t runs < <(find "$perf/runs" -name run.json -printf '%h\n' 2> /dev/null | sort)
  if ((${#runs[@]})); then
    step bundle "$python" run.py bundle pack "${runs[@]}" --out "$perf/bundle.zip" || true
  else
    skip bundle "no experiment left a run"
  fi
else
  skip timing "tests failed, and wrong kernels have no speed (FORCE=1 times them)"
fi

cat "$summary"
summarise < "$summary"
say "results: $perf (compare runs of two machines: run.py compare RUN RUN; runs are in $perf/runs)"
exit "$worst"
