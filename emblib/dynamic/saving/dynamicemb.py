"""Save and load tables of a module as files of NVIDIA's DynamicEmb, see `dynamicemb_files`."""

from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from emblib.columns import Hyper
from emblib.dynamic import keys as routing
from emblib.dynamic.saving import dynamicemb_files, loading
from emblib.dynamic.saving.checkpoint import set_table_entries, table_entries, target_of
from emblib.dynamic.saving.dumps import Part
from emblib.dynamic.saving.dynamicemb_files import DynamicEmbTable, Layout
from emblib.dynamic.saving.entries import WEIGHT
from emblib.dynamic.saving.loading import Loaded
from emblib.dynamic.state import DynamicState, of_state


@of_state
def save_dynamicemb(
    state: DynamicState,
    directory: str | Path,
    table: int | str,
    arguments: Mapping[str, Any] | None = None,
    *,
    leave_out: Collection[str] = (),
) -> None:
    """Save a table in the files of NVIDIA's DynamicEmb, as rank 0 of 1.

    Args:
        state: the tables.
        directory: directory of the collection. Existing files of the table stay until the new ones
            are written, so there must be space for both.
        table: number or name of the table.
        arguments: content of `<table>_opt_args.json`, besides the eviction strategy and the router;
            None writes the learning rate.
        leave_out: "states" of the optimizer, "counts" of keys that were not admitted yet.

    Raises:
        KeyError, IndexError: there is no such table.
        ValueError: `leave_out` has an unknown word.
        OSError: the files cannot be written; old ones stay.
    """
    t = state.table_number(table)
    content = export_dynamicemb(state, t, arguments, leave_out=leave_out)
    layout = Layout(state.index.order)
    dynamicemb_files.write(directory, state.table_names[t], layout, content, state.index.tick)


@of_state
def stage_dynamicemb(
    state: DynamicState,
    directory: str | Path,
    table: int | str,
    content: DynamicEmbTable,
    *,
    part: Part,
    has_uses_first: bool = False,
) -> None:
    """Write the files of one rank without replacing the files of the table.

    `dynamicemb_files.commit` replaces them, once the files of all ranks are staged.

    Args:
        state: the tables.
        directory: directory of the collection.
        table: number or name of the table.
        content: the table to write, see `export_dynamicemb`.
        part: rank and number of ranks.
        has_uses_first: order of two score columns, see `dynamicemb_files.Layout`.

    Raises:
        KeyError, IndexError: there is no such table.
        OSError: the files cannot be written.
    """
    t = state.table_number(table)
    dynamicemb_files.stage(
        directory,
        state.table_names[t],
        Layout(state.index.order, has_uses_first),
        content,
        state.index.tick,
        part=part,
    )


@of_state
def load_dynamicemb(
    state: DynamicState,
    directory: str | Path,
    table: int | str,
    *,
    part: Part = Part(),  # noqa: B008
    leave_out: Collection[str] = (),
) -> Loaded:
    """Replace a table by one that DynamicEmb saved on any number of ranks.

    The hyperparameters of the optimizer stay as they are. States that were not saved start from
    their first value. Counts are loaded if the table has an `ExactCounter`.

    Args:
        state: the tables.
        directory: directory of the collection.
        table: number or name of the table, which is also the name of the files.
        part: rank and number of ranks that load; a rank loads the keys that it owns.
        leave_out: "states" of the optimizer, "counts" of keys that were not admitted yet.

    Raises:
        KeyError, IndexError: there is no such table.
        DumpError: files are missing or truncated, or are of another dim or optimizer.
        ValueError: the entries do not fit the table, or an unknown word in `leave_out`; nothing is
            changed.
    """
    content = read_dynamicemb(state, directory, table, leave_out=leave_out)
    owned_content = content.owned(lambda keys: routing.owner(keys, part.world_size) == part.rank)
    return set_dynamicemb(state, table, owned_content)


@of_state
def read_dynamicemb(
    state: DynamicState,
    directory: str | Path,
    table: int | str,
    *,
    rank: int | None = None,
    leave_out: Collection[str] = (),
    has_uses_first: bool = False,
) -> DynamicEmbTable:
    """Read and check what `load_dynamicemb` would load, for `set_dynamicemb`; change nothing.

    `rank` selects the files of one rank, None reads all; `has_uses_first` is that of `Layout`.

    Raises:
        Exception: see `load_dynamicemb`.
    """
    _check_left_out(leave_out)
    t = state.table_number(table)
    views = [] if "states" in leave_out else list(state.table_rows(t).items())[1:]
    content = dynamicemb_files.read(
        directory,
        state.table_names[t],
        state.specs[t].dim,
        {name: view.shape[1:] for name, view in views},
        Layout(state.index.order, has_uses_first),
        rank=rank,
    )
    loading.check(target_of(state, t), content.entries)
    return replace(content, counts=None) if "counts" in leave_out else content


@of_state
def set_dynamicemb(state: DynamicState, table: int | str, content: DynamicEmbTable) -> Loaded:
    """Replace a table by what `read_dynamicemb` returned, and its exact counts if both have any.

    The newest stamp becomes the tick, or a later one: keys do not expire by the steps before.
    """
    t = state.table_number(table)
    age = max(0, state.index.tick - content.entries.newest_stamp())
    entries = replace(content.entries, stamps=content.entries.stamps + age)
    loaded = set_table_entries(state, t, entries)
    if state.scores is not None:  # files with scores of steps have no times of use
        scores = content.entries.scores
        state.scores.continue_steps(t, content.entries.stamps if scores is None else scores, scores)
    admission = state.admission
    if content.counts is not None and admission is not None and admission.counts_exactly(t):
        admission.set_counts(t, content.counts[0], content.counts[1])
    return loaded


@of_state
def export_dynamicemb(
    state: DynamicState,
    table: int,
    arguments: Mapping[str, Any] | None = None,
    *,
    leave_out: Collection[str] = (),
) -> DynamicEmbTable:
    """Return a copy of the content of a table, sorted by route, so that it can be saved later.

    `arguments` and `leave_out` are those of `save_dynamicemb`.
    """
    _check_left_out(leave_out)
    entries = table_entries(state, table).sorted()
    if "states" in leave_out:
        entries = replace(entries, rows={WEIGHT: entries.rows[WEIGHT]})
    counts, admission = None, state.admission
    if "counts" not in leave_out and admission is not None and admission.counts_exactly(table):
        counts = admission.counts(table)
    saved_arguments = (
        {"lr": float(state.hyperparams[Hyper.LEARNING_RATE])} if arguments is None else arguments
    )
    return DynamicEmbTable(entries, saved_arguments, counts)


def _check_left_out(leave_out: Collection[str]) -> None:
    unknown_parts = sorted(set(leave_out) - {"states", "counts"})
    if unknown_parts:
        raise ValueError(f"leave_out takes 'states' and 'counts', got {unknown_parts}")
