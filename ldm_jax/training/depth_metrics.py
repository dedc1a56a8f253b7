"""What happens along the depth of a network: sizes of streams, outputs and gradients per sublayer.

The model is the one that trains, unchanged.  Each mixer's call is observed: on the way in the
streams are measured, and the sublayer is wrapped so that its output v is measured and the gradient
that comes back for it, too.  Forward numbers leave as `mixers.observation` has it; the backward
number leaves as the "gradient" of a dummy (`_tap`), so no gradient array is ever kept.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float

from ldm_jax.config import Config
from ldm_jax.data.packing import Batch
from ldm_jax.mixers import DeferredMemoryStreams, HyperConnectionStreams
from ldm_jax.mixers.observation import COLLECTION, note, noted, observer
from ldm_jax.sharding import constrain
from ldm_jax.training.step import (
  StepMetrics,
  TrainState,
  compiler_options,
  dropout_keys,
  loss_sums,
  make_model,
  sum_over_parts,
)
from ldm_jax.typing import ActivationsBTD, PyTree


class DepthSums(NamedTuple):
  """What one batch says, as sums over its parts.

  streams: mean square of each stream by name, one dictionary for each sublayer and one for the
    head, before they are read.
  outputs: mean square of each sublayer's output v [L].
  gradients: squared norm of the gradient of the loss sum with respect to each v [L].
  tokens: real targets.
  """

  streams: tuple[dict[str, jax.Array], ...]
  outputs: jax.Array
  gradients: jax.Array
  tokens: jax.Array


@flax.struct.dataclass
class _Seen:
  """What one mixer saw; `output` is None for the head."""

  index: int = flax.struct.field(pytree_node=False)
  streams: dict[str, Any]
  output: Any = None


def make_depth_step(config: Config) -> Callable[[TrainState, Batch], DepthSums]:
  """Returns `depth_step(state, batch) -> DepthSums`, a pure function to compile.

  It costs a forward pass and the part of a backward pass that carries gradients through the
  sublayers, in as many parts as a train step (`train.accumulate`) and with the same units dropped.
  It changes nothing.
  """
  model, z_loss = make_model(config), config.optimizer.z_loss

  def objective(taps, params, batch, keys):
    batch = jax.tree.map(lambda x: constrain(x, "batch", "sequence"), batch)
    with nn.intercept_methods(_observer(taps)):
      logits, collections = model.apply(
        {"params": params},
        batch.tokens,
        batch.positions,
        batch.segment_ids,
        keys,
        mutable=[COLLECTION],
      )
    sums = loss_sums(logits, batch.targets, batch.loss_mask)
    seen = noted(collections, _Seen)
    streams = tuple(one.streams for one in seen)
    outputs = jnp.stack([one.output for one in seen[:-1]])
    return sums.cross_entropy + z_loss * sums.squared_log_partition, (streams, outputs, sums.tokens)

  def part_sums(params, batch, keys):
    taps = jnp.zeros(config.model.sublayers)
    gradient = jax.grad(objective, has_aux=True)
    gradients, (streams, outputs, tokens) = gradient(taps, params, batch, keys)
    return DepthSums(streams, outputs, gradients, tokens)

  def depth_step(state: TrainState, batch: Batch) -> DepthSums:
    parts = config.train.accumulate
    keys = dropout_keys(config, state.step)
    sums = sum_over_parts(lambda part: part_sums(state.params, *part), (batch, keys), parts)
    means = jax.tree.map(lambda x: x / parts, (sums.streams, sums.outputs))
    return DepthSums(*means, sums.gradients, sums.tokens)

  return depth_step


def compile_depth_step(
  config: Config, mesh: Mesh, state: TrainState, batch: Batch
) -> jax.stages.Compiled:
  """Compiles `depth_step` ahead of time; its numbers are replicated, so every host has them."""
  step = jax.jit(
    make_depth_step(config),
    out_shardings=NamedSharding(mesh, PartitionSpec()),
    compiler_options=compiler_options(mesh),
  )
  return step.lower(state, batch).compile()


def depth_values(sums: DepthSums, metrics: StepMetrics, params: PyTree) -> dict[str, Any]:
  """What `metrics.jsonl` says about a step's depth, from arrays on the host.

  Args:
    sums: what `depth_step` returned for the parameters before the step and its batch.
    metrics: of the same step.
    params: parameters, for their names; the values are not used.

  Returns:
    What `sublayer_values` returns, and
    parameter_gradient_norm: norm of the gradient of the mean loss with respect to the parameters of
      each part of the model: embedder, block_0, …; before clipping.
  """
  return {**sublayer_values(sums), "parameter_gradient_norm": _norms_by_part(metrics, params)}


def sublayer_values(sums: DepthSums) -> dict[str, Any]:
  """Sizes along the depth, from arrays on the host.

  Returns:
    stream_rms: for each stream its RMS per entry, a list over sublayers 0 … L−1 and the head (L),
      as each finds it before it reads; None where the stream does not exist.  Names are those of
      the fields: x for PreLN; x, M, P (and pending) for the depth memory; X/0 … X/N−1 for
      hyper-connections; for attention residuals sources/0 (the embedding), sources/1, … (one more
      for each finished block), partial, and reads/i/mean, log_weight and query of the i-th read of
      the block that is still to come.
    output_rms: RMS per entry of each sublayer's output v.
    output_gradient_norm: norm, over the whole batch, of the gradient of the mean loss with respect
      to v, z-loss included.
  """
  names = sorted({name for streams in sums.streams for name in streams})
  return {
    "stream_rms": {
      name: [_root(streams[name]) if name in streams else None for streams in sums.streams]
      for name in names
    },
    "output_rms": [_root(square) for square in sums.outputs],
    "output_gradient_norm": [_root(square) / max(int(sums.tokens), 1) for square in sums.gradients],
  }


def _root(square):
  return float(np.sqrt(square))


def _norms_by_part(metrics, params):
  squares = {}
  paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(params)]
  for path, norm in zip(paths, metrics.gradient_norms, strict=True):
    squares[path[0].key] = squares.get(path[0].key, 0.0) + float(norm) ** 2
  return {name: square**0.5 for name, square in squares.items()}


def _observer(taps):
  """A method interceptor that measures what goes into each mixer and out of its sublayer."""

  def at_sublayer(mixer, streams, sublayer):
    def observed(h):
      v = _tap(sublayer(h), taps[mixer.index])
      note(mixer, _Seen(mixer.index, _mean_squares(streams), _mean_square(v)))
      return v

    return observed

  def at_head(mixer, streams, h):
    del h
    note(mixer, _Seen(mixer.index, _mean_squares(streams)))

  return observer(taps.shape[0], at_sublayer, at_head)


@jax.custom_vjp
def _tap(v: ActivationsBTD, dummy: Float[Array, ""]) -> ActivationsBTD:
  """v; the gradient of the dummy is the squared norm of the gradient of v."""
  return v


_tap.defvjp(
  lambda v, dummy: (v, None),
  lambda _, gradient: (gradient, jnp.sum(jnp.square(gradient.astype(jnp.float32)))),
)


def _mean_squares(streams):
  """Mean square of each stream by its name, hyper-connections' N streams one by one."""
  if isinstance(streams, DeferredMemoryStreams):
    streams = streams.explicit()
  if isinstance(streams, HyperConnectionStreams):
    streams = {"X": tuple(streams.X)}
  return {
    jax.tree_util.keystr(path, simple=True, separator="/"): _mean_square(leaf)
    for path, leaf in jax.tree_util.tree_leaves_with_path(streams)
  }


def _mean_square(x):
  return jnp.mean(jnp.square(x.astype(jnp.float32)))
