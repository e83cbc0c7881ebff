"""Rules: called with `now`, they return decisions. No socket, clock, event loop or randomness."""
