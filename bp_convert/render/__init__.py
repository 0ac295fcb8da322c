"""Values as words and tables of a terminal: numbers, names, one verdict."""
