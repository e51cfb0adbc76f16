#!/usr/bin/env bash
# Checks whether the working tree is slower than a base revision.
#   scripts/gate.sh [--advisory] [BASE] [key=value ...]
#   BASE         any name of a commit; else GATE_BASE, else origin/main
#   --advisory   report findings as warnings (status 0); fail only if the gate itself fails
#   key=value    settings of the run, e.g. timing=smoke device=cpu
# The results are in build/perf/gate/*/. Exit status: that of the gate, see explain() below.
set -euo pipefail
. "$(dirname "$0")/lib.sh"

advisory=
if [ "${1:-}" = --advisory ]; then
  advisory=yes
  shift
fi
base=${GATE_BASE:-origin/main}
if [[ ${1:-} && ${1:-} != *=* ]]; then
  base=$1
  shift
fi

explain() {
  case $1 in
    0) echo "no regression was found" ;;
    1) echo "the gate itself failed" ;;
    2) echo "the gate was called wrongly" ;;
    3) echo "a regression was found and confirmed" ;;
    4) echo "a point is unsure or too noisy to gate, and gate.strict=true" ;;
    5) echo "head does not build, or points failed or gave wrong results" ;;
    6) echo "nothing was comparable" ;;
    130) echo "interrupted" ;;
    *) echo "ended by signal or unknown status $1" ;;
  esac
}

if ! sha=$(git rev-parse --quiet --verify --end-of-options "$base^{commit}"); then
  complain "'$base' is not a commit of this repository; fetch it (git fetch origin main; in a workflow: fetch-depth: 0)"
  exit 2
fi
if [ "$sha" = "$(git rev-parse HEAD)" ] && [ -z "$(git status --porcelain --untracked-files=no)" ]; then
  say "the working tree is $base: this compares a revision with itself"
fi

python=$(find_python)
mkdir -p "$perf"
take_the_machine
say "gate against $base (${sha:0:12})"
"$python" run.py doctor > "$perf/doctor.txt" 2>&1 || say "doctor found something: $perf/doctor.txt"
started=$perf/.started
: > "$started"
status=0
"$python" run.py +experiment=gate "gate.base='$sha'" "gate.noise='$(noise_folder)'" \
  "report.folder='$perf'" "$@" || status=$?

text="performance gate against $base: $(explain "$status") (exit status $status)"
say "$text"
# The gate writes its verdicts to the job's page itself; say so if it ended before that.
if [ -z "$(find "$perf" -name gate.md -newer "$started" -print -quit)" ]; then
  printf '### %s\n\nIt wrote no verdicts: see the log of this step.\n' "$text" | summarise
fi
case $status in
  0) ;;
  3 | 4 | 6)
    if [ "$advisory" ]; then
      annotate warning "$text (advisory: this does not fail the job)"
      exit 0
    fi
    annotate error "$text"
    ;;
  *) annotate error "$text" ;;
esac
exit "$status"
