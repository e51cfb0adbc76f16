"""DynamicEmb's functions of whole models: dump, load, scores, and incremental dumps."""

import contextlib
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor, nn

from emblib.compat.checks import check_flags, check_names
from emblib.compat.dynamicemb_functions import DynamicEmbTables, SavedNumbers, raise_on_all_ranks
from emblib.compat.dynamicemb_sharders import dynamic_tables_in
from emblib.compat.dynamicemb_tables import BatchedDynamicEmbeddingTablesV2
from emblib.dynamic.saving import dynamicemb_files
from emblib.dynamic.saving.dumps import Part
from emblib.dynamic.saving.dynamicemb import read_dynamicemb, set_dynamicemb, stage_dynamicemb
from emblib.dynamic.saving.dynamicemb_files import DynamicEmbTable
from emblib.sharding.dense import unwrapped
from emblib.sharding.ranks import RankGroup

Scores = int | Mapping[str, Mapping[str, int]]
"""One number for all tables; or numbers by module, its path or name, and by table."""


class _DumpedTable(NamedTuple):
    """A table of a dump."""

    directory: Path  # directory of its files
    module: DynamicEmbTables
    name: str


def modules_of(model: nn.Module) -> Iterator[tuple[str, str, DynamicEmbTables]]:
    """Yield path, name and tables of all modules with dynamic tables in a model.

    These are modules of tables, and sharded collections with tables that a planner of DynamicEmb
    made dynamic. A path begins with "model"; wrappers such as `DistributedModelParallel` are not
    part of it.
    """
    for path, module in unwrapped(model).named_modules(prefix="model"):
        tables: Any = module
        if not isinstance(module, BatchedDynamicEmbeddingTablesV2):
            tables = dynamic_tables_in(module)
        if tables is not None:
            yield path, path.rpartition(".")[2], tables


def _numbers_by_module(
    model: nn.Module, numbers: Scores
) -> Iterator[tuple[str, DynamicEmbTables, dict[str, int]]]:
    """Yield path, tables, and numbers by table, of each module that `numbers` names; an int: all.

    Raises:
        TypeError: `numbers` is neither an int nor a mapping.
        ValueError: the model does not have a module.
    """
    modules = list(modules_of(model))
    if isinstance(numbers, int) and not isinstance(numbers, bool):
        for path, _, module in modules:
            yield path, module, dict.fromkeys(module.table_names, numbers)
        return
    if not isinstance(numbers, Mapping):
        raise TypeError(f"scores must be an int, or ints by module and table, got {numbers!r}")
    _check_modules(modules, numbers)
    for path, module_name, module in modules:
        if path in numbers or module_name in numbers:
            yield path, module, dict(numbers.get(path, numbers.get(module_name, {})))


def _check_modules(
    modules: Sequence[tuple[str, str, DynamicEmbTables]], requested: Mapping[str, Any]
) -> None:
    """Raise ValueError unless all keys of `requested` are paths or names of `modules`.

    Raise TypeError if `requested` is not a mapping.
    """
    if not isinstance(requested, Mapping):
        raise TypeError(f"tables are requested by module, a dict of lists, got {requested!r}")
    valid_names = {name for path, module_name, _ in modules for name in (path, module_name)}
    if unknown_names := sorted(requested.keys() - valid_names):
        raise ValueError(
            f"the model has no modules {unknown_names} with dynamic tables; it has "
            f"{[path for path, _, _ in modules]}"
        )


def set_score(model: nn.Module, table_score: Scores) -> None:
    """Set the scores that keys of the next batches get in CUSTOMIZED tables.

    Args:
        model: model with modules of dynamic tables, see `modules_of`.
        table_score: one score for all tables, or scores by module and table.

    Raises:
        TypeError: `table_score` is neither an int nor ints by module and table.
        ValueError: a module or table does not exist, a table is not CUSTOMIZED, or a score is 0.
            Scores of other modules may be set by then.
    """
    for _, module, scores in _numbers_by_module(model, table_score):
        module.set_score(scores)


def get_score(model: nn.Module) -> dict[str, dict[str, int]] | None:
    """Return the scores of the next batch's keys, by path of the module and by table.

    The result is None if the model has no dynamic tables. CUSTOMIZED tables without a score are
    left out.
    """
    scores = {path: module.get_score() for path, _, module in modules_of(model)}
    return scores or None


def incremental_dump(
    model: nn.Module, score_threshold: Scores, pg: Any = None
) -> tuple[dict[str, dict[str, tuple[Tensor, Tensor]]], dict[str, dict[str, int]]]:
    """Return the keys with scores from a threshold on, of all ranks, and the next thresholds.

    All ranks must call this, with the same arguments.

    Args:
        model: model with modules of dynamic tables, see `modules_of`.
        score_threshold: minimum score of all tables, or minimum scores by module and table.
        pg: process group of the ranks; None is all processes.

    Returns:
        two dicts by path of the module and by table: keys, sorted int64 `[N]`, and rows `[N, D]`,
        on the CPU; and thresholds for the next call. A CUSTOMIZED table without a score has none.

    Raises:
        TypeError: `score_threshold` is neither an int nor ints by module and table.
        ValueError: a module or table does not exist.
    """
    rows_by_module, scores = {}, {}
    for path, module, thresholds in _numbers_by_module(model, score_threshold):
        rows_by_module[path], scores[path] = module.incremental_dump(thresholds, pg)
    return rows_by_module, scores


def DynamicEmbDump(
    path: str,
    model: nn.Module,
    table_names: Mapping[str, Sequence[str]] | None = None,
    optim: bool | None = False,
    counter: bool | None = False,
    pg: Any = None,
    allow_overwrite: bool = False,
) -> None:
    """Write the tables of a model in DynamicEmb's files, one directory per module.

    All ranks must call this. Each writes the entries of its own tables; of a sharded collection it
    writes those whose keys `dist_type` routes to it. Names of files are such as
    `<table>_emb_keys.rank_<r>.world_size_<W>`.

    The files of an earlier dump stay until every rank has written its new files, so the disk needs
    space for both. Then the files of all tables are replaced together: after a failure or an
    interrupt, all files are old or all are new. If the process is killed while it replaces them,
    `DynamicEmbLoad` refuses the directory, and the old files are in `.<table>.old`.

    Args:
        path: directory of the dump, created if it is missing; all ranks must see the same one.
        model: model with modules of dynamic tables, see `modules_of`; without any this warns.
        table_names: names of tables to write, each once, by name or path of their module; None for
            all. Names under the path of a module replace those under its name.
        optim: whether to write optimizer states.
        counter: whether to write the counts of admission.
        pg: process group of the ranks; None is all processes.
        allow_overwrite: whether `path` may be a directory that is not empty.

    Raises:
        FileExistsError: `path` is not empty and `allow_overwrite` is not set, or it is no
            directory.
        DumpError: rank 0 does not see the files of another rank; the earlier files are unchanged.
        NotImplementedError: DynamicEmb does not have the optimizer of a table, or its decay.
        OSError: a file could not be written or moved; the earlier files are unchanged, or restored
            as far as possible. If only the last sync failed, the new files are in place.
        RuntimeError: another rank failed; the files are as described for its error.
        TypeError: `table_names` is not a mapping of sequences, or a flag is text.
        ValueError: a module or table does not exist, or ranks have different paths or tables.
    """
    check_flags(allow_overwrite=allow_overwrite)
    ranks, root = RankGroup.from_value(pg), Path(path).expanduser()
    with _all_ranks_succeed(ranks):
        tables = list(_tables_of(root, model, table_names))
        omitted = _omitted_parts(states=optim, counts=counter)
    _dump(ranks, root, tables, omitted, allow_overwrite=allow_overwrite)


def dump_module(
    save_dir: str,
    module: DynamicEmbTables,
    table_names: Sequence[str] | None,
    *,
    optim: bool,
    counter: bool,
    pg: Any,
) -> None:
    """Write tables of one module to a directory, and replace older files of them there.

    Arguments and errors are those of `DynamicEmbDump`; `table_names` None writes all tables.
    """
    ranks, root = RankGroup.from_value(pg), Path(save_dir).expanduser()
    with _all_ranks_succeed(ranks):
        tables = [_DumpedTable(root, module, name) for name in _checked_names(module, table_names)]
        omitted = _omitted_parts(states=optim, counts=counter)
    _dump(ranks, root, tables, omitted, allow_overwrite=True)


def _checked_names(module: DynamicEmbTables, names: Sequence[str] | None) -> list[str]:
    """Return the names of the tables, None for all; ValueError if the module does not have one."""
    requested_names = module.table_names
    if names is not None:
        requested_names = check_names("table_names", names)
    if unknown_names := sorted(set(requested_names) - set(module.table_names)):
        raise ValueError(f"there are no tables {unknown_names}, there are {module.table_names}")
    return requested_names


def _dump(
    ranks: RankGroup,
    root: Path,
    tables: Sequence[_DumpedTable],
    omitted: Sequence[str],
    *,
    allow_overwrite: bool,
) -> None:
    """Write tables below `root`: write the files of all, then replace the earlier ones together.

    All ranks must call this, with the same paths and tables. `omitted` may have "states" and
    "counts". New files are *staged*: they have other names until they replace the earlier ones.
    """
    directories_and_names = [(directory, name) for directory, _, name in tables]
    _check_same_tables(ranks, root, tables)
    with _all_ranks_succeed(ranks):
        _check_target(root, allow_overwrite=allow_overwrite)
    with _all_ranks_succeed(ranks):
        root.mkdir(parents=True, exist_ok=True)
        _discard(ranks, directories_and_names)
    dump_argument = dynamicemb_files.dump_argument(
        [_label(*table) for table in directories_and_names]
    )
    part = Part(ranks.rank, ranks.size)
    try:
        for directory, module, name in tables:
            with _all_ranks_succeed(ranks):
                table_entries = module.saved_entries(name, ranks, omitted)
                arguments = {**module.opt_args(name), **dump_argument}
                table_module, index = module.table_module_of(name)
                stage_dynamicemb(
                    table_module,
                    directory,
                    index,
                    replace(table_entries, arguments=arguments),
                    part=part,
                    has_uses_first=module.has_uses_first(name),
                )
        with _all_ranks_succeed(ranks):
            if ranks.rank == 0:
                dynamicemb_files.commit(directories_and_names, ranks.size)
    except BaseException:
        _discard(ranks, directories_and_names)
        raise


def _discard(ranks: RankGroup, directories_and_names: Sequence[tuple[Path, str]]) -> None:
    """Delete the staged files of all ranks. Only rank 0, which also commits them, does anything."""
    for directory, name in directories_and_names if ranks.rank == 0 else ():
        dynamicemb_files.discard(directory, name)


def _label(directory: Path, name: str) -> str:
    """Return a name for a table that is unique in a dump: its directory and name."""
    return f"{directory.name}/{name}"


def _check_target(root: Path, *, allow_overwrite: bool) -> None:
    """Raise FileExistsError if `root` is not a directory, or has files that may not be replaced."""
    if root.exists() and not root.is_dir():
        raise FileExistsError(f"{root} is not a directory; give another path")
    if root.is_dir() and os.listdir(root) and not allow_overwrite:
        raise FileExistsError(
            f"{root} has files in it, which a dump may overwrite; give another path, or "
            "allow_overwrite=True"
        )


def _check_same_tables(ranks: RankGroup, root: Path, tables: Sequence[_DumpedTable]) -> None:
    """Raise ValueError on all ranks unless all of them have the same `root` and tables."""
    local_description = (str(root), [(str(directory), name) for directory, _, name in tables])
    for rank, description in enumerate(ranks.gather_objects(local_description)):
        if description != local_description:
            raise ValueError(
                f"all ranks must give the same path and tables; rank {ranks.rank} gives "
                f"{local_description}, rank {rank} {description}"
            )


@contextlib.contextmanager
def _all_ranks_succeed(
    ranks: RankGroup, outcome: str = "nothing was changed here"
) -> Iterator[None]:
    """Raise at the end of the context on all ranks, if an exception was raised in it on any.

    `outcome` says in the message what was changed. Interrupts are raised at once: other ranks wait.
    """
    error = None
    try:
        yield
    except Exception as failure:
        error = failure
    raise_on_all_ranks(ranks, error, outcome)


class _CheckedFiles(NamedTuple):
    """The content of the files of a table, checked."""

    module: DynamicEmbTables
    name: str
    saved_numbers: SavedNumbers
    entries: DynamicEmbTable


def DynamicEmbLoad(
    path: str,
    model: nn.Module,
    table_names: Mapping[str, Sequence[str]] | None = None,
    optim: bool | None = False,
    counter: bool | None = False,
    pg: Any = None,
) -> None:
    """Read a dump of DynamicEmb or of `DynamicEmbDump`, on any number of ranks.

    All ranks must call this. If as many ranks load as dumped, modules of tables read the files of
    their rank. Otherwise they read all files, and take the keys that the `dist_type` of the dump
    routes to their rank. Sharded collections read all files, and take the keys that emblib's hash
    routes to their rank.

    All files of all tables are read and checked on all ranks before the first table is changed.

    Args:
        path: directory of the dump.
        model: model with modules of dynamic tables, see `modules_of`; without any this warns.
        table_names: names of tables to read, each once, by name or path of their module; None for
            all. Names under the path of a module replace those under its name.
        optim: whether to read optimizer states, and the step, the learning rate and the other
            numbers of the optimizer. An `initial_accumulator_value` is not loaded; it warns if it
            is not that of the table.
        counter: whether to read the counts of admission.
        pg: process group of the ranks; None is all processes.

    Raises:
        DumpError: a file is missing or damaged, or tables are of different dumps; nothing is
            changed.
        NotImplementedError: DynamicEmb does not have the optimizer of a table, or its decay.
        RuntimeError: another rank failed; the message says whether tables were changed.
        TypeError: `table_names` is not a mapping of sequences, or a flag is text.
        ValueError: the dump is of another optimizer or score strategy, or has remainders of keys
            (`dist_type` continuous of DynamicEmb); a module or table does not exist; or ranks have
            different paths or tables. Nothing is changed.
    """
    ranks, root = RankGroup.from_value(pg), Path(path).expanduser()
    with _all_ranks_succeed(ranks):
        tables = list(_tables_of(root, model, table_names))
        omitted = _omitted_parts(states=optim, counts=counter)
    _load(ranks, root, tables, omitted)


def load_module(
    save_dir: str,
    module: DynamicEmbTables,
    table_names: Sequence[str] | None,
    *,
    optim: bool,
    counter: bool,
    pg: Any,
) -> None:
    """Read tables of one module from a directory that `dump_module` wrote.

    Arguments and errors are those of `DynamicEmbLoad`; `table_names` None reads all tables.
    """
    ranks, root = RankGroup.from_value(pg), Path(save_dir).expanduser()
    with _all_ranks_succeed(ranks):
        tables = [_DumpedTable(root, module, name) for name in _checked_names(module, table_names)]
        omitted = _omitted_parts(states=optim, counts=counter)
    _load(ranks, root, tables, omitted)


def _load(
    ranks: RankGroup, root: Path, tables: Sequence[_DumpedTable], omitted: Sequence[str]
) -> None:
    """Read and check the files of all tables, then change the tables; see `DynamicEmbLoad`."""
    _check_same_tables(ranks, root, tables)
    with_optimizer = "states" not in omitted
    checked_files, arguments = [], {}
    with _all_ranks_succeed(ranks):
        for directory, module, name in tables:
            file = dynamicemb_files.arguments_path(directory, name)
            content = dynamicemb_files.arguments_of(directory, name)
            arguments[_label(directory, name)] = (file, content)
            saved_numbers = module.check_opt_args(
                name, file, content, with_optimizer=with_optimizer
            )
            entries = _read(ranks, directory, module, name, omitted)
            checked_files.append(_CheckedFiles(module, name, saved_numbers, entries))
        dynamicemb_files.check_one_dump(arguments)
    with _all_ranks_succeed(ranks, "some tables were changed already: load again"):
        for files in checked_files:
            set_dynamicemb(*files.module.table_module_of(files.name), files.entries)
            files.module.set_opt_args(files.name, files.saved_numbers)


def _read(
    ranks: RankGroup,
    directory: Path,
    module: DynamicEmbTables,
    name: str,
    omitted: Sequence[str],
) -> DynamicEmbTable:
    """Return the entries of a table in a dump that belong to this rank."""
    has_same_world_size = dynamicemb_files.saved_world_size(directory, name) == ranks.size
    reads_own_file = has_same_world_size and module.reads_own_files
    table_module, index = module.table_module_of(name)
    table_entries = read_dynamicemb(
        table_module,
        directory,
        index,
        rank=ranks.rank if reads_own_file else None,
        leave_out=omitted,
        has_uses_first=module.has_uses_first(name),
    )
    if reads_own_file or ranks.size == 1:
        return table_entries
    return module.select_owned(name, ranks, table_entries)


def _omitted_parts(**flags: bool | None) -> list[str]:
    """Return the names of the flags that are not set: parts that are neither written nor read."""
    check_flags(optim=flags["states"], counter=flags["counts"])
    return [part_name for part_name, is_included in flags.items() if not is_included]


def _tables_of(
    root: Path, model: nn.Module, names: Mapping[str, Sequence[str]] | None
) -> Iterator[_DumpedTable]:
    """Yield the tables `names` of a model, by module; None for all. Warn if it has no modules.

    Raises:
        TypeError: `names` is not a mapping of sequences.
        ValueError: a module or table does not exist.
    """
    modules = list(modules_of(model))
    _check_modules(modules, {} if names is None else names)
    if not modules:
        warnings.warn(
            "the model has no BatchedDynamicEmbeddingTablesV2, so there is nothing to do",
            stacklevel=3,
        )
    for path, module_name, module in modules:
        requested_names = (
            module.table_names if names is None else names.get(path, names.get(module_name, ()))
        )
        check_names(f"table_names[{path!r}]", requested_names)
        if unknown_names := sorted(set(requested_names) - set(module.table_names)):
            raise ValueError(f"{path} has no tables {unknown_names}, it has {module.table_names}")
        for name in requested_names:
            yield _DumpedTable(root / path, module, name)
