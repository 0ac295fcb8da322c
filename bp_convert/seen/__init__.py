"""What the weights of a layer multiply in a call: rows, and which of them are looked at."""
