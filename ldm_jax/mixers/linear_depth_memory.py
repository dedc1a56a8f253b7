"""Linear depth memory (LDM): a small matrix memory per token beside the residual stream.

Each sublayer writes its output under a key, the next one queries the memory:

    x ← x + v,   M ← write(M, k, v)        after sublayer l
    h = x + gain · gate · M q              before sublayer l + 1

Keys, queries, gates and importances come from small MLPs on the residual stream, one shared latent
for the read side and one for the write side.  D is cut into G contiguous groups, each with its own
memory, query, key and forgetting factor.  Source: the Depth Memory framework text and the Linear
Depth Memory tutorial; activations, initial values and the delta rule are this project's own.
"""

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from ldm_jax.errors import InputError
from ldm_jax.mixers.base import KEPT, DepthMixer
from ldm_jax.mixers.depth_memory_controls import ReadControls, WriteControls, read_controls
from ldm_jax.mixers.depth_memory_streams import (
  DeferredMemoryStreams,
  DepthMemoryStreams,
  WaitingWrite,
)
from ldm_jax.ops import depth_memory as dm
from ldm_jax.ops.depth_memory import deferred
from ldm_jax.ops.depth_memory.forms import FORMS, Form, choose_form
from ldm_jax.ops.depth_memory.natural import Natural
from ldm_jax.sharding import constrain
from ldm_jax.typing import ActivationsBTD, Dtype, Sublayer

_RULES = ("rls", "delta", "outer")
_READOUTS = ("add", "memory_only")


class LinearDepthMemory(DepthMixer):
  """The linear depth memory as a depth mixer.

  Attributes:
    index: sublayer number from 0.  Before the first write the memory is empty: the read is x,
      without parameters.
    rule: how an output enters the memory: "rls" keeps M the exact ridge regression from keys to
      outputs, "delta" takes one gradient step on it, "outer" adds v kᵀ.
    groups: G; must divide the width D.
    key_dim: K, at least 1; may exceed the number of sublayers.
    shared_key: one key for all groups instead of one each.
    latent_dim: R, the width of the two control latents.
    alpha: inverse ridge strength, P₋₁ = α I.
    min_forgetting: lower bound of the learned forgetting factors λ.
    forgetting_init: λ at initialisation.
    gain_init: read gain at initialisation.  At 0 the network starts as PreLN to the bit, which
      suits one that is trained already; from scratch the memory then takes part too late (with 1
      small models ended 0.1 to 0.2 nats lower, see the README), so the presets start with 1.
    key_bias_init: every component of the key and query biases at initialisation.  At 0 they point
      anywhere; the larger, the more alike they start, and the closer M q is to the weighted mean of
      the outputs so far.
    memory_dtype: dtype in which M is carried ("float32" or "bfloat16"); sums are float32.
    readout: "add" reads x + gain · gate · M q; "memory_only" reads M q alone (an ablation; there is
      no gain and no gate then).
    residual: False replaces x ← x + v by x ← v (an ablation).
    forgetting: False holds λ at 1 (an ablation).
    importance: False holds ω at 1 (an ablation).
    write_embedding: True makes the embedding the memory's first record, under the fixed key
      (1, …, 1) / √K with importance 1, so that reads can draw on it as on any output; False starts
      from an empty memory.
    write_every: sublayers per write; each write takes the sum of their outputs, under a key from
      the residual stream after the last of them (2 is one write per block, an ablation).
    form: how the memory is computed; all give the same numbers, see `ops.depth_memory.forms`.
      "auto" is the reference unless `sublayers` is known.  Where writes are put off, streams grow
      from sublayer to sublayer, and a differentiated program reads them once for each mixer.
    chunk: the most writes put off by the forms that do so; None leaves it to a cost rule.
    dtype: dtype of the control matrix products.
  """

  rule: str = "rls"
  groups: int = 16
  key_dim: int = 8
  shared_key: bool = False
  latent_dim: int = 64
  alpha: float = 1.0
  min_forgetting: float = 0.5
  forgetting_init: float = 0.98
  gain_init: float = 0.0
  key_bias_init: float = 0.0
  memory_dtype: Dtype = "float32"
  readout: str = "add"
  residual: bool = True
  forgetting: bool = True
  importance: bool = True
  write_embedding: bool = False
  write_every: int = 1
  form: str = "auto"
  chunk: int | None = None

  def __post_init__(self):
    for setting, choices in (("rule", _RULES), ("readout", _READOUTS)):
      self.require(setting, getattr(self, setting) in choices, f"one of {', '.join(choices)}")
    for setting in ("groups", "key_dim", "latent_dim", "write_every"):
      self.require(setting, getattr(self, setting) >= 1, "at least 1")
    self.require("form", self.form in FORMS, f"one of {', '.join(FORMS)}")
    self.require("chunk", self.chunk is None or self.chunk >= 1, "at least 1 or None")
    super().__post_init__()

  def setup(self):
    """Declares both control networks; parameters appear only where they are used."""
    names = ("groups", "key_dim", "latent_dim", "key_bias_init", "dtype")
    shared = {name: getattr(self, name) for name in names}
    self.read_controls = ReadControls(
      **shared, gain_init=self.gain_init, gated=self.readout == "add"
    )
    self.write_controls = WriteControls(
      **shared,
      rule=self.rule,
      shared_key=self.shared_key,
      min_forgetting=self.min_forgetting,
      forgetting_init=self.forgetting_init,
      forgetting=self.forgetting,
      importance=self.importance,
    )

  def init_streams(self, x: ActivationsBTD) -> DepthMemoryStreams | DeferredMemoryStreams:
    """x with an empty memory, M = 0 and P = α I, or one that holds the embedding.

    Raises:
      InputError: if the width is not divisible by `groups`.
    """
    value_dim, rest = divmod(x.shape[-1], self.groups)
    if rest:
      raise InputError(
        f"groups: the width {x.shape[-1]} is not divisible by groups = {self.groups}; "
        "choose a divisor of the width"
      )
    form = self.chosen_form(x)
    pending = jnp.zeros_like(x) if self.write_every > 1 else None
    if form.arithmetic is None:
      M, P = dm.rls_init(x.shape[:2], self.groups, value_dim, self.key_dim, self.alpha)
      streams = DepthMemoryStreams(x, M.astype(self.memory_dtype), P, pending)
    else:
      memory = deferred.start(form.arithmetic, x.shape[:2], self.alpha)
      starts_with_x = self._is_sum and not self.write_embedding
      base = jax.lax.stop_gradient(x) if starts_with_x else None
      streams = DeferredMemoryStreams(x, base, memory, pending, form.arithmetic, form.chunk)
    if self.write_embedding:
      layout = _layout(streams)
      k = layout.constant_key(x.shape[:2])
      streams = self._record(streams, x, (k, layout.ones(k), jnp.ones((self.groups,))), -1)
    return self._place(streams)

  def read(self, streams: DepthMemoryStreams | DeferredMemoryStreams) -> ActivationsBTD:
    """h = x + concat_g(gain_g · gate_g · M_g q_g), or M q alone; x where nothing is written yet."""
    return self._read(streams)[0]

  def __call__(
    self, streams: DepthMemoryStreams | DeferredMemoryStreams, f: Sublayer
  ) -> DepthMemoryStreams | DeferredMemoryStreams:
    """`write(streams, f(read(streams)))`; a write that waited is settled once for both."""
    h, streams = self._read(streams)
    return self.write(streams, f(h))

  def _read(self, streams):
    """What the sublayer sees, and the streams with no write waiting."""
    if self.index < self.write_every:
      return streams.x, streams
    q, scale, streams = self._asked(streams)
    return self._answer(streams, q, scale), streams

  def _asked(self, streams):
    """Query and gain · gate, and the streams with no write waiting."""
    layout, waiting = _layout(streams), getattr(streams, "waiting", None)
    if waiting is None:
      return *self.read_controls(streams.x, layout), streams
    maps, gain = self.read_controls.parameters(streams.x.shape[-1])
    written, asked = layout.mapped(streams.x, (waiting.maps, maps), self.dtype)
    return *read_controls(layout, *asked, gain), waiting.settle(streams, *written)

  def _answer(self, streams, q, scale):
    x, layout, added = streams.x, _layout(streams), self.readout == "add"
    if isinstance(streams, DeferredMemoryStreams):
      if streams.memory.empty:
        return x if added else jnp.zeros_like(x)
      base = layout.to_plane(x) if added else None
      return layout.from_plane(deferred.read(layout, base, q, scale, streams.memory))
    r_BTGV = dm.read(streams.M, q)
    if not added:
      return r_BTGV.reshape(x.shape).astype(x.dtype)
    return x + (scale[..., None] * r_BTGV).reshape(x.shape).astype(x.dtype)

  def write(
    self, streams: DepthMemoryStreams | DeferredMemoryStreams, v: ActivationsBTD
  ) -> DepthMemoryStreams | DeferredMemoryStreams:
    """x ← x + v, then (k, v) enters the memory under a key computed from the new x."""
    if isinstance(streams, DeferredMemoryStreams):
      streams = streams.settled()
    layout = _layout(streams)
    v = layout.from_plane(checkpoint_name(layout.to_plane(v), KEPT))
    x = streams.x + v if self.residual else v
    if isinstance(streams, DeferredMemoryStreams):
      folds = len(streams.memory.values) == streams.chunk
      base = jax.lax.stop_gradient(streams.x) if self._is_sum and folds else streams.base
      streams = streams.replace(base=base, memory=deferred.next_sublayer(streams.memory))
    if self.write_every > 1:
      v = streams.pending + v
    if (self.index + 1) % self.write_every:
      return self._place(streams.replace(x=x, pending=v))
    if self.write_every > 1:
      streams = streams.replace(pending=jnp.zeros_like(v))
    streams = streams.replace(x=x)
    if self._waits(layout):
      maps, forgetting = self.write_controls.parameters(x.shape[-1])
      reads = tuple(self._reads(self.index, streams.chunk))
      return streams.replace(waiting=WaitingWrite(v, maps, forgetting, self.dtype, reads))
    return self._place(self._record(streams, v, self.write_controls(x, layout), self.index))

  def pack(
    self, streams: DepthMemoryStreams | DeferredMemoryStreams
  ) -> DepthMemoryStreams | DeferredMemoryStreams:
    """Without x where it is a sum of arrays that the streams have anyway."""
    if not self._can_pack(streams):
      return streams
    streams = streams.settled()
    return streams.replace(x=deferred.gradient_carrier(streams.x))

  def unpack(
    self, streams: DepthMemoryStreams | DeferredMemoryStreams
  ) -> DepthMemoryStreams | DeferredMemoryStreams:
    """With x again, added up in the order in which it grew."""
    if not self._can_pack(streams):
      return streams
    values = tuple(map(streams.arithmetic.from_plane, streams.memory.values))
    terms = values if streams.base is None else (streams.base, *values)
    return streams.replace(x=deferred.sum_again(streams.x, terms))

  def _can_pack(self, streams):
    return self._is_sum and isinstance(streams, DeferredMemoryStreams)

  def _waits(self, layout):
    """Whether a write leaves its controls to the next read, see `WaitingWrite`."""
    alike = self.rule == "rls" and self.importance and not self.shared_key
    single = isinstance(layout, Natural) and layout.single
    return single and alike and self.readout == "add" and self.sublayers is not None

  @property
  def _is_sum(self):
    """Whether x is the embedding and all that was written since, term by term."""
    return self.residual and self.write_every == 1

  def _record(self, streams, v, controls, index):
    """(k, v) enters the memory by the rule; `controls` are k, ω (or β) and λ."""
    k, strength, forgetting = controls
    if isinstance(streams, DeferredMemoryStreams):
      return streams.record(v, k, strength, forgetting, self._reads(index, streams.chunk))
    M, P = streams.M, streams.P
    v_BTGV = v.reshape(*v.shape[:2], self.groups, -1)
    if self.rule == "rls":
      M, P = dm.rls_write(M, P, k, v_BTGV, forgetting, strength)
    elif self.rule == "delta":
      M = dm.delta_write(M, k, v_BTGV, strength)
    else:
      M = dm.outer_write(M, k, v_BTGV)
    return streams.replace(M=M, P=P)

  def chosen_form(self, x: ActivationsBTD) -> Form:
    """The form in which the memory of a residual stream such as x is computed.

    Raises:
      InputError: if the one that is asked for cannot run, see `ops.depth_memory.forms.choose_form`.
    """
    return choose_form(
      self.form,
      self.chunk,
      x,
      rule=self.rule,
      groups=self.groups,
      key_dim=self.key_dim,
      memory_dtype=self.memory_dtype,
      writes=self._writes(),
      smallest_forgetting=self.min_forgetting if self.forgetting else 1.0,
    )

  def _writes(self):
    """In the whole network; None if it is not known how large that is."""
    if self.sublayers is None:
      return None
    return max(1, self.sublayers // self.write_every + self.write_embedding)

  def _reads(self, index, chunk):
    """Pending writes at the read of each sublayer after a first write at `index`; 0 for no read."""
    last = index + chunk * self.write_every
    if self.sublayers is not None:
      last = min(last, self.sublayers)
    return [
      1 + (reader - index - 1) // self.write_every if reader >= self.write_every else 0
      for reader in range(index + 1, last + 1)
    ]

  def _place(self, streams):
    """Drops P where the rule has none and pins the sharding of each stream."""
    token, pending = ("batch", "sequence"), streams.pending
    x = constrain(streams.x, *token, "activation_embed")
    if pending is not None:
      pending = constrain(pending, *token, "activation_embed")
    streams = streams.replace(x=x, pending=pending)
    if isinstance(streams, DeferredMemoryStreams):
      return streams.replace(memory=streams.arithmetic.place(streams.memory))
    M = constrain(streams.M, *token, "groups", "group_width", "key_dim")
    P = constrain(streams.P, *token, "groups", None, None) if self.rule == "rls" else None
    return streams.replace(M=M, P=P)


def _layout(streams):
  """How the controls are laid out: as the arithmetic of the streams wants them."""
  if isinstance(streams, DeferredMemoryStreams):
    return streams.arithmetic
  return Natural(*streams.M.shape[-3::2])
