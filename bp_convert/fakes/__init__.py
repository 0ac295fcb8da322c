"""A forward run by shape alone, and the inputs that are found that way."""
