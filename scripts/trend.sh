#!/usr/bin/env bash
# Compares the working tree with the last commit of the gate's history, adds the result, draws the trend.
#   scripts/trend.sh [--advisory] [key=value ...]
#   HISTORY   folder with a file per measured commit (default build/history); branch gate-history keeps it
# The page is build/trend/index.html. Exit status: that of scripts/gate.sh.
set -euo pipefail
. "$(dirname "$0")/lib.sh"

history=${HISTORY:-build/history}
mkdir -p "$history"
advisory=()
if [ "${1:-}" = --advisory ]; then
  advisory=(--advisory)
  shift
fi

# The newest ancestor in the history: so the runs are one chain, whatever was pushed in between.
base=HEAD^1
for sha in $(git rev-list --max-count=500 HEAD^1); do
  if [ -e "$history/$sha.json" ]; then
    base=$sha
    break
  fi
done

changes=$(git status --porcelain -- emblib csrc)
started=$(mktemp)
status=0
scripts/gate.sh "${advisory[@]}" "$base" "$@" || status=$?
result=$(find "$perf" -name gate.json -newer "$started" -print -quit)
rm -f "$started"
# The trend leaves out other runs, which would replace one of this commit.
if ((status == 130)) || [ -n "$changes" ]; then
  say "interrupted, or of a working tree with changes: not added to $history"
elif [ -n "$result" ]; then
  cp "$result" "$history/$(git rev-parse HEAD).json"
  "$(find_python)" run.py trend "$history" --out build/trend
  summarise < build/trend/trend.md
fi
exit "$status"
