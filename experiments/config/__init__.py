"""The configuration of a run: its schema, and the cells that follow from it."""
