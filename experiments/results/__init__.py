"""The results of a run: its records, and the metrics computed from them."""
