"""The sets of dependencies that `make dependency-test` has are those that pyproject.toml allows."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from pathlib import Path

import yaml
from packaging.requirements import Requirement
from packaging.version import Version

from experiments.paths import ROOT

CONSTRAINTS = ROOT / "constraints"
EXTRAS = ("harness", "metrics", "launchers", "test", "parquet")


def pins(path: Path) -> Iterator[Requirement]:
    """Return what a constraints file holds, with the files that it includes."""
    for line in path.read_text().splitlines():
        if line.startswith("-c "):
            yield from pins(path.parent / line.removeprefix("-c "))
        elif line and not line.startswith("#"):
            yield Requirement(line)


def allowed() -> dict[str, Requirement]:
    """Return what the harness and its tests require, by name."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    return {(need := Requirement(text)).name: need for name in EXTRAS for text in extras[name]}


def test_the_lowest_are_the_lower_bounds() -> None:
    lowest = {pin.name: str(pin.specifier) for pin in pins(CONSTRAINTS / "lowest-pyarrow.txt")}
    for name, need in allowed().items():
        bounds = [part for part in need.specifier if part.operator == ">="]
        if bounds and not name.startswith("nvidia-cuda"):  # these read what nvcc made
            (bound,) = bounds
            pinned = lowest[name].removeprefix("==")
            assert need.specifier.contains(pinned), name
            # 2.3 may have been released as 2.3.1 only.
            release = Version(bound.version).release
            assert Version(pinned).release[: len(release)] == release, name
    assert lowest.keys() <= allowed().keys()


def test_every_set_is_within_what_is_allowed_and_has_a_job() -> None:
    workflow = yaml.safe_load((ROOT / ".github/workflows/dependencies.yml").read_text())
    sets = workflow["jobs"]["harness"]["strategy"]["matrix"]["set"]
    assert sorted(sets) == sorted(path.stem for path in CONSTRAINTS.glob("*.txt"))
    for path in CONSTRAINTS.glob("*.txt"):
        for pin in pins(path):
            assert pin.name in allowed()
    (pandas,) = pins(CONSTRAINTS / "pandas-3.0.txt")
    assert allowed()["pandas"].specifier.contains(str(pandas.specifier).strip("=.*") + ".0")
