# Shared by the scripts that measure; sourced, after which the repository is the working directory.
# shellcheck shell=bash
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1

# Where runs, reports and logs of these scripts go.
# shellcheck disable=SC2034  # used by those that source this
perf=${PERF_FOLDER:-build/perf}

say() { echo "emblib: $*"; }
complain() { echo "error: $*" >&2; }

# The interpreter with everything installed: EMBLIB_PYTHON, else that of `make native`, else python3.
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

# Where noise floors are kept: EMBLIB_NOISE; on a runner of one's own outside the checkout, which is
# cleaned before every job; else the repository's own reports/noise.
noise_folder() {
  if [ -n "${EMBLIB_NOISE:-}" ]; then
    echo "$EMBLIB_NOISE"
  elif [ "${RUNNER_ENVIRONMENT:-}" = self-hosted ]; then
    echo "${XDG_STATE_HOME:-${HOME:-/tmp}/.local/state}/emblib/noise"
  else
    echo reports/noise
  fi
}

# On GitHub: a line at the top of the run, and Markdown (from standard input) on the job's page.
annotate() { # error|warning|notice text
  if [ -n "${GITHUB_ACTIONS:-}" ]; then echo "::$1 title=emblib::$2"; fi
}
summarise() {
  if [ -n "${GITHUB_STEP_SUMMARY:-}" ]; then cat >> "$GITHUB_STEP_SUMMARY"; else cat > /dev/null; fi
}

# One measurement at a time on a machine, whoever starts it: runners do not know of each other.
take_the_machine() {
  local lock=${EMBLIB_LOCK:-/tmp/emblib-bench.lock} wait=${EMBLIB_LOCK_SECONDS:-3600}
  if ! command -v flock > /dev/null; then
    say "no flock here: nothing keeps another measurement from starting meanwhile"
    return
  fi
  [ -e "$lock" ] || : > "$lock"
  exec 9< "$lock" # for reading: the file may be another user's
  flock -n 9 && return
  say "another measurement has this machine; waiting up to $wait s for $lock"
  flock -w "$wait" 9 && return
  complain "the machine was not free within $wait s (EMBLIB_LOCK_SECONDS); what holds it: fuser $lock"
  exit 1
}
