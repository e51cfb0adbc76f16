"""What is published: metadata, files of the wheel and of the source distribution, release notes."""

from __future__ import annotations

import contextlib
import re
import subprocess
import tarfile
import tomllib
import zipfile
from email.parser import Parser
from pathlib import Path
from typing import Any

import pytest

import emblib
from scripts import pypi_readme, release_notes

ROOT = Path(__file__).resolve().parents[1]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_the_source_distribution_is_what_a_build_needs(tmp_path: Path) -> None:
    build = pytest.importorskip("scikit_build_core.build")
    with contextlib.chdir(ROOT):
        archive = tmp_path / build.build_sdist(str(tmp_path))
    with tarfile.open(archive) as source:
        names = {name.partition("/")[2] for name in source.getnames()}
    assert archive.name == f"emblib-{emblib.__version__}.tar.gz"
    assert names >= {"pyproject.toml", "LICENSE", "csrc/schema.cpp", "emblib/__init__.py"}
    folders = {name.partition("/")[0] for name in names if "/" in name}
    assert folders == {"csrc", "docs", "emblib"}
    assert not [name for name in names if name.endswith(".so")]
    assert archive.stat().st_size < 2_000_000


def test_the_wheel_has_the_package_and_nothing_else(tmp_path: Path) -> None:
    build = pytest.importorskip("scikit_build_core.build")
    with contextlib.chdir(ROOT):  # without CMake, which takes minutes: all but the libraries
        name = build.build_wheel(str(tmp_path), {"wheel.cmake": "false", "build-dir": ""})
    with zipfile.ZipFile(tmp_path / name) as wheel:
        names = {n for n in wheel.namelist() if ".dist-info/" not in n}
        (metadata,) = (n for n in wheel.namelist() if n.endswith("METADATA"))
        stated = Parser().parsestr(wheel.read(metadata).decode())
    sources = subprocess.check_output(["git", "ls-files", "emblib"], cwd=ROOT, text=True)
    others = subprocess.check_output(
        ["git", "ls-files", "--others", "--exclude-standard", "emblib"], cwd=ROOT, text=True
    )
    assert {n for n in names if not n.endswith(".so")} == {*sources.split(), *others.split()}
    assert name.startswith(f"emblib-{emblib.__version__}-py3-none-")
    assert stated["Requires-Python"] == ">=3.11"
    assert stated.get_all("Requires-Dist")[0] == "torch>=2.10"
    assert stated["Description-Content-Type"] == "text/markdown"


def test_links_of_the_published_readme_are_absolute() -> None:
    text = "[![a](figure.png)](docs/a.md#b) [c](#c) [d](https://d.org) ![e](e.png)"
    assert pypi_readme.make_links_absolute(text, "https://github.com/me/emblib", "v1") == (
        "[![a](https://raw.githubusercontent.com/me/emblib/v1/figure.png)]"
        "(https://github.com/me/emblib/blob/v1/docs/a.md#b) [c](#c) [d](https://d.org) "
        "![e](https://raw.githubusercontent.com/me/emblib/v1/e.png)"
    )
    repository = PROJECT["project"]["urls"]["Repository"]
    text = pypi_readme.make_links_absolute((ROOT / "README.md").read_text(), repository, "v1")
    assert not re.findall(r"\]\((?!https://|#)[^)]*\)", text)


def test_a_build_downloads_no_torch_that_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """And none for a source distribution, which contains nothing of torch."""
    pytest.importorskip("scikit_build_core")
    monkeypatch.syspath_prepend(ROOT / "csrc/backend")
    import build_backend  # type: ignore[import-not-found]

    requires = [*PROJECT["build-system"]["requires"], *build_backend.get_requires_for_build_sdist()]
    assert not [need for need in requires if need.startswith("torch")]
    hooks = (
        build_backend.get_requires_for_build_wheel,
        build_backend.get_requires_for_build_editable,
    )
    for hook in hooks:
        assert not [need for need in hook() if need.startswith("torch")]
    monkeypatch.setattr(build_backend, "_TORCH_CHECK", "import no_such_module")
    for hook in hooks:
        assert "torch>=2.10" in hook()


def test_one_minimum_of_torch_is_stated_everywhere() -> None:
    assert PROJECT["project"]["dependencies"] == ["torch>=2.10"]
    cmake = (ROOT / "csrc/CMakeLists.txt").read_text()
    assert "torch_release VERSION_LESS 2.10)" in cmake
    assert "TORCH_TARGET_VERSION=0x020a000000000000" in cmake
    wheels = PROJECT["tool"]["cibuildwheel"]
    assert "torch==2.10.0" in wheels["before-build"]
    assert "torch==2.10.0" in wheels["before-test"]
    needs = PROJECT["build-system"]["requires"]
    assert all(f'"{need}"' in wheels["before-build"] for need in needs if ">" in need)


CHANGES = "# Changelog\n\n## [Unreleased]\n\n- later\n\n## [{}] - 2027-01-31\n\n- a table\n"


def test_release_notes_are_the_section_of_the_version() -> None:
    number = emblib.__version__
    text = CHANGES.format(number) + "\n## [0.0.1] - 2026-01-01\n\n- older\n"
    files = [f"emblib-{number}-py3-none-x.whl", f"emblib-{number}+cu130-py3-none-x.whl"]
    written = release_notes.notes(f"v{number}", text, files)
    assert written.startswith("- a table\n")
    assert "later" not in written
    assert "older" not in written
    assert all(f"`{file}`" in written for file in files)


@pytest.mark.parametrize(
    ("tag", "section", "files", "error"),
    [
        ("v9.9", emblib.__version__, [], "the tag is v9.9"),
        (f"v{emblib.__version__}", "9.9", [], "CHANGELOG.md has no section"),
        (f"v{emblib.__version__}", emblib.__version__, ["emblib-9.9.tar.gz"], "is not of version"),
    ],
)
def test_releases_that_disagree_with_themselves_are_refused(
    tag: str, section: str, files: list[str], error: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(error)):
        release_notes.notes(tag, CHANGES.format(section), files)
