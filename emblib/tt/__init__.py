"""Tensor-train mathematics without modules: how a table is cut into factors."""
