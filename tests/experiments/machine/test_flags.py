"""Every flag that is raised is explained, in the reports and in the docs."""

from __future__ import annotations

from pathlib import Path

from experiments.machine import flags, preflight, telemetry
from experiments.paths import ROOT
from experiments.timing import race


def test_every_flag_that_is_raised_is_explained() -> None:
    """Flags are strings in the modules that raise them."""
    raised = set()
    for module in (preflight, telemetry, race):
        text = Path(module.__file__ or "").read_text()
        raised |= {flag for flag in flags.ADVICE if f'"{flag}"' in text}
    assert raised == flags.ADVICE.keys()  # every explained flag can be raised
    for flag in raised:
        assert flags.explain(flag) != flag
        assert flags.remedy(flag)
    assert (flags.explain("unheard_of"), flags.remedy("unheard_of")) == ("unheard_of", "")


def test_the_page_on_timing_explains_the_same_flags() -> None:
    lines = (ROOT / "docs/timing.md").read_text().splitlines()
    rows = [line.split("|")[1:3] for line in lines if line.startswith("| `")]
    table = {flag.strip(" `"): meaning.strip() for flag, meaning in rows}
    reasons_to_stop = {"precise", "stabilised", "max_rounds", "budget", "failed"}
    explained = {flag: flags.explain(flag) for flag in flags.ADVICE}
    assert {k: v for k, v in table.items() if k not in reasons_to_stop} == explained
