"""Hidden states of the target: reading the target, running it, and keeping what it computed on disk."""
