"""Attention over depth: a softmax over the outputs of earlier sublayers (arXiv 2603.15031).

A read with query w and key-norm scale s over sources v_0 … v_{S−1}, all [..., D], is

    h = Σ_i softmax_i(w · RMSNorm(v_i)) v_i        RMSNorm with the learned scale s

without temperature or bias.  `depth_softmax` is that sentence and the reference.  `prepare_reads`
and `finish_read` compute the same number in two parts: what the finished sources contribute, for
several queries in one pass, and the one source that is still growing, merged by online softmax.
Scores, weights and sums are float32.  Between its two parts a read is kept in the dtype of the
sources, which costs bfloat16 one rounding more than the direct form and half the memory.
"""

from collections.abc import Sequence
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from ldm_jax.ops.normalize import inverse_rms, inverse_rms_of
from ldm_jax.ops.planes import plane_weights, sums_and_planes, thin_products
from ldm_jax.ops.products import exact_einsum
from ldm_jax.typing import AnyArray

Source = Float[AnyArray, "*batch D"]
Plane = Float[Array, "B D T"]


def depth_softmax(
  sources: Sequence[Source], query: Float[AnyArray, " D"], norm_scale: Float[AnyArray, " D"]
) -> Float[Array, "*batch D"]:
  """The direct form: softmax over all sources at once.

  Args:
    sources: one or more arrays [..., D] of one shape.
    query: w [D].
    norm_scale: learned scale of the key norm [D], 1 at initialisation.

  Returns:
    h [..., D] in the dtype of the sources.

  Raises:
    ValueError: without any source.
  """
  return _weighted_mean(sources, _scores(sources, (query * norm_scale)[None])[:, 0])[0]


@flax.struct.dataclass
class PreparedRead:
  """A read that knows all sources but the growing one.

  mean: softmax-weighted mean of the finished sources [..., D], in their dtype.
  log_weight: logarithm of the sum of their exponentiated scores [...], float32.
  query: w · s [D], float32, to score the growing source with.
  """

  mean: Any
  log_weight: Any
  query: Any


def prepare_reads(
  sources: Sequence[Source],
  queries: Float[AnyArray, "reads D"],
  norm_scales: Float[AnyArray, "reads D"],
) -> tuple[PreparedRead, ...]:
  """What the finished sources contribute to several reads, each source scored for all at once.

  Args:
    sources: one or more arrays [..., D] of one shape.
    queries: w of each read.
    norm_scales: s of each read.

  Raises:
    ValueError: without any source.
  """
  keys = (queries * norm_scales).astype(jnp.float32)
  scores = _scores(sources, keys)
  prepared = []
  for index in range(len(keys)):
    mean, log_weight = _weighted_mean(sources, scores[:, index])
    prepared.append(PreparedRead(mean, log_weight, keys[index]))
  return tuple(prepared)


def finish_read(prepared: PreparedRead, growing: Source) -> Float[Array, "*batch D"]:
  """Adds the growing source [..., D] to a prepared read by online softmax; returns h [..., D]."""
  score = _scores([growing], prepared.query[None])[0, 0]
  weight = jax.nn.sigmoid(score - prepared.log_weight)[..., None]
  mean = prepared.mean.astype(jnp.float32)
  return (mean + weight * (growing.astype(jnp.float32) - mean)).astype(growing.dtype)


def prepare_plane_reads(
  sources: Sequence[Plane],
  queries: Float[AnyArray, "reads D"],
  norm_scales: Float[AnyArray, "reads D"],
  *,
  interpret: bool = False,
) -> tuple[tuple[PreparedRead, ...], tuple[Plane, ...]]:
  """`prepare_reads` of planes, in two passes over them.

  Args:
    sources: one or more planes.
    queries: as in `prepare_reads`.
    norm_scales: as in `prepare_reads`.
    interpret: run kernels in Pallas's interpreter, for tests.

  Returns:
    The reads, whose means are planes, and the sources to go on with.
  """
  keys = (queries * norm_scales).astype(jnp.float32)
  each = (keys,) * len(sources)
  products, squares, sources = thin_products(sources, each, interpret=interpret)
  scores = [y * inverse_rms_of(z, keys.shape[1]) for y, z in zip(products, squares, strict=True)]
  if len(sources) == 1:
    log_weight, means = scores[0], sources * len(keys)
  else:
    scores = jnp.stack(scores)  # [S, B, reads, T]
    log_weight = jax.nn.logsumexp(scores, axis=0)
    weights = jnp.exp(scores - log_weight[None]).transpose(2, 0, 1, 3)
    weights = plane_weights(weights, sources[0])
    means, sources = sums_and_planes(sources, weights, interpret=interpret)
  reads = zip(means, log_weight.swapaxes(0, 1), keys, strict=True)
  return tuple(PreparedRead(*read) for read in reads), sources


def finish_plane_read(
  prepared: PreparedRead, growing: Plane, *, interpret: bool = False
) -> tuple[Plane, Plane]:
  """`finish_read` of a plane: h and the growing source to go on with."""
  key = prepared.query[None]
  (product,), (squares,), (growing,) = thin_products([growing], [key], interpret=interpret)
  score = product * inverse_rms_of(squares, key.shape[1])
  weight = jax.nn.sigmoid(score[:, 0] - prepared.log_weight)
  weights = plane_weights(jnp.stack([1 - weight, weight])[None], growing)
  (h,), (_, growing) = sums_and_planes((prepared.mean, growing), weights, interpret=interpret)
  return h, growing


def _scores(sources, keys):
  """w · RMSNorm(v) of every source and read: [S, reads, ...], float32."""
  if not len(sources):
    raise ValueError("attention over depth needs at least one source")
  scores = []
  for source in sources:
    source = jnp.asarray(source, jnp.float32)
    product = exact_einsum("...d,rd->r...", source, keys)
    scores.append(product * inverse_rms(source)[None])
  return jnp.stack(scores)


def _weighted_mean(sources, scores):
  """Softmax-weighted mean [..., D] and log of the total weight [...], from scores [S, ...]."""
  log_weight = jax.nn.logsumexp(scores, axis=0)
  weights = jnp.exp(scores - log_weight[None])
  total = sum(
    weight[..., None] * jnp.asarray(source, jnp.float32)
    for weight, source in zip(weights, sources, strict=True)
  )
  return total.astype(jnp.asarray(sources[0]).dtype), log_weight
