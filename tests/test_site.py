"""The documentation site: every page and every public name is in it, and it builds."""

import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import emblib

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"


# Packages of which the reference has every name.
WHOLE = (
    *("checkpoints", "collections.optimizers", "dynamic", "inference", "jagged", "online"),
    *("sharding", "sharding.checkpoints", "sharding.planner", "storage", "telemetry"),
)


def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", tmp_path],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    page = (tmp_path / "api/tables/index.html").read_text()
    assert 'id="emblib.TableBatchedEmbeddingBags"' in page
    assert '<span class="gp">&gt;&gt;&gt; </span>' in page  # examples are code,
    assert "<blockquote>" not in page  # not quotations
    assert "=====</p>" not in page  # and tables keep their lines
    assert 'id="emblib.TableBatchedEmbeddingBags.set_learning_rate"' in page  # of a base class,
    assert 'id="emblib.TableBatchedEmbeddingBags.state_problems"' not in page  # if it is for users
    page = (tmp_path / "api/collections/index.html").read_text()
    assert 'id="emblib.EmbeddingBagCollection.quantized"' in page
    page = (tmp_path / "api/sharding/index.html").read_text()
    assert 'id="emblib.sharding.TrainPipelineSparseDist.progress"' in page
    page = (tmp_path / "api/dynamic/index.html").read_text()
    assert 'id="emblib.DynamicEmbeddingBags.save"' in page  # `save = ...` of another module
    reference = "".join(page.read_text() for page in tmp_path.glob("api/*/index.html"))
    shown = set(re.findall(r'id="emblib[\w.]*\.(\w+)"', reference))
    for package in WHOLE:
        names = importlib.import_module(f"emblib.{package}").__all__
        assert not [name for name in names if name not in shown], package
    readme = (tmp_path / "getting_started/index.html").read_text()
    assert "/blob/main/examples/README.md" in readme  # links out of docs/ lead to the repository


def test_every_page_is_in_the_navigation() -> None:
    listed = set(re.findall(r"[\w/]+\.md", (ROOT / "mkdocs.yml").read_text()))
    assert listed == {str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md")}


def test_every_public_name_is_in_the_reference() -> None:
    shown = set()
    for page in (DOCS / "api").glob("*.md"):
        shown |= set(re.findall(r"^::: emblib\.(\w+)", page.read_text(), re.MULTILINE))
    described = {"checkpoints", "dynamic", "ops", "reference", "trace"}  # packages, by their names
    optional = {"metrics"}  # imported by name, as it needs torchmetrics
    assert {*emblib.__all__, *optional} == shown | described


# What users type into the search box: headings that have these words come first there.
QUESTIONS = {
    "benchmark my gpu": "getting_started.md",
    "inference": "inference.md",
    "negative ids -1": "tables.md",
    "out of range": "tables.md",
    "padding": "tables.md",
    "several machines": "sharding.md",
    "state dicts": "checkpoints.md",
    "without python": "serving.md",
}


@pytest.mark.parametrize("words", QUESTIONS)
def test_a_heading_names_the_answer(words: str) -> None:
    headings = re.findall(r"^#+ (.*)", (DOCS / QUESTIONS[words]).read_text(), re.MULTILINE)
    assert any(all(word in line.lower() for word in words.split()) for line in headings)


def test_pages_of_the_reference_begin_with_a_title() -> None:
    for page in (DOCS / "api").glob("*.md"):
        assert page.read_text().startswith("# ")
