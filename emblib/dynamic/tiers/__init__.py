"""Backing stores of dynamic tables: in host memory, in files, or in a database."""
