"""Looking at the calls of all mixers of a network, which stays as it is.

Each mixer's call is intercepted, and what is noted leaves through a Flax collection, which works
inside rematerialised blocks.
"""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax

from ldm_jax.mixers.base import DepthMixer
from ldm_jax.typing import Sublayer

COLLECTION = "observed"


def observer(
  head: int,
  at_sublayer: Callable[[DepthMixer, Any, Sublayer], Sublayer],
  at_head: Callable[[DepthMixer, Any, jax.Array], None],
) -> Callable:
  """A method interceptor, for `flax.linen.intercept_methods`.

  Args:
    head: number of the mixer that reads for the head.
    at_sublayer: from a mixer, the streams before it reads and its sublayer f, what to call in place
      of f.
    at_head: takes the head's mixer, the streams and what it read.
  """

  def intercept(call, args, kwargs, context):
    mixer = context.module
    if isinstance(mixer, DepthMixer) and context.method_name == "__call__":
      streams, sublayer = args
      return call(streams, at_sublayer(mixer, streams, sublayer))
    result = call(*args, **kwargs)
    if isinstance(mixer, DepthMixer) and context.method_name == "read" and mixer.index == head:
      at_head(mixer, args[0], result)
    return result

  return intercept


def note(mixer: nn.Module, seen: Any) -> None:
  """Puts something with an `index` into the collection."""
  mixer.sow(COLLECTION, "seen", seen, init_fn=lambda: None, reduce_fn=lambda _, new: new)


def noted(collections: Any, kind: type) -> list[Any]:
  """All that was noted, of one class, by index."""
  seen = jax.tree.leaves(collections, is_leaf=lambda leaf: isinstance(leaf, kind))
  return sorted(seen, key=lambda one: one.index)
