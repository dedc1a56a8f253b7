"""The linear depth memory: weighted ridge regression over depth, one token at a time.

from ldm_jax.ops import depth_memory as dm

M, P = dm.rls_init((B, T), groups=G, value_dim=V, key_dim=K)
M, P = dm.rls_write(M, P, k, v, forgetting, importance)   # after every sublayer
r = dm.read(M, q)                                         # before the next one
"""

from ldm_jax.ops.depth_memory.oracle import depth_weights, ridge_solution
from ldm_jax.ops.depth_memory.reference import (
  bounded_forgetting,
  delta_write,
  outer_write,
  read,
  rls_init,
  rls_write,
)

__all__ = [
  "bounded_forgetting",
  "delta_write",
  "depth_weights",
  "outer_write",
  "read",
  "ridge_solution",
  "rls_init",
  "rls_write",
]
