"""Hyper-connections: N residual streams with learned connections (arXiv 2409.19606).

    h = A_mᵀ X,    X ← A_rᵀ X + Bᵀ f(h)          X ∈ R^{N×D}, N copies of the embedding at first

The head reads the sum of the streams.  In the dynamic form the connections depend on the token:

    B += s_β tanh(X̄ W_β)ᵀ,   A_m += s_α tanh(X̄ W_m),   A_r += s_α tanh(X̄ W_r)

with X̄ the normalised streams.  The paper says "norm"; here it is RMSNorm without a scale, which W
can absorb.  At initialisation W = 0, s = 0.01, B = 1, A_m picks stream l mod N, A_r = I: every
stream is PreLN's.
"""

from typing import Any

import flax.linen as nn
import flax.struct
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from ldm_jax.errors import InputError
from ldm_jax.mixers.base import KEPT, DepthMixer
from ldm_jax.ops.hyper_connections import project_each, read_streams, write_streams
from ldm_jax.sharding import constrain, partitioned
from ldm_jax.typing import ActivationsBTD


@flax.struct.dataclass
class HyperConnectionStreams:
  """X [N, B, T, D], in the dtype of the embeddings."""

  X: Any


class MultiStreamMixer(DepthMixer):
  """What hyper-connections and their manifold-constrained form share.

  `sublayers` must be given: the mixer of that number is the head, which reads all streams alike.
  The first sublayer reads the embedding itself and has no read weights: its streams are all equal,
  so weights could only scale what the sublayer's norm scales back.  A single stream is read as it
  is, for the same reason.
  """

  def __post_init__(self):
    self.require("streams", self.streams >= 1, "at least 1")
    super().__post_init__()

  def init_streams(self, x: ActivationsBTD) -> HyperConnectionStreams:
    """N copies of x.

    Raises:
      InputError: if `sublayers` is not given.
    """
    self.is_head()
    return self._place(jnp.broadcast_to(x[None], (self.streams, *x.shape)))

  def is_head(self) -> bool:
    """Whether this is mixer number L.

    Raises:
      InputError: if `sublayers` is not given.
    """
    if self.sublayers is None:
      raise InputError(
        f"{type(self).__name__} needs sublayers = L, the number of sublayers: the mixer with index "
        "L is the head, which reads all streams alike"
      )
    return self.index >= self.sublayers

  def _place(self, X):
    return HyperConnectionStreams(constrain(X, None, "batch", "sequence", "activation_embed"))


class HyperConnections(MultiStreamMixer):
  """Hyper-connections as a depth mixer.

  Attributes:
    sublayers: L, required.
    streams: N, at least 1.
    dynamic: whether the connections depend on the token.
  """

  streams: int = 4
  dynamic: bool = True

  def setup(self):
    """Declares the connections; their parameters appear where they are used."""
    self.coefficients = Connections(self.index % self.streams, self.dynamic)

  def read(self, streams: HyperConnectionStreams) -> ActivationsBTD:
    """A_mᵀ X; x before the first write; the sum of the streams for the head."""
    if self.is_head():
      return read_streams(streams.X, jnp.ones((self.streams, 1, 1)))
    if self.index == 0 or self.streams == 1:
      return streams.X[0]
    return read_streams(streams.X, self.coefficients(streams.X, "read"))

  def write(self, streams: HyperConnectionStreams, v: ActivationsBTD) -> HyperConnectionStreams:
    """A_rᵀ X + Bᵀ v."""
    v = checkpoint_name(v, KEPT)
    mixing, writing = self.coefficients(streams.X, "write")
    return self._place(write_streams(streams.X, v, writing, mixing.swapaxes(0, 1)))


class Connections(nn.Module):
  """A_m for the read, A_r and B for the write, from the streams before the sublayer."""

  home: int
  dynamic: bool

  @nn.compact
  def __call__(
    self, X: Float[Array, "N B T D"], side: str
  ) -> Float[Array, "N #B #T"] | tuple[Float[Array, "N N #B #T"], Float[Array, "N #B #T"]]:
    """A_m [N, B, T] for side "read"; (A_r [N, N, B, T], B [N, B, T]) for "write"; float32.

    Without the dynamic part B and T are 1.
    """
    count = X.shape[0]
    if side == "read":
      static = self._parameter("read_weight", lambda *_: jnp.eye(count)[self.home], count)
      return static[:, None, None] + self._dynamic(X, "read", 1, "alpha")[:, 0]
    mixing = self._parameter("mix_weight", lambda *_: jnp.eye(count), count, count)
    writing = self._parameter("write_weight", nn.initializers.ones, count)
    return (
      mixing[:, :, None, None] + self._dynamic(X, "mix", count, "alpha"),
      writing[:, None, None] + self._dynamic(X, "write", 1, "beta")[:, 0],
    )

  def _dynamic(self, X, name, outputs, greek):
    """s tanh(X̄ W), [N, outputs, B, T]; zero in the static form."""
    if not self.dynamic:
      return jnp.zeros((X.shape[0], outputs, 1, 1))
    width = X.shape[-1]
    shape = (width,) if outputs == 1 else (width, outputs)
    axes = ("stream_embed", None)[: len(shape)]
    kernel = self.param(f"{name}_kernel", partitioned(nn.initializers.zeros, *axes), shape)
    scale = self._parameter(f"{greek}_scale", nn.initializers.constant(0.01))
    product = project_each(X, kernel.reshape(width, outputs))
    return scale * jnp.tanh(product)

  def _parameter(self, name, init, *shape):
    return self.param(name, partitioned(init, *(None,) * len(shape)), shape)
