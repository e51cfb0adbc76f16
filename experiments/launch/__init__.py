"""Several runs from one command: Hydra's launchers, and who may use which processor meanwhile."""
