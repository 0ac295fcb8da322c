"""Times measured on the user's machine: of calls that take turns, of layers, of whole models."""

from bp_convert.tuning.clock import Times as Times
from bp_convert.tuning.clock import in_turn as in_turn
from bp_convert.tuning.machine_table import MachineTable as MachineTable
from bp_convert.tuning.tuner import tune as tune
