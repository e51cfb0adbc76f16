#!/usr/bin/env bash
# Writes every report of a folder of runs as pages for a web server, and the answers to the job's page.
#   scripts/perf_report.sh [FOLDER] [OUT]      (default build/perf build/pages)
set -euo pipefail
. "$(dirname "$0")/lib.sh"
folder=${1:-$perf}
out=${2:-build/pages}
text=$("$(find_python)" run.py gallery "$folder" --out "$out")
echo "$text"
summarise <<< "$text"
