"""What pickles may name and how objects are pickled: the safe loader's side of model files."""
