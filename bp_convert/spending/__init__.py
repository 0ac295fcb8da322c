"""A target spent on a model: choices made, and tried on examples held out of calibration."""
