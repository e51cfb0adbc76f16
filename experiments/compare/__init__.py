"""Results of several machines side by side, and published ones beside ours."""
