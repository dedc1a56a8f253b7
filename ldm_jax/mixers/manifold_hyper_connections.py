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

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from ldm_jax.mixers.hyper_connections import (
  HyperConnectionStreams,
  MultiStreamMixer,
  PlaneWeights,
)
from ldm_jax.ops.hyper_connections import Streams, project_jointly, read_streams, write_streams
from ldm_jax.ops.normalize import inverse_rms_of
from ldm_jax.ops.planes import thin_products
from ldm_jax.ops.sinkhorn import sinkhorn_leading, sinkhorn_tokenwise
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

  def read_streams(self, X: Streams) -> ActivationsBTD:
    """H_pre X; x before the first write; the mean of the streams for the head."""
    if self.is_head():
      return read_streams(X, jnp.full((self.streams, 1, 1), 1 / self.streams))
    if self._reads_first():
      return X[0]
    return read_streams(X, self.coefficients(X, "pre"))

  def write_streams(self, X: Streams, v: ActivationsBTD) -> Streams:
    """H_res X + H_postᵀ v."""
    mixing = self.coefficients(X, "res") if self._mixes() else None
    writing = self.coefficients(X, "post")
    return write_streams(X, v, writing, mixing)

  def weigh_planes(
    self, streams: HyperConnectionStreams, sides: tuple[str, ...]
  ) -> tuple[PlaneWeights, HyperConnectionStreams]:
    """As declared by the base class."""
    if self.is_head():
      return PlaneWeights(jnp.full((self.streams, 1, 1), 1 / self.streams)), streams
    names = ("pre",) if "read" in sides and not self._reads_first() else ()
    if "write" in sides:
      names += ("res", "post") if self._mixes() else ("post",)
    if not names:
      return PlaneWeights(), streams
    found, X = self.coefficients(streams.X, names, streams.interpret)
    weights = PlaneWeights(found.get("pre"), found.get("res"), found.get("post"))
    return weights, streams.replace(X=X)

  def _mixes(self):
    return 0 < self.index < self.sublayers - 1 and self.streams > 1


class ManifoldCoefficients(nn.Module):
  """H_pre, H_post or H_res from the streams before the sublayer."""

  home: int

  @nn.compact
  def __call__(
    self,
    X: Float[Array, "N B T D"] | tuple[Float[Array, "B D T"], ...],
    names: str | tuple[str, ...],
    interpret: bool = False,
  ) -> Any:
    """[N, B, T] for name "pre" or "post", [N, N, B, T] for "res"; float32.

    Args:
      X: streams; or planes, to be had for several names in one pass.
      names: one name; or, for planes, some.
      interpret: for planes, whether kernels run in Pallas's interpreter.

    Returns:
      The array; or, for planes, all arrays by name and the planes to go on with.
    """
    if isinstance(X, tuple):
      return self._of_planes(X, names, interpret)
    kernel, bias, scale = self._parameters(len(X), X.shape[-1], names)
    product = project_jointly(X, kernel)
    product = product.reshape(*bias.shape, *product.shape[1:])
    logits = scale * product + bias[..., None, None]
    if names == "res":
      return sinkhorn_leading(logits, _ITERATIONS)
    return _gate(names, logits)

  def _of_planes(self, planes, names, interpret):
    batch, width, tokens = planes[0].shape
    parameters = [self._parameters(len(planes), width, name) for name in names]
    kernel = jnp.concatenate([kernel for kernel, _, _ in parameters], axis=-1).swapaxes(1, 2)
    products, squares, planes = thin_products(planes, tuple(kernel), interpret=interpret)
    product = sum(products) * inverse_rms_of(sum(squares), len(planes) * width)
    found, first = {}, 0
    for name, (_, bias, scale) in zip(names, parameters, strict=True):
      # Rows are in the sublanes of a register until all that is done to each alone is done.
      logits = scale * product[:, first : first + bias.size] + bias.reshape(-1, 1)[None]
      first += bias.size
      if name != "res":
        found[name] = _gate(name, logits).swapaxes(0, 1)
        continue
      logits = logits.swapaxes(0, 1).reshape(*bias.shape, batch, tokens)
      found[name] = sinkhorn_tokenwise(logits, _ITERATIONS, interpret=interpret)
    return found, planes

  def _parameters(self, count, width, name):
    """φ, b and a of a · u φ + b, with φ = 0 and a = 0.01 at initialisation."""
    bias = jnp.zeros(count)
    if name == "pre":
      bias = 6.0 * jnp.eye(count)[self.home] - 3.0
    if name == "res":
      bias = 6.0 * jnp.eye(count) - 3.0
    shape = (count, width, bias.size)
    init = partitioned(nn.initializers.zeros, None, "stream_embed", None)
    kernel = self.param(f"{name}_kernel", init, shape)
    init = partitioned(lambda *_: bias, *(None,) * bias.ndim)
    scale = partitioned(nn.initializers.constant(0.01))
    return (
      kernel,
      self.param(f"{name}_bias", init, bias.shape),
      self.param(f"{name}_scale", scale, ()),
    )


def _gate(name, logits):
  """H_pre or H_post."""
  gate = jax.nn.sigmoid(logits)
  return 2 * gate if name == "post" else gate
