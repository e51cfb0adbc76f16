#!/usr/bin/env bash
# All that a GPU can say in ten minutes: tests, sanitizers, kernels against their aims, experiments.
#   scripts/gpu_day.sh [key=value ...]     options of the experiments, e.g. timing=standard
#   scripts/gpu_day.sh --list              the parts and their limits in seconds; runs nothing
#   PARTS="a b"           these parts only
#   MINUTES=10            scales the limits of the parts
#   EXPERIMENTS="a b"     instead of tt_vs_tbe and peers
#   SANITIZED="a b"       tests that run under compute-sanitizer
#   FORCE=1               time kernels although tests failed
# Works without make and without a network: EMBLIB_PYTHON names a Python that imports emblib with its
# prebuilt libraries. Everything is written to reports/gpu-day (PERF_FOLDER), the aims and what was
# measured to aims.md there. A part that fails or reaches its limit does not stop the next one, except
# that nothing is timed after failed tests. Exit status: the worst; 124 for a part that was stopped.
set -euo pipefail
. "$(dirname "$0")/lib.sh"

list=
if [ "${1:-}" = --list ]; then
  list=1
  shift
fi
minutes=${MINUTES:-10}
PERF_FOLDER=${PERF_FOLDER:-reports/gpu-day}
export PERF_FOLDER
if [ -z "$list" ]; then
  if [ -z "${EMBLIB_PYTHON:-}" ]; then
    EMBLIB_CUDA=ON make --no-print-directory native
  fi
  python=$(find_python)
  mkdir -p "$PERF_FOLDER"
  perf=$(cd "$PERF_FOLDER" && pwd)
  summary=$perf/summary.md
  printf '| part | exit status | took |\n| --- | ---: | ---: |\n' > "$summary"
  take_the_machine
fi
worst=0

# Run a part for at most so many seconds; its output goes to NAME.txt and its status to the summary.
# With --list only say what it is. With open_ended=1 reaching the limit is not a failure.
part() { # NAME SECONDS what command...
  local name=$1 limit=$(($2 * minutes / 10)) what=$3 status=0 began=$SECONDS
  shift 3
  if [ -n "${PARTS:-}" ] && [[ " $PARTS " != *" $name "* ]]; then return 0; fi
  if [ -n "$list" ]; then
    printf '%-10s %4d s  %s\n' "$name" "$limit" "$what"
    return 0
  fi
  say "$name: output in $perf/$name.txt"
  timeout -k 10 "$limit" "$@" > "$perf/$name.txt" 2>&1 || status=$?
  if [ -n "${open_ended:-}" ] && ((status == 124 || status == 137)); then
    echo "| $name | 0: nothing found until its limit | $((SECONDS - began)) s |" >> "$summary"
    return 0
  fi
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
  if [ -n "${PARTS:-}" ] && [[ " $PARTS " != *" $1 "* ]]; then return 0; fi
  if [ -n "$list" ]; then
    printf '%-10s         skipped: %s\n' "$1" "$2"
    return 0
  fi
  echo "| $1 | skipped: $2 | |" >> "$summary"
  say "$1: skipped: $2"
}
python=${python:-python}
perf=${perf:-$PERF_FOLDER}

part doctor 20 "is the machine fit for measurements?" "$python" run.py doctor || true

# As many processes as the tests found good on 16 cores, where pytest-xdist is there.
workers=()
if [ -z "$list" ] && "$python" -c 'import xdist' 2> /dev/null; then workers=(-n "${WORKERS:-14}" --dist loadfile); fi
passed=1
part tests 80 "tests that use a GPU" "$python" -m pytest -q -k cuda "${workers[@]}" \
  --ignore tests/simt --ignore tests/pretend --ignore tests/sanitize --ignore tests/fuzz \
  --ignore tests/experiments tests || passed=0

# The parts that measure: kernels, host, peers. Each ends by itself before its limit.
bench() { # NAME SECONDS what
  part "$1" "$2" "$3" "$python" -m tests.bench.gpu "$1" --out "$perf" \
    --seconds $((($2 - 12) * minutes / 10)) || true
}
if ((passed)) || [ -n "${FORCE:-}" ]; then
  bench updates 60 "updates and grouping by kernel, against FBGEMM"
  bench host 30 "what the host needs for forwards and steps"
  bench trains 50 "tensor trains against FBTT"
  bench hash 60 "hash tables against HierarchicalKV, dynamic steps"
  bench caches 35 "cached tables against FBGEMM, prefetch, the bus"
  bench quantised 20 "quantised lookups"
  bench matrix 45 "forward and step of every optimizer against peers"
  bench kernels 30 "kernels of a step against a model of their bytes"
  limit=$((22 * minutes / 10))
  for name in ${EXPERIMENTS-tt_vs_tbe peers}; do
    part "$name" 38 "the experiment $name, timing=quick" "$python" run.py "+experiment=$name" \
      "report.folder='$perf/runs'" device=cuda timing=quick "timing.total_seconds=$limit" "$@" || true
  done
else
  skip timing "tests failed, and wrong kernels have no speed (FORCE=1 times them)"
fi

# Some tests of each family: all of them take hours under a sanitizer.
sanitized=${SANITIZED:-tests/ops/test_update.py tests/ops/test_tbe.py tests/ops/test_tt.py tests/ops/test_hash.py}
if [ -n "$list" ] || command -v compute-sanitizer > /dev/null; then
  for tool in racecheck memcheck; do
    # shellcheck disable=SC2086  # a list of files
    open_ended=1 part "$tool" 30 "$tool over tests of kernels, as far as it gets" \
      compute-sanitizer --tool "$tool" --error-exitcode 9 --target-processes all \
      "$python" -m pytest -q -x -k cuda $sanitized || true
  done
else
  skip sanitizers "compute-sanitizer, of the CUDA toolkit, is not on the PATH"
fi
if [ -n "$list" ]; then exit 0; fi

mapfile -t runs < <(find "$perf/runs" -name run.json -printf '%h\n' 2> /dev/null | sort)
if ((${#runs[@]})); then
  part bundle 15 "one file of all runs" "$python" run.py bundle pack "${runs[@]}" --out "$perf/bundle.zip" || true
else
  skip bundle "no experiment left a run"
fi
part aims 10 "the table of aims" "$python" -m tests.bench.gpu summary --out "$perf" || true

cat "$summary"
if [ -r "$perf/aims.md" ]; then cat "$perf/aims.md"; fi
summarise < "$summary"
say "results: $perf (compare bundles of two machines: run.py compare A.zip B.zip)"
exit "$worst"
