"""Which pair and how many terms each weight gets: candidates, their errors, and the choice."""
