"""Attention residuals: every sublayer attends over the outputs of those before it.

There is no running sum: a read is a softmax over sources, the embedding and the sublayer outputs,
with one learned query per sublayer (arXiv 2603.15031).  In the block form the outputs of
`block_size` consecutive sublayers are summed into one source.  The first sublayer of a block reads
the finished sources, the later ones also the sum so far of their own block.
"""

from typing import Any

import flax.linen as nn
import flax.struct
from jaxtyping import Array, Float

from ldm_jax.mixers.base import DepthMixer
from ldm_jax.ops.attention_residuals import (
  finish_plane_read,
  finish_read,
  prepare_plane_reads,
  prepare_reads,
)
from ldm_jax.ops.planes import from_plane, place_plane, takes_planes, to_plane
from ldm_jax.sharding import constrain, partitioned
from ldm_jax.typing import ActivationsBTD, Sublayer


@flax.struct.dataclass
class AttentionResidualStreams:
  """What later reads draw on; it grows by one source per finished block.

  sources: the embedding and the sum of each finished block, arrays [B, T, D].
  partial: sum of the current block's outputs so far [B, T, D]; None between blocks.
  reads: for each remaining sublayer of the current block, what the finished sources contribute to
    its read (`ops.attention_residuals.PreparedRead`).
  planes: whether all these are planes [B, D, T] instead, which they are in programs for TPUs.
  interpret: whether kernels on planes run in Pallas's interpreter, for tests.
  """

  sources: tuple[Any, ...]
  partial: Any = None
  reads: tuple[Any, ...] = ()
  planes: bool = flax.struct.field(pytree_node=False, default=False)
  interpret: bool = flax.struct.field(pytree_node=False, default=False)

  def as_planes(self, interpret: bool = False) -> "AttentionResidualStreams":
    """Streams at their start, as planes."""
    return AttentionResidualStreams(
      tuple(map(to_plane, self.sources)), planes=True, interpret=interpret
    )


class AttentionResiduals(DepthMixer):
  """Attention residuals as a depth mixer.

  If `sublayers` is given, the mixer of a block's first sublayer holds the queries of the whole
  block and computes the finished sources' part of all its reads in one pass.  Otherwise each mixer
  holds its own query and computes its own read; the results are the same.

  Queries are zero at initialisation, so every read starts as the mean of its sources.  The first
  sublayer, which can only see the embedding, has no query.

  Attributes:
    block_size: sublayers per source, at least 1; the last block may be short; 1 is the full form.
  """

  block_size: int = 6

  def __post_init__(self):
    self.require("block_size", self.block_size >= 1, "at least 1")
    super().__post_init__()

  def setup(self):
    """Declares the queries of this mixer's reads; they appear only where they are used."""
    self.queries = DepthQueries(self._own_reads())

  def init_streams(self, x: ActivationsBTD) -> AttentionResidualStreams:
    """The embedding as the only source."""
    streams = AttentionResidualStreams((x,))
    return streams.as_planes() if takes_planes(x) else streams

  def read(self, streams: AttentionResidualStreams) -> ActivationsBTD:
    """Softmax over the finished sources and the partial sum; x where there is nothing else."""
    if self.index == 0:
      return self._read(streams)[0]
    # The first sublayer of a block prepares the same reads in its write; compilers merge the two,
    # in the forward pass at least.
    return self._read(self._prepared(streams))[0]

  def write(self, streams: AttentionResidualStreams, v: ActivationsBTD) -> AttentionResidualStreams:
    """Adds v to the partial sum, which becomes a source when the block is complete."""
    streams = self._prepared(streams)
    sources, partial = streams.sources, streams.partial
    reads = streams.reads if self.index == 0 else streams.reads[1:]
    if streams.planes:
      v = to_plane(v)
    partial = v if partial is None else partial + v
    partial = place_plane(partial) if streams.planes else _place(partial)
    if (self.index + 1) % self.block_size == 0:
      sources, partial = (*sources, partial), None
    return streams.replace(sources=sources, partial=partial, reads=reads)

  def __call__(self, streams: AttentionResidualStreams, f: Sublayer) -> AttentionResidualStreams:
    """One sublayer; reads of planes are prepared once for both sides."""
    if not streams.planes:
      return self.write(streams, f(self.read(streams)))
    h, streams = self._read(self._prepared(streams))
    return self.write(streams, f(h))

  def _read(self, streams):
    """What the sublayer sees and the streams to go on with."""
    partial, out = streams.partial, from_plane if streams.planes else lambda h: h
    if self.index == 0:
      return out(streams.sources[0]), streams
    prepared = streams.reads[0]
    if partial is None:
      return out(prepared.mean), streams
    if not streams.planes:
      return finish_read(prepared, partial), streams
    h, partial = finish_plane_read(prepared, partial, interpret=streams.interpret)
    return from_plane(h), streams.replace(partial=partial)

  def _prepared(self, streams):
    """Streams with the reads that this mixer holds the queries of."""
    if streams.reads or not self._own_reads():
      return streams
    sources, planes = streams.sources, streams.planes
    width = sources[0].shape[1 if planes else 2]
    if planes:
      reads, sources = prepare_plane_reads(
        sources, *self.queries(width), interpret=streams.interpret
      )
    else:
      reads = prepare_reads(sources, *self.queries(width))
    place = place_plane if planes else _place
    reads = tuple(read.replace(mean=place(read.mean)) for read in reads)
    return streams.replace(sources=sources, reads=reads)

  def _own_reads(self):
    """How many queries this mixer holds, its own first."""
    start = self.index % self.block_size == 0
    if self.sublayers is None or self.index >= self.sublayers:
      return int(self.index > 0)
    if not start:
      return 0
    return min(self.block_size, self.sublayers - self.index) - (self.index == 0)


def _place(x):
  return constrain(x, "batch", "sequence", "activation_embed")


class DepthQueries(nn.Module):
  """Queries and key-norm scales of `reads` reads; called with the width."""

  reads: int

  @nn.compact
  def __call__(self, width: int) -> tuple[Float[Array, "reads D"], Float[Array, "reads D"]]:
    """Returns queries, zero at initialisation, and scales, one at initialisation; float32."""
    shape = (self.reads, width)
    query = self.param("query", partitioned(nn.initializers.zeros, None, "norm"), shape)
    scale = self.param("norm_scale", partitioned(nn.initializers.ones, None, "norm"), shape)
    return query, scale
