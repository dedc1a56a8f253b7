"""Products of a plane with a matrix of few rows, and the squares that a norm needs."""

import functools

import jax
from jaxtyping import Array, Float

from ldm_jax.ops.planes import plain, thin_kernel
from ldm_jax.ops.planes.forms import PLANE, Choice, on_each_device, takes_kernel, thin_refusal

_MATRIX = (None, "activation_embed")
_THIN = ("batch", None, "sequence")


def thin_product(
  x_BDT: Float[Array, "B D T"],
  w_RD: Float[Array, "R D"],
  *,
  form: str = "auto",
  interpret: bool = False,
) -> tuple[Float[Array, "B R T"], Float[Array, "B 1 T"]]:
  """w x for each token, and the sum of the squares of x, in one pass over x.

  With them an RMSNorm in front of the product costs nothing of width D: it is
  y * rsqrt(squares / D + eps).  Gradients take one pass as well.  Inside a user's own `shard_map`
  sums are over the part of the width that is there.

  Args:
    x_BDT: float32 or bfloat16, the dtype in which operands of the products are taken; sums are
      float32, and products of float32 are exact.
    w_RD: some 64 to 160 rows.
    form: as in `weighted_sums`; "auto" goes by `thin_refusal`.
    interpret: see `weighted_sums`.

  Returns:
    y and squares, float32.

  Raises:
    InputError: if `form` is "kernel" and it cannot run here, saying why.
    ValueError: for another form.
  """
  return _thin_product(_choose(form, x_BDT, interpret), x_BDT, w_RD)


def thin_product_gradients(
  x_BDT: Float[Array, "B D T"],
  w_RD: Float[Array, "R D"],
  y_bar_BRT: Float[Array, "B R T"],
  squares_bar_B1T: Float[Array, "B 1 T"],
  incoming_BDT: Float[Array, "B D T"] | None = None,
  *,
  form: str = "auto",
  interpret: bool = False,
) -> tuple[Float[Array, "B D T"], Float[Array, "R D"]]:
  """The gradients of `thin_product` in one pass over x; for those who write a backward pass.

      x_bar = w^T y_bar + 2 x squares_bar + incoming;  w_bar = sum over tokens of y_bar x^T

  Args:
    x_BDT: as in `thin_product`, as w and the rest.
    w_RD: the matrix.
    y_bar_BRT: the gradient of y, rounded to the dtype of x.
    squares_bar_B1T: that of the squares, float32.
    incoming_BDT: what else x receives; None is nothing.
    form: see `weighted_sums`.
    interpret: see `weighted_sums`.

  Returns:
    x_bar in the dtype of x and w_bar in that of w.

  Raises:
    InputError: if `form` is "kernel" and it cannot run here, saying why.
    ValueError: for another form.
  """
  choice = _choose(form, x_BDT, interpret)
  return _gradients(choice, x_BDT, w_RD, y_bar_BRT, squares_bar_B1T, incoming_BDT)


def _choose(form, x, interpret):
  refuse = functools.partial(thin_refusal, x.shape, (x.dtype,))
  return Choice(takes_kernel(form, refuse, x, interpret), interpret)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _thin_product(choice, x, w):
  w = w.astype(x.dtype)
  if not choice.kernel:
    return plain.thin_product(x, w)
  kernel = functools.partial(thin_kernel.thin_product, interpret=choice.interpret)
  over_width = ("activation_embed",)
  return on_each_device(
    kernel, (x, w), [PLANE, _MATRIX], [_THIN, _THIN], summed=[over_width, over_width]
  )


def _forward(choice, x, w):
  return _thin_product(choice, x, w), (x, w)


def _backward(choice, saved, bars):
  return _gradients(choice, *saved, *bars, None)


_thin_product.defvjp(_forward, _backward)


def _gradients(choice, x, w, y_bar, squares_bar, incoming):
  operands = (x, w.astype(x.dtype), y_bar, squares_bar)
  operands += () if incoming is None else (incoming,)
  if choice.kernel:
    kernel = functools.partial(thin_kernel.thin_product_gradients, interpret=choice.interpret)
    axes = [PLANE, _MATRIX, _THIN, _THIN, PLANE][: len(operands)]
    over_tokens = ("batch", "sequence")
    x_bar, w_bar = on_each_device(
      kernel, operands, axes, [PLANE, _MATRIX], summed=[(), over_tokens]
    )
  else:
    x_bar, w_bar = plain.thin_product_gradients(*operands)
  return x_bar, w_bar.astype(w.dtype)
