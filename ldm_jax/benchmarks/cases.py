"""The kernels that are measured, each at the sizes at which the larger models use it.

8,192 tokens a chip in bfloat16, widths 2048 and 1024 in 16 groups, key widths K of 8 and 4; N are
the outputs that wait to be folded into the memory's K planes.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ldm_jax.ops.attention import attention
from ldm_jax.ops.planes import (
  group_products,
  thin_product,
  thin_product_gradients,
  tokenwise,
  weighted_sums,
)

ROWS, TOKENS, GROUPS, LATENT, PENDING = 4, 2048, 16, 64, 4
HEAD_WIDTH = 128


class Case(NamedTuple):
  """One function to compile, and how it is used.

  name: with its sizes.
  function: of arrays, with one or more kernels in it.
  arguments: arrays as `jax.ShapeDtypeStruct`.
  conditional_share: of the work that a kernel does on conditions on data, how much is done.
  """

  name: str
  function: Callable
  arguments: Any
  conditional_share: float = 1.0


def cases() -> Iterator[Case]:
  """All cases, the ones of the depth memory first."""
  for width in (2048, 1024):
    for keys in (8, 4):
      yield from _memory_cases(width, keys)
    yield from _thin_cases(width)
  yield from _stream_cases(2048)
  yield _attention_case(2048)


def _memory_cases(width, keys):
  planes, label = keys + PENDING, f"D={width} K={keys}"
  yield _sums(f"read {label} N={PENDING}", width, GROUPS, 1, planes, 1)
  yield _sums(f"fold {label} N={PENDING}", width, GROUPS, keys, planes, 0)
  # Backwards: what reads put on the memory and on the pending outputs, and on their weights.
  yield _sums(f"read backward {label}", width, GROUPS, planes, 1, planes)
  yield _products(f"read weights backward {label}", width, GROUPS, 1, planes)
  yield _products(f"fold weights backward {label}", width, GROUPS, keys, planes)
  coefficients = [_coefficients(keys), _coefficients(keys, keys), _coefficients()]
  yield Case(f"gain {label}", lambda k, p, w: tokenwise(_gain, (k, p, w)), coefficients)


def _thin_cases(width):
  x, w = _array(ROWS, width, TOKENS), _array(LATENT, width)
  y = _array(ROWS, LATENT, TOKENS, dtype=jnp.float32)
  squares = _array(ROWS, 1, TOKENS, dtype=jnp.float32)
  label = f"D={width} R={LATENT}"
  yield Case(f"thin product {label}", thin_product, (x, w))
  yield Case(f"thin product backward {label}", thin_product_gradients, (x, w, y, squares, x))


def _stream_cases(width):
  yield _sums(f"mhc write D={width} N=4", width, 1, 4, 5, 0)
  yield _sums(f"attnres read D={width} S=9", width, 1, 1, 9, 0)


def _attention_case(width):
  heads = width // HEAD_WIDTH
  q = _array(ROWS, TOKENS, heads, HEAD_WIDTH)
  ids = jax.ShapeDtypeStruct((ROWS, TOKENS), jnp.int32)

  def loss(q, k, v, ids):
    mixed = attention(q, k, v, ids, form="splash")
    return jnp.sum(jnp.square(mixed.astype(jnp.float32)))

  share = causal_share(TOKENS)
  gradients = jax.grad(loss, argnums=(0, 1, 2))
  return Case(f"attention D={width} T={TOKENS}", gradients, (q, q, q, ids), share)


def causal_share(tokens: int, block: int = 512) -> float:
  """How many of the blocks of T x T logits a causal mask leaves, as splash attention skips them."""
  count = -(-tokens // block)
  return (count + 1) / (2 * count)


def _sums(name, width, groups, outputs, planes, bases):
  def function(planes, weights, base):
    return weighted_sums(planes, weights, base or None)

  weights = _coefficients(outputs, planes, groups=groups)
  plane = _array(ROWS, width, TOKENS)
  return Case(name, function, ([plane] * planes, weights, [plane] * min(bases, outputs)))


def _products(name, width, groups, left, right):
  plane = _array(ROWS, width, TOKENS)
  function = lambda left, right: group_products(left, right, groups)
  return Case(name, function, ([plane] * left, [plane] * right))


def _gain(k, p, w):
  """The RLS gain P k / (1 / w + k P k) of one group and token, unrolled over K."""
  pk = [sum(p[i, j] * k[j] for j in range(len(k))) for i in range(len(k))]
  scale = w / (1.0 + w * sum(a * b for a, b in zip(pk, k, strict=True)))
  gain = k.copy()
  for place, value in enumerate(pk):
    gain[place] = scale * value
  return gain


def _array(*shape, dtype=jnp.bfloat16):
  return jax.ShapeDtypeStruct(shape, dtype)


def _coefficients(*lead, groups=GROUPS):
  return _array(*lead, ROWS, groups, TOKENS, dtype=jnp.float32)
