"""The depth memory with its writes put off: a read is a weighted sum of the outputs themselves.

After l writes, of which the first b are folded into M_b and the others still pending,

    M_l q = M_b z + Σ_i w_i v_i        w_i = Γ(l,i) ω_i · k_iᵀ P_l q        z = q − Σ_i k_i w_i

with sums over the pending writes.  It is the same regression: with C_l = M_l P_l⁻¹ the recursion is
C ← λ C + ω v kᵀ, so M_l q = Γ(l,b) M_b P_b⁻¹ P_l q + Σ_i w_i v_i, and by the recursion of P⁻¹ the
vector Γ(l,b) P_b⁻¹ P_l q is z.  For the outer-product rule P is I, every Γ and ω is 1, and z is q.
Only P and vectors of key width are recurrent.  Every `chunk` writes the pending ones are folded
into M: reads with the unit vectors as queries give its new columns.  Never to fold is attention
over depth; to fold at every write is the recursion itself.

Gradients are put off too.  Read l would add w_{l,i} r̄_l to the gradient of every pending v_i: for
each read a pass over as many arrays as are pending.  Instead it sends r̄_l and a few vectors of key
width back to the writes, each of which sums over the reads after it in one pass.  JAX has no place
for such a message, so the streams carry one `Ticket` of zeros for each read to come, and the
cotangent of the ticket is the message.  What comes out is the exact gradient, in reverse mode.

How arrays lie and how sums are done is the business of an arithmetic, such as `natural.Natural`.
The equations are those of the Linear Depth Memory tutorial; how they are put off, forwards and
backwards, is this project's own.
"""

import functools
from collections.abc import Sequence
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp


@flax.struct.dataclass
class Record:
  """One write in key space, as an arithmetic lays it out.

  key: the unit key k.
  weight: ω / Γ, Γ being the product of forgetting factors since the last fold, this write's
    included, so that one number serves all later reads.
  """

  key: Any
  weight: Any


@flax.struct.dataclass
class Covariance:
  """P and its forgetting apart: P = `matrix` / `decay`, with `decay` = Γ since the last fold."""

  matrix: Any
  decay: Any


@flax.struct.dataclass
class Ticket:
  """Zeros for one read to come, whose cotangent is what that read tells the writes before it.

  residual: r̄, the cotangent of what was read.
  planes: z times gain · gate, on the K memory planes; None without any.
  writes: for each pending write w times gain · gate, the cotangent of w, and w.
  projection: Γ P_l q.
  rest: the cotangent of z; None without memory planes, or where z is q.
  uses: how many reads used the ticket.
  """

  residual: Any
  planes: Any
  writes: tuple
  projection: Any
  rest: Any
  uses: Any


@flax.struct.dataclass
class Pending:
  """The depth memory with writes put off.

  memory: M as K planes, as of the last fold; () before the first.
  values: pending outputs, oldest first.
  records: their keys and weights.
  covariance: P; None where the rule has none.
  tickets: of the reads before the next fold, the next one first; None for a read that draws nothing
    from the memory.
  """

  memory: tuple
  values: tuple
  records: tuple
  covariance: Any
  tickets: tuple

  @property
  def empty(self) -> bool:
    """Whether nothing was ever written."""
    return not self.memory and not self.values


def start(arithmetic: Any, batch_shape: tuple[int, int], alpha: float) -> Pending:
  """The memory before the first write."""
  return Pending((), (), (), arithmetic.start(batch_shape, alpha), ())


def read(arithmetic: Any, base: Any, query: Any, scale: Any, pending: Pending) -> jax.Array:
  """The plane base + scale · M q; without base or scale where they are None.

  It uses up the ticket of the next sublayer.  If that read twice, its two messages would be added
  up and mean nothing; the gradient is then NaN instead of a wrong number.

  Args:
    arithmetic: how sums are done.
    base: the residual stream as a plane.
    query: queries, as the arithmetic wants them.
    scale: gain · gate per group.
    pending: the memory.

  Raises:
    ValueError: without a ticket, since mixers are numbered in another order than they are called.
  """
  if not pending.tickets or pending.tickets[0] is None:
    raise ValueError(
      "this sublayer was not expected to read the depth memory: number the mixers 0, 1, … in the "
      "order of their calls, L for the head, and give none or all of them `sublayers` = L"
    )
  return _read(arithmetic, base, query, scale, _drawn(pending), pending.tickets[0])


def _drawn(pending):
  return pending.memory, pending.values, pending.records, pending.covariance


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _read(arithmetic, base, query, scale, drawn, ticket):
  del ticket
  return arithmetic.read(base, query, scale, *drawn)


def _read_forward(arithmetic, base, query, scale, drawn, ticket):
  kept = (query, scale, drawn, base is None)
  return _read(arithmetic, base, query, scale, drawn, ticket), kept


def _read_backward(arithmetic, kept, residual):
  query, scale, drawn, no_base = kept
  gradients, message = arithmetic.read_gradients(residual, query, scale, *drawn)
  query_bar, scale_bar, covariance_bar = gradients
  ticket = Ticket(residual=residual, uses=jnp.ones(()), **message)
  base_bar = None if no_base else residual
  return base_bar, query_bar, scale_bar, (None, None, None, covariance_bar), ticket


_read.defvjp(_read_forward, _read_backward)


def write(
  arithmetic: Any,
  value: Any,
  key: Any,
  importance: Any,
  forgetting: Any,
  pending: Pending,
  chunk: int,
  reads: Sequence[int],
) -> Pending:
  """Puts (key, value) on the pending writes; folds the earlier ones first if they are `chunk`.

  Args:
    arithmetic: how sums are done.
    value: the output as a plane.
    key: keys, as the arithmetic wants them.
    importance: ω per group.
    forgetting: λ per group.
    pending: the memory before.
    chunk: the most writes that may be pending.
    reads: how many writes will be pending at the read of each later sublayer before the next fold,
      should this write be the first since the last one; 0 where a sublayer does not read.
  """
  tickets = pending.tickets
  if len(pending.values) == chunk:
    pending = fold(arithmetic, pending)
  covariance, record = arithmetic.write(pending.covariance, key, importance, forgetting)
  memory, index = pending.memory, len(pending.values)
  if index == 0:
    tickets = _issue(arithmetic, len(memory), reads, value, record)
    if memory:
      memory, tickets = _attach_memory(arithmetic, memory, tickets)
  value, record, tickets = _attach(arithmetic, index, value, record, tickets)
  values, records = (*pending.values, value), (*pending.records, record)
  return Pending(memory, values, records, covariance, tickets)


@jax.custom_vjp
def gradient_carrier(x: jax.Array) -> jax.Array:
  """Zeros whose gradient is that of x."""
  return jnp.zeros_like(x)


gradient_carrier.defvjp(lambda x: (gradient_carrier(x), None), lambda _, gradient: (gradient,))


@jax.custom_vjp
def sum_again(carrier: jax.Array, terms: tuple) -> jax.Array:
  """A sum from left to right, whose gradient is that of the carrier alone.

  The terms have their gradients from where the sum was made first.
  """
  del carrier
  total, *others = terms
  for term in others:
    total = total + term
  return total


sum_again.defvjp(lambda *given: (sum_again(*given), None), lambda _, gradient: (gradient, None))


def next_sublayer(pending: Pending) -> Pending:
  """Drops the ticket of a sublayer that has read, or that does not."""
  return pending.replace(tickets=pending.tickets[1:])


def fold(arithmetic: Any, pending: Pending) -> Pending:
  """Brings the pending writes into M; the ordinary gradient of this goes through all of it."""
  memory = fold_planes(arithmetic, pending)
  covariance = pending.covariance
  return Pending(memory, (), (), covariance and arithmetic.restart(covariance), ())


def fold_planes(arithmetic: Any, pending: Pending) -> tuple:
  """M as K planes, with all pending writes in it; () if nothing was ever written."""
  if not pending.values:
    return pending.memory
  return arithmetic.fold(*_drawn(pending))


def _issue(arithmetic, planes, reads, value, record):
  """Tickets for reads of `planes` memory planes and so many pending writes; None for 0 of them."""

  def ticket(pending):
    message = arithmetic.message_zeros(record, planes, pending)
    return Ticket(residual=jnp.zeros_like(value), uses=jnp.zeros(()), **message)

  return tuple(ticket(pending) if pending else None for pending in reads)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attach_memory(arithmetic, memory, tickets):
  """The arguments; in the gradient, the memory planes get what later reads said of them."""
  del arithmetic
  return memory, tickets


def _attach_memory_forward(arithmetic, memory, tickets):
  del arithmetic
  return (memory, tickets), None


def _attach_memory_backward(arithmetic, _, gradients):
  memory, tickets = gradients
  return arithmetic.memory_gradients(memory, *_messages(tickets)), tickets


_attach_memory.defvjp(_attach_memory_forward, _attach_memory_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attach(arithmetic, index, value, record, tickets):
  """The arguments; in the gradient, pending write `index` gets what later reads said of it."""
  del arithmetic, index
  return value, record, tickets


def _attach_forward(arithmetic, index, value, record, tickets):
  del arithmetic, index
  return (value, record, tickets), record


def _attach_backward(arithmetic, index, record, gradients):
  value_bar, record_bar, tickets = gradients
  messages, factors = _messages(tickets)
  if messages:
    value_bar, record_bar = arithmetic.write_gradients(
      index, record, value_bar, record_bar, messages, factors
    )
  return value_bar, record_bar, tickets


_attach.defvjp(_attach_forward, _attach_backward)


def _messages(tickets):
  """Messages of the reads to come, and for each the factor 1, or NaN if there was a second one."""
  messages = [ticket for ticket in tickets if ticket is not None]
  return messages, [jnp.where(ticket.uses > 1, jnp.nan, 1.0) for ticket in messages]
