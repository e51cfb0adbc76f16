#!/usr/bin/env bash
# Makes a GPU's clocks steady for measuring, as far as it is permitted; scripts/restore_gpu.sh undoes
# exactly what was done. Never fails: a measurement on clocks that vary is possible, and is flagged.
#   EMBLIB_GPUS=0,1          which (default: all)
#   EMBLIB_CLOCK_PERCENT=80  SM clock to hold, of the highest: low enough to be held under load
# Power limits, ECC, MIG and compute modes are left alone.
set -euo pipefail
. "$(dirname "$0")/gpu.sh"

if ! have_gpu; then
  echo "tune: no NVIDIA GPU here, nothing to do"
  exit 0
fi
if [ -s "$gpu_state" ]; then
  echo "tune: $gpu_state is from a run that was not undone; undoing that first"
  "$(dirname "$0")/restore_gpu.sh" || echo "tune: what is left stays in $gpu_state, to be undone later"
fi
if ! { mkdir -p "$(dirname "$gpu_state")" && : >> "$gpu_state"; } 2> /dev/null; then
  echo "tune: $gpu_state cannot be written (EMBLIB_GPU_STATE): what cannot be undone is not changed"
  exit 0
fi
remember() { grep -qxF "$*" "$gpu_state" || echo "$*" >> "$gpu_state"; }

# The highest clock that the GPU supports within the given share of its highest one.
steady_clock() { # GPU
  nvidia-smi -i "$1" --query-supported-clocks=graphics --format=csv,noheader,nounits 2> /dev/null |
    awk -v percent="${EMBLIB_CLOCK_PERCENT:-80}" '
      /^ *[0-9]+ *$/ { n++; clock[n] = $1 + 0; if (clock[n] > most) most = clock[n] }
      END { for (i = 1; i <= n; i++)
              if (clock[i] <= most * percent / 100 && clock[i] > best) best = clock[i]
            if (best) print best }'
}

for gpu in $(gpus); do
  echo "tune: GPU $gpu, $(ask "$gpu" name)"
  if [ "$(ask "$gpu" mig.mode.current)" = Enabled ]; then
    echo "  is divided by MIG: its clocks belong to all instances and are left alone"
    continue
  fi
  if [ "$(ask "$gpu" persistence_mode)" = Disabled ] && change "$gpu" -pm 1; then
    echo "  persistence mode on"
    remember "$gpu persistence"
  fi
  clock=$(steady_clock "$gpu")
  if [ -z "$clock" ]; then
    echo "  does not say which SM clocks it supports: left as they are"
  elif change "$gpu" -lgc "$clock,$clock"; then
    echo "  SM clock held at $clock MHz"
    remember "$gpu sm_clock"
  fi
  memory=$(ask "$gpu" clocks.max.memory)
  if [ "$memory" != unknown ] && change "$gpu" -lmc "$memory,$memory"; then
    echo "  memory clock held at $memory MHz"
    remember "$gpu memory_clock"
  fi
done

if [ -s "$gpu_state" ]; then
  echo "tune: undo with scripts/restore_gpu.sh (what was changed: $gpu_state)"
else
  rm -f "$gpu_state"
  echo "tune: nothing was changed; clocks vary with load and temperature"
fi
