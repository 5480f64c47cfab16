"""Media files to arrays, for the programs of every family."""
