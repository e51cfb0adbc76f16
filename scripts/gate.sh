#!/usr/bin/env bash
# Is the working tree slower than a revision of it?
#   scripts/gate.sh [--advisory] [BASE] [key=value ...]
#   BASE         any name of a commit; else GATE_BASE, else origin/main
#   --advisory   what the gate finds is a warning (status 0); only a gate that breaks fails
#   key=value    passed on, e.g. timing=smoke device=cpu
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
    0) echo "no slowdown was found" ;;
    1) echo "the gate itself broke" ;;
    2) echo "the gate was called wrongly" ;;
    3) echo "a slowdown was found and confirmed" ;;
    4) echo "unsure: more than it may be is too noisy to tell" ;;
    5) echo "some points failed, or gave wrong results" ;;
    6) echo "nothing was comparable" ;;
    130) echo "interrupted" ;;
    *) echo "ended by signal or unknown status $1" ;;
  esac
}

if ! sha=$(git rev-parse --quiet --verify --end-of-options "$base^{commit}"); then
  complain "'$base' is no commit here; fetch it (git fetch origin main; in a workflow: fetch-depth: 0)"
  exit 2
fi
if [ "$sha" = "$(git rev-parse HEAD)" ] && [ -z "$(git status --porcelain --untracked-files=no)" ]; then
  say "the working tree is $base: this compares a revision with itself"
fi

python=$(find_python)
mkdir -p "$perf"
take_the_machine
say "gate against $base (${sha:0:12})"
"$python" -m experiments.doctor > "$perf/doctor.txt" 2>&1 || say "doctor found something: $perf/doctor.txt"
started=$perf/.started
: > "$started"
status=0
"$python" run.py +experiment=gate "gate.base='$sha'" "gate.noise='$(noise_folder)'" \
  "report.folder='$perf'" "$@" || status=$?

text="performance gate against $base: $(explain "$status") (exit status $status)"
say "$text"
# The gate writes its verdicts to the job's page itself; if it ended before that, this says so.
if [ -z "$(find "$perf" -name gate.md -newer "$started" -print -quit)" ]; then
  printf '### %s\n\nIt left no verdicts: the log of this step says what happened.\n' "$text" | summarise
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
