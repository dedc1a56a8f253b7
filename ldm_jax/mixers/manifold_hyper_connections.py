"""Manifold-constrained hyper-connections: streams mixed by doubly stochastic matrices.

    u = RMSNorm(vec X)                                   X ∈ R^{N×D}, one norm over all N·D numbers
    H_pre = sigmoid(a_pre u φ_pre + b_pre)               what the sublayer reads
    H_post = 2 sigmoid(a_post u φ_post + b_post)         where its output goes
    H_res = Sinkhorn(exp(a_res mat(u φ_res) + b_res))    how the streams mix
    X ← H_res X + H_postᵀ f(H_pre X)

Source: arXiv 2512.24880 with its N = 4, 20 iterations and a = 0.01 at initialisation.  The paper
states neither the initial biases nor the ends of the streams; this project's choices are φ = 0,
b_pre = −3 with +3 on stream l mod N, b_post = 0, b_res = 6 I − 3, N copies of the embedding, and
their mean for the head.  So at the start a sublayer reads a positive multiple of PreLN's residual
stream, and the home stream l mod N breaks the symmetry that would otherwise keep all streams equal
for ever.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from ldm_jax.mixers.base import KEPT
from ldm_jax.mixers.hyper_connections import HyperConnectionStreams, MultiStreamMixer
from ldm_jax.ops.hyper_connections import project_jointly, read_streams, write_streams
from ldm_jax.ops.sinkhorn import sinkhorn_leading
from ldm_jax.sharding import partitioned
from ldm_jax.typing import ActivationsBTD

_ITERATIONS = 20


class ManifoldHyperConnections(MultiStreamMixer):
  """Manifold-constrained hyper-connections as a depth mixer.

  Streams are not mixed where mixing is not meant to matter: at the first sublayer all are equal,
  and after the last one the head takes their mean, which a doubly stochastic matrix keeps.  The
  latter is exact only in the limit: next to 6 I − 3 the iteration converges slowly, and with logits
  scattered around it by 0.3 the columns, and so the weights in that mean, are off by 3e-3 after 20
  iterations.

  Attributes:
    sublayers: L, required.
    streams: N, at least 1.
  """

  streams: int = 4

  def setup(self):
    """Declares the coefficients; their parameters appear where they are used."""
    self.coefficients = ManifoldCoefficients(self.index % self.streams)

  def read(self, streams: HyperConnectionStreams) -> ActivationsBTD:
    """H_pre X; x before the first write; the mean of the streams for the head."""
    if self.is_head():
      return read_streams(streams.X, jnp.full((self.streams, 1, 1), 1 / self.streams))
    if self.index == 0 or self.streams == 1:
      return streams.X[0]
    return read_streams(streams.X, self.coefficients(streams.X, "pre"))

  def write(self, streams: HyperConnectionStreams, v: ActivationsBTD) -> HyperConnectionStreams:
    """H_res X + H_postᵀ v."""
    v = checkpoint_name(v, KEPT)
    between = 0 < self.index < self.sublayers - 1 and self.streams > 1
    mixing = self.coefficients(streams.X, "res") if between else None
    writing = self.coefficients(streams.X, "post")
    return self._place(write_streams(streams.X, v, writing, mixing))


class ManifoldCoefficients(nn.Module):
  """H_pre, H_post or H_res from the streams before the sublayer."""

  home: int

  @nn.compact
  def __call__(
    self, X: Float[Array, "N B T D"], name: str
  ) -> Float[Array, "N B T"] | Float[Array, "N N B T"]:
    """[N, B, T] for name "pre" or "post", [N, N, B, T] for "res"; float32."""
    count = X.shape[0]
    if name == "pre":
      logits = self._logits(X, name, 6.0 * jnp.eye(count)[self.home] - 3.0)
      return jax.nn.sigmoid(logits)
    if name == "post":
      return 2 * jax.nn.sigmoid(self._logits(X, name, jnp.zeros(count)))
    logits = self._logits(X, name, 6.0 * jnp.eye(count) - 3.0)
    return sinkhorn_leading(logits, _ITERATIONS)

  def _logits(self, X, name, initial_bias):
    """a · u φ + b with φ = 0, a = 0.01 and b = `initial_bias` at initialisation."""
    shape = (X.shape[0], X.shape[-1], initial_bias.size)
    init = partitioned(nn.initializers.zeros, None, "stream_embed", None)
    kernel = self.param(f"{name}_kernel", init, shape)
    init = partitioned(lambda *_: initial_bias, *(None,) * initial_bias.ndim)
    bias = self.param(f"{name}_bias", init, initial_bias.shape)
    init = partitioned(nn.initializers.constant(0.01))
    scale = self.param(f"{name}_scale", init, ())
    product = project_jointly(X, kernel)
    product = product.reshape(*bias.shape, *product.shape[1:])
    return scale * product + bias[..., None, None]
