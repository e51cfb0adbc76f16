"""How long one call takes, how sure that is, and what it needs in memory."""
