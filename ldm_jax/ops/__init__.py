"""Pure functions: no Flax, no parameters, no state."""
