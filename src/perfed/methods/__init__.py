"""One file per method, both sides of it."""
