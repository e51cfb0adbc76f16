# What tune_gpu.sh and restore_gpu.sh share; sourced.
# shellcheck shell=bash

# Outside the checkout, which a runner cleans: what was changed outlives a job that was killed.
# shellcheck disable=SC2034  # used by those that source this
gpu_state=${EMBLIB_GPU_STATE:-${XDG_STATE_HOME:-${HOME:-/tmp}/.local/state}/emblib/gpu-state}

have_gpu() { command -v nvidia-smi > /dev/null && [[ $(nvidia-smi -L 2> /dev/null) == "GPU "* ]]; }

# EMBLIB_GPUS: indices or UUIDs, separated by commas; else all.
gpus() {
  if [ -n "${EMBLIB_GPUS:-}" ]; then
    tr ',' '\n' <<< "$EMBLIB_GPUS"
  else
    ask '' index
  fi
}

# Values of one field, bare; 'unknown' where the driver does not say.
ask() { # GPU|'' field
  local value
  value=$(nvidia-smi ${1:+-i "$1"} --query-gpu="$2" --format=csv,noheader,nounits 2> /dev/null) || value=unknown
  case $value in *"N/A"* | *"Not Supported"* | "") value=unknown ;; esac
  echo "$value"
}

# As this user, else through sudo where that asks for no password. nvidia-smi says "not supported"
# and "insufficient permissions" on standard output, and sometimes with status 0.
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
