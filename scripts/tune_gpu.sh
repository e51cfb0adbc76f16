#!/usr/bin/env bash
# Locks a GPU's clocks for measuring, as far as permitted; scripts/restore_gpu.sh undoes exactly these
# changes. Never fails: a measurement with varying clocks is possible, and is flagged.
#   EMBLIB_GPUS=0,1          the GPUs (default: all)
#   EMBLIB_CLOCK_PERCENT=80  SM clock to lock, in percent of the maximum: sustainable under load
# Does not change power limits, ECC, MIG and compute modes.
set -euo pipefail
. "$(dirname "$0")/gpu.sh"

if ! have_gpu; then
  echo "tune: no NVIDIA GPU here, nothing to do"
  exit 0
fi
if [ -s "$gpu_state" ]; then
  echo "tune: $gpu_state is left from a run that was not undone; undoing that first"
  "$(dirname "$0")/restore_gpu.sh" || echo "tune: the rest stays in $gpu_state, to be undone later"
fi
if ! { mkdir -p "$(dirname "$gpu_state")" && : >> "$gpu_state"; } 2> /dev/null; then
  echo "tune: $gpu_state cannot be written (EMBLIB_GPU_STATE): nothing is changed, because it could not be undone"
  exit 0
fi
remember() { grep -qxF "$*" "$gpu_state" || echo "$*" >> "$gpu_state"; }

# Print the highest supported clock within EMBLIB_CLOCK_PERCENT of the maximum.
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
    echo "  is divided by MIG: its clocks belong to all instances and are not changed"
    continue
  fi
  if [ "$(ask "$gpu" persistence_mode)" = Disabled ] && change "$gpu" -pm 1; then
    echo "  persistence mode on"
    remember "$gpu persistence"
  fi
  clock=$(steady_clock "$gpu")
  if [ -z "$clock" ]; then
    echo "  does not report its supported SM clocks: not changed"
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
  echo "tune: undo with scripts/restore_gpu.sh (changes recorded in $gpu_state)"
else
  rm -f "$gpu_state"
  echo "tune: nothing was changed; clocks vary with load and temperature"
fi
