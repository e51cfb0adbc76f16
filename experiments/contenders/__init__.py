"""The implementations that are measured, behind one interface; `contenders.yaml` lists them."""
