"""Run of an experiment: jobs in fresh processes, several ranks, the report at the end."""
