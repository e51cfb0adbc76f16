#!/usr/bin/env bash
# Undoes what scripts/tune_gpu.sh did, and nothing else; may be called at any time, any number of times.
# Fails if something could not be undone, and records it: the next call tries again.
set -euo pipefail
. "$(dirname "$0")/gpu.sh"

if [ ! -s "$gpu_state" ]; then
  rm -f "$gpu_state"
  echo "restore: nothing to undo"
  exit 0
fi
left=$(
  while read -r gpu what; do
    case $what in
      persistence) option=(-pm 0) ;;
      sm_clock) option=(-rgc) ;;
      memory_clock) option=(-rmc) ;;
      *)
        echo "  unknown entry '$gpu $what' is dropped" >&2
        continue
        ;;
    esac
    if change "$gpu" "${option[@]}" >&2; then
      echo "restore: GPU $gpu, $what" >&2
    else
      echo "$gpu $what"
    fi
  done < <(tac "$gpu_state")
)
if [ -z "$left" ]; then
  rm -f "$gpu_state"
  exit 0
fi
tac <<< "$left" > "$gpu_state"
echo "error: could not undo: $(paste -sd, <<< "$left"); try as root, or reboot the machine" >&2
exit 1
