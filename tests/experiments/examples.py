"""The commands that help texts, pages, docstrings and comments tell their reader to type."""

from __future__ import annotations

import argparse
import importlib
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from experiments import cli
from experiments.paths import ROOT

FILES = (
    *("README.md", "CONTRIBUTING.md", "Makefile", "docs/**/*.md", "reports/*.md"),
    *("conf/**/*.yaml", "scripts/*.sh", ".github/workflows/*.yml", "run.py"),
    *("experiments/**/*.py", "experiments/**/*.jinja", "experiments/**/*.yaml"),
    *("emblib/**/*.py", "tests/**/*.py"),
)
HISTORY = ("reports/LOG.md",)  # what was typed once, of code that was
OWN = ("tests/experiments/",)  # command lines that are wrong on purpose
# In Markdown, YAML, docstrings and shell scripts a command ends at one of these.
END = re.compile(r"`|  |\t| #|'(?=[ ,.)]|$)|\"(?=[ ,.)]|$)|;|\||&&| >|$|\)|\\n|\{")
PYTHON = re.compile(r"\bpython3? ((?:run\.py|-m (?:emblib|experiments|tests)\.[\w.]+)\b.*)")
MAKE = re.compile(r"(?:^|`|\"|&& )(make [a-z][\w-]*(?: [A-Z_]+=(?:\"[^\"]*\"|\S*))*)", re.MULTILINE)


def files() -> Iterator[Path]:
    """Return every file with commands that somebody may follow."""
    for pattern in FILES:
        for path in sorted(ROOT.glob(pattern)):
            name = path.relative_to(ROOT).as_posix()
            if name not in HISTORY and not name.startswith(OWN):
                yield path


def helps() -> Iterator[tuple[str, str]]:
    """Return the help texts of run.py and of its commands, and theirs."""
    yield "run.py --help", cli.HELP
    for name, (module, _) in cli.COMMANDS.items():
        program = importlib.import_module(module)
        parser = argparse.ArgumentParser(prog=f"run.py {name}", description=program.__doc__)
        program.add_arguments(parser)
        yield f"run.py {name} --help", parser.format_help()


def texts() -> Iterator[tuple[str, str]]:
    """Return (where, text) of all."""
    yield from helps()
    for path in files():
        yield path.relative_to(ROOT).as_posix(), path.read_text()


def commands() -> dict[str, str]:
    """Return every `python run.py ...` and `python -m ...`, and where it stands first."""
    found: dict[str, str] = {}
    for where, text in texts():
        # A backslash continues a command; so does a line's end within backquotes.
        joined = re.sub(r" *\\\n[ #]*", " ", text)
        joined = re.sub(r"(`[^`\n]*python[^`\n]*)\n[ #]*([^`\n]*`)", r"\1 \2", joined)
        for command in PYTHON.findall(joined):
            end = END.search(command)
            assert end is not None
            found.setdefault(command[: end.start()].rstrip(" .,:"), where)
    return found


def make_commands() -> dict[str, str]:
    """Return every `make TARGET VARIABLE=...`, and where it stands first."""
    found: dict[str, str] = {}
    for where, text in texts():
        if where.endswith((".md", "Makefile", ".yml")):
            for command in MAKE.findall(text):
                found.setdefault(command, where)
    return found


def words_of(command: str) -> list[str]:
    """Return the words of a command line without what its text marks as optional or repeated."""
    short = re.sub(r" \[(?!\w*\])[^\]]*\]", "", command).replace("...", " ")
    return short.split()


def without(words: Sequence[str], *keys: str) -> tuple[str, ...]:
    """Return the words that give none of these keys."""
    return tuple(word for word in words if word.partition("=")[0] not in keys)
