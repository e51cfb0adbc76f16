"""`python run.py ...`: run a command, or check the words of an experiment and measure it.

A usage error is a message on stderr and exit status 2.
"""

from __future__ import annotations

import argparse
import difflib
import gc
import importlib
import os
import select
import shlex
import sys
import textwrap
from collections.abc import Sequence

from experiments.config.schema import UsageError

BROKEN_PIPE = 141  # exit status after `| head` has closed the output: 128 + SIGPIPE
# Command -> module with `add_arguments(parser)` and `run(arguments)`, and a line for --help.
COMMANDS = {
    "list": ("experiments.listing", "list experiments, contenders, presets and what runs here"),
    "doctor": ("experiments.doctor", "check whether this machine is fit for measurements"),
    "report": ("experiments.report", "rebuild reports from raw records, or report benchmarks"),
    "compare": ("experiments.compare", "compare runs of several machines, or published figures"),
    "trend": ("experiments.gate.trend", "show runs of the gate over commits"),
    "gallery": ("experiments.gallery", "collect the reports of many runs as pages"),
    "statistics": ("experiments.table_statistics", "draw statistics of tables from a series"),
    "reference": ("experiments.reference", "store runs as references; update the README's tables"),
    "bundle": ("experiments.bundle.command", "pack runs into an archive and verify archives"),
}
HELP = f"""\
Measure embedding tables and write a report.

  python run.py +experiment=NAME [key=value ...]
  python run.py +experiment=NAME --help            its question and keys
  python run.py +experiment=NAME --cfg job         print the composed configuration, run nothing
  python run.py -m +experiment=A,B                 one run after another (Hydra's multirun)
  python run.py COMMAND ...                        one of the commands below; each has --help

commands
{chr(10).join(f"  {name:<14}{purpose}" for name, (_, purpose) in COMMANDS.items())}

examples
  python run.py +experiment=tt_vs_tbe
  python run.py +experiment=tt_vs_tbe timing=quick sweep.D=[64] sweep.rank=[16,32]
  python run.py +experiment=tt_vs_tbe cases.criteo.workload.B=512 device.threads=1

  python run.py +experiment=tt_vs_tbe dry_run=true          what would be measured, for how long
  python run.py +experiment=tt_vs_tbe rerun=failed          ... once more where something failed

A repeated run resumes: what an earlier run has measured, of the same code on the same machine, is
taken from there (rerun=all measures everything again).

exit status of experiments; some commands have others, which their --help lists
  0  done; running out of memory is a result (with strict=true it is a failure)
  1  internal error                       2  wrong usage
  3  the gate: a confirmed regression     4  the gate is not sure, and gate.strict=true
  5  done, but a contender failed, was wrong or ran out of time
  6  the gate: nothing to compare         130  interrupted; what was measured is kept and reported

CPU threads wait passively (OMP_WAIT_POLICY=PASSIVE unless it is set): a little slower on an idle
machine, far steadier on a shared one.
"""


def groups_in_brief() -> str:
    """Return the config groups with the names of their options."""
    from experiments import configure

    return "\n".join(
        textwrap.fill(", ".join(names), 100, initial_indent=f"{group}=", subsequent_indent="  ")
        for group, names in configure.groups().items()
    )


def questions_in_brief() -> str:
    """Return one line per experiment: its name and the beginning of its question."""
    from experiments import configure

    names = configure.groups()["experiment"]
    left_width = max(map(len, names)) + 4
    return "\n".join(
        f"  {name}".ljust(left_width)
        + textwrap.shorten(configure.question(name), 100 - left_width, placeholder=" …")
        for name in names
    )


def main(arguments: Sequence[str]) -> int:
    """Run the words of a command line, without the program's name; return the exit status.

    Sets OMP_WAIT_POLICY for this process and its children. The options of a command are parsed by
    argparse, which raises SystemExit: 0 after --help, 2 for a usage error. Internal errors are
    raised as they are.
    """
    # On a busy machine, a thread that waits by spinning occupies the core of the thread it waits
    # for: with two busy cores every contender takes 10 to 50 times as long. OpenMP reads the
    # variable when torch is loaded, so it is set first. The user's own value has precedence.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    try:
        is_command = bool(arguments) and arguments[0] in COMMANDS
        status = (
            _run_command(arguments[0], arguments[1:]) if is_command else _run_experiment(arguments)
        )
        sys.stdout.flush()  # at the interpreter's end, a broken pipe could not be caught
        return status
    except BrokenPipeError:
        stdout_poll = select.poll()
        stdout_poll.register(sys.stdout, 0)
        if not stdout_poll.poll(0):  # the pipe of a child, not the output
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what is unflushed
        return BROKEN_PIPE
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package in ("", "experiments", "emblib"):
            raise
        print(
            f"error: the harness needs {package}, which is not installed: "
            "pip install -e '.[harness]'",
            file=sys.stderr,
        )
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


def _run_command(name: str, arguments: Sequence[str]) -> int:
    """Run a command of COMMANDS; raise UsageError for its errors of files, but not of sockets."""
    command_module = importlib.import_module(COMMANDS[name][0])
    parser = argparse.ArgumentParser(prog=f"run.py {name}", description=command_module.__doc__)
    command_module.add_arguments(parser)
    parsed = parser.parse_args(arguments)
    try:
        return int(command_module.run(parsed))
    except ConnectionError:
        raise
    except OSError as error:  # of a file or folder that the user named, or a full disk
        raise UsageError(str(error)) from error


def _run_experiment(arguments: Sequence[str]) -> int:
    """Check the words of an experiment and run it; return the exit status.

    With the flags --help and --cfg job, print instead. With --multirun, `launch` gets the words.
    """
    from experiments import configure

    flags = {argument for argument in arguments if argument.startswith("-")}
    words = [argument for argument in arguments if not argument.startswith("-")]
    experiment_names = [
        word.partition("=")[2] for word in words if word.lstrip("+").startswith("experiment=")
    ]
    if flags & {"-h", "--help"}:
        for name in experiment_names:
            configure.load([f"+experiment={name}"])  # raises if there is none
            print(f"{configure.source(name)}\n# All keys: --cfg job instead of --help")
        if not experiment_names:
            print(f"{HELP}\ngroups; `python run.py list` says more\n{groups_in_brief()}")
        return 0
    if flags & {"-m", "--multirun"}:
        from experiments import launch

        return launch.run(arguments)
    similar_commands = difflib.get_close_matches(arguments[0], COMMANDS, 1) if arguments else []
    if similar_commands and "=" not in arguments[0]:
        raise UsageError(f"no command '{arguments[0]}'. Did you mean '{similar_commands[0]}'?")
    if shows_config := flags == {"--cfg"} and "job" in words:
        words.remove("job")
    elif flags:
        raise UsageError(f"no flag {min(flags)}: there is --help, --cfg job and -m")
    if not experiment_names:
        configure.check_keys(words)
        print(f"experiments, and what they answer\n{questions_in_brief()}\n", file=sys.stderr)
        example = shlex.join(["+experiment=tt_vs_tbe", *words])
        raise UsageError(
            f"which experiment? e.g. python run.py {example}; --help explains the rest"
        )
    if shows_config:
        print(configure.composed_yaml(words), end="")
        return 0
    config = configure.load(words)
    if not config.dry_run:
        activity = "loading torch and examining this machine; nothing is measured yet"
        print(f"{config.name}: {activity}", flush=True)
    from experiments.run import runner  # torch, pandas and matplotlib load only when there is work

    gc.freeze()  # collections of torch's objects would take a seventh of a small run
    return runner.run(config, question=configure.question(experiment_names[0]), words=words)
