"""Looks inside a trained model: which outputs each read draws on, and how its depth memory works.

    python -m ldm_jax.analysis --workdir runs/ldm_tiny --out figures

measures and draws.  In Python, `analyse(model, params, batch)` returns the numbers as arrays, and
the functions of `ldm_jax.analysis.plots` draw each of them into axes of your own.
"""

from ldm_jax.analysis.measure import Analysis, analyse
from ldm_jax.analysis.memory import Memory
from ldm_jax.analysis.mixing import Mixing

__all__ = ["Analysis", "Memory", "Mixing", "analyse"]
