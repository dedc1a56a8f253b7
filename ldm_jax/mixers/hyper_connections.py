"""Hyper-connections: N residual streams with learned connections (arXiv 2409.19606).

    h = A_mᵀ X,    X ← A_rᵀ X + Bᵀ f(h)          X ∈ R^{N×D}, N copies of the embedding at first

The head reads the sum of the streams.  In the dynamic form the connections depend on the token:

    B += s_β tanh(X̄ W_β)ᵀ,   A_m += s_α tanh(X̄ W_m),   A_r += s_α tanh(X̄ W_r)

with X̄ the normalised streams.  The paper says "norm"; here it is RMSNorm without a scale, which W
can absorb.  At initialisation W = 0, s = 0.01, B = 1, A_m picks stream l mod N, A_r = I: every
stream is PreLN's.
"""

from typing import Any, NamedTuple

import flax.linen as nn
import flax.struct
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from ldm_jax.errors import InputError
from ldm_jax.mixers.base import KEPT, DepthMixer
from ldm_jax.ops.hyper_connections import Streams, project_each, read_streams, write_streams
from ldm_jax.ops.normalize import inverse_rms_of
from ldm_jax.ops.planes import (
  from_plane,
  place_plane,
  plane_weights,
  sums_and_planes,
  takes_planes,
  thin_products,
  to_plane,
  weighted_sums,
)
from ldm_jax.sharding import constrain, partitioned
from ldm_jax.typing import ActivationsBTD, Sublayer


@flax.struct.dataclass
class HyperConnectionStreams:
  """X [N, B, T, D], in the dtype of the embeddings; in programs for TPUs N planes [B, D, T].

  interpret: whether kernels on planes run in Pallas's interpreter, for tests.
  """

  X: Any
  interpret: bool = flax.struct.field(pytree_node=False, default=False)

  @property
  def planes(self) -> bool:
    """Whether X is a tuple of planes."""
    return isinstance(self.X, tuple)

  def as_planes(self, interpret: bool = False) -> "HyperConnectionStreams":
    """The same with X as planes."""
    return HyperConnectionStreams(tuple(map(to_plane, self.X)), interpret)

  def stacked(self) -> Streams:
    """X [N, B, T, D] in either case."""
    return jnp.stack([from_plane(plane) for plane in self.X]) if self.planes else self.X


class PlaneWeights(NamedTuple):
  """What planes are weighed with, float32; B and T are 1 where no token has weights of its own.

  read: [N, B, T]; None where a sublayer sees the first stream as it is.
  mixing: out of each new stream (first axis) and each old one [N, N, B, T]; None keeps streams.
  writing: [N, B, T].
  """

  read: Any = None
  mixing: Any = None
  writing: Any = None


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
    if takes_planes(x):
      return HyperConnectionStreams((to_plane(x),) * self.streams)
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

  def read(self, streams: HyperConnectionStreams) -> ActivationsBTD:
    """What the sublayer sees."""
    if not streams.planes:
      return self.read_streams(streams.X)
    weights, streams = self.weigh_planes(streams, ("read",))
    return self._read_planes(streams, weights)[0]

  def write(self, streams: HyperConnectionStreams, v: ActivationsBTD) -> HyperConnectionStreams:
    """The streams, mixed, and v in them."""
    if not streams.planes:
      return self._place(self.write_streams(streams.X, checkpoint_name(v, KEPT)))
    weights, streams = self.weigh_planes(streams, ("write",))
    return self._write_planes(streams, weights, v)

  def __call__(self, streams: HyperConnectionStreams, f: Sublayer) -> HyperConnectionStreams:
    """One sublayer; planes are gone through once for what both sides need to know of them."""
    if not streams.planes:
      return self.write(streams, f(self.read(streams)))
    weights, streams = self.weigh_planes(streams, ("read", "write"))
    h, streams = self._read_planes(streams, weights)
    return self._write_planes(streams, weights, f(h))

  def read_streams(self, X: Streams) -> ActivationsBTD:
    """What the sublayer sees of X [N, B, T, D]."""
    raise NotImplementedError(f"{type(self).__name__} must define read_streams")

  def write_streams(self, X: Streams, v: ActivationsBTD) -> Streams:
    """X [N, B, T, D] after the write."""
    raise NotImplementedError(f"{type(self).__name__} must define write_streams")

  def weigh_planes(
    self, streams: HyperConnectionStreams, sides: tuple[str, ...]
  ) -> tuple[PlaneWeights, HyperConnectionStreams]:
    """The same for planes: their weights and the streams to go on with.

    Args:
      streams: planes.
      sides: "read", "write" or both.
    """
    raise NotImplementedError(f"{type(self).__name__} must define weigh_planes")

  def _reads_first(self):
    """Whether the sublayer sees the first stream as it is."""
    return not self.is_head() and (self.index == 0 or self.streams == 1)

  def _read_planes(self, streams, weights):
    """What the sublayer sees and the streams to go on with."""
    if weights.read is None:
      return from_plane(streams.X[0]), streams
    weights = plane_weights(weights.read[None], streams.X[0])
    (h,), X = sums_and_planes(streams.X, weights, interpret=streams.interpret)
    return from_plane(h), streams.replace(X=X)

  def _write_planes(self, streams, weights, v):
    planes, base = (checkpoint_name(to_plane(v), KEPT),), streams.X
    writing = weights.writing[:, None]
    if weights.mixing is not None:
      planes, base = (*streams.X, *planes), None
      writing = jnp.concatenate([weights.mixing, writing], axis=1)
    writing = plane_weights(writing, streams.X[0])
    dtype = streams.X[0].dtype
    X = weighted_sums(planes, writing, base, dtype=dtype, interpret=streams.interpret)
    return streams.replace(X=tuple(map(place_plane, X)))

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

  def read_streams(self, X: Streams) -> ActivationsBTD:
    """A_mᵀ X; x before the first write; the sum of the streams for the head."""
    if self.is_head():
      return read_streams(X, jnp.ones((self.streams, 1, 1)))
    if self._reads_first():
      return X[0]
    return read_streams(X, self.coefficients(X, "read"))

  def write_streams(self, X: Streams, v: ActivationsBTD) -> Streams:
    """A_rᵀ X + Bᵀ v."""
    mixing, writing = self.coefficients(X, "write")
    return write_streams(X, v, writing, mixing.swapaxes(0, 1))

  def weigh_planes(
    self, streams: HyperConnectionStreams, sides: tuple[str, ...]
  ) -> tuple[PlaneWeights, HyperConnectionStreams]:
    """As declared by the base class."""
    if self.is_head():
      return PlaneWeights(jnp.ones((self.streams, 1, 1))), streams
    sides = tuple(side for side in sides if side == "write" or not self._reads_first())
    if not sides:
      return PlaneWeights(), streams
    weights, X = self.coefficients(streams.X, sides, streams.interpret)
    return weights, streams.replace(X=X)


class Connections(nn.Module):
  """A_m for the read, A_r and B for the write, from the streams before the sublayer."""

  home: int
  dynamic: bool

  @nn.compact
  def __call__(
    self,
    X: Streams | tuple[Float[Array, "B D T"], ...],
    sides: str | tuple[str, ...],
    interpret: bool = False,
  ) -> Any:
    """A_m [N, B, T] for side "read"; (A_r [N, N, B, T], B [N, B, T]) for "write"; float32.

    Without the dynamic part B and T are 1.

    Args:
      X: streams; or planes, to be had for both sides in one pass.
      sides: one side; or, for planes, one or both.
      interpret: for planes, whether kernels run in Pallas's interpreter.

    Returns:
      The arrays; or, for planes, `PlaneWeights` and the planes to go on with.
    """
    if isinstance(X, tuple):
      return self._of_planes(X, sides, interpret)
    count = X.shape[0]
    if sides == "read":
      return self._static("read", count)[:, None, None] + self._dynamic(X, "read")[:, 0]
    return (
      self._static("mix", count)[:, :, None, None] + self._dynamic(X, "mix"),
      self._static("write", count)[:, None, None] + self._dynamic(X, "write")[:, 0],
    )

  def _of_planes(self, planes, sides, interpret):
    count, width = len(planes), planes[0].shape[1]
    rows = {"read": 1, "mix": count, "write": 1}
    names = [name for name in rows if (name if name == "read" else "write") in sides]
    weights = {name: self._static(name, count)[..., None, None] for name in names}
    if self.dynamic:
      kernel = [self._kernel(name, width, rows[name]) for name in names]
      kernel = jnp.concatenate(kernel, axis=1).T
      alpha = self._scale("mix")
      scales = {name: self._scale(name) if name == "write" else alpha for name in names}
      products, squares, planes = thin_products(planes, (kernel,) * count, interpret=interpret)
      pairs = zip(products, squares, strict=True)
      parts = [jnp.tanh(product * inverse_rms_of(square, width)) for product, square in pairs]
      parts, first = jnp.stack(parts), 0  # [N, B, rows, T]
      for name in names:
        part = scales[name] * parts[:, :, first : first + rows[name]]
        weights[name] += part.swapaxes(1, 2) if name == "mix" else part[:, :, 0]
        first += rows[name]
    mixing = weights["mix"].swapaxes(0, 1) if "mix" in weights else None
    return PlaneWeights(weights.get("read"), mixing, weights.get("write")), planes

  def _static(self, name, count):
    init = nn.initializers.ones
    if name != "write":
      init = lambda *_: jnp.eye(count)[self.home] if name == "read" else jnp.eye(count)
    return self._parameter(f"{name}_weight", init, *(count,) * (2 if name == "mix" else 1))

  def _dynamic(self, X, name):
    """s tanh(X̄ W), [N, outputs, B, T]; zero in the static form."""
    outputs = X.shape[0] if name == "mix" else 1
    if not self.dynamic:
      return jnp.zeros((X.shape[0], outputs, 1, 1))
    product = project_each(X, self._kernel(name, X.shape[-1], outputs))
    return self._scale(name) * jnp.tanh(product)

  def _kernel(self, name, width, outputs):
    """W [D, outputs]."""
    shape = (width,) if outputs == 1 else (width, outputs)
    axes = ("stream_embed", None)[: len(shape)]
    kernel = self.param(f"{name}_kernel", partitioned(nn.initializers.zeros, *axes), shape)
    return kernel.reshape(width, outputs)

  def _scale(self, name):
    """s, of which reading and mixing share one."""
    greek = "beta" if name == "write" else "alpha"
    return self._parameter(f"{greek}_scale", nn.initializers.constant(0.01))

  def _parameter(self, name, init, *shape):
    return self.param(name, partitioned(init, *(None,) * len(shape)), shape)
