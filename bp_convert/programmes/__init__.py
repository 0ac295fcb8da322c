"""The choice of one option of each unit within limits, as programmes of numbers alone."""
