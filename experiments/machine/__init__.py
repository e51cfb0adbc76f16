"""The machine under the numbers."""
