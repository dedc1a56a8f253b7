"""Weighted sums of planes and their products by group, each the other's gradient."""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from ldm_jax.ops.planes import plain, sums_kernel
from ldm_jax.ops.planes.forms import (
  COEFFICIENT,
  PLANE,
  Choice,
  on_each_device,
  planes_refusal,
  takes_kernel,
)
from ldm_jax.typing import Dtype

_PAIRS = (None, None, *COEFFICIENT)


def weighted_sums(
  planes: Sequence[Float[Array, "B D T"]],
  weights_OPBGT: Float[Array, "O P B G T"],
  base: Sequence[Float[Array, "B D T"] | None] | None = None,
  *,
  dtype: Dtype | None = None,
  form: str = "auto",
  interpret: bool = False,
) -> tuple[Float[Array, "B D T"], ...]:
  """out_o = base_o + sum over p of weights[o, p] * plane_p, a weight for each group and token.

  The width D is G contiguous groups of rows; weights [O, P, B, G, T] are the same for all rows of
  one.  Sums are float32.  Its gradients are `group_products` and `weighted_sums` again.

  Args:
    planes: P arrays, float32 or bfloat16, not necessarily the same.
    weights_OPBGT: taken in float32.
    base: O arrays of a plane's shape, of which some may be None; None is none.
    dtype: of the outputs; that of the first plane by default.
    form: "kernel" is a Pallas kernel for TPUs that reads every plane once; "plain" is ordinary jnp;
      "auto" takes the kernel wherever `planes_refusal` has nothing against it.
    interpret: run the kernel in Pallas's interpreter, on any platform: slow, for tests.

  Returns:
    O arrays.

  Raises:
    InputError: if `form` is "kernel" and it cannot run here, saying why.
    ValueError: for another form, or arrays that do not fit each other.
  """
  outputs, count, _, groups, _ = weights_OPBGT.shape
  base = (None,) * outputs if base is None else tuple(base)
  dtypes = (jnp.dtype(planes[0].dtype if dtype is None else dtype),) * outputs
  if len(planes) != count or len(base) != outputs:
    raise ValueError(
      f"weights of shape {weights_OPBGT.shape} are for {count} planes and {outputs} outputs; got "
      f"{len(planes)} planes and {len(base)} bases"
    )
  bases = [x for x in base if x is not None]
  choice = _choose(form, (*planes, *bases), groups, dtypes, interpret)
  weights_OPBGT = weights_OPBGT.astype(jnp.float32)
  return _weighted_sums((choice, dtypes, False), tuple(planes), weights_OPBGT, base)


def group_products(
  left: Sequence[Float[Array, "B D T"]],
  right: Sequence[Float[Array, "B D T"]],
  groups: int,
  *,
  form: str = "auto",
  interpret: bool = False,
) -> Float[Array, "O P B G T"]:
  """prod[o, p] = sum over the rows of each group of left_o * right_p, in float32.

  Args:
    left: O arrays, float32 or bfloat16, not necessarily the same.
    right: P arrays.
    groups: G; divides D.
    form: see `weighted_sums`.
    interpret: see `weighted_sums`.

  Returns:
    Float32 array [O, P, B, G, T].

  Raises:
    InputError: if `form` is "kernel" and it cannot run here, saying why.
    ValueError: for another form, or a width that is not a multiple of groups.
  """
  choice = _choose(form, (*left, *right), groups, (), interpret)
  return _group_products((choice, groups), tuple(left), tuple(right))


def _choose(form, planes, groups, dtypes, interpret):
  shape = planes[0].shape
  if shape[1] % groups:
    raise ValueError(f"planes of width {shape[1]} cannot be split in {groups} groups")
  if len({x.shape for x in planes}) > 1:
    raise ValueError(f"planes differ in shape: {sorted({x.shape for x in planes})}")
  dtypes = (*(x.dtype for x in planes), *dtypes)
  refuse = functools.partial(planes_refusal, shape, groups, dtypes)
  return Choice(takes_kernel(form, refuse, planes[0], interpret), interpret)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _weighted_sums(static, planes, weights, base):
  choice, dtypes, transposed = static
  if not choice.kernel:
    return plain.weighted_sums(planes, weights, base, dtypes, transposed=transposed)

  def local(weights, *arrays):
    arrays = list(arrays)
    planes = [arrays.pop(0) for _ in range(count)]
    bases = [arrays.pop(0) if has else None for has in based]
    return sums_kernel.weighted_sums(
      planes, weights, bases, dtypes, transposed=transposed, interpret=choice.interpret
    )

  count, based = len(planes), [x is not None for x in base]
  operands = (weights, *planes, *(x for x in base if x is not None))
  axes = [_PAIRS] + [PLANE] * (len(operands) - 1)
  return on_each_device(local, operands, axes, [PLANE] * len(dtypes))


def _sums_forward(static, planes, weights, base):
  # Of a base only the dtype is needed, which an empty slice carries.
  kinds = tuple(None if x is None else x[:0, :0, :0] for x in base)
  return _weighted_sums(static, planes, weights, base), (planes, weights, kinds)


def _sums_backward(static, saved, out_bars):
  choice, _, transposed = static
  planes, weights, kinds = saved
  dtypes = tuple(x.dtype for x in planes)
  none = (None,) * len(planes)
  plane_bars = _weighted_sums((choice, dtypes, not transposed), out_bars, weights, none)
  pair = (planes, out_bars) if transposed else (out_bars, planes)
  weight_bars = _group_products((choice, weights.shape[3]), *pair)
  base_bars = tuple(
    None if kind is None else bar.astype(kind.dtype)
    for kind, bar in zip(kinds, out_bars, strict=True)
  )
  return plane_bars, weight_bars, base_bars


_weighted_sums.defvjp(_sums_forward, _sums_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _group_products(static, left, right):
  choice, groups = static
  if not choice.kernel:
    return plain.group_products(left, right, groups)
  count = len(left)

  def local(*planes):
    local_groups = groups * planes[0].shape[1] // width  # of this device
    return sums_kernel.group_products(
      planes[:count], planes[count:], local_groups, interpret=choice.interpret
    )

  width = left[0].shape[1]
  operands = (*left, *right)
  return on_each_device(local, operands, [PLANE] * len(operands), _PAIRS)


def _products_forward(static, left, right):
  return _group_products(static, left, right), (left, right)


def _products_backward(static, saved, prod_bar):
  choice, _ = static
  left, right = saved

  def sums(planes, like, transposed):
    dtypes = tuple(x.dtype for x in like)
    return _weighted_sums((choice, dtypes, transposed), planes, prod_bar, (None,) * len(like))

  return sums(right, left, False), sums(left, right, True)


_group_products.defvjp(_products_forward, _products_backward)
