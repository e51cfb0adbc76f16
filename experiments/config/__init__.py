"""What a run is asked to do: the schema, the check of what was typed, the sweep's points."""
