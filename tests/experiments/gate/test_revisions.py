"""Revisions of emblib as folders: what is in them, which libraries they get, who imports what."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from filelock import FileLock, Timeout

from experiments.config.schema import Config, UsageError
from experiments.gate import revisions, worker
from experiments.paths import ROOT


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    root = tmp_path / "repository"
    for name, text in (("emblib/__init__.py", "WHO = 'old'\n"), ("csrc/a.cpp", "old\n")):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    monkeypatch.setattr(revisions, "ROOT", root)
    git = ["git", "-c", "user.name=x", "-c", "user.email=x@example.org", "-C", str(root)]
    for words in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "old"]):
        subprocess.run([*git, *words], check=True)
    return root


def test_revisions_are_folders_of_their_own(repository: Path, tmp_path: Path) -> None:
    home = tmp_path / "home"
    (repository / "emblib/__init__.py").write_text("WHO = 'new'\n")
    (repository / "emblib/libemblib_cpu.so").write_text("built")
    base, head = revisions.checkout("HEAD", home), revisions.checkout("WORKTREE", home)
    assert (base.folder / "emblib/__init__.py").read_text() == "WHO = 'old'\n"
    assert (head.folder / "emblib/__init__.py").read_text() == "WHO = 'new'\n"
    assert not (head.folder / "emblib/libemblib_cpu.so").exists()
    assert revisions.checkout("WORKTREE", home) == head
    (repository / "emblib/__init__.py").write_text("WHO = 'newer'\n")
    assert revisions.checkout("WORKTREE", home).folder != head.folder


def test_a_second_gate_waits_while_folders_are_written(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home, library, calls = tmp_path / "home", tmp_path / "libemblib_cpu.so", []
    copy, write_sources = shutil.copy2, revisions._write_sources

    def check_locked(function: Callable[..., object]) -> Callable[..., object]:
        def call(*arguments: object) -> object:
            with pytest.raises(Timeout), FileLock(home / ".lock", timeout=0):
                pass
            calls.append(function)
            return function(*arguments)

        return call

    library.write_text("installed")
    monkeypatch.setattr(revisions, "_write_sources", check_locked(write_sources))
    monkeypatch.setattr(shutil, "copy2", check_locked(copy))
    monkeypatch.setattr(revisions, "installed_libraries", lambda: [library])
    base = revisions.checkout("HEAD", home)
    revisions.provide_libraries(base, base, "cpu", print, home)
    assert set(calls) == {write_sources, copy}


def test_names_that_are_no_revision(repository: Path) -> None:
    with pytest.raises(UsageError, match="'elsewhere' is not a commit here"):
        revisions.resolve("elsewhere")
    with pytest.raises(UsageError, match="not a commit"):
        revisions.resolve("--all")
    empty = Config()
    assert revisions.default_base(empty, smoke=True) == "WORKTREE"
    assert revisions.default_base(empty, smoke=False) == "HEAD"  # there is no origin/main


def test_a_machine_without_git_is_told_so(
    repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(repository))
    with pytest.raises(UsageError, match="the gate needs git"):
        revisions.resolve("HEAD")
    with pytest.raises(UsageError, match="the gate needs git"):
        revisions.default_base(Config(), smoke=False)


def test_equal_native_sources_use_what_is_installed(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = tmp_path / "libemblib_cpu.so"
    library.write_text("installed")
    monkeypatch.setattr(revisions, "installed_libraries", lambda: [library])
    home = tmp_path / "home"
    base, head = revisions.checkout("HEAD", home), revisions.checkout("WORKTREE", home)
    revisions.provide_libraries(base, head, "cpu", print, home)
    for revision in (base, head):
        assert (revision.folder / "emblib" / library.name).read_text() == "installed"


def test_a_base_that_does_not_build_is_named(repository: Path, tmp_path: Path) -> None:
    (repository / "csrc/a.cpp").write_text("new\n")
    home = tmp_path / "home"
    base, head = revisions.checkout("HEAD", home), revisions.checkout("WORKTREE", home)
    with pytest.raises(revisions.BuildError, match=r"HEAD \(\w+\) does not build: .*CMakeLists"):
        revisions.provide_libraries(base, head, "cpu", print, home)


def test_workers_import_the_revision_they_were_hired_for(tmp_path: Path) -> None:
    (tmp_path / "emblib").mkdir()
    (tmp_path / "emblib/__init__.py").write_text("WHO = 'base'\n")
    code = (
        "import sys\n"
        "from importlib.machinery import ModuleSpec, SourceFileLoader\n"
        "class Editable:\n"  # as editable installs put it in front of everything
        "    @staticmethod\n"
        "    def find_spec(name, path=None, target=None):\n"
        "        if name == 'emblib':\n"
        "            return ModuleSpec(name, None, origin='/elsewhere/emblib/__init__.py')\n"
        "sys.meta_path.insert(0, Editable)\n"
        "from experiments.gate import worker\n"
        f"worker.import_from({str(tmp_path)!r})\n"
        "import emblib\n"
        "print(emblib.WHO)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == "base\n", done.stderr


def test_a_worker_with_another_revision_does_not_work(tmp_path: Path) -> None:
    import emblib

    assert "emblib" in sys.modules
    with pytest.raises(worker.WrongRevision, match="not the one in"):
        worker.import_from(str(tmp_path))
    sys.path.remove(str(tmp_path))
    assert emblib.__file__


def test_a_failed_build_says_what_is_wrong(tmp_path: Path) -> None:
    log = tmp_path / "build.log"
    for text, said in (
        ("[1/2] x\na.cpp:3:1: error: expected ';'\nmore\n", "a.cpp:3:1: error: expected ';'"),
        ("CMake Error at a:4 (b):\n  Too old.\n\n", "CMake Error at a:4 (b): Too old."),
        ("nothing known\n", "nothing known"),
        ("", "no output"),
    ):
        log.write_text(text)
        assert revisions._first_error(log) == said


@pytest.mark.parametrize(("folder", "command"), [("bin", "env {}"), ("a b", "{}")])
def test_another_compiler_is_another_build(
    repository: Path, monkeypatch: pytest.MonkeyPatch, folder: str, command: str
) -> None:
    compiler = repository / folder / "c++"
    compiler.parent.mkdir()
    monkeypatch.setenv("CXX", command.format(compiler))
    revision = revisions.Revision("HEAD", "", repository)
    keys = []
    for version in (1, 2):
        compiler.write_text(f"#!/bin/sh\necho {version}\n")
        compiler.chmod(0o755)
        keys.append(revisions._build_key(revision, "OFF"))
    assert keys[0] != keys[1]


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("ninja"), reason="needs cmake, ninja and a compiler")
def test_a_build_is_kept_by_its_sources(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JOBS", "1")
    (repository / "csrc/CMakeLists.txt").write_text(
        "cmake_minimum_required(VERSION 3.16)\nproject(emblib LANGUAGES C)\n"
        'file(WRITE ${CMAKE_BINARY_DIR}/a.c "int a(void) { return 1; }")\n'
        "add_library(emblib_cpu SHARED ${CMAKE_BINARY_DIR}/a.c)\n"
        "install(TARGETS emblib_cpu DESTINATION emblib)\n"
    )
    home, said = tmp_path / "home", []
    head = revisions.checkout("WORKTREE", home)
    for _ in range(2):
        (library,) = revisions.build(head, home / "native", "cpu", said.append)
        assert library.name == "libemblib_cpu.so"
    assert len(said) == 1
    work = library.parent / "work"
    work.mkdir()  # as if a build from another revision's folder had been interrupted
    (work / "CMakeCache.txt").write_text("CMAKE_HOME_DIRECTORY:INTERNAL=/elsewhere/csrc\n")
    revisions.build(head, home / "native", "cpu", said.append)
    assert len(said) == 2
    assert not work.exists()
