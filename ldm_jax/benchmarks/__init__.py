"""Benchmarks: `python -m ldm_jax.benchmarks.NAME`.  Figures are printed, never asserted."""
