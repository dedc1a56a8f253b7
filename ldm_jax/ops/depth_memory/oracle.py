"""What the recurrences must equal: the closed-form ridge solution and the depth-attention weights.

Both look at all writes at once, so they are for tests, analysis and small models, not for training.
"""

import jax.numpy as jnp
from jaxtyping import Float

from ldm_jax.typing import AnyArray, InverseCovariance, Key, Memory, PerGroup


def ridge_solution(
  k: Float[AnyArray, "L *batch K"],
  v: Float[AnyArray, "L *batch V"],
  forgetting: PerGroup,
  importance: PerGroup,
  alpha: float = 1.0,
) -> Memory:
  """The memory after L writes, solved in closed form from all of them.

  With Γ(L,i) = Π_{i<j≤L} λⱼ and Γ(L) = Π_{j≤L} λⱼ,

      M = argmin_M  Σᵢ Γ(L,i) ωᵢ ‖M kᵢ − vᵢ‖² + Γ(L) α⁻¹ ‖M‖²
        = (Σᵢ Γ(L,i) ωᵢ vᵢ kᵢᵀ) (Σᵢ Γ(L,i) ωᵢ kᵢ kᵢᵀ + Γ(L) α⁻¹ I)⁻¹

  Args:
    k: keys of all writes, the first axis is depth: [L, ..., G, K].
    v: values [L, ..., G, V].
    forgetting: λ [L, G], [L, ..., G], [L] or a scalar.
    importance: ω [L, ..., G], [L] or a scalar.
    alpha: inverse strength of the ridge penalty.

  Returns:
    M [..., G, V, K] in the dtype of `k`.
  """
  later, total = _decays(forgetting, k)
  weights = later * _per_write(importance, k)
  gram = jnp.einsum("l...,l...i,l...j->...ij", weights, k, k)
  cross = jnp.einsum("l...,l...v,l...k->...vk", weights, v, k)
  ridge = (total / alpha)[..., None, None] * jnp.eye(k.shape[-1], dtype=k.dtype)[
    (None,) * total.ndim
  ]
  return jnp.swapaxes(jnp.linalg.solve(gram + ridge, jnp.swapaxes(cross, -1, -2)), -1, -2)


def depth_weights(
  k: Float[AnyArray, "L *batch K"],
  q: Key,
  P: InverseCovariance,
  forgetting: PerGroup,
  importance: PerGroup,
) -> Float[AnyArray, "L *batch"]:
  """How much of each written value a read returns: the depth-attention form of the memory.

      M_l q = Σ_{i≤l} w_{l,i} vᵢ        w_{l,i} = Γ(l,i) ωᵢ · kᵢᵀ P_l q

  An exact map of which sublayer a read draws on.  Weights may be negative and need not sum to 1.

  Args:
    k: keys of the writes so far [l, ..., G, K], the first axis is depth.
    q: the query [..., G, K].
    P: the inverse key covariance after those writes [..., G, K, K].
    forgetting: λ of those writes [l, G], [l, ..., G], [l] or a scalar.  Where keys are degenerate,
      give what the writes really used (`bounded_forgetting`).
    importance: ω of those writes [l, ..., G], [l] or a scalar.

  Returns:
    w [l, ..., G] in the dtype of `k`.
  """
  later, _ = _decays(forgetting, k)
  Pq = jnp.einsum("...ij,...j->...i", P, q)
  return later * _per_write(importance, k) * jnp.einsum("l...k,...k->l...", k, Pq)


def _per_write(value, k):
  """Broadcasts a scalar, [L], [L, G] or [L, ..., G] to one number per write: [L, ..., G]."""
  value = jnp.asarray(value, k.dtype)
  shape = k.shape[:-1]
  if 0 < value.ndim < len(shape):  # depth first, then the trailing axes
    gap = (1,) * (len(shape) - value.ndim)
    value = value.reshape(value.shape[:1] + gap + value.shape[1:])
  return jnp.broadcast_to(value, shape)


def _decays(forgetting, k):
  """Γ(L,i) = Π_{i<j≤L} λⱼ for every write i, [L, ..., G], and Γ(L) = Π_{j≤L} λⱼ, [..., G]."""
  suffix = jnp.cumprod(_per_write(forgetting, k)[::-1], axis=0)[::-1]
  later = jnp.concatenate([suffix[1:], jnp.ones_like(suffix[:1])])
  return later, suffix[0]
