"""What is measured: emblib and its peers, all with one interface. `contenders.yaml` lists them."""
