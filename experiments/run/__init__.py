"""Run an experiment: jobs in fresh processes, on one or several ranks, then the report."""
