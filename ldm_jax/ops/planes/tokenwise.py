"""Any elementwise function of coefficients [*lead, B, G, T], fused into one kernel each way."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from ldm_jax.ops.planes import tokenwise_kernel
from ldm_jax.ops.planes.forms import (
  COEFFICIENT,
  Choice,
  on_each_device,
  takes_kernel,
  tokenwise_refusal,
)
from ldm_jax.ops.planes.tiles import Tiles, apply


def tokenwise(
  body: Callable,
  inputs: Sequence[Float[Array, "..."]],
  *,
  form: str = "auto",
  interpret: bool = False,
) -> Any:
  """Evaluates `body` for every row, group and token at once.

  The body sees each array [*lead, B, G, T] as a numpy object array of shape `lead`, whose elements
  are float32 tiles; or as the tile itself where `lead` is ().  So it is written as if for one token
  of one group, with indices over `lead` unrolled, of elementwise jnp functions only: all tiles have
  one shape, and no element may depend on another's position.  It closes over no arrays.

      def outer(k, v):            # k [K, B, G, T], v [B, G, T] -> [K, B, G, T]
        return k * v

  Args:
    body: of as many arguments as there are inputs; returns an object array or tile, or a tuple.
    inputs: float32 or bfloat16 arrays [*lead, B, G, T].
    form: "kernel" is a Pallas kernel for TPUs that keeps everything between inputs and outputs in
      registers, and one that computes it again for the gradients; "plain" is ordinary jnp on tiles
      [B, G, T]; "auto" takes the kernel wherever `tokenwise_refusal` has nothing against it.
    interpret: run the kernel in Pallas's interpreter, on any platform: slow, for tests.

  Returns:
    What the body returns, as arrays [*lead, B, G, T] of the dtypes that it returns.

  Raises:
    InputError: if `form` is "kernel" and it cannot run here, saying why.
    ValueError: for another form, or inputs that differ in B, G or T.
  """
  inputs = tuple(inputs)
  shapes = {x.shape[-3:] for x in inputs}
  if len(shapes) != 1 or len(min(shapes)) != 3:
    raise ValueError(f"inputs differ in their last three axes [B, G, T]: {sorted(shapes)}")
  refuse = functools.partial(tokenwise_refusal, *shapes)
  choice = Choice(takes_kernel(form, refuse, inputs[0], interpret), interpret)
  tiles = Tiles.of(body, inputs)
  outputs = _tokenwise((choice, tiles), inputs)
  return outputs if tiles.several else outputs[0]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _tokenwise(static, inputs):
  choice, tiles = static
  if not choice.kernel:
    return _plain(tiles, inputs)
  kernel = functools.partial(tokenwise_kernel.forward, tiles, interpret=choice.interpret)
  out_axes = [_axes(lead) for lead in tiles.out_leads]
  return on_each_device(kernel, inputs, [_axes(lead) for lead in tiles.leads], out_axes)


def _plain(tiles, inputs):
  flat = []
  for x in inputs:
    flat += list(x.astype(jnp.float32).reshape(-1, *x.shape[-3:]))
  flat = apply(tiles, flat)
  outputs = []
  for lead, dtype in zip(tiles.out_leads, tiles.out_dtypes, strict=True):
    size = tiles.count(lead)
    outputs.append(jnp.stack(flat[:size]).reshape(*lead, *flat[0].shape).astype(dtype))
    flat = flat[size:]
  return tuple(outputs)


def _forward(static, inputs):
  return _tokenwise(static, inputs), inputs


def _backward(static, inputs, out_bars):
  choice, tiles = static
  if not choice.kernel:
    return (jax.vjp(functools.partial(_plain, tiles), inputs)[1](out_bars)[0],)
  kernel = functools.partial(tokenwise_kernel.backward, tiles, interpret=choice.interpret)
  axes = [_axes(lead) for lead in tiles.leads]
  out_axes = [_axes(lead) for lead in tiles.out_leads]
  return (on_each_device(kernel, (*inputs, *out_bars), axes + out_axes, axes),)


def _axes(lead):
  return (*(None for _ in lead), *COEFFICIENT)


_tokenwise.defvjp(_forward, _backward)
