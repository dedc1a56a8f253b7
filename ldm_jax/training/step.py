"""One optimizer step and one evaluation step, as pure functions to compile."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Key

from ldm_jax.config import Config
from ldm_jax.data.packing import Batch
from ldm_jax.model import TransformerLM, plainest
from ldm_jax.sharding import check_divisible, constrain, parameter_shardings, partition_spec
from ldm_jax.training.optimizer import make_optimizer
from ldm_jax.typing import MaskBT, PyTree, TokensBT

_DROPOUT = 1  # tells the keys of dropout from the key of the initial weights


@flax.struct.dataclass
class TrainState:
  """Everything a step changes.  `step` counts finished optimizer steps, int32 []."""

  step: Any
  params: PyTree
  optimizer_state: PyTree


class StepMetrics(NamedTuple):
  """What a step reports, all small.

  loss: mean cross-entropy over real targets before the update, nats, without z-loss.
  grad_norm: global norm of the gradient before clipping.
  tokens: real targets in the batch.
  gradient_norms: of each parameter [number of leaves], in `jax.tree.leaves` order.
  finite_parameters: whether each parameter was finite before the update [number of leaves].  With
    the norms it tells where a loss that is not finite came from.
  """

  loss: jax.Array
  grad_norm: jax.Array
  tokens: jax.Array
  gradient_norms: jax.Array
  finite_parameters: jax.Array


class LossSums(NamedTuple):
  """Sums over real targets: cross-entropy in nats, squared log-partition, count."""

  cross_entropy: jax.Array
  squared_log_partition: jax.Array
  tokens: jax.Array


def compiler_options(mesh: Mesh) -> dict[str, str]:
  """Options for compiling a step for the devices of a mesh, which need not be this machine's.

  On a CPU, XLA by default orders operations for concurrency and keeps far more alive: `ldm_tiny`
  took 1.7 times the temporary memory and 1.2 times the time, and rematerialisation saved nothing.
  """
  return platform_options(mesh.devices.flat[0].platform)


def platform_options(platform: str) -> dict[str, str]:
  """`compiler_options` for the devices of a platform, such as "cpu"."""
  if platform == "cpu":
    return {"xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"}
  return {}


def make_model(config: Config) -> TransformerLM:
  """The model that a run's config describes."""
  return TransformerLM(config.model, jnp.dtype(config.train.compute_dtype), config.train.remat)


def loss_sums(
  logits: Float[Array, "B T padded_vocab_size"], targets: TokensBT, mask: MaskBT
) -> LossSums:
  """Cross-entropy and squared log-partition in float32, summed over the targets in the mask.

  A batch without any real target gives zeros, never NaN.
  """
  cross_entropy, log_partition = token_losses(logits, targets)
  cross_entropy = jnp.where(mask, cross_entropy, 0.0)
  squared = jnp.where(mask, jnp.square(log_partition), 0.0)
  return LossSums(jnp.sum(cross_entropy), jnp.sum(squared), jnp.sum(mask, dtype=jnp.int32))


def token_losses(
  logits: Float[Array, "B T padded_vocab_size"], targets: TokensBT
) -> tuple[Float[Array, "B T"], Float[Array, "B T"]]:
  """Each target's cross-entropy in nats, and the log-partition, float32."""
  logits = logits.astype(jnp.float32)
  log_partition = jax.nn.logsumexp(logits, axis=-1)
  target_logit = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
  return log_partition - target_logit, log_partition


def make_init(config: Config) -> Callable[[jax.Array], Any]:
  """Returns `init(key) -> TrainState` with boxed parameters, to be traced or jitted."""
  model = plainest(make_model(config))
  optimizer = make_optimizer(config.optimizer, config.train.steps)

  def init(key):
    tokens = jnp.zeros((config.data.batch_size, config.data.sequence_length), jnp.int32)
    params = model.init(key, tokens)["params"]
    return TrainState(jnp.zeros((), jnp.int32), params, optimizer.init(params))

  return init


def abstract_state(config: Config, mesh: Mesh) -> TrainState:
  """Shapes, dtypes and shardings of the train state, without computing any of it."""
  boxed = _boxed_shapes(config)
  shardings = parameter_shardings(boxed, mesh)
  return jax.tree.map(
    lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
    nn.unbox(boxed),
    shardings,
  )


@functools.lru_cache(maxsize=8)  # a deep model is traced for seconds, and for the same mesh thrice
def _boxed_shapes(config):
  return jax.eval_shape(lambda: make_init(config)(jax.random.key(0)))


def init_state(config: Config, mesh: Mesh) -> TrainState:
  """A fresh train state, every array created where it will live."""
  shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract_state(config, mesh))
  boxed = make_init(config)
  with jax.set_mesh(mesh):
    init = jax.jit(lambda key: nn.unbox(boxed(key)), out_shardings=shardings)
    return init(jax.random.key(config.train.seed))


def make_train_step(
  config: Config,
) -> Callable[[TrainState, Batch], tuple[TrainState, StepMetrics]]:
  """Returns `train_step(state, batch) -> (state, metrics)`.

  The batch is computed in `train.accumulate` parts; sums, not means, are accumulated, so parts with
  few real targets weigh as much as they should.
  """
  model, optimizer = make_model(config), make_optimizer(config.optimizer, config.train.steps)
  parts, z_loss = config.train.accumulate, config.optimizer.z_loss

  def objective(params, part):
    sums = _forward(model, params, *part)
    return sums.cross_entropy + z_loss * sums.squared_log_partition, sums

  gradient = jax.grad(objective, has_aux=True)

  def accumulate(params, batch, keys):
    return sum_over_parts(lambda part: gradient(params, part), (batch, keys), parts)

  def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, StepMetrics]:
    keys = dropout_keys(config, state.step)
    gradient_sums, sums = accumulate(state.params, batch, keys)
    tokens = jnp.maximum(sums.tokens, 1).astype(jnp.float32)
    grads = jax.tree.map(lambda g: g / tokens, gradient_sums)
    updates, optimizer_state = optimizer.update(grads, state.optimizer_state, state.params)
    params = optax.apply_updates(state.params, updates)
    gradient_norms = jnp.stack([jnp.linalg.norm(g) for g in jax.tree.leaves(grads)])
    finite = [jnp.isfinite(p).all() for p in jax.tree.leaves(state.params)]
    metrics = StepMetrics(
      loss=sums.cross_entropy / tokens,
      grad_norm=jnp.linalg.norm(gradient_norms),
      tokens=sums.tokens,
      gradient_norms=gradient_norms,
      finite_parameters=jnp.stack(finite),
    )
    return TrainState(state.step + 1, params, optimizer_state), metrics

  return train_step


def dropout_keys(config: Config, step: jax.Array) -> Key[Array, " B"] | None:
  """The random key of each row of the global batch of a step, from (train.seed, step, row).

  None without dropout.

  Nothing random is carried from step to step, so there is nothing that a resume could lose.
  """
  if not config.model.dropout:
    return None
  seeded = jax.random.fold_in(jax.random.key(config.train.seed), _DROPOUT)
  rows = jnp.arange(config.data.batch_size)
  return jax.vmap(jax.random.fold_in, (None, 0))(jax.random.fold_in(seeded, step), rows)


def _batch_sharding(mesh):
  """Of every array [B, T] of a batch."""
  return NamedSharding(mesh, partition_spec(("batch", "sequence")))


def put_batch(
  mesh: Mesh, batch: Batch, rows: Sequence[int] | None = None, batch_size: int | None = None
) -> Batch:
  """Moves a batch to the devices, split by `RULES`.

  Args:
    mesh: the devices.
    batch: rows of a batch [B, T], of which there must be all that this process's devices hold.
    rows: their numbers in it, see `processes.own_rows`; None if they are all there is.
    batch_size: B, if `rows` is given.
  """
  rows = range(len(batch.tokens)) if rows is None else rows
  place = {row: number for number, row in enumerate(rows)}
  sharding = _batch_sharding(mesh)

  def put(local):
    def shard(index):
      wanted = [place[row] for row in range(*index[0].indices(shape[0]))]
      return local[wanted, index[1]]

    shape = (batch_size or len(local), *local.shape[1:])
    return jax.make_array_from_callback(shape, sharding, shard)

  return jax.tree.map(put, batch)


def abstract_batch(config: Config, mesh: Mesh) -> Batch:
  """Shapes, dtypes and shardings of a batch."""
  shape = (config.data.batch_size, config.data.sequence_length)
  sharding = _batch_sharding(mesh)
  ids = jax.ShapeDtypeStruct(shape, jnp.int32, sharding=sharding)
  mask = jax.ShapeDtypeStruct(shape, jnp.bool_, sharding=sharding)
  return Batch(**dict.fromkeys(Batch._fields, ids))._replace(loss_mask=mask)


def compile_train_step(config: Config, state: TrainState, batch: Batch) -> jax.stages.Compiled:
  """Compiles the step ahead of time: one program, the state donated, shapes and shardings fixed."""
  shardings = jax.tree.map(lambda leaf: leaf.sharding, state)
  mesh = jax.tree.leaves(shardings)[0].mesh
  step = jax.jit(
    make_train_step(config),
    donate_argnums=0,
    out_shardings=(shardings, NamedSharding(mesh, PartitionSpec())),
    compiler_options=compiler_options(mesh),
  )
  return step.lower(state, batch).compile()


def compile_train_step_for(config: Config, mesh: Mesh) -> jax.stages.Compiled:
  """`compile_train_step` from shapes alone, for devices that need not exist on this machine.

  Raises:
    InputError: if the mesh cannot split the config's sizes.
  """
  check_divisible(config, mesh)
  with jax.set_mesh(mesh):
    return compile_train_step(config, abstract_state(config, mesh), abstract_batch(config, mesh))


def make_eval_step(config: Config) -> Callable[[PyTree, Batch], LossSums]:
  """Returns `eval_step(params, batch) -> LossSums`; padding rows count for nothing."""
  model, parts = make_model(config), config.train.accumulate

  def eval_step(params: PyTree, batch: Batch) -> LossSums:
    return sum_over_parts(lambda part: _forward(model, params, part, None), batch, parts)

  return eval_step


def sum_over_parts(function, batch, parts):
  """Sums `function` over `parts` equal parts of a batch, one after another."""
  if parts == 1:
    return function(batch)
  # Row r of every part stays on the device that holds it: parts are strided, not contiguous.
  split = jax.tree.map(lambda x: x.reshape(-1, parts, *x.shape[1:]).swapaxes(0, 1), batch)
  shapes = jax.eval_shape(function, jax.tree.map(lambda x: x[0], split))
  zero = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)

  def add(total, part):
    return jax.tree.map(jnp.add, total, function(part)), None

  return jax.lax.scan(add, zero, split)[0]


def _forward(model, params, batch, dropout_keys):
  batch = jax.tree.map(lambda x: constrain(x, "batch", "sequence"), batch)
  logits = model.apply(
    {"params": params}, batch.tokens, batch.positions, batch.segment_ids, dropout_keys
  )
  return loss_sums(logits, batch.targets, batch.loss_mask)
