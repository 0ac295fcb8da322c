"""A model and Settings in, a Plan out. The only reader of alpha."""

from bp_convert.planner.planning import candidate_units, prepare
from bp_convert.planner.warm import NOISE, Planned, maps_for

__all__ = ["NOISE", "Planned", "candidate_units", "maps_for", "prepare"]
