"""Check out a revision of emblib into a folder and build its native libraries.

Sources come from git or from the working tree. Native libraries are cached by the content of their
sources, so that revisions that differ only in Python share them. If both revisions have the native
sources of the working tree and libraries are installed, both use these and nothing is compiled. The
gate does not check that they were built from the sources.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import io
import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
from filelock import FileLock

from experiments.config.schema import Config, UsageError
from experiments.paths import ROOT, library_folders

WORKTREE = "WORKTREE"
SOURCE_FOLDERS = ("emblib", "csrc")
CHECKOUTS = ROOT / "build" / "revisions"
DEFAULT_BASES = ("origin/main", "HEAD")


class BuildError(Exception):
    """A revision cannot be built; the message has the first error of the build, or its cause."""


@dataclass(frozen=True)
class Revision:
    """One state of the sources, checked out into a folder."""

    name: str  # as the user wrote it
    sha: str  # hash of the commit; WORKTREE for the working tree
    folder: Path  # folder with emblib/ and csrc/

    @property
    def description(self) -> str:
        """Return the name, with the beginning of the hash if the name is not the hash."""
        return self.name if self.sha in (WORKTREE, self.name) else f"{self.name} ({self.sha[:12]})"


def git(*arguments: str) -> bytes:
    """Run git in the repository of this harness; return its output.

    Raises:
        UsageError: git is missing, or failed; the message has the last line of its error.
    """
    try:
        completed = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True)
    except OSError as error:
        raise UsageError(f"the gate needs git ({error}); gate.base=WORKTREE does not") from error
    if completed.returncode:
        lines = completed.stderr.decode(errors="replace").strip().splitlines() or ["no message"]
        raise UsageError(f"git {' '.join(arguments[:2])}: {lines[-1]}")
    return completed.stdout


def resolve(name: str) -> str:
    """Resolve a name to a commit, WORKTREE to itself; raise UsageError for an unknown name."""
    if name == WORKTREE:
        return WORKTREE
    try:
        sha = git("rev-parse", "--quiet", "--verify", "--end-of-options", f"{name}^{{commit}}")
    except UsageError:
        if shutil.which("git") is None:
            raise
        raise UsageError(
            f"gate: '{name}' is not a commit here; fetch it, or name another, e.g. gate.base=HEAD"
        ) from None
    return sha.decode().strip()


def commit_facts(sha: str) -> dict[str, str]:
    """Return `sha`, `date` and `subject` of a commit; {} if git fails, as without git.

    For WORKTREE it is the checked out commit, or {} if the sources that the gate builds differ.
    """
    try:
        if sha == WORKTREE:
            if git("status", "--porcelain", "--", *SOURCE_FOLDERS).strip():
                return {}
            sha = "HEAD"
        output = git("show", "--no-patch", "--format=%H%x00%cI%x00%s", sha).decode().strip()
    except UsageError:  # no git, where both sides are working trees
        return {}
    return dict(zip(("sha", "date", "subject"), output.split("\0"), strict=True))


def default_base(config: Config, *, smoke: bool) -> str:
    """Return gate.base or its default, without resolving gate.base.

    The default is gate.head in a smoke run, else the first of DEFAULT_BASES that exists.

    Raises:
        UsageError: none of DEFAULT_BASES exists, or git is missing.
    """
    if config.gate.base:
        return config.gate.base
    if smoke:
        return config.gate.head
    for name in DEFAULT_BASES:
        try:
            resolve(name)
            return name
        except UsageError:
            if shutil.which("git") is None:
                raise
    raise UsageError("gate.base: there is neither origin/main nor HEAD; name a revision")


@contextmanager
def _locked(home: Path) -> Iterator[None]:
    """Hold the lock of the folders below `home`: two gates may need one revision at once."""
    home.mkdir(parents=True, exist_ok=True)
    with FileLock(home / ".lock"):
        yield


def checkout(name: str, home: Path = CHECKOUTS) -> Revision:
    """Check out the sources of a revision into a folder below `home`, unless an earlier call did.

    Only SOURCE_FOLDERS are checked out. WORKTREE is copied without built files; the folder is named
    by the content, so that a later edit leads to another folder.

    Raises:
        UsageError: there is no such revision, it lacks one of SOURCE_FOLDERS, or git fails.
    """
    sha = resolve(name)
    folder = home / (sha[:12] if sha != WORKTREE else f"worktree-{_sources_digest(ROOT)}")
    with _locked(home):
        if not (folder / ".complete").exists():
            _write_sources(sha, folder)
    return Revision(name, sha, folder)


def _write_sources(sha: str, folder: Path) -> None:
    """Replace a folder by the sources of a commit or of WORKTREE, and mark it as complete."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    if sha == WORKTREE:
        for path in _source_files(ROOT):
            target = folder / path.relative_to(ROOT)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(path, target)
    else:
        archive = io.BytesIO(git("archive", sha, *SOURCE_FOLDERS))
        with tarfile.open(fileobj=archive) as sources:
            if hasattr(tarfile, "data_filter"):  # Python 3.11.4 and newer
                sources.extractall(folder, filter="data")
            else:
                sources.extractall(folder)
    (folder / ".complete").touch()


def _source_files(root: Path) -> Iterator[Path]:
    """Yield all source files of emblib and then of csrc, each sorted by path."""
    for folder in SOURCE_FOLDERS:
        for path in sorted((root / folder).rglob("*")):
            is_built = path.suffix in (".so", ".pyc") or "__pycache__" in path.parts
            if path.is_file() and not is_built:
                yield path


def _sources_digest(root: Path, prefix: str = "") -> str:
    """Return a digest of the names and contents of the sources whose paths begin with `prefix`."""
    digest = hashlib.blake2b(digest_size=6)
    for path in _source_files(root):
        name = str(path.relative_to(root))
        if name.startswith(prefix):
            digest.update(name.encode() + b"\0" + hashlib.blake2b(path.read_bytes()).digest())
    return digest.hexdigest()


def installed_libraries() -> list[Path]:
    """Return the native libraries of the installed emblib; [] if none is built."""
    folders = reversed(library_folders())
    return list(
        {file.name: file for folder in folders for file in folder.glob("libemblib_*.so")}.values()
    )


Say = Callable[[str], object]  # prints a message before a step that takes long


def provide_libraries(
    base: Revision, head: Revision, device: str, say: Say, home: Path = CHECKOUTS
) -> None:
    """Copy native libraries into the folders of both revisions.

    If both have the native sources of the working tree, both receive the installed libraries, which
    are assumed to be built from these sources. Otherwise, and if none are installed, the libraries
    are built. Waits while another process checks out or builds below `home`.

    Args:
        base: revision that is built first.
        head: revision that is built second; it may be the same.
        device: "cpu" or "cuda", see `build`.
        say: function that prints a message before a step that takes long.
        home: folder of the cache of builds.

    Raises:
        BuildError: a revision does not build. The message begins with `Revision.description`.
    """
    digests = {_sources_digest(folder, "csrc/") for folder in (base.folder, head.folder, ROOT)}
    installed = installed_libraries() if len(digests) == 1 else []
    with _locked(home):
        for revision in (base, head):
            try:
                libraries = installed or build(revision, home / "native", device, say)
            except BuildError as error:
                raise BuildError(f"{revision.description} does not build: {error}") from error
            for library in libraries:
                target = revision.folder / "emblib" / library.name
                partial_file = target.with_suffix(".partial")
                shutil.copy2(library, partial_file)
                os.replace(partial_file, target)


def _build_key(revision: Revision, cuda: str) -> str:
    """Return a key of a build's inputs: sources, torch, the C++ compiler, variables, `cuda`."""
    variables = ("TORCH_CUDA_ARCH_LIST", "CXX", "CXXFLAGS", "CUDACXX", "CUDAFLAGS", "CUDA_HOME")
    settings = [cuda, *(os.environ.get(name, "") for name in variables)]
    compiler = os.environ.get("CXX") or "c++"
    command = [compiler] if shutil.which(compiler) else compiler.split()  # such as "ccache g++"
    try:
        version = subprocess.run([*command, "--version"], capture_output=True, text=True)
        compiler = version.stdout.partition("\n")[0]
    except OSError:
        compiler = ""
    torch = importlib.util.find_spec("torch")
    digest = _sources_digest(revision.folder, "csrc/")
    torch_version = importlib.metadata.version("torch")
    inputs = [digest, compiler, str(torch and torch.origin), torch_version, *settings]
    return hashlib.blake2b("\0".join(inputs).encode(), digest_size=6).hexdigest()


def build(revision: Revision, home: Path, device: str, say: Say) -> list[Path]:
    """Compile a revision's libraries, or find libraries built earlier from the same sources.

    CUDA kernels take long to compile and are left out if `device` is "cpu". The libraries are
    returned in the cache below `home`; the revision's folder is not changed.

    Raises:
        BuildError: a tool is missing, or the build fails.
    """
    cuda = "OFF" if device == "cpu" else os.environ.get("EMBLIB_CUDA") or "AUTO"
    folder = home / _build_key(revision, cuda)
    work, log = folder / "work", folder / "build.log"
    libraries = sorted(folder.glob("libemblib_*.so"))
    if libraries and not work.exists():  # a build removes `work` when all libraries are copied
        return libraries
    if not (revision.folder / "csrc" / "CMakeLists.txt").exists():
        raise BuildError("it has no csrc/CMakeLists.txt")
    say(f"building the native libraries of {revision.description}; this is done once")
    work.mkdir(parents=True, exist_ok=True)
    # CMake refuses the cache of an interrupted build that began from another revision's folder.
    (work / "CMakeCache.txt").unlink(missing_ok=True)
    source = str(revision.folder / "csrc")
    # Tools next to this Python come first, because the system's cmake and ninja may be too old.
    environment = os.environ | {
        "PATH": f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}"
    }
    with log.open("w") as out:
        for command in (
            [
                *("cmake", "-S", source, "-B", str(work), "-G", "Ninja"),
                *("-DCMAKE_BUILD_TYPE=Release", f"-DEMBLIB_CUDA={cuda}"),
                f"-DPython_EXECUTABLE={sys.executable}",
            ],
            [
                "cmake",
                "--build",
                str(work),
                "--parallel",
                os.environ.get("JOBS") or str(_num_jobs()),
            ],
            ["cmake", "--install", str(work), "--prefix", str(work / "installed")],
        ):
            try:
                completed = subprocess.run(
                    command, stdout=out, stderr=subprocess.STDOUT, env=environment
                )
            except OSError as error:
                raise BuildError(f"{command[0]} is needed to build it ({error})") from error
            if completed.returncode:
                raise BuildError(f"{_first_error(log)} (all of it: {log})")
    for library in (work / "installed" / "emblib").glob("libemblib_*.so"):
        shutil.copy2(library, folder)
    shutil.rmtree(work)
    return sorted(folder.glob("libemblib_*.so"))


def _num_jobs() -> int:
    """Return the number of processors, or fewer if memory is short: nvcc may need 2.5 GB."""
    return max(1, min(os.cpu_count() or 1, int(psutil.virtual_memory().available / 2.5e9)))


def _first_error(log: Path) -> str:
    """Return the first error in a build's output; without one, its last line."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    for mark in ("error:", "CMake Error", "FAILED:"):
        for number, line in enumerate(lines):
            if mark in line:  # CMake writes file and line here, and the error on the next line
                return " ".join(lines[number : number + 1 + line.endswith(":")])
    return (lines or ["no output"])[-1]
