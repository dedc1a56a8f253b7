"""One measurement each, drawn into axes of yours: `plot_depth_weights(plt.gca(), analysis)`.

Rows are the reads from the first sublayer down to the head, columns what they draw on, so depth
grows downwards and to the right.  Grey is where there is nothing.  Groups of the depth memory are
averaged unless one is named.
"""

from collections.abc import Sequence

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import Normalize

from ldm_jax.analysis.measure import Analysis

# Both can be told apart with any kind of colour blindness, and in grey but for the sign.
_SIGNED, _SIZE = "RdBu_r", "viridis"
_LINES = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00")  # Okabe and Ito
_MOST_LABELS = 26


def plot_weights(axes: Axes, analysis: Analysis, group: int | None = None) -> None:
  """The effective depth-mixing matrix W: factors of all sources in every read, mean over tokens.

  White is 1, what a residual stream has, where most are nearer to 1 than to 0; otherwise 0.
  """
  values = _of_group(analysis.mixing.weights, group)
  middle = 1.0 if np.nanmedian(values) > 0.5 else 0.0
  reach = np.nanmax(np.abs(values - middle), initial=0) or 1.0
  label = "W, mean over tokens" + "; white: 1" * (middle == 1.0)
  limits = (middle - reach, middle + reach)
  _heatmap(axes, values, analysis.reads, analysis.sources, label, signed=True, limits=limits)
  axes.set_title(_titled("Weight of each source in each read", group))


def plot_shares(axes: Axes, analysis: Analysis) -> None:
  """How much of every read each source accounts for; rows add up to 1."""
  shares = analysis.mixing.shares
  _heatmap(axes, shares, analysis.reads, analysis.sources, "share of the read", signed=True)
  axes.set_title("Share of each read that a source accounts for")


def plot_depth_weights(
  axes: Axes,
  analysis: Analysis,
  group: int | None = None,
  magnitude: bool = False,
  limit: float | None = None,
) -> None:
  """Depth-attention weights w of M q = Σ w v: which write each read draws on, and with which sign.

  Args:
    axes: to draw into.
    analysis: of a depth memory.
    group: one group; None for the mean of all.
    magnitude: |w| instead, which does not cancel between tokens and groups.
    limit: the colours' largest size, to compare plots; None for what is there.
  """
  memory = analysis.memory
  values = _of_group(memory.magnitudes if magnitude else memory.weights, group)
  label = "|w|, mean over tokens" if magnitude else "w, mean over tokens"
  limits = None if limit is None else (0 if magnitude else -limit, limit)
  names = write_names(analysis)
  _heatmap(axes, values, analysis.reads, names, label, signed=not magnitude, limits=limits)
  axes.set_xlabel("write j")
  axes.set_title(_titled("Depth attention" + " in size" * magnitude, group))


def plot_recall_error(axes: Axes, analysis: Analysis, group: int | None = None) -> None:
  """‖M k − v‖ / ‖v‖: how far a read with the key of an earlier write is from what was written."""
  values = _of_group(analysis.memory.recall_error, group)
  names = write_names(analysis)
  _heatmap(axes, values, analysis.reads, names, "relative error", signed=False, limits=(0, 2))
  axes.set_xlabel("write j, asked for with its own key")
  axes.set_title(_titled("Error of recall", group))


def plot_key_overlap(
  axes: Axes, analysis: Analysis, group: int | None = None, magnitude: bool = False
) -> None:
  """Cosine of the keys of two writes of one token, or its size; mean over tokens."""
  memory = analysis.memory
  values = _of_group(memory.key_overlap if magnitude else memory.key_cosine, group)
  names, label = write_names(analysis), "|cosine|" if magnitude else "cosine"
  limits = (0, 1) if magnitude else (-1, 1)
  _heatmap(axes, values, names, names, label, signed=not magnitude, limits=limits)
  axes.set_xlabel("write")
  axes.set_ylabel("write")
  axes.set_title(_titled(f"Overlap of keys: {label}", group))


def plot_by_depth(axes: Axes, values: np.ndarray, names: Sequence[str], label: str) -> None:
  """Numbers of each group by depth: thin lines for groups, a thick one for their mean.

  Args:
    axes: to draw into.
    values: [depth, G], NaN where there is nothing.
    names: of the places in the depth.
    label: of the vertical axis.
  """
  places = np.arange(len(names))
  if values.shape[1] > 1:
    lines = axes.plot(places, values, color=_LINES[0], alpha=0.35, linewidth=0.8)
    lines[0].set_label("each group")
  axes.plot(places, _of_group(values, None), color="black", marker=".", label="mean of the groups")
  _finish_lines(axes, names, label)


def plot_condition_number(axes: Axes, analysis: Analysis) -> None:
  """Largest over smallest eigenvalue of P as each read finds it, median over tokens."""
  values = analysis.memory.condition_number
  plot_by_depth(axes, values, analysis.reads, "largest / smallest eigenvalue")
  _spread(axes)
  axes.set_title("Condition number of P, median over tokens")


def plot_ranks(axes: Axes, analysis: Analysis) -> None:
  """Effective ranks of the keys so far and of P, as each read finds them; mean over groups."""
  memory = analysis.memory
  named = {"keys so far": memory.key_rank, "P": memory.covariance_rank}
  for index, (label, values) in enumerate(named.items()):
    if not np.isnan(values).all():
      style = {"color": _LINES[index], "marker": "os"[index], "markersize": 4}
      axes.plot(_of_group(values, None), label=label, **style)
  axes.set_ylim(bottom=0)
  _finish_lines(axes, analysis.reads, "effective rank (directions)")
  axes.set_title("Directions in use, of K at most")


def plot_sizes(axes: Axes, analysis: Analysis) -> None:
  """RMS of the streams as each sublayer finds them, and of what it puts out."""
  depth = analysis.depth
  skipped = ("M", "P", "reads/")  # not of the width; the memory has figures of its own
  streams = {k: v for k, v in depth["stream_rms"].items() if not k.startswith(skipped)}
  colours = matplotlib.colormaps["viridis"](np.linspace(0, 0.85, len(streams)))
  for (name, values), colour in zip(streams.items(), colours, strict=True):
    values = [np.nan if value is None else value for value in values]
    axes.plot(values, color=colour, linewidth=1.5, marker=".", label=f"stream {name}")
  outputs = depth["output_rms"]
  axes.plot(outputs, color=_LINES[1], linestyle="--", marker="s", markersize=4, label="output v")
  _spread(axes)
  _finish_lines(axes, analysis.reads, "RMS per entry")
  axes.set_title("Sizes")


def plot_gradients(axes: Axes, analysis: Analysis) -> None:
  """Norm of the gradient of the mean loss with respect to each sublayer's output."""
  norms = analysis.depth["output_gradient_norm"]
  axes.plot(norms, color=_LINES[0], marker="o", markersize=4, label="output v")
  _spread(axes)
  _finish_lines(axes, analysis.reads[:-1], "norm of the gradient (nats)")
  axes.set_title("Gradient of the loss at each output")


def _of_group(values, group):
  """One group of the last axis; or the mean, NaN only where no group has a number."""
  return values[..., group] if group is not None else np.mean(values, axis=-1)


def _titled(title, group):
  return title if group is None else f"{title}, group {group}"


def write_names(analysis: Analysis) -> list[str]:
  """What each record of the depth memory holds: one source, or the sum of several."""
  names, before = [], -1 if analysis.writes[0] == 0 else 0
  for number in analysis.writes:
    first, last = analysis.sources[before + 1], analysis.sources[number]
    names.append(last if first == last else f"{first}…{last}")
    before = number
  return names


def _heatmap(axes, values, rows, columns, label, signed, limits=None):
  if limits is None:
    largest = np.nanmax(np.abs(values), initial=0) or 1.0
    limits = (-largest, largest) if signed else (0, largest)
  axes.set_facecolor("0.9")
  masked = np.ma.masked_invalid(values)
  norm = Normalize(*limits)
  image = axes.imshow(masked, cmap=_SIGNED if signed else _SIZE, norm=norm, aspect="equal")
  beyond = np.nanmax(values, initial=0) > limits[1]
  axes.figure.colorbar(
    image, ax=axes, label=label, shrink=0.8, extend="max" if beyond else "neither"
  )
  _tick(axes.yaxis, rows)
  _tick(axes.xaxis, columns, rotation=90)
  axes.set_ylabel("read l")
  axes.set_xlabel("source s")


def _tick(axis, names, **style):
  """Names along an axis, as many as can be read."""
  step = -(-len(names) // _MOST_LABELS)
  axis.set_ticks(range(0, len(names), step), names[::step], fontsize=7, **style)


def _spread(axes):
  """A logarithmic axis where values differ by more than tenfold; otherwise one from 0."""
  values = np.concatenate([np.asarray(line.get_ydata(), float) for line in axes.lines])
  values = values[np.isfinite(values) & (values > 0)]
  if len(values) and values.max() > 10 * values.min():
    axes.set_yscale("log")
  else:
    axes.set_ylim(bottom=0)


def _finish_lines(axes, names, label):
  _tick(axes.xaxis, names, rotation=90)
  axes.set_ylabel(label)
  axes.grid(alpha=0.3)
  axes.spines[["top", "right"]].set_visible(False)
  axes.legend(fontsize=8)
