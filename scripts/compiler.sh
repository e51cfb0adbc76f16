# shellcheck shell=bash
# Sourced: parse compilers as CMake does, as a path or as a command such as "ccache g++ -O1".

# split_compiler COMMAND: set the array `compiler` to the words of COMMAND.
# shellcheck disable=SC2034  # used by the scripts that source this
split_compiler() {
  if command -v "$1" >/dev/null; then
    compiler=("$1")  # the path may contain spaces
  else
    read -ra compiler <<< "$1"
  fi
}
