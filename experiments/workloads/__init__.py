"""The workloads that are measured: tables, and batches of lookups into them."""
