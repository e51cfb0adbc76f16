#!/usr/bin/env bash
# Runs the harness's tests, with a report of every kind of experiment, on sets of its dependencies.
#   scripts/dependency_test.sh [SET ...]       of constraints/SET.txt; default: all
# Every set has an environment of its own, build/dependencies/SET, with the torch that `make` installs.
# PYTHON names a Python without torch and without the packages of the sets: a new environment would see them.
# Continues after a failed set; exit status: 1 if one failed.
set -euo pipefail
. "$(dirname "$0")/lib.sh"

sets=("$@")
if ((${#sets[@]} == 0)); then
  for file in constraints/*.txt; do sets+=("$(basename "$file" .txt)"); done
fi
for set in "${sets[@]}"; do
  if [ ! -f "constraints/$set.txt" ]; then
    complain "there is no constraints/$set.txt; there is: $(basename -s .txt constraints/*.txt | tr '\n' ' ')"
    exit 2
  fi
done

# Whether the environment has exactly what the set says: pip keeps what it finds in a parent.
check_versions() { # python set
  "$1" - "$2" <<'PY'
import importlib.metadata, sys
from pathlib import Path
from packaging.requirements import Requirement

def read(path):
    for line in path.read_text().splitlines():
        if line.startswith("-c "):
            yield from read(path.parent / line[3:])
        elif line and not line.startswith("#"):
            yield Requirement(line)

file = Path("constraints") / f"{sys.argv[1]}.txt"
for wanted in read(file):
    found = importlib.metadata.version(wanted.name)
    if found not in wanted.specifier:
        sys.exit(f"error: {wanted} is wanted and {found} installed")
try:
    found = importlib.metadata.version("pyarrow")
except importlib.metadata.PackageNotFoundError:
    found = ""
if bool(found) != ("# extras: parquet" in file.read_text()):
    sys.exit(f"error: pyarrow is {found or 'missing'}; name a PYTHON without packages")
PY
}

failed=()
for set in "${sets[@]}"; do
  say "dependencies: $set"
  environment=build/dependencies/$set
  more=$(sed -n 's/^# extras: /,/p' "constraints/$set.txt")
  if PIP_CONSTRAINT=constraints/$set.txt make --no-print-directory native \
      VENV="$environment" EXTRAS="harness,metrics,launchers,test$more" &&
    check_versions "$environment/bin/python" "$set" &&
    "$environment/bin/python" -m pytest -q -p no:cacheprovider -n "${WORKERS:-2}" --dist loadfile \
      tests/experiments; then
    say "$set: everything works"
  else
    failed+=("$set")
    annotate error "the harness fails with the dependencies '$set'"
  fi
done
if ((${#failed[@]})); then
  complain "failed: ${failed[*]}"
  exit 1
fi
