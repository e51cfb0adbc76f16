"""The gate: decide whether one revision of emblib is slower than another, in paired processes."""
