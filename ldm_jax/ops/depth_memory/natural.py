"""The arithmetic of put-off writes in the layout of the equations: k [B, T, G, K], P [..., K, K].

What a CPU likes best: K is the vector axis.  See `deferred` for what is computed.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from ldm_jax.ops.depth_memory.covariance import dot, symmetric_outer, times, write_covariance
from ldm_jax.ops.depth_memory.deferred import Covariance, Record
from ldm_jax.ops.normalize import inverse_rms, l2norm
from ldm_jax.ops.products import exact_einsum
from ldm_jax.sharding import constrain


@dataclasses.dataclass(frozen=True)
class Natural:
  """Planes [B, T, D], keys [B, T, G, K], numbers [B, T, G]; weights are tuples of numbers.

  Attributes:
    groups: G.
    key_dim: K.
    rule: "rls", or "outer", which has no covariance.
    memory_dtype: of folded planes.
    apart: keep XLA from fusing steps with each other, see `_apart`: for programs of one CPU device.
    single: for few tokens on one device, see `is_single`: few operations instead of fast ones, and
      a write leaves its controls to the next read.
  """

  groups: int
  key_dim: int
  rule: str = "rls"
  memory_dtype: str = "float32"
  apart: bool = False
  single: bool = False

  def start(self, batch_shape, alpha):
    """P₋₁ = α I, without forgetting so far; None for the rule without P."""
    if self.rule == "outer":
      return None
    leading = (*batch_shape, self.groups)
    matrix = jnp.broadcast_to(alpha * jnp.eye(self.key_dim), (*leading, *(self.key_dim,) * 2))
    return Covariance(matrix, jnp.ones(leading))

  def to_plane(self, x):
    """[B, T, D], as it is."""
    return x

  def from_plane(self, plane):
    """[B, T, D], as it is."""
    return plane

  def latent(self, x, kernel, bias, dtype):
    """silu(W norm(x) + b), [B, T, R]."""
    product = jnp.einsum(
      "btd,dr->btr", x.astype(dtype), kernel.astype(dtype), preferred_element_type=jnp.float32
    )
    return jax.nn.silu(product * inverse_rms(x)[..., None] + bias[None, None]).astype(dtype)

  def vectors(self, latent, kernel, bias):
    """Affine maps [B, T, G, K] of the latent, float32."""
    kernel = kernel.astype(latent.dtype)
    product = jnp.einsum("btr,rgk->btgk", latent, kernel, preferred_element_type=jnp.float32)
    return product + bias[None, None]

  def numbers(self, latent, kernel, bias):
    """Affine maps [B, T, G] of the latent, float32."""
    kernel = kernel.astype(latent.dtype)
    product = jnp.einsum("btr,rg->btg", latent, kernel, preferred_element_type=jnp.float32)
    return product + bias[None, None]

  def vectors_and_numbers(self, latent, vectors, numbers):
    """`vectors` and `numbers` of two pairs of kernel and bias."""
    return self.vectors(latent, *vectors), self.numbers(latent, *numbers)

  def mapped(self, x, sides, dtype):
    """Vectors and numbers of each side, a pair of them, in one product for all sides and one more.

    Args:
      x: residual stream [B, T, D].
      sides: `ControlMaps` of equal shapes, with numbers.
      dtype: of the products.
    """
    kernel, bias = (
      jnp.concatenate(parts, -1) for parts in zip(*(s.latent for s in sides), strict=True)
    )
    latent = self.latent(x, kernel, bias, dtype).reshape(*x.shape[:2], len(sides), -1)
    kernel, bias = (jnp.stack(parts) for parts in zip(*map(_affine, sides), strict=True))
    product = jnp.einsum(
      "btsr,srn->sbtn", latent, kernel.astype(dtype), preferred_element_type=jnp.float32
    )
    both = product + bias[:, None, None]
    vectors = both[..., : self.groups * self.key_dim]
    vectors = vectors.reshape(*both.shape[:-1], self.groups, self.key_dim)
    return tuple(zip(vectors, both[..., self.groups * self.key_dim :], strict=True))

  def unit(self, vectors):
    """Vectors of length 1."""
    return l2norm(vectors)

  def constant_key(self, batch_shape):
    """(1, …, 1) / √K for all."""
    return jnp.full((*batch_shape, self.groups, self.key_dim), self.key_dim**-0.5)

  def ones(self, key):
    """1 for each token and group of some keys."""
    return jnp.ones(key.shape[:-1])

  def per_group(self, numbers):
    """[G] -> what broadcasts with numbers."""
    return numbers[None, None]

  def place(self, pending):
    """Pins the sharding of a memory."""
    token = ("batch", "sequence")

    def planes(arrays):
      return tuple(constrain(x, *token, "activation_embed") for x in arrays)

    def record(record):
      key = constrain(record.key, *token, "groups", "key_dim")
      return Record(key, constrain(record.weight, *token, "groups"))

    covariance = pending.covariance
    if covariance is not None:
      matrix = constrain(covariance.matrix, *token, "groups", None, None)
      covariance = Covariance(matrix, constrain(covariance.decay, *token, "groups"))
    return pending.replace(
      memory=planes(pending.memory),
      values=planes(pending.values),
      records=tuple(record(r) for r in pending.records),
      covariance=covariance,
    )

  def memory_matrix(self, x, planes):
    """Planes as matrices [B, T, G, V, K]; zeros if there are none."""
    if not planes:
      planes = (jnp.zeros(x.shape, self.memory_dtype),) * self.key_dim
    return jnp.stack(planes, -1).reshape(*x.shape[:2], self.groups, -1, self.key_dim)

  def covariance_matrix(self, covariance):
    """P [B, T, G, K, K], forgetting and all."""
    return covariance and self.restart(covariance).matrix

  def write(self, covariance, key, importance, forgetting):
    """P after a write, and the record of it."""
    if covariance is None:
      return None, Record(key, jnp.ones(key.shape[:-1]))
    return write_covariance(self._alone, covariance, key, importance, forgetting)

  @property
  def _alone(self):
    return _apart if self.apart else _together

  def restart(self, covariance):
    """P with its forgetting in it."""
    matrix = covariance.matrix / covariance.decay[..., None, None]
    return Covariance(matrix, jnp.ones_like(covariance.decay))

  def read(self, base, query, scale, memory, values, records, covariance):
    """base + scale · M q, see `deferred.read`."""
    matrix = covariance and covariance.matrix
    weights, _ = self._alone(self._weights, query, matrix, records, bool(memory))
    return self._mix((*memory, *values), [_scaled(weights, scale)], [base])[0]

  def _weights(self, query, matrix, records, memory):
    """z on the memory planes, if there are any, and w on the pending values; and Γ P q."""
    projection = query if matrix is None else times(matrix, query)
    if self.single:
      keys = jnp.stack([record.weight[..., None] * record.key for record in records], -2)
      weights = tuple(jnp.moveaxis(times(keys, projection), -1, 0))
    else:
      weights = tuple(record.weight * dot(record.key, projection) for record in records)
    if memory:
      rest = query
      if matrix is not None:  # a sum of outer products corrects nothing
        rest -= sum(w[..., None] * r.key for w, r in zip(weights, records, strict=True))
      weights = (*(rest[..., index] for index in range(self.key_dim)), *weights)
    return weights, projection

  def read_gradients(self, residual, query, scale, memory, values, records, covariance):
    """Cotangents of (query, scale, covariance), and the message to the writes."""
    products = tuple(dot(self._split(residual), self._split(x)) for x in (*memory, *values))
    matrix = covariance and covariance.matrix
    (query_bar, scale_bar, projection_bar), message = self._alone(
      self._weight_gradients, query, scale, matrix, records, bool(memory), products
    )
    covariance_bar = None
    if covariance is not None:
      matrix_bar = symmetric_outer(projection_bar, query)
      covariance_bar = Covariance(matrix_bar, jnp.zeros_like(covariance.decay))
    return (query_bar, scale_bar, covariance_bar), message

  def _weight_gradients(self, query, scale, matrix, records, memory, products):
    weights, projection = self._weights(query, matrix, records, memory)
    scale_bar = None
    if scale is not None:
      scale_bar = sum(w * p for w, p in zip(weights, products, strict=True))
    products, scaled = _scaled(products, scale), _scaled(weights, scale)
    planes = self.key_dim if memory else 0
    rest = jnp.stack(products[:planes], -1) if memory else None
    gradients = tuple(
      product if rest is None or matrix is None else product - dot(record.key, rest)
      for product, record in zip(products[planes:], records, strict=True)
    )
    projection_bar = sum(
      (record.weight * gradient)[..., None] * record.key
      for record, gradient in zip(records, gradients, strict=True)
    )
    query_bar = projection_bar if matrix is None else times(matrix, projection_bar)
    if rest is not None:
      query_bar = query_bar + rest
    message = {
      "planes": scaled[:planes] if memory else None,
      "writes": tuple(zip(scaled[planes:], gradients, weights[planes:], strict=True)),
      "projection": projection,
      "rest": None if matrix is None else rest,
    }
    return (query_bar, scale_bar, projection_bar), message

  def message_zeros(self, record, planes, pending):
    """Zeros of the shapes of the message of a read from memory planes and pending writes."""
    number, vector = jnp.zeros_like(record.weight), jnp.zeros_like(record.key)
    return {
      "planes": (number,) * planes if planes else None,
      "writes": ((number,) * 3,) * pending,
      "projection": vector,
      "rest": vector if planes and self.rule == "rls" else None,
    }

  def write_gradients(self, index, record, value_bar, record_bar, messages, factors):
    """Adds what later reads said of pending write `index` to its cotangents."""
    scaled = [m.writes[index][0] * factor for m, factor in zip(messages, factors, strict=True)]
    (value_bar,) = self._mix([m.residual for m in messages], [scaled], [value_bar])
    key_bar, weight_bar = record_bar.key, record_bar.weight
    for message in messages:
      _, gradient, weight = message.writes[index]
      key_bar = key_bar + (record.weight * gradient)[..., None] * message.projection
      weight_bar = weight_bar + gradient * dot(record.key, message.projection)
      if message.rest is not None:
        key_bar = key_bar - weight[..., None] * message.rest
    return value_bar, Record(key_bar, weight_bar)

  def memory_gradients(self, memory_bar, messages, factors):
    """Adds what later reads said of the memory planes to their cotangents."""
    weights = [
      [m.planes[index] * factor for m, factor in zip(messages, factors, strict=True)]
      for index in range(self.key_dim)
    ]
    return self._mix([m.residual for m in messages], weights, memory_bar)

  def fold(self, memory, values, records, covariance):
    """The K memory planes with all pending writes in them: reads with each unit vector.

    Their weights on one pending value are the vector w = weight · P k, since P is symmetric, and on
    the memory planes the matrix z = I − Σ k wᵀ.
    """
    keys = jnp.stack([record.key for record in records], -2)
    weights = jnp.stack([record.weight for record in records], -1)[..., None]
    if covariance is None:
      weights = weights * keys
    else:  # `write_covariance` wants symmetric cotangents
      matrix = 0.5 * (covariance.matrix + jnp.swapaxes(covariance.matrix, -1, -2))
      weights = weights * exact_einsum("...ij,...nj->...ni", matrix, keys)
    if memory:
      rest = jnp.broadcast_to(jnp.eye(self.key_dim), (*keys.shape[:-2], *(self.key_dim,) * 2))
      if covariance is not None:  # a sum of outer products corrects nothing
        rest = rest - exact_einsum("...ni,...nj->...ij", keys, weights)
      weights = jnp.concatenate([rest, weights], -2)
    return _combine(self, (*memory, *values), weights)

  def _mix(self, planes, weights, bases, dtype=None):
    """For each row of weights base + Σ weight · plane, in the dtype of the last plane."""
    dtype = planes[-1].dtype if dtype is None else dtype
    return self._alone(self._sums, planes, weights, bases, dtype)

  def _sums(self, planes, weights, bases, dtype):
    split = [self._split(plane) for plane in planes]
    sums = []
    for row, base in zip(weights, bases, strict=True):
      total = sum(weight[..., None] * plane for weight, plane in zip(row, split, strict=True))
      total = total.reshape(planes[0].shape)
      sums.append((total if base is None else base.astype(total.dtype) + total).astype(dtype))
    return tuple(sums)

  def _split(self, plane):
    """[B, T, D] -> [B, T, G, V], at least float32."""
    plane = plane.astype(jnp.promote_types(plane.dtype, jnp.float32))
    return plane.reshape(*plane.shape[:-1], self.groups, -1)


def _affine(side):
  """Kernel [R, G K + G] and bias [G K + G] to vectors and numbers."""
  return (
    jnp.concatenate([v.reshape(*v.shape[:-2], -1), n], -1)
    for v, n in zip(side.vectors, side.numbers, strict=True)
  )


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _combine(arithmetic, planes, weights):
  """Σ_i weights[..., i, j] · plane i for each j, in the dtype of the memory.

  Automatic differentiation takes ten times as long on a CPU: through a branch it keeps all that was
  seen there, spread out, and sums up each weight's cotangent by itself.

  Args:
    arithmetic: a `Natural`.
    planes: n arrays [B, T, D].
    weights: [B, T, G, n, K].
  """
  dtype = jnp.dtype(arithmetic.memory_dtype)
  rows = range(weights.shape[-1])
  columns = [[weights[..., i, row] for i in range(len(planes))] for row in rows]
  return tuple(arithmetic._mix(planes, [column], [None], dtype)[0] for column in columns)


def _combine_forward(arithmetic, planes, weights):
  return _combine(arithmetic, planes, weights), (planes, weights)


def _combine_backward(arithmetic, kept, sums_bar):
  planes, weights = kept
  rows = range(len(sums_bar))
  planes_bar = tuple(
    arithmetic._mix(sums_bar, [[weights[..., i, row] for row in rows]], [None], plane.dtype)[0]
    for i, plane in enumerate(planes)
  )
  split, split_bar = (
    jnp.stack([arithmetic._split(x) for x in arrays], -2) for arrays in (planes, sums_bar)
  )
  return planes_bar, exact_einsum("...iv,...jv->...ij", split, split_bar)


_combine.defvjp(_combine_forward, _combine_backward)


def _scaled(weights, scale):
  return tuple(weights) if scale is None else tuple(scale * weight for weight in weights)


def _apart(function, *operands):
  """function(*operands), without XLA fusing anything inside with anything outside.

  On CPUs it computes a cheap producer again for every use inside a fusion: a vector for each number
  of a matrix, a sum over many outputs for each number of its transpose.  A branch is the one thing
  that it does not look through.  The other branch, NaN to NaN, is never taken by finite numbers.
  """
  leaves, tree = jax.tree.flatten(operands)
  arrays = [x for x in leaves if isinstance(x, jax.Array)]

  def branch(arrays):
    rest = iter(arrays)
    filled = [next(rest) if isinstance(x, jax.Array) else x for x in leaves]
    return function(*jax.tree.unflatten(tree, filled))

  def not_a_number(arrays):
    shapes = jax.eval_shape(branch, arrays)
    return jax.tree.map(lambda x: jnp.full(x.shape, jnp.nan, x.dtype), shapes)

  return jax.lax.cond(jnp.isnan(jnp.ravel(arrays[0])[0]), not_a_number, branch, arrays)


def _together(function, *operands):
  return function(*operands)
