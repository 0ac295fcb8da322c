"""A model and Settings in, a Plan out. The only reader of alpha."""

from bp_convert.planner.planning import candidate_units, make_plan
from bp_convert.planner.warm import MAP_BATCH, NOISE

__all__ = ["MAP_BATCH", "NOISE", "candidate_units", "make_plan"]
