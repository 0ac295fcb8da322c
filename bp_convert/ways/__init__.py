"""How a layer runs: on its factors, or on what is built of them once."""
