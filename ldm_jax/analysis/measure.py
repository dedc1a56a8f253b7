"""All measurements of a model on a batch."""

import contextlib
import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from ldm_jax.analysis.capture import capture
from ldm_jax.analysis.memory import Memory, MemoryMeasurement
from ldm_jax.analysis.mixing import Mixing, measure_read
from ldm_jax.analysis.replay import replay
from ldm_jax.config import Config, TrainConfig
from ldm_jax.data.packing import Batch
from ldm_jax.errors import InputError
from ldm_jax.model import TransformerLM
from ldm_jax.training.depth_metrics import make_depth_step, sublayer_values
from ldm_jax.training.step import TrainState, compiler_options, put_batch
from ldm_jax.typing import PyTree


class Analysis(NamedTuple):
  """What a model does along its depth; all arrays are NumPy.

  kind: of the mixer.
  reads: short names of the L + 1 reads: A0, M0 (attention and MLP of block 0), A1, …, head.
  sources: of what they can draw on: embedding, A0, M0, ….
  writes: number of the last source in each record of the depth memory; () for other mixers.
  tokens: how many were looked at one by one.
  loss: mean cross-entropy of the batch, nats per token.
  mixing: the effective depth-mixing matrix.
  memory: the inside of the depth memory; None for other mixers, and if nothing is ever written.
  depth: `stream_rms`, `output_rms` and `output_gradient_norm` over all of the batch, see
    `training.depth_metrics.sublayer_values`.
  """

  kind: str
  reads: tuple[str, ...]
  sources: tuple[str, ...]
  writes: tuple[int, ...]
  tokens: int
  loss: float
  mixing: Mixing
  memory: Memory | None
  depth: dict[str, Any]


def analyse(
  model: TransformerLM,
  params: PyTree,
  batch: Batch,
  tokens: int = 512,
  seed: int = 0,
  mesh: Mesh | None = None,
) -> Analysis:
  """Measures what a model does along its depth, on some rows, without dropout.

  The gradient and the sizes of streams are over the whole batch.  Everything else is of single
  tokens, as many of its real ones as are asked for.

  Args:
    model: the network, with any mixer.
    params: its parameters.
    batch: rows [B, T].
    tokens: how many tokens; all where there are fewer.
    seed: which ones.
    mesh: that the parameters are laid out on, and whose devices share the rows; None for one
      device.

  Raises:
    InputError: if the batch has no real token.
  """
  chosen = _choose(batch, tokens, seed)
  model = model.clone(config=dataclasses.replace(model.config, dropout=0.0))
  captured, sums, depth = _run(model, params, batch, chosen, mesh)
  mixing, memory = _look(model, _mixer_parameters(params), captured)
  names = [f"{part}{block}" for block in range(model.config.blocks) for part in "AM"]
  return Analysis(
    kind=model.config.mixer.kind,
    reads=(*names, "head"),
    sources=("embedding", *names),
    writes=_write_sources(model),
    tokens=len(chosen),
    loss=float(sums.cross_entropy) / int(sums.tokens),
    mixing=mixing,
    memory=memory,
    depth=sublayer_values(depth),
  )


def _choose(batch, tokens, seed):
  real = np.flatnonzero(np.asarray(batch.loss_mask))
  if not len(real):
    raise InputError("the batch has no real token; give rows with targets in their loss_mask")
  return np.sort(np.random.default_rng(seed).permutation(real)[:tokens]).astype(np.int32)


def _run(model, params, batch, chosen, mesh):
  """What the model itself says: its reads and outputs, its loss, its sizes and gradients."""
  options, context = None, contextlib.nullcontext()
  if mesh is not None:
    options, context = compiler_options(mesh), jax.set_mesh(mesh)
    batch = put_batch(mesh, batch)
  depth_step = make_depth_step(_config(model))
  state = TrainState(jnp.zeros((), jnp.int32), params, None)
  with context:
    look = jax.jit(lambda *args: capture(model, *args), compiler_options=options)
    depth = jax.jit(depth_step, compiler_options=options)
    return jax.device_get((*look(params, batch, chosen), depth(state, batch)))


def _config(model):
  """For the parts of training that want a config."""
  train = TrainConfig(compute_dtype=jnp.dtype(model.dtype).name, remat=model.remat)
  return Config(model=model.config, train=train)


def _mixer_parameters(params):
  """On one device, where single tokens are looked at."""
  chosen = {
    part: own if part.endswith("_mixer") else {k: v for k, v in own.items() if k.endswith("_mixer")}
    for part, own in params.items()
  }
  return jax.tree.map(jnp.asarray, jax.device_get(chosen))


def _look(model, params, captured):
  """Operation by operation: compiled as one program, it would take longer with every layer."""
  sources, rows, writes = captured.sources, [], _write_sources(model)
  memory = MemoryMeasurement(sources, writes) if writes else None
  for moment in replay(model, params, sources):
    rows.append(measure_read(moment, sources, captured.reads[moment.index]))
    if memory is not None:
      memory.add(moment)
  mixing = Mixing(*(np.stack(column) for column in zip(*rows, strict=True)))
  return mixing, memory and memory.result()


def _write_sources(model):
  """The last source of each record of the depth memory."""
  mixer = model.config.mixer
  if mixer.kind != "ldm":
    return ()
  every = mixer.write_every
  writes = range(every, model.config.sublayers + 1, every)
  return (*((0,) if mixer.write_embedding else ()), *writes)
