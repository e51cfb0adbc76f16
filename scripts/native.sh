#!/usr/bin/env bash
# Builds the native libraries into the environment (an editable install); compiles only what changed.
#   EMBLIB_CUDA JOBS scripts/native.sh STATE
# The whole output goes to build/native.log; progress and errors are shown.
set -euo pipefail
state=$1
python=$(cat "$state/bin")/python
log=build/native.log
mkdir -p build

# nvcc may take 2.5 GB: run fewer jobs than processors if memory is short.
jobs=$(getconf _NPROCESSORS_ONLN)
memory=$(awk '/MemAvailable/ { print int($2 / 2.5e6) }' /proc/meminfo 2>/dev/null || echo "$jobs")
jobs=$((memory >= jobs ? jobs : memory > 1 ? memory : 1))
export CMAKE_BUILD_PARALLEL_LEVEL=${JOBS:-$jobs}

show_progress() {
  local step='^ *\[([0-9]+)/([0-9]+)\] (Building|Linking)' note='^ *-- (emblib: .*)' line
  while IFS= read -r line; do
    if [[ $line =~ $note ]]; then
      echo "${BASH_REMATCH[1]}"
    elif [[ $line =~ $step ]]; then
      if [ -t 1 ]; then
        printf '\r  %s of %s\033[K' "${BASH_REMATCH[1]}" "${BASH_REMATCH[2]}"
      elif ((BASH_REMATCH[1] % 10 == 0)); then
        echo "  ${BASH_REMATCH[1]} of ${BASH_REMATCH[2]}"
      fi
    fi
  done
  if [ -t 1 ]; then printf '\r\033[K'; fi
}

choice=$("$(dirname "$0")/cuda_choice.sh" "$state")
export EMBLIB_CUDA=${choice%% *}
if [ "$EMBLIB_CUDA" = ON ]; then
  echo "emblib: building the CPU and the CUDA library (${choice#* })"
else
  echo "emblib: building the CPU library only (${choice#* }); for both: make EMBLIB_CUDA=ON"
fi
echo "emblib: $CMAKE_BUILD_PARALLEL_LEVEL jobs, log: $log"
if ! "$python" -m pip --disable-pip-version-check install -v --no-deps --no-build-isolation \
    -e . 2>&1 | tee "$log" | show_progress; then
  grep -E -A 12 'FAILED:|error:|CMake Error' "$log" | head -60 >&2 || true
  echo "error: the native build failed; its whole output is in $log" >&2
  exit 1
fi
# Where the linker finds no shared libstdc++, it takes the static one, and then the first error that the
# library raises crashes the process.
if ! "$python" -c 'import torch, emblib
try:
    torch.ops.emblib.cache_locate(*[torch.empty(0)] * 4)
except RuntimeError:
    raise SystemExit(0)
raise SystemExit(1)' >> "$log" 2>&1; then
  echo "error: the library that was built crashes or does not refuse wrong input (see the end of $log); if it" >&2
  echo "  contains a static libstdc++ (ldd build/*/libemblib_cpu.so names none), install the shared one" >&2
  exit 1
fi
touch "$state/native"
