"""Save and load tables of a module as files of NVIDIA's DynamicEmb, see `dynamicemb_files`."""

from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from emblib.dynamic import keys as routing
from emblib.dynamic.saving import dynamicemb_files, loading
from emblib.dynamic.saving.checkpoint import set_table_entries, table_entries, target_of
from emblib.dynamic.saving.dumps import Part
from emblib.dynamic.saving.dynamicemb_files import DynamicEmbTable, Layout
from emblib.dynamic.saving.entries import WEIGHT
from emblib.dynamic.saving.loading import Loaded
from emblib.tables.locks import atomic

if TYPE_CHECKING:
    from emblib.dynamic.module import DynamicEmbeddingBags


@atomic
def save_dynamicemb(
    module: "DynamicEmbeddingBags",
    directory: str | Path,
    table: int | str,
    arguments: Mapping[str, Any] | None = None,
    *,
    leave_out: Collection[str] = (),
) -> None:
    """Save a table in the files of NVIDIA's DynamicEmb.

    Args:
        module: module of the table.
        directory: directory of the collection. Existing files of the table stay until the new ones
            are written, so there must be space for both.
        table: number or name of the table.
        arguments: content of `<table>_opt_args.json`; None writes the learning rate.
        leave_out: "states" of the optimizer, "counts" of keys that were not admitted yet.
    """
    t = module.table_number(table)
    saved = export_dynamicemb(module, t, arguments, leave_out=leave_out)
    layout = Layout(module.index.order)
    dynamicemb_files.write(directory, module.table_names[t], layout, saved, module.index.tick)


@atomic
def stage_dynamicemb(
    module: "DynamicEmbeddingBags",
    directory: str | Path,
    table: int | str,
    found: DynamicEmbTable,
    *,
    part: Part,
    uses_first: bool = False,
) -> None:
    """Write the files of one rank without replacing the files of the table.

    `dynamicemb_files.commit` replaces them, once the files of all ranks are staged.

    Args:
        module: module of the table, for its name and order of eviction.
        directory: directory of the collection.
        table: number or name of the table.
        found: table to write, see `export_dynamicemb`.
        part: rank and number of ranks.
        uses_first: order of two score columns, see `dynamicemb_files.Layout`.
    """
    t = module.table_number(table)
    dynamicemb_files.stage(
        directory,
        module.table_names[t],
        Layout(module.index.order, uses_first),
        found,
        module.index.tick,
        part=part,
    )


@atomic
def load_dynamicemb(
    module: "DynamicEmbeddingBags",
    directory: str | Path,
    table: int | str,
    *,
    part: Part = Part(),  # noqa: B008
    leave_out: Collection[str] = (),
) -> Loaded:
    """Replace a table by one that DynamicEmb saved on any number of ranks.

    The hyperparameters of the optimizer stay as they are. States that were not saved start from
    their first value.

    Args:
        module: module of the table.
        directory: directory of the collection.
        table: number or name of the table, which is also the name of the files.
        part: rank and number of ranks that load.
        leave_out: "states" of the optimizer, "counts" of keys that were not admitted yet.

    Raises:
        DumpError: files are missing or truncated, or are of another dim or optimizer.
    """
    found = read_dynamicemb(module, directory, table, leave_out=leave_out)
    owned = found.owned(lambda keys: routing.owner(keys, part.world_size) == part.rank)
    return set_dynamicemb(module, table, owned)


@atomic
def read_dynamicemb(
    module: "DynamicEmbeddingBags",
    directory: str | Path,
    table: int | str,
    *,
    rank: int | None = None,
    leave_out: Collection[str] = (),
    uses_first: bool = False,
) -> DynamicEmbTable:
    """Read and check what `load_dynamicemb` would load, for `set_dynamicemb`; change nothing.

    Raises:
        DumpError: files are missing or truncated, or are of another dim or optimizer.
        ValueError: the entries do not fit the table.
    """
    _check_left_out(leave_out)
    t = module.table_number(table)
    views = [] if "states" in leave_out else list(module.table_rows(t).items())[1:]
    found = dynamicemb_files.read(
        directory,
        module.table_names[t],
        module.tables[t].dim,
        {name: view.shape[1] if view.dim() > 1 else 1 for name, view in views},
        Layout(module.index.order, uses_first),
        rank=rank,
    )
    loading.check(target_of(module, t), found.entries)
    return replace(found, counts=None) if "counts" in leave_out else found


@atomic
def set_dynamicemb(
    module: "DynamicEmbeddingBags", table: int | str, found: DynamicEmbTable
) -> Loaded:
    """Replace a table by one that `read_dynamicemb` returned."""
    t = module.table_number(table)
    loaded = set_table_entries(module, t, found.entries)
    admission = module.admission
    if found.counts is not None and admission is not None and admission.counts_exactly(t):
        admission.set_counts(t, found.counts[0], found.counts[1])
    return loaded


@atomic
def export_dynamicemb(
    module: "DynamicEmbeddingBags",
    table: int,
    arguments: Mapping[str, Any] | None = None,
    *,
    leave_out: Collection[str] = (),
) -> DynamicEmbTable:
    """Return the content of a table to save; rows are copied when they are indexed."""
    _check_left_out(leave_out)
    entries = table_entries(module, table).sorted()
    if "states" in leave_out:
        entries = replace(entries, rows={WEIGHT: entries.rows[WEIGHT]})
    counts, admission = None, module.admission
    if "counts" not in leave_out and admission is not None and admission.counts_exactly(table):
        counts = admission.counts(table)
    saved = {"lr": module.learning_rate} if arguments is None else arguments
    return DynamicEmbTable(entries, saved, counts)


def _check_left_out(leave_out: Collection[str]) -> None:
    unknown = sorted(set(leave_out) - {"states", "counts"})
    if unknown:
        raise ValueError(f"leave_out takes 'states' and 'counts', got {unknown}")
