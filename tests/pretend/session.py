"""Runs tests on the pretend GPU: `python -m tests.pretend.session short|matrix|FILES [ARGS]`.

`short` is what each change runs, under one set of settings. `matrix` runs the same tests under each
of `MATRIX`; its exit status is the worst one. Anything else is passed on to pytest, with the
settings of the environment (`torch_cuda.Settings`).
"""

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence

from tests.pretend.library import ROOT

# Which entries these call, test_entries.py counts.
SHORT = (
    "tests/pretend/test_training.py",
    "tests/pretend/test_host_waits.py",
    "tests/pretend/test_kernel_times.py",
    "tests/tables/test_graph_capture.py::test_a_captured_step_trains_as_eager_code_does[adam]",
    "tests/tables/test_graph_capture.py::test_a_captured_step_trains_as_eager_code_does[lamb]",
    "tests/tables/test_graph_capture.py::test_a_captured_step_checks_bounds",
    "tests/tables/test_graph_capture.py::test_a_captured_step_reads_other_tiers",
    "tests/tables/test_graph_capture.py::test_an_optimizer_that_counts_forwards_is_not_captured",
    "tests/tables/test_graph_capture.py::test_a_dense_gradient_does_not_wait",
    "tests/tables/test_graph_capture.py::test_no_kind_of_lookup_waits_for_the_device",
    "tests/tables/test_graph_capture.py::test_waits_are_seen_on_a_gpu",
    "tests/tables/test_bounds_report.py",
    "tests/tables/test_tbe.py::test_dense_gradient_equals_embedding_bag",
    "tests/tables/test_tbe.py::test_state_dict_round_trip_resumes_exactly",
    "tests/ops/test_tbe_places.py::test_grouping_of_a_variable_batch",
    "tests/ops/test_tbe_places.py::test_bounds_of_a_variable_batch",
    "tests/ops/test_primitives.py::test_invalid_keys_belong_to_no_group",
    "tests/ops/test_hash.py::test_growth_needs_no_rows",
    "tests/ops/test_route.py::test_combine_and_spread[cuda-out0-dtype0-sums]",
    "tests/ops/test_route.py::test_combine_and_spread[cuda-out0-dtype0-means]",
    "tests/ops/test_route.py::test_gather_segments[cuda-index0-shape0-dtype0]",
    "tests/ops/test_tt.py::test_rows_and_gradients_match_the_reference[cuda-dtype0-readme_small]",
    "tests/ops/test_tt.py::test_rows_and_gradients_match_the_reference[cuda-dtype0-two_cores_odd]",
    "tests/ops/test_tt_precision.py::test_stochastic_rounding_is_unbiased",
    "tests/ops/test_route.py::test_keys_go_where_checkpoints_have_them",
    "tests/dynamic/test_key_status.py",
    "tests/dynamic/test_expiry.py",
    "tests/dynamic/test_arena.py",
)
# The test that needs the others before it.
LAST = "tests/pretend/test_entries.py"

SCHEDULES = ("eager", "lazy", "sides_late", "sides_early", "random:1", "random:2", "random:3")
MATRIX: tuple[Mapping[str, str], ...] = (
    *({"EMBLIB_PRETEND_SCHEDULE": schedule} for schedule in SCHEDULES),
    {"EMBLIB_PRETEND_POISON": "00"},
    {"EMBLIB_PRETEND_POISON": "7f"},
    {"EMBLIB_PRETEND_ALIGN": "start"},
    {"EMBLIB_PRETEND_SMS": "1"},
    {"EMBLIB_PRETEND_SMS": "132"},
    {"EMBLIB_SIMT_ORDER": "reverse"},
    {"EMBLIB_PRETEND_RACES": "1"},
    {"EMBLIB_PRETEND_RACES": "1", "EMBLIB_PRETEND_SCHEDULE": "random:4"},
)


def run(tests: Sequence[str], arguments: Sequence[str], settings: Mapping[str, str]) -> int:
    """Run tests in a process of their own and return the exit status of pytest."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.pretend.plugin", "-k", "cuda"]
    done = subprocess.run([*command, *tests, *arguments], cwd=ROOT, env={**os.environ, **settings})
    return done.returncode


def run_short(arguments: Sequence[str], settings: Mapping[str, str]) -> int:
    """Run the short set, and at its end the count of entries where no argument selects tests."""
    whole = {"EMBLIB_PRETEND_COUNT": "1"} if not arguments else {}
    return run([*SHORT, LAST], arguments, {**settings, **whole})


def main() -> int:
    """Return the worst exit status of what the command line asks for."""
    what, arguments = sys.argv[1:2], sys.argv[2:]
    if what == ["short"]:
        return run_short(arguments, {})
    if what != ["matrix"]:
        return run([*what, *arguments], [], {})
    statuses = []
    for settings in MATRIX:
        print(f"pretend GPU: {dict(settings)}", flush=True)
        statuses.append(run_short(arguments, settings))
    return max(statuses)


if __name__ == "__main__":
    sys.exit(main())
