"""Report of a bounds check: which index of which feature was invalid.

On the CPU `describe_first_violation` names the index at once. On a GPU the check only counts
violations, in device memory. Every few checks `BoundsReport` copies the counts to pinned memory. It
warns after a copy is complete, so a lookup does not make the host wait.
"""

import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor, nn

from emblib.columns import FeatureColumn
from emblib.context_values import with_value
from emblib.tables.parameters import caller_level

CHECKS_PER_COPY = 16  # checks per copy of the counts, which costs a copy and an event; not measured
_P = ParamSpec("_P")
_R = TypeVar("_R")

_is_padded = ContextVar("is_padded", default=False)
BOUNDS_MESSAGE = (
    "emblib: {indices} indices and {offsets} offsets out of bounds{where}; "
    "such indices read row 0, such offsets are clamped (are they offsets, not lengths, "
    "and in this order? bounds_check=BoundsCheck.FATAL raises instead)"
)


class BatchCheck(NamedTuple):
    """Arguments of an op that checks the bounds of its batch itself, before it reads the batch.

    Attributes:
        mode: a code of `codes.BOUNDS_CHECK`, None for no check.
        violations: int64 `[2]`, the counts of invalid indices and offsets to which a GPU adds in
            mode WARNING.
    """

    mode: int | None
    violations: Tensor


def with_padding(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Return a function whose lookups may have padding: ids -1 before the first offset.

    Dense tables skip id -1 in any case. In dynamic tables -1 is a valid key, so their lookups call
    `is_padded` to know whether such ids are padding.
    """
    return with_value(_is_padded, True, function)


def is_padded() -> bool:
    """Return whether the caller is inside `with_padding`."""
    return _is_padded.get()


def describe_first_violation(
    module: object,
    indices: Tensor,
    offsets: Tensor,
    features: Tensor,
    bag_layout: Tensor | None,
) -> str:
    """Return a phrase that names the first invalid index of a batch on the CPU.

    Args:
        module: module whose features and tables are named in the message.
        indices: `[L]`; if none is invalid, the phrase is empty, as it is without features.
        offsets: `[bags + 1]`, repaired.
        features: `[F, columns]`, see `FeatureColumn`.
        bag_layout: `[bags, 2]` with the feature of each bag, if batch sizes differ.
    """
    if not len(features):
        return ""
    if bag_layout is None:
        feature_of_bag = torch.arange(len(features), device="cpu").repeat_interleave(
            (len(offsets) - 1) // len(features)
        )
    else:
        feature_of_bag = bag_layout[:, 0]
    feature_of_index = feature_of_bag.repeat_interleave(offsets.diff())
    first_offset = int(offsets[0])
    checked_ids = indices[first_offset : first_offset + len(feature_of_index)]
    num_rows = features[feature_of_index, FeatureColumn.ROWS]
    invalid_positions = ((checked_ids < -1) | (checked_ids >= num_rows)).nonzero()
    if not len(invalid_positions):
        return ""
    position = int(invalid_positions[0])
    return (
        f" (the first: index {int(checked_ids[position])} at position {first_offset + position}, "
        f"{feature_label(module, int(feature_of_index[position]))} of "
        f"{int(num_rows[position])} rows)"
    )


def feature_label(module: Any, feature: int) -> str:
    """Return a phrase that names a feature of a table module and its table.

    In a collection these are the names that the collection has set as `feature_labels`.
    """
    labels: Sequence[str] | None = getattr(module, "feature_labels", None)
    if labels is not None:
        return labels[feature]
    return f"feature {feature}, table {module.table_names[module.feature_tables[feature]]!r}"


def error_with_names(
    module: Any, error: RuntimeError, offsets: Tensor, bag_layout: Tensor | None
) -> RuntimeError:
    """Return the error of a check in mode FATAL, with names in place of a feature's number.

    Arguments are those of `describe_first_violation`, but `offsets` are those of the batch, not
    repaired ones.
    """
    if "not decrease" in str(error):
        length_error = negative_length_error(module, offsets, bag_layout)
        if length_error is not None:
            return length_error

    def label(number: re.Match[str]) -> str:
        return f"indices of {feature_label(module, int(number[1]))}"

    return RuntimeError(re.sub(r"indices of feature (\d+)", label, str(error)))


def negative_length_error(
    module: Any, offsets: Tensor, bag_layout: Tensor | None
) -> RuntimeError | None:
    """Return an error if offsets on the CPU decrease in a module of a collection; None otherwise.

    A bag whose offsets decrease has a negative length. No repair is possible: later bags would get
    ids of other bags. Arguments are those of `describe_first_violation`, but `offsets` are those of
    the batch, not repaired ones.
    """
    lengths = offsets.diff()
    labels: Sequence[str] | None = getattr(module, "feature_labels", None)
    if not labels or not bool((lengths < 0).any()):
        return None
    negative_bag = int((lengths < 0).nonzero()[0])
    bags_per_feature = max(len(lengths) // len(labels), 1)
    feature = (
        negative_bag // bags_per_feature if bag_layout is None else int(bag_layout[negative_bag, 0])
    )
    return RuntimeError(
        f"bounds_check: lengths must be >= 0, got {int(lengths[negative_bag])} in "
        f"{labels[feature]} (are they offsets that decrease?)"
    )


def _features_phrase(module: Any) -> str:
    """Return a phrase that names the features whose violations a GPU counts together."""
    labels = getattr(module, "feature_labels", None)
    if labels is None:
        labels = [feature_label(module, feature) for feature in range(len(module.feature_tables))]
    omitted = f" and {len(labels) - 3} more" if len(labels) > 3 else ""
    return f" (in one of: {'; '.join(labels[:3])}{omitted})"


class BoundsReport:
    """Warns of violations that a CUDA device has counted since the last warning.

    The counts of a module are copied into pinned memory at its first check and then at every
    `CHECKS_PER_COPY`-th, after the kernels of the current stream, unless the last copy is still
    incomplete. Once a copy is complete, a later check or `poll` warns of its violations;
    `report_now` reads the counts on the device. Nothing is copied during the capture of a CUDA
    graph. Replays of the graph count violations, which `report_now` or later checks outside the
    graph report. Threads may share a report, and may then warn of a violation twice.
    """

    def __init__(self) -> None:
        self._reported_counts = (0, 0)
        self._num_checks = 0
        self._pending_copy: tuple[Tensor, torch.cuda.Event] | None = None
        self._message, self._module_features = BOUNDS_MESSAGE, ""

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy and pickle as a new report: events belong to a process."""
        return BoundsReport, ()

    def add_check(self, module: Any, message: str) -> None:
        """Note that a check may have added to the module's `bounds_violations` on the device.

        The check must be enqueued already; the host does not wait for it. `message` is a format
        string as in `batches.check_bounds`. A warning of several checks has the message of the last
        one.
        """
        if self._pending_copy is None and self._num_checks % CHECKS_PER_COPY != 0:
            self._num_checks += 1
            return
        if torch.cuda.is_current_stream_capturing():
            return
        if not self._module_features:
            self._module_features = _features_phrase(module)
        self._message = message
        self.poll()
        if self._pending_copy is None and self._num_checks % CHECKS_PER_COPY == 0:
            self._start_copy(module.bounds_violations)
        self._num_checks += 1

    def poll(self) -> None:
        """Warn of the violations in the last copy from the device, if it is complete."""
        # Read once: another thread may finish it and set it to None.
        pending_copy = self._pending_copy
        if pending_copy is not None and pending_copy[1].query():
            self._report(pending_copy[0])

    def report_now(self, counts: Tensor) -> None:
        """Warn of the violations in `counts` that no warning reported; wait for the current stream.

        `counts` is the module's `bounds_violations`; on the CPU this does nothing.
        """
        if counts.is_cuda:
            self._report(counts)

    def _start_copy(self, counts: Tensor) -> None:
        """Start to copy the counts of violations, int64 `[2]`, to host memory."""
        with torch.cuda.device(counts.device):
            counts_on_host = torch.empty(2, dtype=torch.int64, device="cpu", pin_memory=True)
            counts_on_host.copy_(counts, non_blocking=True)
            event = torch.cuda.Event()
            event.record()
        self._pending_copy = counts_on_host, event

    def _report(self, violations: Tensor) -> None:
        """Warn about the `violations` `[2]` that no earlier report had."""
        counts: Sequence[int] = violations.tolist()
        self._pending_copy = None
        counts_before = self._reported_counts
        if any(
            count < count_before for count, count_before in zip(counts, counts_before, strict=True)
        ):
            counts_before = (0, 0)  # the module was reset or moved
        num_indices, num_offsets = (
            count - count_before for count, count_before in zip(counts, counts_before, strict=True)
        )
        self._reported_counts = counts[0], counts[1]
        if num_indices or num_offsets:
            warning = self._message.format(
                indices=num_indices, offsets=num_offsets, where=self._module_features
            )
            warning += "; counted on the GPU in earlier batches"
            warnings.warn(warning, stacklevel=caller_level())


def report_of(module: object) -> BoundsReport:
    """Return the report of a module, which the first call constructs."""
    report: BoundsReport | None = vars(module).get("_bounds_report")
    if report is None:
        report = vars(module).setdefault("_bounds_report", BoundsReport())
    return report


def report_bounds_violations(model: nn.Module) -> None:
    """Warn of violations on a GPU that no warning has reported yet (reads the device).

    With `BoundsCheck.WARNING` a lookup on a GPU does not wait for its bounds check: a later lookup
    warns. Call this where the host waits anyway, for example once per epoch.

    Args:
        model: model whose tables, at any depth, are reported, with one warning per module with
            violations.

    Example:
        >>> model = torch.nn.Sequential(emblib.TableBatchedEmbeddingBags([emblib.TableSpec(10, 4)]))
        >>> emblib.report_bounds_violations(model)  # there were none
    """
    for module in dict.fromkeys(_table_modules(model)):
        counts = getattr(module, "bounds_violations", None)
        if counts is not None:
            report_of(module).report_now(counts)


def _table_modules(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules of a model, and those of its collections, which are not submodules."""
    for module in model.modules():
        yield module
        if (table_modules := getattr(module, "table_modules", None)) is not None:
            for table_module in table_modules():
                yield from table_module.modules()
