# shellcheck shell=bash
# Sourced: compilers as CMake reads them, a path or a command with words, such as "ccache g++ -O1".

# split_compiler COMMAND: sets the array `compiler` to its words.
# shellcheck disable=SC2034  # used by those that source this
split_compiler() {
  if command -v "$1" >/dev/null; then
    compiler=("$1")  # the path may contain spaces
  else
    read -ra compiler <<< "$1"
  fi
}
