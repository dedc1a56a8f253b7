"""Where every read comes from: the weights of the embedding and of all earlier outputs in it.

Once the controls of a mixer are known (keys, queries, gates, connections), its reads and writes are
linear in the sources s: the embedding (0) and the output of sublayer i (1 + i).  So

    h_l = Σ_s W[l, s] v_s        per token; for the depth memory per group of the width, too

To find W, each mixer is played twice, at single tokens: on the sources, where what its control
networks say is written down, and on unit vectors in place of the sources, where they are told to
say the same.  What the second one reads is W.  It is the mixers' own code, so it holds for every
rule and ablation alike.  Only attention residuals, whose weights depend on the sources themselves,
are written out.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from ldm_jax.mixers import (
  AttentionResiduals,
  DepthMixer,
  HyperConnections,
  HyperConnectionStreams,
  LinearDepthMemory,
  ManifoldHyperConnections,
  make_mixer,
)
from ldm_jax.mixers.depth_memory_controls import ReadControls, WriteControls
from ldm_jax.mixers.hyper_connections import Connections
from ldm_jax.mixers.manifold_hyper_connections import ManifoldCoefficients
from ldm_jax.model import TransformerLM
from ldm_jax.ops.normalize import inverse_rms
from ldm_jax.ops.products import exact_einsum
from ldm_jax.typing import PyTree

_CONTROLS = (ReadControls, WriteControls, Connections, ManifoldCoefficients)

Sources = Float[Array, "S n D"]
Weights = Float[Array, "n G S"]


class Moment(NamedTuple):
  """One read of the streams.

  index: of the sublayer, L for the head.
  weights: W of every source [n, G, S], float32; G is 1 but for the depth memory.
  mixer: the module, in the form that the equations have.
  params: its parameters.
  streams: as the read finds them, B = 1 and T = n; None for attention residuals.
  coefficients: the streams with unit vectors for sources; the width is G · S.
  asked: what the control networks said for the read: a list, empty where there are none.
  written: what they said for the write before it.
  """

  index: int
  weights: jax.Array
  mixer: DepthMixer
  params: PyTree
  streams: Any = None
  coefficients: Any = None
  asked: tuple = ()
  written: tuple = ()


def replay(model: TransformerLM, params: PyTree, sources: Sources) -> Iterator[Moment]:
  """Every read of the network in order, the head's last.

  Args:
    model: the network.
    params: its parameters.
    sources: the embedding and the outputs of all sublayers at n tokens [S, n, D].
  """
  mixers = _mixers(model, params)
  if isinstance(mixers[0][0], AttentionResiduals):
    yield from _attention_residuals(mixers, sources)
    return
  head = mixers[-1][0]
  groups = head.groups if isinstance(head, LinearDepthMemory) else 1
  units = _unit_vectors(len(sources), sources.shape[1], groups)
  streams, coefficients = _start(head, sources[0][None]), _start(head, units[0])
  written = ()
  for index, (mixer, own) in enumerate(mixers):
    _, asked = _listen(mixer, own, "read", streams)
    read = _prompt(asked, mixer, "read", coefficients)
    weights = read.reshape(-1, groups, len(sources))
    yield Moment(index, weights, mixer, own, streams, coefficients, asked, written)
    if index + 1 < len(mixers):
      v, unit = sources[index + 1][None], units[index + 1]
      streams, written = _listen(mixer, own, "write", streams, v)
      coefficients = _prompt(written, mixer, "write", coefficients, unit)


def _mixers(model, params):
  """All mixers with their parameters, in the form that the equations have and in float32."""
  config, last = model.config, model.config.sublayers
  settings = dataclasses.replace(config.mixer, form="reference", memory_dtype="float32")

  def mixer(index, *path):
    own = params
    for name in path:
      own = own.get(name, {})
    return make_mixer(settings, index, last, model.dtype, None), own

  parts = [
    (f"block_{block}", f"{part}_mixer")
    for block in range(config.blocks)
    for part in ("attention", "mlp")
  ]
  return [mixer(index, *path) for index, path in enumerate(parts)] + [mixer(last, "output_mixer")]


def _unit_vectors(count, tokens, groups):
  """In place of source s a 1 in its own component of each group [S, 1, n, G · S]."""
  units = jnp.tile(jnp.eye(count), (1, groups))
  return jnp.broadcast_to(units[:, None, None], (count, 1, tokens, groups * count))


def _start(mixer, x):
  if isinstance(mixer, HyperConnections | ManifoldHyperConnections):  # never as planes
    return HyperConnectionStreams(jnp.broadcast_to(x[None], (mixer.streams, *x.shape)))
  return mixer.apply({}, x, method="init_streams")


def _listen(mixer, params, method, *args):
  """The result of a method, and what control networks said in it, call by call."""
  said = []

  def record(call, args, kwargs, context):
    result = call(*args, **kwargs)
    if _speaks(context):
      said.append(result)
    return result

  with nn.intercept_methods(record):
    result = mixer.apply({"params": params}, *args, method=method)
  return result, tuple(said)


def _prompt(said, mixer, method, *args):
  """The result of a method whose control networks say what they are told."""
  left = iter(said)

  def tell(call, args, kwargs, context):
    return next(left) if _speaks(context) else call(*args, **kwargs)

  with nn.intercept_methods(tell):
    return mixer.apply({}, *args, method=method)


def _speaks(context):
  return isinstance(context.module, _CONTROLS) and context.method_name == "__call__"


def _attention_residuals(mixers, sources):
  """Softmax weights; those of a finished block, or of the sum so far, hold for all its members."""
  size, last, count = mixers[0][0].block_size, len(mixers) - 1, len(sources)
  units = jnp.eye(count)
  finished, members, partial, inside = [sources[0]], [units[0]], None, jnp.zeros(count)
  for index, (mixer, own) in enumerate(mixers):
    seen = finished if partial is None else [*finished, partial]
    spread = jnp.stack(members if partial is None else [*members, inside])
    weights = jnp.ones((1, sources.shape[1]))
    if index:
      weights = jax.nn.softmax(_scores(seen, _query(mixers, index, size)), axis=0)
    yield Moment(index, exact_einsum("an,as->ns", weights, spread)[:, None], mixer, own)
    if index < last:
      v = sources[index + 1]
      partial, inside = v if partial is None else partial + v, inside + units[index + 1]
      if (index + 1) % size == 0:
        finished, members = [*finished, partial], [*members, inside]
        partial, inside = None, jnp.zeros(count)


def _scores(sources, key):
  """w · RMSNorm(v) of some sources [n, D]: [len(sources), n], float32."""
  sources = jnp.stack(sources).astype(jnp.float32)
  return exact_einsum("and,d->an", sources, key) * inverse_rms(sources)


def _query(mixers, index, size):
  """w times the scale of the key norm, from the mixer that holds it, see `AttentionResiduals`."""
  last = len(mixers) - 1
  holder = index if index == last else index // size * size
  mixer, own = mixers[holder]
  width = own["queries"]["query"].shape[-1]
  query, scale = mixer.apply({"params": own}, method=lambda mixer: mixer.queries(width))
  place = index - max(holder, 1)
  return query[place] * scale[place]
