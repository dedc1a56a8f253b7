"""The figures of an analysis: several plots each, with a sentence on what they show."""

import math
from collections.abc import Iterator

import numpy as np
from matplotlib.figure import Figure

from ldm_jax.analysis import plots
from ldm_jax.analysis.measure import Analysis

_NAMES = "A3 and M3 are the attention and the MLP of block 3."


def draw(analysis: Analysis) -> Iterator[tuple[str, Figure]]:
  """All figures that the mixer has something to show in, with the names of their files."""
  yield "mixing.png", _mixing(analysis)
  yield "sizes.png", _sizes(analysis)
  if analysis.memory is None:
    return
  yield "depth_weights.png", _depth_weights(analysis)
  if analysis.memory.weights.shape[-1] > 1:
    yield "depth_weights_by_group.png", _depth_weights_by_group(analysis)
  if _control_panels(analysis):
    yield "controls.png", _controls(analysis)
  yield "keys.png", _keys(analysis)
  yield "recall.png", _recall(analysis)


def _mixing(analysis):
  figure, (left, right) = _figure(
    analysis,
    "What each sublayer reads",
    "Left: the factor W that each source has in a read h = Σ W v; a residual stream has 1 "
    "everywhere. Right: how much of the read it accounts for in size and direction; a row adds up "
    "to 1.",
    columns=2,
  )
  plots.plot_weights(left, analysis)
  plots.plot_shares(right, analysis)
  return figure


def _sizes(analysis):
  figure, (left, right) = _figure(
    analysis,
    "Sizes along the depth",
    "Left: streams as each sublayer finds them, and its output. Right: how much the mean loss of "
    "the rows feels a change of each output.",
    columns=2,
    names=f"{_NAMES} Over all tokens of the rows.",
  )
  plots.plot_sizes(left, analysis)
  plots.plot_gradients(right, analysis)
  return figure


def _depth_weights(analysis):
  figure, (left, right) = _figure(
    analysis,
    "Depth attention: which write each read of the memory draws on",
    "A read of the memory is M q = Σ w v exactly; left the mean of w over tokens and groups, right "
    "of |w|, which does not cancel.",
    columns=2,
  )
  plots.plot_depth_weights(left, analysis)
  plots.plot_depth_weights(right, analysis, magnitude=True)
  return figure


def _depth_weights_by_group(analysis):
  groups = analysis.memory.weights.shape[-1]
  columns = math.ceil(math.sqrt(groups))
  figure, axes = _figure(
    analysis,
    "Depth attention of each group",
    "M q = Σ w v in each slice of the width, mean of w over tokens; all panels have one scale.",
    columns=columns,
    rows=-(-groups // columns),
    size=4.0,
  )
  limit = float(np.nanmax(np.abs(analysis.memory.weights), initial=0)) or None
  for group in range(groups):
    plots.plot_depth_weights(axes[group], analysis, group, limit=limit)
    axes[group].set_title(f"group {group}")
  for unused in axes[groups:]:
    unused.remove()
  return figure


def _controls(analysis):
  panels = _control_panels(analysis)
  added = not np.isnan(analysis.memory.gain).all()
  figure, axes = _figure(
    analysis,
    "Controls of the memory by depth",
    "A write leaves λ of the weights of all before it; ω or β is how much it counts itself. "
    + ("A sublayer reads x + gain · gate · M q." if added else "A sublayer reads M q."),
    columns=2,
    rows=-(-len(panels) // 2),
    height=3.4,
  )
  for panel, (title, values, names) in zip(axes, panels, strict=False):
    plots.plot_by_depth(panel, values, names, title.split(",")[0].split(" (")[0])
    panel.set_title(title)
  for unused in axes[len(panels) :]:
    unused.remove()
  return figure


def _control_panels(analysis):
  """Title, numbers and places of the controls that the memory has; none is possible."""
  memory, reading, writing = analysis.memory, analysis.reads, plots.write_names(analysis)
  panels = [
    ("Forgetting λ (learned)", memory.forgetting, writing),
    (f"{_strength(analysis)}, mean over tokens", memory.strength, writing),
    ("Read gain (learned)", memory.gain, reading),
    ("Gate, mean over tokens", memory.gate, reading),
  ]
  return [panel for panel in panels if not np.isnan(panel[1]).all()]


def _strength(analysis):
  rls = not np.isnan(analysis.memory.forgetting).all()
  return "Importance ω" if rls else "Step size β"


def _keys(analysis):
  figure, axes = _figure(
    analysis,
    "Keys of the memory",
    "Writes whose keys overlap share a place in the memory. P says how well directions of key "
    "space are known: the larger its condition number, the more unequally.",
    columns=2,
    rows=2,
  )
  plots.plot_key_overlap(axes[0], analysis)
  plots.plot_key_overlap(axes[1], analysis, magnitude=True)
  plots.plot_ranks(axes[2], analysis)
  if np.isnan(analysis.memory.condition_number).all():  # rules without P
    axes[3].remove()
    return figure
  plots.plot_condition_number(axes[3], analysis)
  return figure


def _recall(analysis):
  age = _by_age(analysis.memory.recall_error)
  figure, (left, right) = _figure(
    analysis,
    "How well the memory recalls what was written",
    "‖M k − v‖ / ‖v‖ with the key of an earlier write, mean over tokens: 0 is perfect, 1 no better "
    "than nothing, more is mixed up with others. The memory is a regression; it need not recall.",
    columns=2,
  )
  plots.plot_recall_error(left, analysis)
  plots.plot_by_depth(right, age, [str(since) for since in range(len(age))], "relative error")
  right.set_xlabel("writes since")
  right.set_ylim(bottom=0)
  right.set_title("Error by age of the write, mean over reads")
  return figure


def _by_age(errors):
  """Mean over reads of the error of the write so many writes before the newest one [W, G]."""
  _, writes, groups = errors.shape
  found = [[] for _ in range(writes)]
  for row in errors:
    seen = np.flatnonzero(~np.isnan(row[:, 0]))
    for number in seen:
      found[seen[-1] - number].append(row[number])
  return np.stack([np.mean(rows, axis=0) if rows else np.full(groups, np.nan) for rows in found])


def _figure(analysis, title, caption, columns, rows=1, size=5.0, height=None, names=None):
  """A figure with a title, a caption below and a grid of axes, row by row."""
  names = names or f"{_NAMES} Grey: nothing there. Over {analysis.tokens} tokens."
  extent = (columns * size + 0.5, rows * (height or size * 0.86) + 1.0)
  figure = Figure(figsize=extent, dpi=120, layout="constrained")
  axes = figure.subplots(rows, columns, squeeze=False).ravel()
  figure.suptitle(f"{title} ({analysis.kind})", fontsize=12)
  figure.supxlabel(f"{caption}\n{names}", fontsize=8, color="0.3", wrap=True)
  return figure, axes
