"""The streams of the depth memory: as the equations have them, and with writes put off."""

from collections.abc import Sequence
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from ldm_jax.mixers.depth_memory_controls import write_controls
from ldm_jax.ops.depth_memory import deferred


@flax.struct.dataclass
class DepthMemoryStreams:
  """The streams (x, M, P) of the RLS rule; (x, M) of the outer-product and delta rules.

  x: residual stream [B, T, D].  M: memory.  P: inverse key covariance [B, T, G, K, K], float32,
  or None where the rule has none.  pending: sum of the outputs since the last write [B, T, D], or
  None where every output is written at once.  The axis order of M is the mixer's business; use
  `memory_matrix()` to look at it.
  """

  x: Any
  M: Any
  P: Any = None
  pending: Any = None

  def memory_matrix(self) -> Float[Array, "B T G V K"]:
    """The memory as matrices [B, T, G, V, K]: column space of group g is x[g·V : (g+1)·V]."""
    return self.M


@flax.struct.dataclass
class DeferredMemoryStreams:
  """The same streams where writes are put off, see `ops.depth_memory.deferred`.

  x: residual stream [B, T, D]; packed, zeros that carry its gradient.  base: x without the outputs
  that are pending in the memory, or None where it is not x and their sum.  memory: M and P, and the
  writes not yet in M.  pending: as in `DepthMemoryStreams`.  arithmetic: how the sums are done.
  chunk: the most writes put off.  waiting: the last write, where not even its key is known yet.
  """

  x: Any
  base: Any
  memory: deferred.Pending
  pending: Any
  arithmetic: Any = flax.struct.field(pytree_node=False)
  chunk: int = flax.struct.field(pytree_node=False)
  waiting: "WaitingWrite | None" = None

  def record(
    self, v: jax.Array, key: Any, strength: Any, forgetting: Any, reads: Sequence[int]
  ) -> "DeferredMemoryStreams":
    """With (key, v) pending, see `deferred.write`; `forgetting` is λ [G] or None."""
    layout = self.arithmetic
    if forgetting is not None:
      forgetting = jnp.broadcast_to(layout.per_group(forgetting), strength.shape)
    plane = layout.to_plane(v)
    written = (plane, key, strength, forgetting)
    memory = deferred.write(layout, *written, self.memory, self.chunk, reads)
    return self.replace(memory=memory, waiting=None)

  def settled(self) -> "DeferredMemoryStreams":
    """Without a write that waits: its key and importance computed by themselves."""
    if self.waiting is None:
      return self
    waiting = self.waiting
    (mapped,) = self.arithmetic.mapped(self.x, (waiting.maps,), waiting.dtype)
    return waiting.settle(self, *mapped)

  def memory_matrix(self) -> Float[Array, "B T G V K"]:
    """The memory as matrices [B, T, G, V, K]: column space of group g is x[g·V : (g+1)·V]."""
    planes = deferred.fold_planes(self.arithmetic, self.settled().memory)
    return self.arithmetic.memory_matrix(self.x, planes)

  def explicit(self) -> DepthMemoryStreams:
    """With all writes in M, to look at."""
    return DepthMemoryStreams(self.x, self.M, self.P, self.pending)

  @property
  def M(self) -> Float[Array, "B T G V K"]:
    """`memory_matrix()`."""
    return self.memory_matrix()

  @property
  def P(self) -> Float[Array, "B T G K K"] | None:
    """The inverse key covariance, float32; None where the rule has none."""
    return self.arithmetic.covariance_matrix(self.settled().memory.covariance)


@flax.struct.dataclass
class WaitingWrite:
  """A write by the RLS rule whose key and importance are left to the next read.

  They come from the x that the next read's query comes from, so that read has all of them in two
  products instead of four.  That is what a token costs in decoding, where a product's size is not.

  v: output [B, T, D].  maps: `ControlMaps`.  forgetting: λ [G].  dtype: of the products.
  reads: see `deferred.write`.
  """

  v: Any
  maps: Any
  forgetting: Any
  dtype: Any = flax.struct.field(pytree_node=False)
  reads: tuple = flax.struct.field(pytree_node=False)

  def settle(
    self, streams: DeferredMemoryStreams, keys: jax.Array, importances: jax.Array
  ) -> DeferredMemoryStreams:
    """The streams with this write in them, from what its maps gave."""
    controls = write_controls(streams.arithmetic, keys, importances)
    return streams.record(self.v, *controls, self.forgetting, self.reads)
