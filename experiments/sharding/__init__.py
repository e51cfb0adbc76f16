"""Collections over several ranks: whole steps and their parts, and what a cost model predicts."""
