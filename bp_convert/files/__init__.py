"""Models in files: told apart, read safely, written whole."""
