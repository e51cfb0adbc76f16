"""The page that lists DynamicEmb's options, written from `dynamicemb_option_list`.

`python -m emblib.compat.dynamicemb_options docs/dynamicemb.md` writes it. A test compares the page
with what the list says, and the list with the signatures.
"""

import sys
from pathlib import Path

from emblib.compat import option_pages
from emblib.compat.dynamicemb_option_list import GROUPS

_INTRODUCTION = """\
# Options: DynamicEmb's, and what they are here

`emblib.compat.dynamicemb` has the names, arguments and defaults of NVIDIA's DynamicEmb
(recsys-examples, `corelib/dynamicemb`, version 0.1.0) over `emblib.DynamicEmbeddingBags`: change
the import and keep the code. Every option has its effect or raises with the reason, and what is a
hint there and has none here is named as such. DynamicEmb needs CUDA and was not run beside this:
what is said of it (*there*) was read in its source.

Not here: its planner and sharders, and its inference tables. A module has the keys that its process
looks up; routing them to ranks is the caller's, and dumps have the files of all ranks.

This page is written by `python -m emblib.compat.dynamicemb_options docs/dynamicemb.md`.
"""


def page() -> str:
    """The text of the page."""
    heads = ("DynamicEmb", "emblib", "what it does")
    return "\n".join([_INTRODUCTION, *option_pages.groups(heads, GROUPS)])


def names() -> set[str]:
    """DynamicEmb's names that the page explains, one by one."""
    options = (option for group in GROUPS.values() for option in group)
    return {
        name.strip()
        for option in options
        for name in option.dynamicemb.removeprefix("forward: ").split(":")[0].split(",")
    }


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(page())
