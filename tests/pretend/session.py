"""Runs tests on the pretend GPU: `python -m tests.pretend.session short|matrix|wide|FILES [ARGS]`.

`short` is what each change runs, under one set of settings. `matrix` runs the same tests under each
of `MATRIX`, `wide` every test that takes a device or ranks, and counts what became of them; their
exit status is the worst one. Anything else is passed on to pytest, with the settings of the
environment (`torch_cuda.Settings`).
"""

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple
from xml.etree import ElementTree

from tests.pretend.library import FOLDER, ROOT

# Which entries these call, test_entries.py counts.
SHORT = (
    "tests/pretend/test_training.py",
    "tests/pretend/test_cache_launches.py",
    "tests/pretend/test_host_waits.py",
    "tests/pretend/test_kernel_times.py",
    "tests/pretend/test_torch_side.py",
    "tests/tables/test_graph_capture.py::test_a_captured_step_trains_as_eager_code_does[adam]",
    "tests/tables/test_graph_capture.py::test_a_captured_step_trains_as_eager_code_does[lamb]",
    "tests/tables/test_graph_capture.py::test_a_captured_step_checks_bounds",
    "tests/tables/test_graph_capture.py::test_a_captured_step_reads_other_tiers",
    "tests/tables/test_graph_capture.py::test_an_optimizer_that_counts_forwards_is_not_captured",
    "tests/tables/test_graph_capture.py::test_a_dense_gradient_does_not_wait",
    "tests/tables/test_graph_capture.py::test_no_kind_of_lookup_waits_for_the_device",
    "tests/tables/test_graph_capture.py::test_waits_are_seen_on_a_gpu",
    "tests/test_captured_step.py::test_the_bits_of_a_plain_loop",
    "tests/test_captured_step.py::test_batches_on_the_device_or_partly",
    "tests/test_captured_step.py::test_a_collection_of_several_kernels",
    "tests/test_captured_step.py::test_dynamic_tables",
    "tests/test_captured_step.py::test_cached_tensor_trains",
    "tests/test_captured_step.py::test_a_loop_waits_for_nothing",
    "tests/test_captured_step.py::test_a_step_that_waits_is_refused",
    "tests/test_captured_optimizers.py::test_a_grad_scaler",
    "tests/tables/test_bounds_report.py",
    "tests/inference/test_indexed.py::test_pruned_ids_read_zeros",
    "tests/tables/test_mapped_memory.py",
    "tests/tables/test_tt_calls.py::test_bits_of_the_long_path",
    "tests/tables/test_tbe.py::test_dense_gradient_equals_embedding_bag",
    "tests/tables/test_tbe.py::test_known_number_of_rows",
    "tests/tables/test_checkpoint.py::test_moving_between_devices",
    "tests/tables/test_tbe.py::test_state_dict_round_trip_resumes_exactly",
    "tests/ops/test_tbe_places.py::test_grouping_of_a_variable_batch",
    "tests/ops/test_tbe_places.py::test_bounds_of_a_variable_batch",
    "tests/ops/test_tbe_places.py::test_weights_of_skipped_lookups_do_not_matter",
    "tests/ops/test_primitives.py::test_invalid_keys_belong_to_no_group",
    "tests/ops/test_hash.py::test_growth_needs_no_rows",
    "tests/ops/test_hash_rows.py",
    "tests/ops/test_route.py::test_combine_and_spread[cuda-out0-dtype0-sums]",
    "tests/ops/test_route.py::test_combine_and_spread[cuda-out0-dtype0-means]",
    "tests/ops/test_route.py::test_a_part_of_the_source_in_its_own_tensor[cuda-sums-True]",
    "tests/ops/test_route.py::test_gather_segments[cuda-index0-shape0-dtype0]",
    "tests/ops/test_tt.py::test_rows_and_gradients_match_the_reference[cuda-dtype0-readme_small]",
    "tests/ops/test_tt.py::test_rows_and_gradients_match_the_reference[cuda-dtype0-two_cores_odd]",
    "tests/ops/test_tt_precision.py::test_stochastic_rounding_is_unbiased",
    "tests/ops/test_route.py::test_keys_go_where_checkpoints_have_them",
    "tests/dynamic/test_admission.py::test_sketches_are_count_min",
    "tests/dynamic/test_admission.py::test_keys_missing_longest_ago_give_way",
    "tests/dynamic/test_key_status.py",
    "tests/dynamic/test_expiry.py::test_steps_count_and_custom_scores_stay",
    "tests/dynamic/test_expiry.py::test_scores_are_set_where_they_are_used",
    "tests/dynamic/test_expiry.py::test_the_sweep_keeps_its_promise",
    "tests/dynamic/test_expiry.py::test_keys_live_for_their_time[cuda-900.0]",
    "tests/dynamic/test_expiry.py::test_expire_keys_does_not_wait_for_training",
    "tests/dynamic/test_fallback.py::test_late_updates_go_to_the_row_that_was_read",
    "tests/dynamic/test_arena.py",
)
# What their ranks do includes collectives of every kind of sharding, DDP and fully_shard.
SHORT_RANKS = (
    "tests/sharding/test_worlds.py::test_results_by_rank",
    "tests/sharding/test_sharded.py::test_every_plan[mixed-sum-2]",
    "tests/sharding/test_pipelines.py::test_results_of_the_plain_loop[copies]",
    "tests/sharding/test_pipelines.py::test_results_of_the_plain_loop[fully sharded]",
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
    {"EMBLIB_PRETEND_CAPABILITY": "8"},
    {"EMBLIB_SIMT_ORDER": "reverse"},
    {"EMBLIB_PRETEND_RACES": "1"},
    {"EMBLIB_PRETEND_RACES": "1", "EMBLIB_PRETEND_SCHEDULE": "random:4"},
    {"EMBLIB_TEST_CUDA": "cuda:1"},
)

ON_PRETEND_GPUS = ("-p", "tests.pretend.plugin", "-k", "cuda")
# Their ranks have the devices, each in a process of its own.
RANKS_ON_PRETEND_GPUS = {"EMBLIB_TEST_RANKS": "cuda"}


class Room(NamedTuple):
    """Tests of the wide set that run in one process."""

    tests: tuple[str, ...]
    options: tuple[str, ...] = ON_PRETEND_GPUS
    settings: Mapping[str, str] = {}


# What takes a device, and what takes ranks, whose device is a GPU.
WIDE: dict[str, Room] = {
    "ops": Room(("tests/ops",)),
    "tables": Room(
        ("tests/tables", "tests/test_captured_step.py", "tests/test_captured_optimizers.py")
    ),
    "tt": Room(("tests/tt",)),
    "dynamic": Room(("tests/dynamic",)),
    "sharding": Room(
        (
            "tests/sharding/test_sharded.py",
            "tests/sharding/test_shared_shards.py",
            "tests/sharding/test_scaled_ranks.py",
            "tests/sharding/test_pipelines.py",
            "tests/sharding/test_sharded_checkpoints.py",
            "tests/sharding/test_collectives.py",
            "tests/sharding/test_table_handles.py",
            "tests/sharding/test_backing_stores.py",
        ),
        (),
        RANKS_ON_PRETEND_GPUS,
    ),
}
# On the current device, and on another one.
WIDE_SETTINGS: tuple[Mapping[str, str], ...] = ({}, {"EMBLIB_TEST_CUDA": "cuda:1"})


def run(
    tests: Sequence[str],
    arguments: Sequence[str],
    settings: Mapping[str, str],
    options: Sequence[str] = ON_PRETEND_GPUS,
) -> int:
    """Run tests in a process of their own and return its exit status, 128 + n after signal n."""
    command = [sys.executable, "-m", "pytest", "-q", *options, *tests, *arguments]
    status = subprocess.run(command, cwd=ROOT, env={**os.environ, **settings}).returncode
    return status if status >= 0 else 128 - status  # -n would be lost in a maximum


def run_short(arguments: Sequence[str], settings: Mapping[str, str]) -> int:
    """Run the short set; where no argument selects tests, count entries and run ranks too."""
    whole = {"EMBLIB_PRETEND_COUNT": "1"} if not arguments else {}
    status = run([*SHORT, LAST], arguments, {**settings, **whole})
    if arguments:
        return status
    return max(status, run(SHORT_RANKS, (), {**settings, **RANKS_ON_PRETEND_GPUS}, ()))


def run_matrix(arguments: Sequence[str]) -> int:
    """Run the short set under each setting of the matrix and return the worst exit status."""
    statuses = []
    for settings in MATRIX:
        print(f"pretend GPU: {dict(settings)}", flush=True)
        statuses.append(run_short(arguments, settings))
    return max(statuses)


def run_wide(names: Sequence[str]) -> int:
    """Run rooms of the wide set, all by default, write counts and return the worst exit status."""
    statuses, lines = [], []
    for name in names or WIDE:
        tests, options, settings = WIDE[name]
        on_one = "EMBLIB_TEST_RANKS" in settings  # its ranks are on both devices anyway
        for number, devices in enumerate(WIDE_SETTINGS[:1] if on_one else WIDE_SETTINGS):
            report = FOLDER / f"wide-{name}-{number}.xml"
            report.unlink(missing_ok=True)  # a process that is killed writes none
            arguments = [f"--junitxml={report}"]
            statuses.append(run(tests, arguments, {**settings, **devices}, options))
            outcomes = [f"no report, exit status {statuses[-1]}"]
            if report.exists():
                outcomes = count_outcomes(report.read_text())
            title = " ".join([name, *devices.values()])
            lines += [f"{title}: {outcome}" for outcome in outcomes]
    print("\n".join(lines), flush=True)
    return max(statuses)


def count_outcomes(report: str) -> list[str]:
    """Summarize a JUnit report: a line of counts, then one for each test that was left out."""
    cases = list(ElementTree.fromstring(report).iter("testcase"))
    counts, left_out = Counter[str](), []
    for case in cases:
        found = [child for child in case if child.tag in {"failure", "error", "skipped"}]
        outcome = found[0].tag if found else "passed"
        counts[outcome] += 1
        if outcome == "skipped":
            left_out.append(f"skipped {case.get('name')}: {found[0].get('message')}")
    seconds = sum(float(case.get("time", "0")) for case in cases)
    numbers = ", ".join(f"{counts[name]} {name}" for name in ("passed", "failure", "error"))
    return [f"{numbers}, {counts['skipped']} skipped in {seconds:.0f} s", *left_out]


def main() -> int:
    """Return the worst exit status of what the command line asks for."""
    what, arguments = sys.argv[1:2], sys.argv[2:]
    if what == ["short"]:
        return run_short(arguments, {})
    if what == ["matrix"]:
        return run_matrix(arguments)
    if what == ["wide"]:
        return run_wide(arguments)
    return run([*what, *arguments], [], {})


if __name__ == "__main__":
    sys.exit(main())
