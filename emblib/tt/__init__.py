"""Tensor-train mathematics without modules: factors of tables, and work of lookups."""
