# Helpers of tune_gpu.sh and restore_gpu.sh; sourced.
# shellcheck shell=bash

# The record of changes lies outside the checkout, which a runner cleans, so that it survives a killed job.
# shellcheck disable=SC2034  # used by the scripts that source this
gpu_state=${EMBLIB_GPU_STATE:-${XDG_STATE_HOME:-${HOME:-/tmp}/.local/state}/emblib/gpu-state}

have_gpu() { command -v nvidia-smi > /dev/null && [[ $(nvidia-smi -L 2> /dev/null) == "GPU "* ]]; }

# List the GPUs: EMBLIB_GPUS (indices or UUIDs, separated by commas), or all.
gpus() {
  if [ -n "${EMBLIB_GPUS:-}" ]; then
    tr ',' '\n' <<< "$EMBLIB_GPUS"
  else
    ask '' index
  fi
}

# Print the value of one field without units; 'unknown' if the driver does not report it.
ask() { # GPU|'' field
  local value
  value=$(nvidia-smi ${1:+-i "$1"} --query-gpu="$2" --format=csv,noheader,nounits 2> /dev/null) || value=unknown
  case $value in *"N/A"* | *"Not Supported"* | "") value=unknown ;; esac
  echo "$value"
}

# Change a setting as this user, or through sudo if that needs no password. nvidia-smi prints "not
# supported" and "insufficient permissions" to standard output, sometimes with status 0.
change() { # GPU option...
  local gpu=$1 words reason first=
  shift
  for words in nvidia-smi "sudo -n nvidia-smi"; do
    if [ "$words" != nvidia-smi ] && ! command -v sudo > /dev/null; then continue; fi
    # shellcheck disable=SC2086  # two words on purpose
    if reason=$($words -i "$gpu" "$@" 2>&1) && ! grep -qiE 'not supported|insufficient|permission' <<< "$reason"; then
      return 0
    fi
    first=${first:-$reason}
  done
  echo "  GPU $gpu: $* was refused: $(head -n 1 <<< "$first")"
  return 1
}
