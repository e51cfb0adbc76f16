"""The configuration of a run: the schema, the checks of the command line, the cells."""
