"""Depth mixers in models that others wrote, and their trained parameters beside new ones.

`mixer(streams, f)` needs the sublayer f by itself.  Where a model can be subclassed and its parts
have names, call them: `mixer(streams, lambda h: block.mlp(block.norm(h)))`.  Where the additions
`x + f(norm(x))` are buried inside a block, `Adopted` exchanges them from outside.
"""

from collections.abc import Callable, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.extend
from flax.traverse_util import flatten_dict, unflatten_dict

from ldm_jax.errors import InputError
from ldm_jax.mixers import DepthMixer
from ldm_jax.typing import PyTree

_NAMED = 5  # paths that an error names


class Adopted(nn.Module):
  """A pre-norm transformer, used as it is, with depth mixers in place of its residual additions.

  While the model runs, what a norm gets is replaced by `mixer.read(streams)`, and what the sublayer
  behind it gives goes to `mixer.write`.  The model's own additions are then used by nobody, and XLA
  removes them.  Its parameters keep their paths; those of the mixers stand beside them as
  `mixers_0`, `mixers_1`, ….

  Right for blocks that compute x + f(norm(x)), one sublayer after another.  `writes` must name the
  last module before the addition (say a dropout or layer scale), and nothing but modules may stand
  in between; with a gain of 0 the outputs are those of the model to the bit, which tells whether
  the two functions are right.  Parallel sublayers behind one norm, `nn.scan` and `nn.remat` inside
  the model do not fit: all layers must be in one trace, for the streams run through them.

  Attributes:
    model: takes and gives what it always did.
    mixers: one for each sublayer, numbered from 0, and one for the head.
    reads: whether a module is the norm before a sublayer or the last norm before the head.  The
      first array it is called with is replaced, [batch, tokens, width].
    writes: whether a module's output, or the first of several, is what the model adds to x.

  Raises:
    InputError: when called, if the mixers are numbered otherwise, or if norms and sublayers do not
      alternate, are more or fewer than the mixers, or are inside a transformation.
  """

  model: nn.Module
  mixers: Sequence[DepthMixer]
  reads: Callable[[nn.Module], bool]
  writes: Callable[[nn.Module], bool]

  def setup(self):
    """Gives the model this module's scope, so that its parameters keep their paths."""
    nn.share_scope(self, self.model)

  def __call__(self, *args: Any, **kwargs: Any) -> Any:
    """The model's outputs for its own arguments."""
    exchange = _Exchange(self.mixers, self.reads, self.writes)
    with nn.intercept_methods(exchange):
      outputs = self.model(*args, **kwargs)
    exchange.check_end()
    return outputs


class _Exchange:
  """Carries the streams through one run of the model."""

  def __init__(self, mixers, reads, writes):
    for place, mixer in enumerate(mixers):
      if mixer.index != place:
        raise InputError(
          f"Adopted: mixers[{place}] has index {mixer.index}; number them 0, 1, … in their order"
        )
    self.mixers, self.reads, self.writes = mixers, reads, writes
    self.streams = None
    self.trace = _trace()
    self.done = 0  # reads and writes so far: even before a read, odd before a write
    self.mixing = False  # the modules inside a mixer are not the model's

  def __call__(self, method, args, kwargs, context):
    if self.mixing or context.method_name != "__call__":
      return method(*args, **kwargs)
    if self.reads(context.module):
      self._check(context.module, 0, "reads")
      if not args:  # called with its array by keyword
        name, x = next(iter(kwargs.items()))
        return method(**{**kwargs, name: self._read(x)})
      return method(self._read(args[0]), *args[1:], **kwargs)
    outputs = method(*args, **kwargs)
    if self.writes(context.module):
      self._check(context.module, 1, "writes")
      v = outputs[0] if isinstance(outputs, tuple) else outputs
      self.streams = self._mix("write", self.streams, v)
    return outputs

  def _read(self, x):
    if self.streams is None:
      self.streams = self.mixers[-1].init_streams(x)
    return self._mix("read", self.streams)

  def _mix(self, method, *args):
    mixer = self.mixers[self.done // 2]
    self.mixing = True
    result = getattr(mixer, method)(*args)
    self.mixing = False
    self.done += 1
    return result

  def _check(self, module, turn, name):
    where = f"Adopted: {'/'.join(module.path) or type(module).__name__}"
    if _trace() != self.trace:
      raise InputError(
        f"{where} is inside a transformation such as nn.remat or nn.scan; make the model without"
      )
    if self.done >= 2 * len(self.mixers) - 1:
      raise InputError(
        f"{where} comes after the head's norm; give one mixer for each sublayer and one for the "
        f"head (now {len(self.mixers)}), or narrow `{name}`"
      )
    if self.done % 2 != turn:
      fault = "a second norm before sublayer" if turn == 0 else "an output without a norm, after"
      raise InputError(f"{where} is {fault} {self.done // 2}; narrow `{name}` or widen the other")

  def check_end(self):
    mixers, written = len(self.mixers), self.done // 2
    if self.done != 2 * mixers - 1:
      raise InputError(
        f"Adopted: the model has {written} sublayers, and {self.done - written} norms before them "
        f"and the head; {mixers} mixers want {mixers - 1} and {mixers}; check `reads` and `writes`"
      )


def _trace():
  return jax.extend.core.get_opaque_trace_state(convention="flax")


def graft(pretrained: PyTree, fresh: PyTree) -> PyTree:
  """The parameters of a model that has got new parts: old values where there are any, else fresh.

  Args:
    pretrained: nested dicts of arrays, as they were loaded.
    fresh: freshly initialised, of the model with the mixers; may be in Flax's boxes.

  Returns:
    A tree like `fresh`.  Old arrays are taken over as they are, dtype included.

  Raises:
    InputError: naming the paths of old arrays that `fresh` lacks or has in another shape.
  """
  old, new = flatten_dict(pretrained), flatten_dict(fresh)
  _refuse([path for path in old if path not in new], "have no place in the new model")
  shapes = {path: (nn.unbox(old[path]).shape, nn.unbox(new[path]).shape) for path in old}
  _refuse(
    [path for path, (was, wanted) in shapes.items() if was != wanted],
    "have another shape in the new model",
    lambda path: " ({} is not {})".format(*shapes[path]),
  )
  return unflatten_dict({path: _put(leaf, old.get(path)) for path, leaf in new.items()})


def new_leaves(params: PyTree, pretrained: PyTree) -> PyTree:
  """Which parameters a model has beyond the old ones: a tree of bools like `params`, for optax.

  The negation is what `optax.selective_transform` and `optax.freeze` call the freeze mask:

      frozen = jax.tree.map(operator.not_, new_leaves(params, pretrained))
      optimizer = optax.selective_transform(optax.adam(1e-3), freeze_mask=frozen)

  `optax.masked` alone would not do: it passes the gradients of the others on as updates.
  """
  old = flatten_dict(pretrained)
  marked = {
    path: jax.tree.map(lambda _, new=path not in old: new, leaf)
    for path, leaf in flatten_dict(params).items()
  }
  return unflatten_dict(marked)


def _put(leaf, old):
  if old is None:
    return leaf
  if isinstance(leaf, nn.meta.AxisMetadata) and not isinstance(old, nn.meta.AxisMetadata):
    return leaf.replace_boxed(old)
  return old


def _refuse(paths, fault, detail=lambda path: ""):
  if paths:
    named = ", ".join("/".join(path) + detail(path) for path in paths[:_NAMED])
    more = f" and {len(paths) - _NAMED} more" if len(paths) > _NAMED else ""
    raise InputError(f"old parameters {fault}: {named}{more}; load the tree of the same model")
