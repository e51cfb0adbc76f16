"""Read the command line into a checked Config; suggest keys and values for wrong ones.

`load` composes conf/ and the words of the command line with Hydra (`_compose`), which checks keys,
types and choices, and converts the result (`to_config`), which checks values. Words of the command
line that set a key, such as `sweep.D=[32]`, are called overrides, as in Hydra.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import math
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any, cast

from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import (
    ChoiceSweep,
    Override,
    Quote,
    QuotedString,
    ValueType,
)
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from experiments import kinds
from experiments.config.schema import (
    MAX_WORKERS,
    OPERATIONS,
    CaseConfig,
    Config,
    DeviceKind,
    Distribution,
    Mode,
    ReportConfig,
    Tables,
    TimingConfig,
    UsageError,
    WorkloadConfig,
    device_kind,
    folder_name,
    require,
)
from experiments.config.sweep import COMPUTED_ARMS, ONLY_ARMS, QUALITY_METHODS, SWEEP, Cell
from experiments.contenders import registry
from experiments.kinds.base import AMOUNT, ContenderType, Ranks, Repetition, check_contender_types
from experiments.paths import CONF

OPTION_OF_KIND = re.compile(r"(cases\.\w+\.)?options\.\w+")  # `complete_options` checks its name
LISTS_OF_GROUPS = ("gate.points", ".published")  # ends of the keys of lists of dictionaries
NON_GROUP_FOLDERS = ("hardware",)  # folders of conf/ that a run does not choose from
NO_TRACE = WorkloadConfig()  # its defaults
ONCE, TIMED = Repetition.ONCE, Repetition.TIMED
BUDGETS = ("cell_seconds", "total_seconds")  # keys of `timing`, see `_scale_budgets`


@functools.cache  # once per process, whose Hydra has one store; the schema takes long to convert
def register() -> None:
    """Register the schema and the resolver ${cpu_gpu:a,b}: a on a CPU, b on a GPU."""

    def cpu_gpu(cpu: Any, gpu: Any, *, _root_: DictConfig) -> Any:
        kind = cast(DeviceKind, _root_.device.kind)
        return cpu if device_kind(kind) == "cpu" else gpu

    ConfigStore.instance().store("schema", Config)
    OmegaConf.register_new_resolver("cpu_gpu", cpu_gpu, replace=True)


def groups() -> dict[str, list[str]]:
    """Return {config group: sorted names of its options}, read from the files of conf/."""
    folders = sorted(
        folder
        for folder in CONF.iterdir()
        if folder.is_dir() and folder.name not in NON_GROUP_FOLDERS
    )
    return {folder.name: sorted(file.stem for file in folder.glob("*.yaml")) for folder in folders}


def source(experiment: str) -> str:
    """Return the YAML of an experiment, which must exist, without the line that is for Hydra."""
    text = (CONF / "experiment" / f"{experiment}.yaml").read_text()
    return text.removeprefix("# @package _global_\n")


def question(experiment: str) -> str:
    """Return the `# Question:` comment of an experiment's YAML as one line; "" without one.

    The experiment must exist.
    """
    question_lines: list[str] = []
    for line in source(experiment).splitlines():
        if line.startswith("# Question:"):
            question_lines.append(line.removeprefix("# Question:").strip())
        elif question_lines and line.startswith("# "):
            question_lines.append(line[2:].strip())
        elif question_lines:
            break
    return " ".join(question_lines)


def load(arguments: Sequence[str]) -> Config:
    """Return the checked configuration of the words of a command line, with complete options.

    Raises:
        UsageError: a word, or a value of the configuration, is wrong.
    """
    composed = _compose(arguments)
    try:
        config = to_config(composed)
    except OmegaConfBaseException as error:
        raise UsageError(_error_in_one_line(error)) from error
    _check_effects(config, arguments)
    return config


GATE_KINDS = ("gate", "noise", "power")
SWEEP_KEYS = ("sweep", "design", "where", "exclude")
# Keys and groups of the run that only its sweep reads; each case has its own.
KEYS_OF_CASES = ("workload", "contenders", "tt", "cache", "keys", "sharding")


def _check_effects(config: Config, arguments: Sequence[str]) -> None:
    """Raise UsageError for words that set a key which this experiment, or its case, does not read.

    An empty list, such as `sweep.D=[]`, is accepted.
    """
    kind = kinds.find(config.kind)
    cases, swept = kind.cells(dataclasses.replace(config, where=[], exclude=[]))
    for override in parse(arguments):
        key, name = override.key_or_group, config.name
        point: Config | CaseConfig = config
        cells = cases + swept
        if key.startswith("cases.") and key.count(".") > 1:
            _, name, key = key.split(".", 2)
            point, cells = config.cases[name], [cell for cell in cases if cell.section == name]
        is_run = point is config
        if key == "workload":  # an option of the group, which the distribution of ids names
            key = "workload.distribution"
        group = key.partition(".")[0]
        if is_run and group in KEYS_OF_CASES and not (group == "cache" and kind.arms.only_arm):
            cells = swept
        if override.value() == [] or not (cases + swept if is_run else cells):
            continue
        if not _is_measured(key, config.report, cells):
            raise UsageError(f"'{override.input_line}': nothing that is measured has it")
        if not cells:
            reason = f"only cases are measured, and cases.NAME.{key} sets theirs"
        elif words := _axes_without_effect(point.workload).get(key.removeprefix("workload.")):
            reason = f"it says nothing about {words}"
        elif group == "cache" and kind.arms.only_arm and not is_run:
            reason = f"all cases have the cache of the run, {key}"
        elif not _is_read(key, kind, cells):
            reason = f"{name} does not read {key}"
        else:
            continue
        cases_note = f" (cases: {', '.join(config.cases)})" if config.cases and is_run else ""
        raise UsageError(f"'{override.input_line}' changes nothing: {reason}{cases_note}")


def _is_measured(key: str, report: ReportConfig, cells: Sequence[Cell]) -> bool:
    """Return whether an arm is what a key of `report` names; True for other keys."""
    arms = [arm for cell in cells for arm in cell.arms]
    cache_sizes = [size for cell in cells for size in cell.cache.fractions]
    cache_sizes += [arm.cache for arm in arms]
    names = [arm.contender for arm in arms]
    measured: dict[str, Sequence[object]] = {"subject": names, "baseline": names}
    measured |= {"subject_rank": [arm.rank for arm in arms], "subject_cache": cache_sizes}
    name = key.removeprefix("report.")
    return key == name or name not in measured or getattr(report, name) in measured[name]


def _is_read(key: str, kind: kinds.Kind, cells: Sequence[Cell]) -> bool:
    """Return whether an experiment of a kind reads a key, or a group, in at least one cell."""
    cell_kinds = [kinds.find(cell.kind) for cell in cells]
    arms = [arm for cell in cells for arm in cell.arms]
    has_ranks = any(arm.rank for arm in arms)
    swept_arms = [arm for cell in cells if cell.section == SWEEP for arm in cell.arms]
    is_read = {  # by key or group
        "gate": kind.name in GATE_KINDS,
        "sharding": any(kind.arms.ranks is Ranks.OF_WORLDS for kind in cell_kinds),
        "contenders": not kind.arms.only_arm,
        "tt": has_ranks,
        "sweep.rank": any(arm.rank for arm in swept_arms),
        "cache": bool(kind.arms.only_arm) or any(arm.cache for arm in arms),
        "timing.modes": not all(kind.measurement.modes for kind in cell_kinds),
        "timing.replicates": any(kind.measurement.repetition is not ONCE for kind in cell_kinds),
        **dict.fromkeys(AMOUNT, any(kind.measurement.repetition is TIMED for kind in cell_kinds)),
        **dict.fromkeys(SWEEP_KEYS, any(cell.section == SWEEP for cell in cells)),
    }
    if not (is_read.get(key, True) and is_read.get(key.partition(".")[0], True)):
        return False
    workload_key = re.sub(r"^sweep\b", "workload", key)
    return not all(
        any(f"{workload_key}.".startswith(f"{ignored}.") for ignored in ignorer.measurement.ignores)
        for ignorer in ([kind] if kind.runner else cell_kinds)
    )


def composed_yaml(arguments: Sequence[str]) -> str:
    """Return the configuration of the words of a command line as YAML, before `check_values`.

    Raises:
        UsageError: a key, a type or a choice is wrong.
    """
    return OmegaConf.to_yaml(_compose(arguments))


def _compose(arguments: Sequence[str]) -> DictConfig:
    """Compose conf/ and the words of a command line; UsageError if a key, type or choice is wrong.

    The rules of `check_values` are not checked.
    """
    register()
    words = [re.sub(r"^experiment=", "+experiment=", argument) for argument in arguments]
    check_keys(words)
    overrides = parse(words)
    for override in overrides:
        if override.is_sweep_override():
            raise UsageError(
                f"'{override.input_line}' has several values: with -m before the "
                "other words run.py makes one run with each"
            )
    try:
        with initialize_config_dir(str(CONF), version_base="1.3"):
            composed = compose("config", list(map(spell_for_hydra, overrides)))
    except (HydraException, OmegaConfBaseException) as error:
        raise UsageError(_error_in_one_line(error)) from error
    _scale_budgets(composed, {str(override.key_or_group) for override in overrides})
    return composed


def _scale_budgets(composed: DictConfig, typed_keys: Collection[str]) -> None:
    """Scale the budgets of an experiment, which are for `timing=standard`, to the chosen preset.

    Without this an experiment's seconds per cell would overrule those of `timing=quick`. Keys
    of the command line (`typed_keys`) keep their value.
    """
    name, presets = composed.timing.preset, groups()["timing"]
    if name not in presets:
        raise UsageError(f"timing.preset: {_unknown_name('preset', name, presets, 'timing=', 0.4)}")
    preset, standard = _read_preset(name), _read_preset("standard")
    for budget in BUDGETS:
        if f"timing.{budget}" not in typed_keys and composed.timing[budget] != preset[budget]:
            composed.timing[budget] *= preset[budget] / standard[budget]


@functools.cache  # parsing both files takes a tenth of the time of `_compose`
def _read_preset(name: str) -> DictConfig:
    return cast(DictConfig, OmegaConf.load(CONF / "timing" / f"{name}.yaml"))


def to_config(composed: DictConfig) -> Config:
    """Convert a configuration, composed with the schema `Config`, to a Config and check its values.

    Raises:
        UsageError: a value breaks a rule.
        OmegaConfBaseException: an interpolation cannot be resolved.
    """
    config = cast(Config, OmegaConf.to_object(composed))
    _convert_modes(config)
    _clear_headline(config)
    complete_options(config)
    check_values(config)
    return config


def _convert_modes(config: Config) -> None:
    """Convert the modes, which OmegaConf does not check behind ${cpu_gpu:...}.

    A mode that is named twice counts once: two measurements of one process would pass for two
    processes, and give an interval.
    """
    names = [getattr(mode, "value", mode) for mode in config.timing.modes]
    known_names = [mode.value for mode in Mode]
    for name in names:
        if name not in known_names:
            raise UsageError(f"timing.modes: no mode '{name}'. There is: {', '.join(known_names)}")
    if not names:
        raise UsageError("timing.modes must name at least one mode, e.g. timing.modes=[hot]")
    config.timing.modes = [Mode(name) for name in dict.fromkeys(names)]


def _clear_headline(config: Config) -> None:
    """Clear the headline if the user's workload is a trace and the headline's case is not."""
    case = config.cases.get(config.report.headline)
    if (
        config.workload.distribution is Distribution.trace
        and case is not None
        and case.workload.distribution is not Distribution.trace
    ):
        config.report.headline = ""  # the answer is about the trace, not about the case


def parse(overrides: Sequence[str]) -> list[Override]:
    """Return the overrides that Hydra's parser makes of words.

    A dictionary becomes an override per value: workload={B:8,D:16} is workload.B=8 and
    workload.D=16, so that each is checked.

    Raises:
        UsageError: the parser refuses a word; the message suggests what was meant.
    """
    try:
        parsed = OverridesParser.create().parse_overrides(list(overrides))
        return [leaf for override in parsed for leaf in _split_dictionary(override)]
    except HydraException as error:
        for word in overrides:
            if word in groups()["experiment"]:
                raise UsageError(f"'{word}' is an experiment: write +experiment={word}") from error
            if word.lstrip("+") in groups():
                names = ", ".join(groups()[word.lstrip("+")])
                form = _spell_override(word.lstrip("+"), "NAME")
                raise UsageError(
                    f"'{word}' needs a value: write {form}. There is: {names}"
                ) from error
            if word.isidentifier():
                raise UsageError(
                    f"'{word}' is not a command, experiment or group: 'python run.py --help' lists "
                    "the commands, 'python run.py list' the experiments"
                ) from error
        first = str(error).splitlines()[0]
        raise UsageError(
            f"cannot read the arguments ({first}); write key=value, lists as sweep.D=[32,64], "
            "texts with blanks in two kinds of quotes, as in \"where=['D > 16']\""
        ) from error


def _split_dictionary(override: Override) -> Iterator[Override]:
    """Yield an override per value of a dictionary, at any depth; others, and {}, as they are."""
    values = override.value()
    if not (isinstance(values, dict) and values) or override.package:
        yield override
        return
    for name, value in values.items():
        key = f"{override.key_or_group}.{name}"
        part = Override(override.type, key, ValueType.ELEMENT, _quote_texts(value))
        part.input_line = f"{part.get_key_element()}={part.get_value_element_as_str()}"
        yield from _split_dictionary(part)


def spell_for_hydra(override: Override) -> str:
    """Return the word by which Hydra composes an override.

    Options get a "++", because Hydra refuses those that no file of conf/ states.
    """
    word = (override.input_line or "").lstrip("+")
    return f"++{word}" if OPTION_OF_KIND.match(word) else str(override.input_line)


def _quote_texts(value: Any) -> Any:
    """Return a value of an override with quotes around its texts, which have lost theirs."""
    match value:
        case str():
            return QuotedString(value, Quote.single)
        case list():
            return [_quote_texts(entry) for entry in value]
        case dict():
            return {name: _quote_texts(entry) for name, entry in value.items()}
    return value


def check_keys(overrides: Sequence[str]) -> None:
    """Raise UsageError for overrides that Hydra would misunderstand or ignore.

    These are unknown keys (Hydra would accept any +key), unknown options of config groups, words
    that Hydra cannot parse, the removal of a key, `+` before a known key, empty groups of keys
    (Hydra ignores them), and lists without brackets.
    """
    choices = groups()
    case_names = _case_names(overrides)
    type_of_key = _types_by_key(case_names)
    for override in parse(overrides):
        text = override.input_line or ""
        if override.type is not None and override.is_delete():
            raise UsageError(f"'{text}': keys cannot be removed; give the key a value instead")
        key = override.key_or_group
        if key in choices:  # a config group, e.g. timing=quick
            _check_choice(key, override, choices[key])
        elif key not in type_of_key and not OPTION_OF_KIND.fullmatch(key):
            raise UsageError(_unknown_key(key, override, set(type_of_key), choices))
        elif isinstance(override.value(), dict) and not override.value():
            raise UsageError(
                f"'{text}' changes nothing, because other keys of a group are kept"
                + "; cases.NAME.contenders=[] leaves a case out" * (key == "cases")
            )
        elif override.is_add():
            raise UsageError(f"'{key}' exists already: write '{text.lstrip('+')}' without '+'")
        else:
            _check_list(key, override, is_list=type_of_key.get(key, "").startswith("list["))


def _types_by_key(cases: Iterable[str]) -> dict[str, str]:
    """Return {dotted key: type} of the schema, with the keys of the experiment's `cases`."""
    keys = dict(_schema_keys(Config, ""))
    for case in cases:
        keys |= {f"cases.{case}": "CaseConfig"} | dict(_schema_keys(CaseConfig, f"cases.{case}."))
    return keys


def _schema_keys(schema: type, prefix: str) -> Iterator[tuple[str, str]]:
    """Yield the name and type of each key of a schema."""
    for field in dataclasses.fields(schema):
        yield prefix + field.name, str(field.type)
        factory = field.default_factory
        if isinstance(factory, type) and dataclasses.is_dataclass(factory):
            yield from _schema_keys(factory, f"{prefix}{field.name}.")


def _check_list(key: str, override: Override, *, is_list: bool) -> None:
    """Raise UsageError for a list without brackets, or one with lists or dictionaries in it.

    `is_list` is False for a key whose type is not a list, or unknown.
    """
    value = override.value()
    values = value.list if isinstance(value, ChoiceSweep) else [value]
    if is_list and not all(isinstance(one, list) or str(one).startswith("${") for one in values):
        typed_value = (override.input_line or "").partition("=")[2].replace("null", "")
        raise UsageError(f"{key} is a list: write {key}=[{typed_value}]")
    entries = [entry for one in values if isinstance(one, list) for entry in one]
    container = list if key.endswith(LISTS_OF_GROUPS) else (list, dict)
    if any(isinstance(entry, container) for entry in entries):
        raise UsageError(f"'{override.input_line}': {key} takes single values, as in {key}=[A,B]")


def _case_names(overrides: Sequence[str]) -> list[str]:
    """Read the case names of the chosen experiments from their YAML, without composing it."""
    experiment_names = [text.lstrip("+").removeprefix("experiment=") for text in overrides]
    paths = [
        CONF / "experiment" / f"{name}.yaml"
        for text in experiment_names
        for name in text.split(",")
    ]
    loaded = [OmegaConf.load(path) for path in paths if path.is_file()]
    return [str(key) for file in loaded for key in OmegaConf.select(file, "cases", default={})]


def _check_choice(group: str, override: Override, options: list[str]) -> None:
    values = override.value() if not override.is_sweep_override() else []
    for value in values if isinstance(values, list) else [values]:
        if str(value) not in options:
            raise UsageError(
                _unknown_name(group, str(value), options, _spell_override(group, ""), 0.5)
            )


def _spell_override(key: str, value: object) -> str:
    return f"{'+' if key == 'experiment' else ''}{key}={value}"


def _unknown_key(
    key: str, override: Override, known: set[str], choices: dict[str, list[str]]
) -> str:
    """Return the error about an unknown key: one suggestion, or else all keys of the same group."""
    value = (override.input_line or "").partition("=")[2]
    parent = key.rpartition(".")[0]
    siblings = sorted(name for name in known | set(choices) if name.rpartition(".")[0] == parent)
    if parent in known and not siblings:
        return f"unknown key '{key}': {parent} has a value, and no keys"
    suggestion = _similar_key(key, siblings, known, is_list=value.startswith("["))
    if suggestion:
        return f"unknown key '{key}'. Did you mean '{_spell_override(suggestion, value)}'?"
    options = siblings if parent in known else sorted({name.partition(".")[0] for name in known})
    return f"unknown key '{key}'. Did you mean one of: {', '.join(options)}?"


def _similar_key(key: str, siblings: Sequence[str], known: set[str], *, is_list: bool) -> str:
    """Return the key that was probably meant; "" for none.

    Args:
        key: unknown key.
        siblings: known keys of the same group.
        known: all known keys.
        is_list: whether the value is a list.
    """
    parent, _, leaf = key.rpartition(".")
    if other_case := [name for name in siblings if name.lower() == key.lower()]:
        return other_case[0]
    # The group is a part of all these names, so they must be more similar.
    if similar_names := difflib.get_close_matches(key, siblings, 1, 0.9 if parent else 0.6):
        return similar_names[0]
    if parent in known:
        return ""
    if similar_names := difflib.get_close_matches(key, known, 1, 0.7):
        return similar_names[0]
    # The same name in another group: an axis of `sweep` takes a list, one of `workload` a number.
    skipped_prefixes = ("workload." if is_list else "sweep.", "cases.")
    same_leaf = [name for name in known if name.rpartition(".")[2] == leaf]
    return max((name for name in same_leaf if not name.startswith(skipped_prefixes)), default="")


def _error_in_one_line(error: Exception) -> str:
    """Return the key and the cause from an error of Hydra, in one line."""
    cause = error.__cause__ or error
    lines = [line.strip() for line in str(cause).splitlines() if line.strip()]
    key = next(
        (line.removeprefix("full_key:").strip() for line in lines if line.startswith("full_key")),
        "",
    )
    first = lines[0].rstrip(".") if lines else type(cause).__name__
    options = re.search(r"Invalid value '(\w*)', expected one of \[(.*)\]", first)
    if options:
        similar_names = difflib.get_close_matches(options[1], options[2].split(", "), 1, 0.4)
        first += f". Did you mean '{key}={similar_names[0]}'?" if similar_names else ""
    return f"{key}: {first}" if key else first


def check_values(config: Config) -> None:
    """Check the values, with complete options, against rules that types cannot express.

    Raises:
        UsageError: a rule is broken.
    """
    folder_name(config.name)
    if not config.report.folder:
        raise UsageError("report.folder must name a folder, e.g. report.folder=reports/runs")
    kind = kinds.find(config.kind)
    try:
        contenders = registry.names()
    except registry.RegistryError as error:
        raise UsageError(str(error)) from error
    for prefix, point in _points(config).items():
        _check_workload(prefix, point.workload)
        _check_point(prefix, point)
        required_type = kind.arms.contenders
        if prefix or required_type is not ContenderType.BOTH:  # such a kind measures only its cases
            if point.keys.loads:
                required_type = ContenderType.KEYED
            elif required_type is ContenderType.BOTH:
                required_type = ContenderType.BAGS
            check_contender_types(prefix, point.contenders, required_type)
            if required_type is ContenderType.KEYED:
                _check_one_table(prefix, point.workload, [] if prefix else config.sweep.T)
        point_kind = kinds.find(point.kind) if point.kind else None  # "" for most cases
        optional_arms = point_kind.arms.optional_arms if point_kind else ()
        for name in point.contenders:
            if name not in (*contenders, *optional_arms):
                message = _unknown_name("contender", name, (*optional_arms, *contenders), "", 0.3)
                raise UsageError(f"{prefix}contenders: {message}")
    for axis in ("T", "E", "D", "B", "L", "rank"):
        _check_counts(f"sweep.{axis}", getattr(config.sweep, axis))
    for axis in ("s", "q"):
        values = getattr(config.sweep, axis)
        is_held = all(map(_is_number_from_0, values))
        require(f"sweep.{axis} must be >= 0 and finite", values, holds=is_held)
    for axis, reason in _axes_without_effect(config.workload).items():
        if getattr(config.sweep, axis, None):
            raise UsageError(
                f"sweep.{axis} changes nothing about {reason}: leave it out with 'sweep.{axis}=[]'"
            )
    timing, device = config.timing, config.device
    _check_timing(timing)
    require("seed must be in [0, 2**32)", config.seed, holds=0 <= config.seed < 2**32)
    for name, minimum in (("ranks", 1), ("threads", 0)):
        _check_counts(f"device.{name}", getattr(device, name), minimum, MAX_WORKERS)
    for name, share in (
        ("device.memory_share", device.memory_share),
        ("report.subject_cache", config.report.subject_cache),
    ):
        require(f"{name} must be in (0, 1]", f"{share:g}", holds=0 < share <= 1)
    require("lr must be > 0 and finite", config.lr, holds=0 < config.lr < math.inf)
    kind.check(config)
    headline = config.report.headline
    if headline and headline not in config.cases:
        raise UsageError(
            f"report.headline: no case '{headline}'. There is: {', '.join(config.cases) or 'none'}"
        )
    options = (*contenders, *COMPUTED_ARMS, *ONLY_ARMS, *QUALITY_METHODS)
    for name in ("subject", "baseline"):
        if (arm := getattr(config.report, name)) not in options:
            raise UsageError(f"report.{name}: {_unknown_name('contender', arm, options, '', 0.3)}")


def _check_timing(timing: TimingConfig) -> None:
    """Raise UsageError for amounts of measuring that are out of range, or minima above maxima."""
    for name, value in dataclasses.asdict(timing).items():
        if name in ("replicates", "pool", "min_rounds", "max_rounds"):
            require(f"timing.{name} must be >= 1", value, holds=value >= 1)
        elif name == "cell_seconds":
            is_positive = 0 < value < math.inf
            rule = "timing.cell_seconds must be > 0 and finite"
            require(rule, f"{value:g}", holds=is_positive)
        elif isinstance(value, int | float):
            require(f"timing.{name} must be >= 0", f"{value:g}", holds=value >= 0)
    for low, high in (("min_rounds", "max_rounds"), ("warmup_seconds", "warmup_cap")):
        maximum, value = getattr(timing, high), getattr(timing, low)
        rule = f"timing.{low} must be <= timing.{high}={maximum:g}"
        require(rule, f"{value:g}", holds=value <= maximum)


def _check_one_table(prefix: str, workload: WorkloadConfig, swept_counts: Sequence[int]) -> None:
    """Raise UsageError for several tables of keys, of which each cell measures one."""
    num_tables = max(len(workload.sizes) or workload.T, *swept_counts, 0)
    is_one = num_tables <= 1 and workload.tables is Tables.equal
    require(f"{prefix}workload.T must be 1 for hash tables", num_tables, holds=is_one)


def _unknown_name(
    category: str, name: str, options: Collection[str], prefix: str, similarity: float
) -> str:
    """Return the error about an unknown name: the most similar option, and all options.

    `similarity` is the least that counts as similar, from 0 to 1, as difflib measures it.
    """
    similar_names = difflib.get_close_matches(name, options, 1, similarity)
    hint = f" Did you mean '{prefix}{similar_names[0]}'?" if similar_names else ""
    return f"no {category} '{name}'.{hint} There is: {', '.join(options)}"


def complete_options(config: Config) -> None:
    """Complete, in place, the options of the run and of cases with a kind by their defaults.

    Raises:
        UsageError: the kind is unknown, or does not have or permit the options.
    """
    for prefix, point in _points(config).items():
        if prefix and not point.kind and point.options:
            raise UsageError(f"{prefix}options needs a kind that has them: {prefix}kind=...")
        if point.kind not in kinds.KINDS and (point.kind or not prefix):
            hint = _unknown_name("kind", point.kind, kinds.KINDS, f"{prefix}kind=", 0.4)
            raise UsageError(f"{prefix}kind: {hint}")
        if point.kind:
            point.options = _complete(kinds.find(point.kind), point.options, prefix)


def _points(config: Config) -> dict[str, Config | CaseConfig]:
    """Return the run and its cases by the prefix of their keys, "" for the run."""
    cases = {f"cases.{name}.": case for name, case in config.cases.items()}
    return {"": config, **cases}


def _complete(kind: kinds.Kind, options: dict[str, Any], prefix: str) -> dict[str, Any]:
    """Return the options of a kind, completed by their defaults; UsageError for wrong ones."""
    if kind.options is None:
        if options:
            raise UsageError(f"{prefix}options: kind={kind.name} has none, got {list(options)}")
        return {}
    names = [field.name for field in dataclasses.fields(kind.options)]
    for name in options:
        if name not in names:
            raise UsageError(_unknown_name("option", name, names, f"{prefix}options.", 0.4))
    try:
        merged_options = OmegaConf.merge(OmegaConf.structured(kind.options), options)
    except OmegaConfBaseException as error:
        raise UsageError(f"{prefix}options.{_error_in_one_line(error)}") from error
    all_options = cast(dict[str, Any], OmegaConf.to_container(merged_options))
    kind.check_options(all_options, prefix)
    return all_options


def _check_point(prefix: str, point: Config | CaseConfig) -> None:
    """Raise UsageError for settings of a case, or of the run, that are out of range.

    `prefix` is that of `_check_workload`.
    """
    tt, cache, keys, sharding = point.tt, point.cache, point.keys, point.sharding
    for fraction in cache.fractions:
        require(f"{prefix}cache.fractions must be in (0, 1]", fraction, holds=0 < fraction <= 1)
    if min(cache.warm_batches, cache.batches, cache.pool) < 1:
        raise UsageError(f"{prefix}cache.warm_batches, .batches and .pool must be >= 1")
    loads = keys.loads
    require(
        f"{prefix}keys.loads must be in (0, 1]", loads, holds=all(0 < share <= 1 for share in loads)
    )
    require(
        f"{prefix}keys.hits must be in [0, 1] and keys.first in (0, 1]",
        f"{keys.hits:g} and {keys.first:g}",
        holds=0 <= keys.hits <= 1 and 0 < keys.first <= 1,
    )
    for name in keys.operations:
        if name not in OPERATIONS:
            raise UsageError(
                f"{prefix}keys.operations: no operation '{name}'. There is: {', '.join(OPERATIONS)}"
            )
    _check_counts(f"{prefix}sharding.worlds", sharding.worlds, 1, MAX_WORKERS)
    _check_counts(f"{prefix}sharding.beyond", sharding.beyond)
    if not sharding.worlds or not sharding.scaling:
        raise UsageError(f"{prefix}sharding.worlds and .scaling must name at least one each")
    for name in ("tables", "ranks", "row_factors", "dim_factors"):
        _check_counts(f"{prefix}tt.{name}", getattr(tt, name))


def _check_counts(key: str, value: int | list[int], minimum: int = 1, maximum: int = 0) -> None:
    """Raise UsageError for a number, or one of a list, out of range; `maximum` 0 is 63 bits."""
    numbers = value if isinstance(value, list) else [value]
    end, limit = (maximum + 1, f"{maximum}]") if maximum else (2**63, "2**63)")
    is_held = all(minimum <= number < end for number in numbers)
    require(f"{key} must be in [{minimum}, {limit}", value, holds=is_held)


def _axes_without_effect(workload: WorkloadConfig) -> dict[str, str]:
    """Return {axis: workload in words} of the axes that do not change the workload."""
    axes: dict[str, str] = {}
    if workload.tables is Tables.criteo_kaggle:
        axes |= dict.fromkeys(("T", "E"), "the tables of Criteo-Kaggle")
    elif workload.sizes:
        axes |= dict.fromkeys(("T", "E"), "tables of workload.sizes")
    if workload.distribution is Distribution.trace:
        axes |= dict.fromkeys(("L", "s", "q", "order"), "a trace")
    elif workload.distribution is not Distribution.zipf:
        axes |= dict.fromkeys(("s", "q"), f"{workload.distribution.value} ids")
    return axes


def _is_number_from_0(value: float) -> bool:
    """Return whether a value is a finite number >= 0."""
    return 0 <= value < math.inf


def _check_workload(prefix: str, workload: WorkloadConfig) -> None:
    """Raise UsageError for values of a workload that are out of range.

    `prefix` precedes the keys in messages: "cases.NAME.", or "" for the run itself.
    """
    is_trace = workload.distribution is Distribution.trace
    for axis in ("T", "E", "D", "B", "L"):
        # For a trace, 0 means the number in its file.
        minimum = 0 if is_trace and axis in ("T", "E") else 1
        _check_counts(f"{prefix}workload.{axis}", getattr(workload, axis), minimum)
    _check_counts(f"{prefix}workload.sizes", workload.sizes)
    if is_trace and not workload.file:
        raise UsageError(f"{prefix}workload.distribution=trace needs a file: workload.file=PATH")
    for name in () if is_trace else ("file", "format", "columns", "ids", "sha256"):
        if getattr(workload, name) != getattr(NO_TRACE, name):
            raise UsageError(f"{prefix}workload.{name} is read by workload=trace only; give both")
    if is_trace and workload.tables is not Tables.equal:
        raise UsageError(f"{prefix}workload.tables must be equal: a trace has tables of its own")
    if not (_is_number_from_0(workload.s) and _is_number_from_0(workload.q)):
        raise UsageError(
            f"{prefix}workload.s and .q must be >= 0 and finite, got {workload.s}, {workload.q}"
        )
