"""Saving and loading of dynamic tables: state dicts, dumps, and files of DynamicEmb."""
