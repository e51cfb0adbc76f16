#!/usr/bin/env bash
# Runs the full matrix: noise floor, every experiment, micro-benchmarks, and pages of all reports.
#   scripts/nightly.sh [key=value ...]         e.g. timing=smoke device=cpu
#   EXPERIMENTS="a b"   run these instead of all (all: without gate, which needs a base, and gate_power,
#                       which takes an hour)
# Continues after a failed experiment. Exit status: the worst one.
set -euo pipefail
. "$(dirname "$0")/lib.sh"

python=$(find_python)
mkdir -p "$perf"
take_the_machine
"$python" run.py doctor | tee "$perf/doctor.txt" || say "the doctor reported problems"
experiments=${EXPERIMENTS:-$("$python" - <<'PY'
from experiments import configure
names = set(configure.groups()["experiment"]) - {"gate", "gate_power"}
print(*sorted(names, key=lambda name: (name != "selftest_aa", name)))
PY
)}

worst=0
lines=
for name in $experiments; do
  say "$name"
  began=$SECONDS status=0
  words=("+experiment=$name" "report.folder='$perf'")
  if [ "$name" = selftest_aa ]; then words+=("gate.noise='$(noise_folder)'"); fi
  "$python" run.py "${words[@]}" "$@" || status=$?
  lines+="| $name | $status | $((SECONDS - began)) s |"$'\n'
  if ((status == 130)); then exit 130; fi
  if ((status > worst)); then
    worst=$status
    annotate error "$name ended with exit status $status"
  fi
done
table=$(printf '| experiment | exit status | took |\n| --- | ---: | ---: |\n%s' "$lines")
echo "$table"
summarise <<< "$table"$'\n'
scripts/perf_report.sh "$perf"
exit "$worst"
