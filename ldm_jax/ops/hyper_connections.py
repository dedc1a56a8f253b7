"""What hyper-connections do to N residual streams X [N, B, T, D].

Weights are float32 with the token axes last, so they fill vector lanes as the streams do.  Mixing
is written out as sums over the N streams, which compilers turn into passes over contiguous arrays;
as a reduction over the stream axis it took four times as long on a CPU, and products of small
matrices, one per token, are what a TPU's matrix unit does worst.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float

from ldm_jax.ops.normalize import inverse_rms
from ldm_jax.ops.products import exact_einsum
from ldm_jax.typing import ActivationsBTD

Streams = Float[Array, "N B T D"]


def read_streams(X: Streams, weights: Float[Array, "N #B #T"]) -> ActivationsBTD:
  """Σ_n weights[n] X[n], summed in float32, in the dtype of X."""
  return _weighted_sum(X.astype(jnp.float32), weights).astype(X.dtype)


def write_streams(
  X: Streams,
  v: ActivationsBTD,
  writing: Float[Array, "N #B #T"],
  mixing: Float[Array, "N N #B #T"] | None = None,
) -> Streams:
  """X[j] ← Σ_i mixing[j, i] X[i] + writing[j] v; without mixing, X[j] ← X[j] + writing[j] v."""
  kept = X.astype(jnp.float32)
  if mixing is not None:
    kept = jnp.stack([_weighted_sum(kept, weights) for weights in mixing])
  return (kept + writing[..., None] * v[None].astype(jnp.float32)).astype(X.dtype)


def _weighted_sum(X, weights):
  return sum(weight[..., None] * x for weight, x in zip(weights, X, strict=True))


def project_each(X: Streams, kernel: Float[Array, "D out"]) -> Float[Array, "N out B T"]:
  """RMSNorm(X_n) W for each stream by itself, float32."""
  product = exact_einsum("nbtd,do->nobt", X.astype(jnp.float32), kernel)
  return product * inverse_rms(X)[:, None]


def project_jointly(X: Streams, kernel: Float[Array, "N D out"]) -> Float[Array, "out B T"]:
  """RMSNorm(vec X) φ, one norm over all N·D numbers, float32."""
  product = exact_einsum("nbtd,ndo->nobt", X.astype(jnp.float32), kernel)
  return jnp.sum(product, axis=0) * inverse_rms(X, axis=(0, -1))[None]
