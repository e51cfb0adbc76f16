"""What a run leaves: its records, and the numbers made of them."""
