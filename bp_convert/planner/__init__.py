"""A model and Settings in, a Plan out. The only reader of alpha."""

from bp_convert.planner.planning import candidate_units, make_plan, prepare
from bp_convert.planner.warm import NOISE, maps_for

__all__ = ["NOISE", "candidate_units", "make_plan", "maps_for", "prepare"]
