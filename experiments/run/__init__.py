"""A run from its first cell to its report."""
