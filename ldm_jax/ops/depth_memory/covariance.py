"""P of the depth memory in the layout of the equations, [B, T, G, K, K]: a write and its gradient.

By hand, since automatic differentiation goes over the matrices twice as often.
"""

import functools

import jax
import jax.numpy as jnp

from ldm_jax.ops.depth_memory.deferred import Covariance, Record
from ldm_jax.ops.depth_memory.reference import eigenvalue_limit, mean_eigenvalue
from ldm_jax.ops.products import exact_einsum

_SINGLE_ROWS = 512
_FEW_ROWS = 4  # more than that XLA sums up in a library, at several times the cost of a product


def is_single(shape: tuple[int, ...]) -> bool:
  """Whether arrays [B, T, …] are of one token of not too many rows, as in decoding."""
  return shape[0] <= _SINGLE_ROWS and shape[1] == 1


def dot(a, b):
  """aᵀ b over the last axis."""
  return jnp.sum(a * b, axis=-1)


def times(matrix, vector):
  """Matrices [B, T, G, n, K] times vectors [B, T, G, K]."""
  # A product of its own costs more than its sums, if they are few.
  if vector.shape[0] <= _FEW_ROWS and vector.shape[1] == 1:
    return jnp.sum(matrix * vector[..., None, :], axis=-1)
  return exact_einsum("...ij,...j->...i", matrix, vector)


def symmetric_outer(a, b):
  """(a bᵀ + b aᵀ) / 2, without a transposition, which CPUs do one number at a time."""
  return 0.5 * (a[..., :, None] * b[..., None, :] + b[..., :, None] * a[..., None, :])


def _times_identity(numbers, size):
  identity = jnp.eye(size)[(None,) * numbers.ndim]
  return numbers[..., None, None] * identity


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def write_covariance(alone, covariance, key, importance, forgetting):
  """P after a write, and the record of it, see `reference.rls_write` for both safeguards.

  `alone` runs a function of arrays, apart from what is around it or not; the cotangent of P must be
  symmetric.
  """
  return _write_forward(alone, covariance, key, importance, forgetting)[0]


def _bounded(matrix, decay, forgetting):
  """λ as `reference.bounded_forgetting` bounds it, that bound, and the mean eigenvalue of Γ P."""
  mean = mean_eigenvalue(matrix)
  bound = jnp.minimum(1.0, mean / (eigenvalue_limit(mean.dtype) * decay))
  return jnp.maximum(forgetting, bound), bound, mean


def _write_forward(alone, covariance, key, importance, forgetting):
  def vectors(matrix, decay, key, importance, forgetting):
    bounded, _, mean = _bounded(matrix, decay, forgetting)
    decay = decay * bounded
    weight = importance / decay
    projection = times(matrix, key)
    share = weight / (1 + weight * dot(key, projection))
    return decay, weight, projection, share, 0.5 * jnp.finfo(mean.dtype).eps * mean

  matrix = covariance.matrix
  decay, weight, projection, share, floor = alone(
    vectors, matrix, covariance.decay, key, importance, forgetting
  )
  downdate = share[..., None, None] * (projection[..., :, None] * projection[..., None, :])
  matrix = matrix - downdate + _times_identity(floor, matrix.shape[-1])
  out = Covariance(matrix, decay), Record(key, weight)
  return out, (covariance, key, importance, forgetting)


def _write_backward(alone, kept, gradients):
  """With s = P k, d = 1 + w k·s, h = w / d and a symmetric cotangent A of P − h s sᵀ:
  s̄ = −2 h A s + d̄ w k,   h̄ = −sᵀ A s,   d̄ = −h̄ w / d²,   P̄ = A + (s̄ kᵀ + k s̄ᵀ) / 2
  """

  def vectors(matrix_bar, decay_bar, record_bar, matrix, decay, key, importance, forgetting):
    bounded, bound, _ = _bounded(matrix, decay, forgetting)
    later = decay * bounded
    weight = importance / later
    projection = times(matrix, key)
    inner = dot(key, projection)
    denominator = 1 + weight * inner
    share = weight / denominator

    seen = times(matrix_bar, projection)
    share_bar = -dot(projection, seen)
    denominator_bar = -share_bar * weight / denominator**2
    weight_bar = record_bar.weight + share_bar / denominator + denominator_bar * inner
    slope = (denominator_bar * weight)[..., None]
    projection_bar = slope * key - 2 * share[..., None] * seen
    key_bar = record_bar.key + slope * projection + times(matrix, projection_bar)

    decay_bar = decay_bar - weight_bar * weight / later
    bounded_bar = decay_bar * decay
    raised = bound > forgetting
    bound_bar = jnp.where(raised & (bound < 1.0), bounded_bar, 0.0)
    diagonal_bar = bound_bar / (eigenvalue_limit(matrix.dtype) * decay * matrix.shape[-1])
    earlier_bar = decay_bar * bounded - bound_bar * bound / decay
    forgetting_bar = jnp.where(raised, 0.0, bounded_bar)
    return projection_bar, diagonal_bar, earlier_bar, key_bar, weight_bar / later, forgetting_bar

  covariance, key, *rest = kept
  covariance_bar, record_bar = gradients
  projection_bar, diagonal_bar, earlier_bar, *others = alone(
    vectors,
    covariance_bar.matrix,
    covariance_bar.decay,
    record_bar,
    covariance.matrix,
    covariance.decay,
    key,
    *rest,
  )
  matrix_bar = covariance_bar.matrix + symmetric_outer(projection_bar, key)
  matrix_bar = matrix_bar + _times_identity(diagonal_bar, key.shape[-1])
  return Covariance(matrix_bar, earlier_bar), *others


write_covariance.defvjp(_write_forward, _write_backward)
