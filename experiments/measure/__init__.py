"""Measurement of a cell of each kind in a process of its own; these modules need torch."""
