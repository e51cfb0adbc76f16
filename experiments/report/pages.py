"""The page of a run: the answer first, then figures and tables, then provenance."""

from __future__ import annotations

import dataclasses

from experiments.report import figures, notes, outcomes, results, text
from experiments.report.data import Run
from experiments.report.document import Notice, Page, Section
from experiments.report.style import Figure

SMOKE_NOTICE = (
    "Smoke run: its tables, batches and rounds are too small for its numbers to mean anything."
)
FILES_IN_FOLDER = (
    "In the folder of this page: points.jsonl (raw samples), results.csv, report.md, figures as "
    "PNG and SVG. To rebuild all but the samples: python run.py report RUN."
)


def page_of(run: Run) -> Page:
    """Return the page of a run: answer, results, failures, then how it was measured.

    Reads config.yaml in the run's directory. The kind of the run provides answer, tables and
    figures; without `report.figures` there are none.
    """
    case_reports = run.case_reports()
    tables = [*run.kind.tables(run), *(table for case in case_reports for table in case.tables)]
    answer = run.kind.answer(run)
    if case_sentences := [sentence for case in case_reports for sentence in case.answer]:
        answer = [" ".join([*answer[:1], *case_sentences]), *answer[1:]]
    answer_section, *result_sections = [
        section for mode in run.modes for section in mode_sections(run, mode)
    ]
    sections = [
        answer_section,
        *(Section(part.title, [part.paragraph], table=part.table) for part in tables),
        *result_sections,
        Section("Failures", [outcomes.failures_sentence(run)], table=outcomes.failures_table(run)),
        Section("How to read this", points=[*notes.how_to_read(run), *run.kind.notes()]),
        Section("Reproduce", code=str(run.environment.get("command", ""))),
        Section(
            "Machine",
            fold_label="Machine and software",
            parts=[
                Section(table=results.flags_table(run)),
                Section(table=results.environment_table(run)),
            ],
        ),
        Section(
            "Configuration",
            fold_label="Configuration that ran",
            code=(run.path / "config.yaml").read_text(),
            web_only=True,
        ),
    ]
    return Page(
        name=str(run.config.name),
        answer=[SMOKE_NOTICE, *answer] if run.is_smoke else answer,
        sections=sections,
        subtitle=figures.subtitle(run),
        question=str(run.info.get("question", "")),
        tiles=[] if run.is_smoke else run.kind.tiles(run),  # tiles catch the eye
        notices=[Notice(sentence) for sentence in notes.notices(run)],
        closing=FILES_IN_FOLDER,
    )


def mode_sections(run: Run, mode: str) -> list[Section]:
    """Return the sections of one mode: main figure, tables of its cases, further figures.

    The first mode has three sections, and the figures of the whole run too. A further mode has one
    section, which the web page folds.
    """
    run_in_mode, is_first = run.in_mode(mode), mode == run.modes[0]
    mode_figures: list[Figure] = []
    if run.config.report.figures:
        subtitle = figures.subtitle(run_in_mode)
        mode_figures = [
            dataclasses.replace(
                figure,
                name=figure.name if is_first else f"{figure.name}_{mode}",
                title=figure.title if is_first else f"{figure.title} · {mode}",
                subtitle=subtitle,
            )
            for figure in [
                *run.kind.figures(run_in_mode),
                *(figure for case in run_in_mode.case_reports() for figure in case.figures),
            ]
        ]
        if is_first:
            mode_figures += [*figures.mode_figures(run), *outcomes.outcome_figures(run)]
    case_sections = [
        section for name in run_in_mode.sections() for section in _case_sections(run_in_mode, name)
    ]
    if is_first:
        return [
            Section("Answer", figures=mode_figures[:1]),
            Section("Results", parts=case_sections),
            Section("Figures", figures=mode_figures[1:]),
        ]
    return [
        Section(
            f"Mode: {mode}",
            [notes.MODE_NOTES.get(mode, "")],
            fold_label=f"Tables and figures, {mode}",
            figures=mode_figures[:1],
            parts=[*case_sections, Section(figures=mode_figures[1:])],
        )
    ]


def _case_sections(run: Run, section: str) -> list[Section]:
    """Return a section with the table of a case or of the sweep, its workload, published numbers.

    It is a list of one section; [] if the kind has no table for the case.
    """
    table = run.kind.section_table(run, section)
    if table is None:
        return []
    title = "The sweep" if run.has_base_point(section) else text.capitalise(run.title(section))
    records = [record for record in run.records if record["section"] == section]
    case, workload = run.config.cases.get(section), run.sizes(section)
    counted_record = next((record for record in records if record["unique_rows"]), None)
    if counted_record is not None:
        distinct = text.percent(counted_record["unique_rows"] / counted_record["lookups"])
        workload += f"; {distinct} of a batch's lookups are distinct rows"
    workload += f". {case.note}" if case is not None and case.note else "."
    if case is not None and case.tt.row_factors and records[0]["rows_scale"] < 1:
        workload += " Scaled tables do not fit these row factors: emblib chose others."
    published = [
        f"Published, not measured here: {number.label} {number.value:g} {number.unit} "
        f"({number.source}). Another machine: compare the order of magnitude, not the ratio."
        for number in (case.published if case is not None else [])
    ]
    return [Section(title, [workload], table=table, points=published)]
