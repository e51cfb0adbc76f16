"""Load nested state dicts, whatever plan and number of ranks saved them.

`load` flattens the state to leaves, and compares every leaf with the metadata of the checkpoint
before it writes anything (`_Loading`). It makes a `Target` per leaf, with new memory if the saved
size or sharding may differ, and reads all targets at once. Then modules and optimizers load their
state dicts.
"""

import itertools
import json
import re
import warnings
from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from emblib.collections.fused_states import HYPER
from emblib.collections.optimizers import KeyedOptimizer
from emblib.dynamic.hash_index import HASH_KEYS
from emblib.sharding.checkpoints import sharded_table
from emblib.sharding.checkpoints.keyed import KeyReader, has_row_per_key, is_of_saved_keys
from emblib.sharding.checkpoints.saved_groups import SavedGroups, write_hyperparams
from emblib.sharding.checkpoints.saving import NOTES, Group
from emblib.sharding.checkpoints.sharded_table import KeyedRows, RowStates, ShardedTable
from emblib.sharding.checkpoints.state_trees import (
    CheckpointError,
    Leaf,
    expand_state_dicts,
    is_stateful,
    is_tensor_of_size,
    leaves,
    run_on_all_ranks,
)
from emblib.sharding.ranks import RankGroup, invoke_on_rank_and_broadcast_result
from emblib.sharding.sharding_types import Shard, Span
from emblib.specs import check_bool
from emblib.storage.composed import describe_difference
from emblib.storage.composed_lookup import LAYOUT as ID_LAYOUT
from emblib.tables.durable_files import check_archive
from emblib.tt import layout_entry

if TYPE_CHECKING:
    from emblib.sharding.checkpoints.files import Reader


class Target:
    """Memory into which a saved value is read, and the leaf whose value it then replaces.

    Args:
        leaf: leaf of the state to load into.
        buffer: tensor of the saved size to read into; it may be the value of the leaf. For a saved
            value that is not a tensor, anything: the value that is read replaces it.
    """

    def __init__(self, leaf: Leaf, buffer: Any) -> None:
        self.leaf, self.buffer = leaf, buffer

    def finish(self) -> None:
        """Replace the value of the leaf by `buffer`."""
        self.leaf.replace(self.buffer)


class RowStateTarget(Target):
    """The target of a row-wise state, of a table that may now be cut by other columns.

    The rows of this rank are read with all saved intervals of columns, see `RowStates`. `finish`
    writes to each shard the mean over its own columns.

    Args:
        leaf: leaf with a `RowStates`, a `ShardedTable` `[R]` or a tensor `[R]`; `finish` writes to
            its memory.
        size: the saved size: `[R]`, or `[R, intervals]`.
        column_cuts: first columns of the saved intervals, and the end; None if the table was not
            cut.
    """

    def __init__(self, leaf: Leaf, size: torch.Size, column_cuts: Sequence[int] | None) -> None:
        value: Tensor = leaf.value
        self._column_cuts = column_cuts
        self._num_intervals = size[1] if len(size) > 1 else 1
        row_spans = [(0, size[0])]
        if isinstance(value, ShardedTable):
            row_spans = [value.shards[i].rows for i in value.parts]
        # Shards of a rank may share rows; disjoint spans read each row once.
        self._row_spans = _split_at_edges(row_spans)
        shards = [Shard(0, span, (0, self._num_intervals)) for span in self._row_spans]
        parts = {
            i: torch.empty(shard.shape[: len(size)], dtype=value.dtype, device="cpu")
            for i, shard in enumerate(shards)
        }
        super().__init__(leaf, ShardedTable(size, shards, parts, RankGroup.single(), value.dtype))

    def finish(self) -> None:
        """Write to each local shard the mean over its columns."""
        value = self.leaf.value
        if not isinstance(value, ShardedTable):
            value.copy_(self._mean_states((0, value.shape[0]), None))
            return
        for i, memory in value.parts.items():
            shard = value.shards[i]
            columns = None
            if isinstance(value, RowStates):
                columns = (value.cuts[shard.columns[0]], value.cuts[shard.columns[1]])
            states = self._mean_states(shard.rows, columns)
            memory.copy_(states.view(-1, *[1] * (memory.dim() - 1)).expand_as(memory))

    def _mean_states(self, rows: Span, columns: Span | None) -> Tensor:
        """Return the states of a span of rows, `[rows]`: means over `columns`, None for all."""
        blocks = [
            self.buffer.parts[i]
            for i, span in enumerate(self._row_spans)
            if rows[0] <= span[0] and span[1] <= rows[1]
        ]
        states = torch.cat(blocks) if blocks else torch.empty(0, self._num_intervals, device="cpu")
        if self._column_cuts is None:
            return states.view(-1)
        return sharded_table.average_columns(
            states, self._column_cuts, columns or (0, self._column_cuts[-1])
        )


def _split_at_edges(spans: Sequence[Span]) -> list[Span]:
    """Return the spans that result if overlapping spans are split at all their edges."""
    edges = sorted({edge for span in spans for edge in span})
    return [
        (start, end)
        for start, end in itertools.pairwise(edges)
        if any(span[0] <= start and end <= span[1] for span in spans)
    ]


def load(
    state: MutableMapping[str, Any], path: str | Path, ranks: Group = None, *, strict: bool = True
) -> list[str]:
    """Fill `state` from a checkpoint written by `save`; a collective over `ranks`.

    Returns the names of the values that the checkpoint lacks; without `strict` there may be some.

    Modules and optimizers that are values of `state` get their saved state dicts. Nested dicts and
    lists are replaced by new ones with the tensors of `state`, which are filled in place. Other
    values are new, and so are rows of dynamic tables, whose number may differ. Every rank reads
    only its own shards of a table, whatever plan saved it. Rank 0 warns of a checkpoint without
    checksums.

    Args:
        state: state dict with the same names as the one passed to `save`.
        path: directory of the checkpoint, also one of torch.distributed.checkpoint.
        ranks: the ranks that load; by default all processes, or this process alone.
        strict: whether a value that the checkpoint lacks is an error; otherwise it stays unchanged,
            with two exceptions. States of a dynamic table whose keys are loaded start from their
            initial values, and are left out of nested dicts. Tables with a fused optimizer count
            the steps of the loaded tables with an equal one. Values that only the checkpoint has
            are ignored.

    Raises:
        CheckpointError: the checkpoint is missing or incomplete, it lacks a value, a tensor has
            another size, an optimizer has other groups of parameters, or the metadata is damaged or
            names something that may run code; then nothing is changed. Or data has another checksum
            than when it was saved, or a value names something that may run code; then part of
            `state` may have been filled. Or another rank raised an error.
        TypeError: `path` is None, `state` is not a dict, or `strict` is not a bool.
        KeyError: a `KeyedOptimizer` cannot have the saved state; nothing is changed.
        ValueError: a `KeyedOptimizer` cannot have the saved numbers; nothing is changed.
        OSError: this rank cannot read the metadata; nothing is changed.
        Exception: `load_state_dict` of a value raised it; part of `state` may have been filled.
    """
    from emblib.sharding.checkpoints.files import Reader, read

    def open_checkpoint() -> Reader:
        check_bool("strict", strict)
        if path is None:
            raise TypeError(
                "path must be a directory, got None: latest(...) gives None where there is no "
                "whole checkpoint, so load only what it found"
            )
        return Reader(Path(path).expanduser())

    ranks = RankGroup.from_value(ranks)
    # Before `_Loading`, which communicates if modules have dynamic tables: their state dicts do.
    reader = run_on_all_ranks(ranks, open_checkpoint)
    loading = run_on_all_ranks(
        ranks, lambda: _Loading(state, Path(reader.path), reader, strict=strict)
    )
    if not reader.has_checksums and ranks.rank == 0:
        warnings.warn(
            f"{path} has no checksums, so damage to it is not noticed: it was saved by an older "
            "emblib or by torch.distributed.checkpoint; save it again with "
            "emblib.sharding.checkpoints.save",
            stacklevel=2,
        )
    # Each rank finds the saved rows of its shards of dynamic tables, and sends them to all ranks.
    targets = loading.targets(ranks)
    targets = run_on_all_ranks(ranks, lambda: loading.read_optimizer_numbers(targets))
    values = {name: target.buffer for name, target in targets.items()}
    read(values, reader, ranks)
    for name, value in values.items():
        targets[name].buffer = value  # `read` replaces values that are not tensors
    run_on_all_ranks(ranks, lambda: loading.finish(targets))
    return loading.missing_names


def latest(directory: str | Path, ranks: Group = None) -> Path | None:
    """Return the newest complete checkpoint in a directory, or None; a collective over `ranks`.

    The newest has the greatest number at the end of its name, such as `step_1200`. Directories
    without a number are ignored. Rank 0 searches, and all ranks get its result: None if the
    directory is missing or rank 0 has no permission to read it.
    """
    from emblib.sharding.checkpoints.files import METADATA

    def find_latest() -> Path | None:
        paths = [path.parent for path in Path(directory).expanduser().glob(f"*/{METADATA}")]
        numbered = [
            (int(match[0]), path) for path in paths if (match := re.search(r"\d+\Z", path.name))
        ]
        return max(numbered)[1] if numbered else None

    return invoke_on_rank_and_broadcast_result(RankGroup.from_value(ranks), 0, find_latest)


_MAX_LISTED = 5  # names or problems in an error message


def _join_texts(texts: Sequence[str], separator: str = ", ") -> str:
    """Join the first texts, and say how many more there are."""
    num_omitted = len(texts) - _MAX_LISTED
    suffix = [f"and {num_omitted} more"] if num_omitted > 0 else []
    return separator.join([*texts[:_MAX_LISTED], *suffix])


def load_export(path: str | Path) -> dict[str, Any]:
    """Load a file of `export` to the CPU and return the state; not a collective.

    Raises:
        CheckpointError: the file is damaged, or it names something that may run code.
        OSError: the file cannot be read.
    """
    remedy, path = "load another one, or export it again", Path(path).expanduser()
    try:
        check_archive(path)
    except ValueError as error:
        raise CheckpointError(f"{path} is damaged: {error}; {remedy}") from error
    try:
        content: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises errors of many types for a damaged file
        message = str(error).partition("\n")[0]
        raise CheckpointError(f"{path} cannot be loaded ({message}); {remedy}") from error
    return content


class _Loading:
    """The values to load, compared with the saved metadata.

    `load` calls the constructor, `targets` and `read_optimizer_numbers`, reads the targets, and
    calls `finish`. Until it reads the targets, `state` is unchanged. The constructor reads small
    entries only, and raises the errors of `load`. It is a collective if modules of `state` have
    dynamic tables.

    Attributes:
        reader: reader of the checkpoint.
        metadata: metadata of each saved entry, by name.
        tree: copy of `state` in which modules and optimizers are their state dicts.
        column_cuts: columns at which the saved row-wise states were cut, by name.
        leaves: leaves of `tree` that the checkpoint has.
        missing_names: names of leaves that the checkpoint lacks.
        _incomplete_keys: keys of `state` whose dynamic tables load without some of their states.
    """

    def __init__(
        self, state: MutableMapping[str, Any], path: Path, reader: "Reader", *, strict: bool
    ) -> None:
        self.state, self.path, self.reader = state, path, reader
        metadata = reader.metadata
        self.metadata: dict[str, Any] = dict(metadata.state_dict_metadata)
        self.tree = expand_state_dicts(state)
        # Optimizers: allocate states that only the checkpoint has.
        self._groups = {
            key: SavedGroups(key, value, self.tree[key], self.metadata, self._read_entries)
            for key, value in state.items()
            if isinstance(value, torch.optim.Optimizer)
        }
        self._add_missing_optimizer_states(metadata.planner_data or {})
        # Row-wise states: find how the saved ones were cut by columns.
        self.column_cuts: dict[str, tuple[int, ...]] = {}
        if NOTES in self.metadata:
            self._check_complete([NOTES])
            notes = self._read_entries([NOTES])
            self.column_cuts = self._parse_notes(bytes(notes[NOTES].flatten().tolist()))
        # Drop leaves that older checkpoints lack; compare the others with the saved entries.
        all_leaves = self._drop_unsaved_layouts(
            self._drop_unsaved_hash_keys(list(leaves(self.tree)))
        )
        self._check_id_mappings(all_leaves)
        missing_names = [leaf.name for leaf in all_leaves if leaf.name not in self.metadata]
        self._check_quantised(missing_names)
        # Groups of optimizers that differ from the saved ones are matched by names of parameters.
        for groups in self._groups.values():
            if not groups.are_saved:
                prefix = groups.options_prefix
                missing_names = [name for name in missing_names if not name.startswith(prefix)]
                missing_names += groups.read_options(strict=strict and not missing_names)
                all_leaves = [leaf for leaf in all_leaves if not leaf.name.startswith(prefix)]
        self.missing_names = sorted(missing_names)
        if missing_names and strict:
            raise CheckpointError(
                f"{path} does not have {_join_texts(self.missing_names)}: it is of another model; "
                "strict=False leaves them as they are"
            )
        self._incomplete_keys = self._drop_states_of_other_keys(all_leaves)
        self.leaves = [leaf for leaf in all_leaves if leaf.name in self.metadata]
        self._check_sizes()
        for groups in self._groups.values():
            groups.share_steps()

    def _read_entries(self, names: Iterable[str]) -> dict[str, Any]:
        """Return saved values by name; this rank alone reads them, so they should be small."""
        from emblib.sharding.checkpoints.files import read

        values: dict[str, Any] = dict.fromkeys(names)
        tensors = {name: self.metadata[name] for name in values if self._is_tensor(name)}
        self._check_complete(tensors)
        for name, metadata in tensors.items():
            values[name] = torch.empty(metadata.size, dtype=metadata.properties.dtype, device="cpu")
        if values:
            read(values, self.reader, RankGroup.single())
        return values

    def _is_tensor(self, name: str) -> bool:
        """Return whether the saved entry `name` is a tensor."""
        return hasattr(self.metadata[name], "properties")

    def _check_quantised(self, missing_names: Sequence[str]) -> None:
        """Raise CheckpointError where quantised tables have the layout from before 0.1.0."""
        old_tables = [
            name.removesuffix(".packed")
            for name in missing_names
            if name.endswith(".packed") and _sibling(name, "scales") in self.metadata
        ]
        if old_tables:
            raise CheckpointError(
                f"{self.path} has the rows of {_join_texts(old_tables)} as before 0.1.0, with "
                "scales apart from numbers: quantise the trained tables again, with "
                "collection.quantized(), or read it with torch.distributed.checkpoint and load "
                "that into the unsharded collection, whose load_state_dict converts the rows"
            )

    def _check_complete(self, names: Iterable[str]) -> None:
        """Raise CheckpointError unless the chunks of saved tensors have all of their elements.

        Memory is allocated by the metadata's sizes, but files have only the chunks: other elements
        would stay uninitialised.
        """
        from emblib.sharding.checkpoints.unpickling import has_all_elements

        incomplete_names = sorted(
            name for name in names if not has_all_elements(self.metadata[name])
        )
        if incomplete_names:
            raise CheckpointError(
                f"{self.path} is damaged: it does not have all of {_join_texts(incomplete_names)}; "
                "load another checkpoint, e.g. an older one"
            )

    def _parse_notes(self, notes: bytes) -> dict[str, tuple[int, ...]]:
        """Return the column cuts of tables, by the names of their states.

        Raises CheckpointError unless `notes` has valid cuts of saved states.
        """
        try:
            column_cuts = {name: tuple(cuts) for name, cuts in json.loads(notes)["cuts"].items()}
            for name, cuts in column_cuts.items():
                are_ints = all(type(cut) is int for cut in cuts)
                if not are_ints or cuts[:1] != (0,) or list(cuts) != sorted(set(cuts)):
                    raise ValueError(f"cuts of {name} are {cuts}")
                size = tuple(getattr(self.metadata.get(name), "size", ()))
                if len(size) != 2 or size[1] != len(cuts) - 1:
                    raise ValueError(f"cuts of {name}, of the size {size}, are {cuts}")
        except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"{self.path}: the entry {NOTES!r} is not a note of emblib.sharding.checkpoints "
                f"({type(error).__name__}: {error})"
            ) from error
        return column_cuts

    def _add_missing_optimizer_states(self, paths: Mapping[str, tuple[Any, ...]]) -> None:
        """Allocate states that a `torch.optim` optimizer creates in its first step.

        `paths` has the steps to each saved entry, by name. The steps to a state are (key of the
        optimizer, "state", parameter, name of the state). States are added to `tree`.
        """
        for key, value in self.state.items():
            if not isinstance(value, torch.optim.Optimizer) or "state" not in self.tree[key]:
                continue
            states = self.tree[key]["state"]
            names = {leaf.name for leaf in leaves(self.tree[key], f"{key}.")}
            parameters = _parameters(value)
            parameter_names = self._groups[key].parameter_names
            # Numbers of parameters are text in a checkpoint.
            parameters_by_text = {str(number): number for number in parameters}
            for name, path in paths.items():
                if name in names or path[:2] != (key, "state") or len(path) != 4:
                    continue
                if name not in self.metadata:
                    continue
                parameter = parameters_by_text.get(path[2], path[2])
                if isinstance(value, KeyedOptimizer) and parameter not in parameter_names:
                    continue
                buffer = self._allocate_state(parameters.get(parameter), name)
                states.setdefault(parameter, {})[path[3]] = buffer

    def _allocate_state(self, parameter: Tensor | None, name: str) -> Tensor | None:
        """Allocate a saved state, sharded like its parameter if of the same size.

        Returns None for a state that is not a tensor.
        """
        if not self._is_tensor(name):
            return None
        metadata = self.metadata[name]
        dtype = metadata.properties.dtype
        if parameter is not None and parameter.size() == metadata.size:
            return torch.empty_like(parameter, dtype=dtype, requires_grad=False)
        self._check_complete([name])
        return torch.empty(metadata.size, dtype=dtype, device="cpu")

    def _drop_unsaved_hash_keys(self, all_leaves: list[Leaf]) -> list[Leaf]:
        """Drop leaves of sketch hash keys if the checkpoint has counters but no hash keys.

        They are removed from `tree` too. Such counters were counted without a hash key, and are
        invalid with the hash key of this model.
        """
        unsaved_keys = {
            leaf.name: leaf
            for leaf in all_leaves
            if leaf.name.endswith(f".sketches.{HASH_KEYS}")
            and leaf.name not in self.metadata
            and _sibling(leaf.name, "counters") in self.metadata
        }
        for leaf in unsaved_keys.values():
            del leaf.container[leaf.key]
        return [leaf for leaf in all_leaves if leaf.name not in unsaved_keys]

    def _drop_states_of_other_keys(self, all_leaves: Sequence[Leaf]) -> set[Any]:
        """Drop unsaved values with one row per key from `tree` if their keys are saved.

        Their rows belong to the current keys, which the saved keys replace. Returns the keys of
        `state` whose values lack something now.
        """
        values_by_name = {leaf.name: leaf.value for leaf in all_leaves}
        dropped_leaves = [
            leaf
            for leaf in all_leaves
            if leaf.name not in self.metadata
            and is_of_saved_keys(leaf.name, values_by_name, self.metadata)
        ]
        for leaf in dropped_leaves:
            del leaf.container[leaf.key]
        return {
            key for key in self.state for leaf in dropped_leaves if leaf.name.startswith(f"{key}.")
        }

    def _drop_unsaved_layouts(self, all_leaves: list[Leaf]) -> list[Leaf]:
        """Drop tensor-train layouts that an older checkpoint lacks, also from `tree`; check others.

        Returns the remaining leaves.

        Raises:
            CheckpointError: the saved cores belong to another tensor train.
        """
        layouts = {leaf.name: leaf for leaf in all_leaves if _is_layout(leaf)}
        saved_names = filter(self._is_tensor, layouts.keys() & self.metadata.keys())
        saved_values = self._read_entries(saved_names)
        saved_layouts = {name: value.to(torch.int64) for name, value in saved_values.items()}
        # Older checkpoints have cores without a layout.
        unsaved_layouts = {
            name
            for name in layouts.keys() - saved_layouts.keys()
            if _sibling(name, "cores.0") in self.metadata
        }
        problems = [
            f"{_sibling(name, 'cores')}: {problem}"
            for name in sorted(saved_layouts.keys() | unsaved_layouts)
            if (
                problem := layout_entry.describe_difference(
                    saved_layouts.get(name), layouts[name].value
                )
            )
        ]
        if problems:
            raise CheckpointError(f"{self.path} is of other tables; {_join_texts(problems, '; ')}")
        for name in unsaved_layouts:  # the sizes of the cores are checked instead
            del layouts[name].container[layouts[name].key]
        return [leaf for leaf in all_leaves if leaf.name not in unsaved_layouts]

    def _check_id_mappings(self, all_leaves: Sequence[Leaf]) -> None:
        """Raise CheckpointError where ids read other rows than those of the saved table."""
        values_by_name = {leaf.name: leaf.value for leaf in all_leaves}
        saved_leaves = values_by_name.keys() & self.metadata.keys()
        mapping_names = {_sibling(name, ID_LAYOUT) for name in saved_leaves}
        saved_mappings = self._read_entries(
            filter(self._is_tensor, mapping_names & self.metadata.keys())
        )
        names = sorted(
            name for name in mapping_names if name in saved_mappings or name in values_by_name
        )
        problems = [
            f"{name}: {problem}"
            for name in names
            if (problem := describe_difference(saved_mappings.get(name), values_by_name.get(name)))
        ]
        if problems:
            raise CheckpointError(f"{self.path} is of other tables; {_join_texts(problems, '; ')}")

    def _saved_size(self, leaf: Leaf) -> torch.Size | None:
        """Return the saved size; None for values that are not tensors."""
        return self.metadata[leaf.name].size if self._is_tensor(leaf.name) else None

    def _check_sizes(self) -> None:
        """Raise CheckpointError for leaves of another size than was saved."""
        problems = []
        self._check_complete(
            leaf.name for leaf in self.leaves if has_row_per_key(leaf.name, self.metadata)
        )
        for leaf in self.leaves:
            saved_size, value = self._saved_size(leaf), leaf.value
            if saved_size is None:
                is_valid = not isinstance(value, Tensor)
            elif has_row_per_key(leaf.name, self.metadata):
                is_valid = isinstance(value, Tensor) and value.size()[1:] == saved_size[1:]
            elif leaf.name in self.column_cuts or isinstance(value, RowStates):
                is_valid = isinstance(value, Tensor) and value.size()[:1] == saved_size[:1]
            else:
                is_valid = is_tensor_of_size(value, saved_size)
            if not is_valid:
                current_size = (
                    tuple(value.size()) if isinstance(value, Tensor) else type(value).__name__
                )
                saved = "no tensor" if saved_size is None else f"a tensor {tuple(saved_size)}"
                problems.append(f"{leaf.name}: saved is {saved}, here is {current_size}")
        if problems:
            raise CheckpointError(
                f"{self.path} is of other tables or another optimizer; "
                f"{_join_texts(problems, '; ')}"
            )

    def targets(self, ranks: RankGroup) -> dict[str, Target]:
        """Return the target of each leaf, by name; a collective over `ranks`."""
        reader = KeyReader(self.reader, self.metadata)
        keyed_leaves = [leaf for leaf in self.leaves if has_row_per_key(leaf.name, self.metadata)]
        local_spans = run_on_all_ranks(
            ranks, lambda: {leaf.name: reader.spans(leaf) for leaf in keyed_leaves}
        )
        rows_by_rank = ranks.gather_objects(local_spans)
        return run_on_all_ranks(
            ranks,
            lambda: {leaf.name: self._make_target(leaf, rows_by_rank) for leaf in self.leaves},
        )

    def _make_target(self, leaf: Leaf, rows_by_rank: list[dict[str, dict[int, Span]]]) -> Target:
        """Return the target of a leaf.

        `rows_by_rank` are the rows of keyed tables that each rank reads, by rank, name and block.
        """
        value, size = leaf.value, self._saved_size(leaf)
        if size is not None and has_row_per_key(leaf.name, self.metadata):
            if not isinstance(value, KeyedRows):
                return Target(leaf, torch.empty(size, dtype=value.dtype, device="cpu"))
            rows_by_block = {
                block: rows
                for rows_by_name in rows_by_rank
                for block, rows in rows_by_name[leaf.name].items()
            }
            return Target(leaf, _allocate_rows(value, size, rows_by_block))
        column_cuts = self.column_cuts.get(leaf.name)
        if size is not None and (column_cuts is not None or isinstance(value, RowStates)):
            return RowStateTarget(leaf, size, column_cuts)
        return Target(leaf, value)

    def read_optimizer_numbers(self, targets: Mapping[str, Target]) -> dict[str, Target]:
        """Read the numbers of `KeyedOptimizer`s into `tree`; return the remaining targets.

        Each optimizer checks its numbers while `state` is still unchanged.

        Raises:
            KeyError, ValueError: an optimizer cannot have the saved numbers.
        """
        optimizers = {
            key: value for key, value in self.state.items() if isinstance(value, KeyedOptimizer)
        }
        prefixes = tuple(f"{key}." for key in optimizers)
        number_names = {
            name
            for name, target in targets.items()
            if name.startswith(prefixes)
            and (target.leaf.key == HYPER or not isinstance(target.leaf.value, Tensor))
        }
        for name, value in self._read_entries(number_names).items():
            leaf = targets[name].leaf
            if leaf.key == HYPER:
                write_hyperparams(leaf.value, value)
            else:
                leaf.replace(value)
        for key, optimizer in optimizers.items():
            optimizer.check_state_dict(self.tree[key])
        return {name: target for name, target in targets.items() if name not in number_names}

    def finish(self, targets: Mapping[str, Target]) -> None:
        """Put what was read into `state`: modules and optimizers load their state dicts."""
        for target in targets.values():
            target.finish()
        for key, value in self.state.items():
            if key in self._incomplete_keys and isinstance(value, nn.Module):
                value.load_state_dict(self.tree[key], strict=False)
            elif is_stateful(value):
                value.load_state_dict(self.tree[key])
            else:
                self.state[key] = self.tree[key]


def _is_layout(leaf: Leaf) -> bool:
    """Return whether a leaf describes the cores of a tensor train."""
    name = leaf.name.rpartition(".")[2]
    return name == layout_entry.NAME and isinstance(leaf.value, Tensor)


def _sibling(name: str, suffix: str) -> str:
    """Return the name of another entry of the same table."""
    return f"{name[: name.rfind('.') + 1]}{suffix}"


def _parameters(optimizer: Any) -> dict[Any, Tensor]:
    """Return parameters by their name or number in the optimizer's state dict."""
    parameters_by_name = getattr(optimizer, "params", None)
    if isinstance(parameters_by_name, dict):
        return parameters_by_name
    parameters = (group["params"] for group in optimizer.param_groups)
    return dict(enumerate(itertools.chain.from_iterable(parameters)))


def _allocate_rows(
    value: KeyedRows, size: torch.Size, rows_by_block: Mapping[int, Span]
) -> KeyedRows:
    """Allocate memory for the saved rows of the blocks of a table; rows are given by block."""
    shards = [shard._replace(rows=rows_by_block[block]) for block, shard in enumerate(value.shards)]
    parts = {
        block: torch.empty(shards[block].shape[: value.dim()], dtype=value.dtype, device="cpu")
        for block in value.parts
    }
    return KeyedRows(size, shards, parts, value.ranks, value.dtype)
