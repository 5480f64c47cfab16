"""Where the time of a request went."""
