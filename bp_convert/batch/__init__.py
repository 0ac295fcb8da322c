"""Recipes: many conversions from one file, run, resumed and compared."""
