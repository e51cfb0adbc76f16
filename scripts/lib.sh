# Helpers of the scripts that measure or lint; sourced. Changes the working directory to the repository.
# shellcheck shell=bash
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1

# The folder for runs, reports and logs of these scripts.
# shellcheck disable=SC2034  # used by the scripts that source this
perf=${PERF_FOLDER:-build/perf}

say() { echo "emblib: $*"; }
complain() { echo "error: $*" >&2; }

# Print the interpreter to use: EMBLIB_PYTHON, else that of `make native`, else python3.
find_python() {
  local made=${VENV-.venv}
  made=${made:-build}/.make/bin
  if [ -n "${EMBLIB_PYTHON:-}" ]; then
    echo "$EMBLIB_PYTHON"
  elif [ -r "$made" ]; then
    echo "$(cat "$made")/python"
  else
    command -v python3
  fi
}

# Print the C++ and CUDA files: those that git does not ignore; in a copy without git, those of the sources.
native_sources() {
  git ls-files --cached --others --exclude-standard -- '*.cpp' '*.h' '*.cu' '*.cuh' 2>/dev/null ||
    find csrc examples experiments tests -name '*.cpp' -o -name '*.h' -o -name '*.cu' -o -name '*.cuh'
}

# Print the folder of noise floors: EMBLIB_NOISE; on a self-hosted runner a folder outside the checkout,
# which is cleaned before every job; else the repository's reports/noise.
noise_folder() {
  if [ -n "${EMBLIB_NOISE:-}" ]; then
    echo "$EMBLIB_NOISE"
  elif [ "${RUNNER_ENVIRONMENT:-}" = self-hosted ]; then
    echo "${XDG_STATE_HOME:-${HOME:-/tmp}/.local/state}/emblib/noise"
  else
    echo reports/noise
  fi
}

# On GitHub: annotate adds a line at the top of the run, summarise adds Markdown from standard input to
# the job's page.
annotate() { # error|warning|notice text
  if [ -n "${GITHUB_ACTIONS:-}" ]; then echo "::$1 title=emblib::$2"; fi
}
summarise() {
  if [ -n "${GITHUB_STEP_SUMMARY:-}" ]; then cat >> "$GITHUB_STEP_SUMMARY"; else cat > /dev/null; fi
}

# Allow one measurement at a time on a machine; runners do not coordinate with each other.
take_the_machine() {
  local lock=${EMBLIB_LOCK:-/tmp/emblib-bench.lock} wait=${EMBLIB_LOCK_SECONDS:-3600}
  if ! command -v flock > /dev/null; then
    say "flock is missing: another measurement may start at the same time"
    return
  fi
  [ -e "$lock" ] || : > "$lock"
  exec 9< "$lock" # open for reading: the file may belong to another user
  flock -n 9 && return
  say "another measurement is using this machine; waiting up to $wait s for $lock"
  flock -w "$wait" 9 && return
  complain "the machine was not free within $wait s (EMBLIB_LOCK_SECONDS); find the holder: fuser $lock"
  exit 1
}
