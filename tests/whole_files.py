"""Processes that share the tests collect only the files that they run.

pytest-xdist wants all processes to collect the same tests, so that each imports every file of
tests: a quarter of a minute of processor time each, before the first test runs. Here a process
collects one item per file without importing it. The controller hands these out, and a process that
gets one imports the file, collects its tests and runs them, with the reports of each.

Where words of the command line name tests of a file (`file.py::test`), files are collected as
always.
"""

import gc
from collections.abc import Iterable, Iterator
from itertools import pairwise
from pathlib import Path

import pytest
from _pytest.runner import runtestprotocol

from tests import nightly

# Seconds of files that took ten or more in a run by three processes on two cores, scaled to one of
# eight minutes: the longest start first, so that no process is alone with one at the end.
LONG = {
    "pretend/test_short_set.py": 129,
    "experiments/run/test_runner.py": 49,
    "collections/test_compiled_collections.py": 47,
    "experiments/report/test_pages.py": 47,
    "tables/test_compile.py": 37,
    "experiments/bundle/test_verify.py": 31,
    "contracts/test_contracts.py": 29,
    "simt/test_grouping.py": 27,
    "experiments/measure/test_sharding.py": 27,
    "sharding/test_sharded_checkpoints.py": 27,
    "fuzz/test_fuzz.py": 25,
    "sharding/test_sharded.py": 21,
    "experiments/contenders/test_new_contender.py": 21,
    "experiments/kinds/test_quality.py": 20,
    "tables/test_parameters.py": 18,
    "dynamic/test_interrupts.py": 18,
    "experiments/test_environment.py": 17,
    "experiments/test_cli.py": 17,
    "experiments/test_examples.py": 17,
    "sharding/test_shared_shards.py": 17,
    "compat/test_fbgemm_install.py": 16,
    "compat/test_torchrec_blocks.py": 16,
    "sharding/test_failures.py": 16,
    "dynamic/test_row_store.py": 16,
    "sharding/test_planner.py": 14,
    "experiments/compare/test_machines.py": 13,
    "experiments/results/test_store.py": 13,
    "ops/test_scaled_gradients.py": 13,
    "storage/test_cached_train.py": 12,
    "tables/test_disk.py": 12,
    "collections/test_shared.py": 12,
    "experiments/kinds/test_new_kind.py": 12,
    "simt/test_compile.py": 12,
    "experiments/report/test_figures.py": 10,
    "tables/test_interrupts.py": 10,
    "test_native_library.py": 10,
}


class LazyFile(pytest.File):
    """A file of tests as one item."""

    def collect(self) -> Iterable[pytest.Item]:
        """Yield the item that stands for the tests of the file."""
        yield WholeFile.from_parent(self, name=self.name)


class WholeFile(pytest.Item):
    """The tests of a file, collected and run when the controller asks for them."""

    def runtest(self) -> None:
        """Refuse to run as one test."""
        raise NotImplementedError

    def run(self, nextitem: pytest.Item | None) -> None:
        """Run the tests; the last may share fixtures with `nextitem`, which follows here."""
        session, position = self.session, self.session.items.index(self)
        tests = self._tests()
        for test, following in pairwise([*tests, nextitem]):
            if test is None or session.shouldfail or session.shouldstop:
                break
            # pytest-xdist compares the test of a report with the item at this index.
            session.items[position] = test
            self.config.hook.pytest_runtest_protocol(item=test, nextitem=following)
        session.items[position] = self
        if not tests:
            # The last test that ran left open what it would have shared with a test of this file.
            session._setupstate.teardown_exact(nextitem)

    def _tests(self) -> list[pytest.Item]:
        assert self.parent is not None
        # As in the collection of all tests (conftest.py): what is imported exists until the end.
        gc.disable()
        try:
            module = pytest.Module.from_parent(self.parent.parent, path=self.path)
            tests = list(self.session.genitems(module))
        finally:
            gc.enable()
        self.config.hook.pytest_collection_modifyitems(
            session=self.session, config=self.config, items=tests
        )
        return tests


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> LazyFile | None:
    """Collect a file as one item in a process that shares the tests with others."""
    config = parent.config
    if not hasattr(config, "workerinput") or any("::" in word for word in config.args):
        return None
    return LazyFile.from_parent(parent, path=module_path)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> Iterator[None]:
    """Sort whole files, the longest first; names and marks select tests when a file runs."""
    files = [item for item in items if isinstance(item, WholeFile)]
    items[:] = [item for item in items if not isinstance(item, WholeFile)]
    yield
    items += sorted(files, key=lambda file: -LONG.get(nightly.name_of(file.path), 0))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
    """Run the tests of a whole file, or one test in a process that shares them.

    Of a test that passes, the controller gets one report, not three and two further messages: of
    the thousands of short ones these took most of the time. With --durations it gets them all.
    """
    if isinstance(item, WholeFile):
        item.run(nextitem)
        return True
    if not hasattr(item.config, "workerinput") or item.config.option.durations is not None:
        return None
    for report in runtestprotocol(item, log=False, nextitem=nextitem):
        if report.when == "call" or not report.passed:
            item.ihook.pytest_runtest_logreport(report=report)
    return True
