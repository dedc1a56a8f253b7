"""The arithmetic of put-off writes with tokens last, as TPUs want it: planes [B, D, T].

Everything of width D is a weighted sum of planes or their products by group, everything of key
width one fused function of numbers [B, G, T]; see `ldm_jax.ops.planes`, which has both as kernels.
P is kept as the K (K + 1) / 2 numbers of its upper triangle.  See `deferred` for what is computed.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from ldm_jax.ops.depth_memory.deferred import Covariance, Record
from ldm_jax.ops.depth_memory.reference import eigenvalue_limit
from ldm_jax.ops.normalize import MIN_LENGTH, inverse_rms_of
from ldm_jax.ops.planes import (
  from_plane,
  group_products,
  place_plane,
  thin_product,
  to_plane,
  tokenwise,
  weighted_sums,
)
from ldm_jax.ops.planes.forms import COEFFICIENT
from ldm_jax.sharding import constrain


@dataclasses.dataclass(frozen=True)
class TokenMinor:
  """Planes [B, D, T], keys [K, B, G, T] of any length, numbers [B, G, T].

  Keys and queries are scaled to length 1 where they are used.

  Attributes:
    groups: G.
    key_dim: K.
    rule: "rls", or "outer", which has no covariance.
    memory_dtype: of folded planes.
    form: of the operations, "plain" or "kernel".
    interpret: run kernels in Pallas's interpreter, on any platform: slow, for tests.
  """

  groups: int
  key_dim: int
  rule: str = "rls"
  memory_dtype: str = "float32"
  form: str = "kernel"
  interpret: bool = False

  @property
  def _how(self):
    return {"form": self.form, "interpret": self.interpret}

  def to_plane(self, x):
    """[B, T, D] -> [B, D, T]."""
    return to_plane(x)

  def from_plane(self, plane):
    """[B, D, T] -> [B, T, D]."""
    return from_plane(plane)

  def latent(self, x, kernel, bias, dtype):
    """silu(W norm(x) + b), [B, R, T]."""
    product, squares = thin_product(to_plane(x.astype(dtype)), kernel.T, **self._how)
    product *= inverse_rms_of(squares, x.shape[-1])
    return jax.nn.silu(product + bias[None, :, None]).astype(dtype)

  def vectors(self, latent, kernel, bias):
    """Affine maps [K, B, G, T] of the latent, float32."""
    kernel = kernel.astype(latent.dtype)
    product = jnp.einsum("brt,rgk->kbgt", latent, kernel, preferred_element_type=jnp.float32)
    return product + bias.T[:, None, :, None]

  def numbers(self, latent, kernel, bias):
    """Affine maps [B, G, T] of the latent, float32."""
    kernel = kernel.astype(latent.dtype)
    product = jnp.einsum("brt,rg->bgt", latent, kernel, preferred_element_type=jnp.float32)
    return product + bias[None, :, None]

  def vectors_and_numbers(self, latent, vectors, numbers):
    """`vectors` and `numbers` of two pairs of kernel and bias."""
    return self.vectors(latent, *vectors), self.numbers(latent, *numbers)

  def unit(self, vectors):
    """Left for later."""
    return vectors

  def constant_key(self, batch_shape):
    """(1, …, 1) for all."""
    batch, tokens = batch_shape
    return jnp.ones((self.key_dim, batch, self.groups, tokens))

  def ones(self, key):
    """1 for each token and group of some keys."""
    return jnp.ones(key.shape[1:])

  def per_group(self, numbers):
    """[G] -> what broadcasts with numbers."""
    return numbers[None, :, None]

  def place(self, pending):
    """Pins the sharding of a memory."""

    def coefficients(x):
      return constrain(x, *(None,) * (x.ndim - len(COEFFICIENT)), *COEFFICIENT)

    return pending.replace(
      memory=tuple(map(place_plane, pending.memory)),
      values=tuple(map(place_plane, pending.values)),
      records=jax.tree.map(coefficients, pending.records),
      covariance=jax.tree.map(coefficients, pending.covariance),
    )

  def memory_matrix(self, x, planes):
    """Planes as matrices [B, T, G, V, K]; zeros if there are none."""
    batch, tokens, width = x.shape
    if not planes:
      planes = (jnp.zeros((batch, width, tokens), self.memory_dtype),) * self.key_dim
    stacked = jnp.stack(planes).reshape(self.key_dim, batch, self.groups, -1, tokens)
    return jnp.moveaxis(stacked, (0, -1), (-1, 1))

  def covariance_matrix(self, covariance):
    """P [B, T, G, K, K], forgetting and all."""
    if covariance is None:
      return None
    packed = self.restart(covariance).matrix
    rows = [[packed[_place(i, j)] for j in range(self.key_dim)] for i in range(self.key_dim)]
    return jnp.moveaxis(jnp.stack([jnp.stack(row) for row in rows]), (0, 1, 4), (3, 4, 1))

  def start(self, batch_shape, alpha):
    """P₋₁ = α I, without forgetting so far; None for the rule without P."""
    if self.rule == "outer":
      return None
    batch, tokens = batch_shape
    diagonal = [i == j for j in range(self.key_dim) for i in range(j + 1)]
    packed = alpha * jnp.asarray(diagonal, jnp.float32)[:, None, None, None]
    shape = (batch, self.groups, tokens)
    return Covariance(jnp.broadcast_to(packed, (len(diagonal), *shape)), jnp.ones(shape))

  def restart(self, covariance):
    """P with its forgetting in it."""
    matrix = covariance.matrix / covariance.decay[None]
    return Covariance(matrix, jnp.ones_like(covariance.decay))

  def write(self, covariance, key, importance, forgetting):
    """P after a write, and the record of it."""
    if covariance is None:
      return None, Record(tokenwise(_unit, [key], **self._how), jnp.ones(key.shape[1:]))
    inputs = [covariance.matrix, covariance.decay, key, importance, forgetting]
    matrix, decay, key, weight = tokenwise(_write, inputs, **self._how)
    return Covariance(matrix, decay), Record(key, weight)

  def read(self, base, query, scale, memory, values, records, covariance):
    """base + scale · M q, see `deferred.read`."""
    static, inputs = self._read_inputs(query, scale, memory, records, covariance)
    weights = tokenwise(functools.partial(_read_body, static), inputs, **self._how)
    planes = (*memory, *values)
    return self._sums(planes, weights[None], None if base is None else [base])[0]

  def _read_inputs(self, query, scale, memory, records, covariance):
    """What the bodies of a read take: how much there is of what, and arrays."""
    static = (len(records), bool(memory), covariance is not None, scale is not None)
    return static, [query, *_flat(records), *_present(covariance and covariance.matrix, scale)]

  def read_gradients(self, residual, query, scale, memory, values, records, covariance):
    """Cotangents of (query, scale, covariance), and the message to the writes."""
    (products,) = group_products((residual,), (*memory, *values), self.groups, **self._how)
    static, inputs = self._read_inputs(query, scale, memory, records, covariance)
    body = functools.partial(_read_gradients_body, static)
    out = list(tokenwise(body, [*inputs, products], **self._how))
    query_bar, projection = out.pop(0), out.pop(0)
    writes = tuple(out.pop(0) for _ in records)
    covariance_bar = None
    if covariance is not None:
      covariance_bar = Covariance(out.pop(0), jnp.zeros_like(covariance.decay))
    scale_bar = None if scale is None else out.pop(0)
    planes, rest = (out.pop(0), out.pop(0)) if memory else (None, None)
    rest = rest if self.rule == "rls" else None
    message = {"planes": planes, "writes": writes, "projection": projection, "rest": rest}
    return (query_bar, scale_bar, covariance_bar), message

  def message_zeros(self, record, planes, pending):
    """Zeros of the shapes of the message of a read from memory planes and pending writes."""
    number, vector = jnp.zeros_like(record.weight), jnp.zeros_like(record.key)
    return {
      "planes": vector if planes else None,
      "writes": (jnp.zeros((3, *number.shape)),) * pending,
      "projection": vector,
      "rest": vector if planes and self.rule == "rls" else None,
    }

  def write_gradients(self, index, record, value_bar, record_bar, messages, factors):
    """Adds what later reads said of pending write `index` to its cotangents."""
    static = tuple(message.rest is not None for message in messages)
    inputs = [record.key, record.weight, record_bar.key, record_bar.weight]
    for message in messages:
      inputs += [message.writes[index], message.projection, *_present(message.rest)]
    body = functools.partial(_write_gradients_body, static)
    key_bar, weight_bar, scaled = tokenwise(body, inputs, **self._how)
    scaled = scaled * jnp.stack(factors)[:, None, None, None]
    residuals = [message.residual for message in messages]
    (value_bar,) = self._sums(residuals, scaled[None], [value_bar], value_bar.dtype)
    return value_bar, Record(key_bar, weight_bar)

  def memory_gradients(self, memory_bar, messages, factors):
    """Adds what later reads said of the memory planes to their cotangents."""
    scaled = [m.planes * factor for m, factor in zip(messages, factors, strict=True)]
    residuals = [message.residual for message in messages]
    return self._sums(residuals, jnp.stack(scaled, 1), memory_bar, memory_bar[0].dtype)

  def fold(self, memory, values, records, covariance):
    """The K memory planes with all pending writes in them: reads with each unit vector."""
    static = (len(records), bool(memory), covariance is not None, self.key_dim)
    inputs = [*_flat(records), *_present(covariance and covariance.matrix)]
    weights = tokenwise(functools.partial(_fold_body, static), inputs, **self._how)
    return self._sums((*memory, *values), weights, None, self.memory_dtype)

  def _sums(self, planes, weights, bases, dtype=None):
    dtype = planes[-1].dtype if dtype is None else dtype
    return weighted_sums(planes, weights, bases, dtype=dtype, **self._how)


def _present(*arrays):
  return [x for x in arrays if x is not None]


def _flat(records):
  return [array for record in records for array in (record.key, record.weight)]


# What follows is written for one token of one group: vectors are object arrays of K tiles.


def _place(i, j):
  """Where P[i, j] = P[j, i] is among the numbers of the upper triangle, column by column."""
  i, j = min(i, j), max(i, j)
  return j * (j + 1) // 2 + i


def _array(tiles):
  array = np.empty(len(tiles), object)
  for place, tile in enumerate(tiles):
    array[place] = tile
  return array


def _by(vector, tile):
  """A vector times a number; `vector * tile` would ask the tile to take the vector in."""
  return _array([x * tile for x in vector])


def _dot(a, b):
  return sum(x * y for x, y in zip(a, b, strict=True))


def _times(packed, vector):
  size = len(vector)
  return _array([sum(packed[_place(i, j)] * vector[j] for j in range(size)) for i in range(size)])


def _inverse_length(vector):
  """1 / max(‖x‖, `MIN_LENGTH`), and whether it is the length that counts."""
  squared = _dot(vector, vector)
  least = MIN_LENGTH**2
  return jax.lax.rsqrt(jnp.maximum(squared, least)), squared > least


def _unit(vector):
  return _by(vector, _inverse_length(vector)[0])


def _write(packed, decay, key, importance, forgetting):
  """Sherman-Morrison with the forgetting apart; see `reference.rls_write` for both safeguards."""
  size, eps = len(key), float(jnp.finfo(jnp.float32).eps)
  key = _unit(key)
  mean = sum(packed[_place(i, i)] for i in range(size)) / size
  bound = jnp.minimum(1.0, mean / (eigenvalue_limit(jnp.float32) * decay))
  decay = decay * jnp.maximum(forgetting, bound)
  weight = importance / decay
  projection = _times(packed, key)
  share = weight / (1 + weight * _dot(key, projection))
  new = np.empty(len(packed), object)
  for j in range(size):
    for i in range(j + 1):
      entry = packed[_place(i, j)] - share * projection[i] * projection[j]
      new[_place(i, j)] = entry + 0.5 * eps * mean if i == j else entry
  return new, decay, key, weight


def _weights(query, records, packed, memory):
  """z, or None, and w and Γ P q."""
  projection = query if packed is None else _times(packed, query)
  weights = [weight * _dot(key, projection) for key, weight in records]
  rest = None
  if memory:
    rest = query
    for w, (key, _) in zip(weights, records, strict=True) if packed is not None else ():
      rest = rest - _by(key, w)
  return rest, weights, projection


def _pairs(count, inputs):
  """Takes keys and weights of `count` records off the front of a list."""
  return [(inputs.pop(0), inputs.pop(0)) for _ in range(count)]


def _read_body(static, query, *inputs):
  count, memory, has_matrix, has_scale = static
  inputs = list(inputs)
  records = _pairs(count, inputs)
  packed = inputs.pop(0) if has_matrix else None
  rest, weights, _ = _weights(_unit(query), records, packed, memory)
  weights = _array([*(rest if memory else ()), *weights])
  return _by(weights, inputs.pop(0)) if has_scale else weights


def _read_gradients_body(static, raw, *inputs):
  """Query bar, projection, a triple for each write; then matrix bar, scale bar, planes and rest bar
  as far as there are any.
  """  # fmt: skip
  count, memory, has_matrix, has_scale = static
  inputs = list(inputs)
  records = _pairs(count, inputs)
  packed = inputs.pop(0) if has_matrix else None
  scale = inputs.pop(0) if has_scale else 1.0
  (products,) = inputs  # with r̄
  size = len(raw)
  inverse, long = _inverse_length(raw)
  query = _by(raw, inverse)
  rest, weights, projection = _weights(query, records, packed, memory)
  scale_bar = _dot([*(rest if memory else ()), *weights], products)
  products = _by(products, scale)
  rest_bar, products = (products[:size], products[size:]) if memory else (None, products)
  gradients = list(products)
  if memory and packed is not None:  # a sum of outer products corrects nothing
    gradients = [g - _dot(key, rest_bar) for g, (key, _) in zip(gradients, records, strict=True)]
  projection_bar = sum(
    _by(key, weight * gradient) for gradient, (key, weight) in zip(gradients, records, strict=True)
  )
  query_bar = projection_bar if packed is None else _times(packed, projection_bar)
  if memory:
    query_bar = query_bar + rest_bar
  along = jnp.where(long, _dot(query, query_bar), 0.0)
  out = [_by(query_bar - _by(query, along), inverse), projection]
  out += [_array([w * scale, g, w]) for w, g in zip(weights, gradients, strict=True)]
  if packed is not None:
    matrix_bar = np.empty(len(packed), object)
    for j in range(size):
      for i in range(j):
        matrix_bar[_place(i, j)] = projection_bar[i] * query[j] + projection_bar[j] * query[i]
      matrix_bar[_place(j, j)] = projection_bar[j] * query[j]
    out.append(matrix_bar)
  if has_scale:
    out.append(scale_bar)
  if memory:
    out += [_by(rest, scale), rest_bar]
  return tuple(out)


def _write_gradients_body(static, key, weight, key_bar, weight_bar, *inputs):
  inputs, scaled = list(inputs), []
  for has_rest in static:
    (through, gradient, own), projection = inputs.pop(0), inputs.pop(0)
    scaled.append(through)
    key_bar = key_bar + _by(projection, weight * gradient)
    weight_bar = weight_bar + gradient * _dot(key, projection)
    if has_rest:
      key_bar = key_bar - _by(inputs.pop(0), own)
  return key_bar, weight_bar, _array(scaled)


def _fold_body(static, *inputs):
  count, memory, has_matrix, size = static
  inputs = list(inputs)
  records = _pairs(count, inputs)
  packed = inputs.pop(0) if has_matrix else None
  zero = records[0][1] * 0.0
  rows = []
  for index in range(size):
    unit = _array([zero + 1.0 if place == index else zero for place in range(size)])
    rest, weights, _ = _weights(unit, records, packed, memory)
    rows.append([*(rest if memory else ()), *weights])
  out = np.empty((size, len(rows[0])), object)
  for place in np.ndindex(out.shape):
    out[place] = rows[place[0]][place[1]]
  return out
