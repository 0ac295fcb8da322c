"""One job run: opened, read, planned, converted, trained, scored, reported and written.

Nothing else in the package puts these into an order. What stands here loads no torch until it is
asked for work.
"""
