"""Operations that hand their planes on to the next one, so that gradients add up in their passes.

A plane that several operations use receives a gradient from each, and adding those up would be
passes of its own over all of them.  Here each operation returns its planes again; whoever uses them
next takes these, so the gradient so far arrives in the backward pass, which adds its own to it.
"""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero
from jaxtyping import Array, Float

from ldm_jax.ops.planes.api import group_products, weighted_sums
from ldm_jax.ops.planes.thin import thin_product, thin_product_gradients

_ROWS = 8  # of a register

Planes = tuple[Float[Array, "B D T"], ...]


def thin_products(
  planes: Sequence[Float[Array, "B D T"]],
  weights: Sequence[Float[Array, "R D"]],
  *,
  interpret: bool = False,
) -> tuple[tuple[Float[Array, "B R T"], ...], tuple[Float[Array, "B 1 T"], ...], Planes]:
  """`thin_product` of each plane with a matrix of its own, of a precision that bfloat16 has not.

  A matrix meets planes in bfloat16 as two, what bfloat16 holds of it and the rest: its few rows
  take no longer for it.  Gradients of products are rounded to the dtype of the planes.

  Args:
    planes: float32 or bfloat16.
    weights: float32, one for each plane.
    interpret: see `weighted_sums`.

  Returns:
    Products and sums of squares, float32, and the planes.
  """
  rows = [len(w) for w in weights]
  # The TPU compiler refuses some products of a single row, and 8 cost the same.
  weights = tuple(jnp.pad(w, ((0, max(0, _ROWS - len(w))), (0, 0))) for w in weights)
  products, squares, planes = _thin_products(interpret, tuple(planes), weights)
  products = tuple(y[:, :count] for y, count in zip(products, rows, strict=True))
  return products, squares, planes


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _thin_products(interpret, planes, weights):
  products, squares = [], []
  for x, w in zip(planes, weights, strict=True):
    rows, narrow = w.shape[0], x.dtype == jnp.bfloat16
    if narrow:
      # Not by astype: XLA may keep more precision than asked for, and nothing would be left.
      coarse = jax.lax.reduce_precision(w, exponent_bits=8, mantissa_bits=7)
      w = jnp.concatenate([coarse, w - coarse])
    y, square = thin_product(x, w, interpret=interpret)
    products.append(y[:, :rows] + y[:, rows:] if narrow else y)
    squares.append(square)
  return tuple(products), tuple(squares), planes


def _thin_forward(interpret, planes, weights):
  planes, weights = _values(planes), _values(weights)
  return _thin_products(interpret, planes, weights), (planes, weights)


def _thin_backward(interpret, saved, bars):
  product_bars, square_bars, plane_bars = bars
  results = []
  for x, w, *these in zip(*saved, product_bars, square_bars, plane_bars, strict=True):
    y_bar, square_bar, incoming = these
    y_bar, square_bar = _dense(y_bar), _dense(square_bar)
    incoming = _dense_or_none(incoming)
    results.append(thin_product_gradients(x, w, y_bar, square_bar, incoming, interpret=interpret))
  return tuple(zip(*results, strict=True))


_thin_products.defvjp(_thin_forward, _thin_backward, symbolic_zeros=True)


def sums_and_planes(
  planes: Sequence[Float[Array, "B D T"]],
  weights_OPBGT: Float[Array, "O P B G T"],
  *,
  interpret: bool = False,
) -> tuple[Planes, Planes]:
  """`weighted_sums` of planes of one dtype, and the planes."""
  return _sums_and_planes(interpret, tuple(planes), weights_OPBGT)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _sums_and_planes(interpret, planes, weights):
  return weighted_sums(planes, weights, interpret=interpret), planes


def _sums_forward(interpret, planes, weights):
  planes, weights = _values(planes), weights.value
  return _sums_and_planes(interpret, planes, weights), (planes, weights)


def _sums_backward(interpret, saved, bars):
  planes, weights = saved
  out_bars, plane_bars = bars
  out_bars, base = [_dense(bar) for bar in out_bars], [_dense_or_none(bar) for bar in plane_bars]
  plane_bars = weighted_sums(
    out_bars, weights.swapaxes(0, 1), base, dtype=planes[0].dtype, interpret=interpret
  )
  weight_bars = group_products(out_bars, planes, weights.shape[3], interpret=interpret)
  return plane_bars, weight_bars


_sums_and_planes.defvjp(_sums_forward, _sums_backward, symbolic_zeros=True)


def _values(primals):
  return tuple(primal.value for primal in primals)


def _dense(bar):
  return jnp.zeros(bar.shape, bar.dtype) if isinstance(bar, SymbolicZero) else bar


def _dense_or_none(bar):
  return None if isinstance(bar, SymbolicZero) else bar
