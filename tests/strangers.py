"""Models as others write them: residual additions of their own, no word about depth mixing."""

import flax.linen as nn
import jax
from flax import nnx


class Mlp(nn.Module):
  """The MLP of `CompactBlock`."""

  @nn.compact
  def __call__(self, x):
    return nn.Dense(x.shape[-1])(nn.gelu(nn.Dense(2 * x.shape[-1])(x)))


class CompactBlock(nn.Module):
  """A block whose parts nobody can reach from outside."""

  @nn.compact
  def __call__(self, x):
    h = nn.LayerNorm()(x)
    x = x + nn.MultiHeadDotProductAttention(num_heads=2)(h, mask=nn.make_causal_mask(x[..., 0]))
    return x + Mlp()(nn.LayerNorm()(x))


class Stranger(nn.Module):
  """A language model of one block: three mixers."""

  block: type = CompactBlock

  @nn.compact
  def __call__(self, tokens):
    x = self.block(name="block")(nn.Embed(16, 8)(tokens))
    return nn.Dense(16, name="head")(nn.LayerNorm(name="last")(x))


class SetUpBlock(nn.Module):
  """The same as `CompactBlock`, with parts that have names."""

  def setup(self):
    self.LayerNorm_0, self.LayerNorm_1 = nn.LayerNorm(), nn.LayerNorm()
    self.MultiHeadDotProductAttention_0 = nn.MultiHeadDotProductAttention(num_heads=2)
    self.Mlp_0 = Mlp()

  def attend(self, x):
    """The attention sublayer without its addition."""
    mask = nn.make_causal_mask(x[..., 0])
    return self.MultiHeadDotProductAttention_0(self.LayerNorm_0(x), mask=mask)

  def think(self, x):
    """The MLP sublayer without its addition."""
    return self.Mlp_0(self.LayerNorm_1(x))


class NNXBlock(nnx.Module):
  """A block of Flax's other API."""

  def __init__(self, width, rngs):
    self.norms = nnx.List([nnx.LayerNorm(width, rngs=rngs) for _ in range(2)])
    self.attention = nnx.MultiHeadAttention(2, width, decode=False, rngs=rngs)
    self.up, self.down = nnx.Linear(width, 16, rngs=rngs), nnx.Linear(16, width, rngs=rngs)

  def attend(self, x):
    """The attention sublayer without its addition."""
    return self.attention(self.norms[0](x))

  def think(self, x):
    """The MLP sublayer without its addition."""
    return self.down(jax.nn.gelu(self.up(self.norms[1](x))))
