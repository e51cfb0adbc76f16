"""The gate: is one revision of emblib slower than another? Two builds, in turns, many times."""
