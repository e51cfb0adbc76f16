"""The sentences, tables and figures of reports: a module per kind of experiment.

A module has NOTES, the paragraphs of "How to read this", and functions of a finished `Run`, which
`kinds.base.Kind` calls by name: `answer`, `figures`, `tables`, `section_table`, `tiles`,
`case_report`, `readme_lines` and `write_files`. The methods of `Kind` with these names state what a
function returns, and the default of a kind without the function. The functions read the records
and the tables of numbers of `Kind.frames`; they measure and write nothing. The answer to a question
without a result begins with "No answer".
"""
