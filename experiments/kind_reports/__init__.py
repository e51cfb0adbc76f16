"""What the report of each kind of experiment says and draws: a module per kind."""
