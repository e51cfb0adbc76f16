"""What the report of each kind of experiment says and draws: a module per kind.

A module has NOTES, paragraphs of "How to read this", and functions of a finished `Run`, which
`kinds.base.Kind` calls by name: `answer`, `figures`, `tables`, `section_table`, `tiles`,
`case_report`, `readme_lines` and `write_files`; the methods of that name say what they return, and
what a kind without the function gets. They read records and the tables of numbers of
`Kind.frames`, and measure and write nothing. A question without a result is answered
by a sentence that begins with "No answer".
"""
