"""The work that is measured: tables, and the lookups into them."""
