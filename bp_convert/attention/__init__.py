"""Multi-head attention: its layer, and what it computes between its projections."""
