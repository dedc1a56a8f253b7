"""The effective depth-mixing matrix: how much of each source enters each read."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from ldm_jax.analysis.replay import Moment, Sources
from ldm_jax.ops.products import exact_einsum
from ldm_jax.typing import AnyArray

_TINY = float(jnp.finfo(jnp.float32).tiny)


class Mixing(NamedTuple):
  """Means over tokens; reads l = 0 … L, the head's last, and sources s = 0 (the embedding) … L.

  NaN where a source comes after the read.

  weights: W[l, s] by group of the width [R, S, G], where G is 1 but for the depth memory.
  magnitudes: |W[l, s]| [R, S, G].
  shares: how far the part W[l, s] v_s reaches along the read, as a fraction of it [R, S]: the inner
    product of the two over the square of the read.  The shares of a read add up to 1; a negative
    one is of a source that the others overrule.
  read_error: length of Σ_s W[l, s] v_s minus what the model read, against the length of the latter,
    each taken over all tokens [R].  What it is above rounding, the weights do not explain.
  """

  weights: Any
  magnitudes: Any
  shares: Any
  read_error: Any


def measure_read(
  moment: Moment, sources: Sources, read: Float[AnyArray, "n D"]
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
  """One row of each field of `Mixing`.

  Args:
    moment: of a replay.
    sources: what it draws on [S, n, D].
    read: what the model itself read.
  """
  weights, groups = moment.weights, moment.weights.shape[1]
  parts = sources.astype(jnp.float32).reshape(*sources.shape[:2], groups, -1)
  total = weighted_sum(weights, sources).reshape(parts.shape[1:])
  along = exact_einsum("ngs,sngv,ngv->ns", weights, parts, total)
  square = jnp.maximum(jnp.sum(jnp.square(total), axis=(1, 2)), _TINY)
  shares = jnp.mean(along / square[:, None], axis=0)
  missing = jnp.arange(len(sources)) > moment.index
  missed = total.reshape(read.shape) - read.astype(jnp.float32)
  return (
    jnp.where(missing[:, None], jnp.nan, jnp.mean(weights, axis=0).T),
    jnp.where(missing[:, None], jnp.nan, jnp.mean(jnp.abs(weights), axis=0).T),
    jnp.where(missing, jnp.nan, shares),
    jnp.linalg.norm(missed) / jnp.maximum(jnp.linalg.norm(read.astype(jnp.float32)), _TINY),
  )


def weighted_sum(weights: Float[Array, "n G S"], sources: Sources) -> Float[Array, "n D"]:
  """Σ_s W[s] v_s, float32: what a read with these weights returns."""
  values = sources.astype(jnp.float32).reshape(*sources.shape[:2], weights.shape[1], -1)
  return exact_einsum("ngs,sngv->ngv", weights, values).reshape(sources.shape[1:])
