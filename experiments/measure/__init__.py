"""Measuring one cell of each kind of experiment in its own process; these modules need torch."""
