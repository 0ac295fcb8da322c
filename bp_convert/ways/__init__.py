"""How a layer runs: on its factors, on what is built of them once, or in one kernel."""
