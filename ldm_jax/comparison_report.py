"""What a comparison found: arithmetic, Markdown table and plot, all from `results.json`.

Everything here works on the results object that `ldm_jax.compare` writes, so a table or a plot can
be made again, or differently, without training anything.
"""

import io
import statistics
from collections.abc import Mapping
from typing import Any

from matplotlib.figure import Figure

# Okabe and Ito's colours without the yellow, which is too pale for a line; black is the baseline's.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00")
_STYLES = (("-", "o"), ("--", "s"), (":", "^"), ("-.", "D"))
_BASELINE_STYLE = {"color": "black", "linestyle": "-", "marker": ".", "linewidth": 2.2}


def summarise(results: Mapping[str, Any]) -> list[dict[str, Any]]:
  """One row for each mixer, the lowest loss first and those without a loss last.

  The best rate is the one with the lowest mean loss over seeds, among the rates at which all seeds
  finished; only if there is none yet, among those at which some did.

  Args:
    results: the object described in `ldm_jax.compare`; needs "comparison" and "runs", and uses
      "parameters" and "timing" as far as they are there.

  Returns:
    Rows with the keys
      mixer: its name.
      status: "finished", "diverged" (every run did) or "missing" (no run finished yet).
      best_rate, loss, loss_sd, seeds: at the best rate, mean and sample standard deviation of the
        held-out loss in nats per token, and the seeds these are over; None and [] without a loss.
      difference, difference_sd: loss minus the baseline's loss at the same seed, each at its own
        best rate: mean and sample standard deviation over the seeds that both have.
      by_rate: for each rate "learning_rate", mean "loss" or None, and how many runs are "finished"
        and "diverged".
      parameters, parameters_percent: number, and how many more than the baseline in percent.
      step_time_ratio, temporary_memory_ratio: against the baseline.
      minutes_per_run: mean wall time of a finished run, compilation and evaluations included.
    A value that is not known, or a standard deviation of one value, is None.
  """
  comparison = results["comparison"]
  losses = {mixer: _losses(results, mixer) for mixer in comparison["mixers"]}
  baseline = _at_best_rate(losses[comparison["baseline"]])
  rows = [
    {
      "mixer": mixer,
      **_loss_columns(losses[mixer], baseline),
      **_cost_columns(results, mixer),
    }
    for mixer in comparison["mixers"]
  ]
  order = {"finished": 0, "diverged": 1, "missing": 2}
  return sorted(rows, key=lambda row: (order[row["status"]], row["loss"] or 0.0))


def _losses(results, mixer):
  """How many seeds are "wanted", and for each of "rates" {seed: final loss, None if diverged}."""
  losses = {rate: {} for rate in results["comparison"]["learning_rates"]}
  for run in results["runs"]:
    if run["mixer"] == mixer and run["status"] != "unfinished":
      losses[run["learning_rate"]][run["seed"]] = run["loss"]
  wanted = len(results["comparison"]["seeds"])
  return {"wanted": wanted, "rates": losses}


def _finished(seeds):
  return {seed: loss for seed, loss in seeds.items() if loss is not None}


def _at_best_rate(losses):
  """The best rate and its {seed: loss}, or (None, {})."""
  finished = {rate: _finished(seeds) for rate, seeds in losses["rates"].items()}
  complete = {rate: seeds for rate, seeds in finished.items() if len(seeds) == losses["wanted"]}
  candidates = complete or {rate: seeds for rate, seeds in finished.items() if seeds}
  if not candidates:
    return None, {}
  rate = min(candidates, key=lambda rate: statistics.mean(candidates[rate].values()))
  return rate, candidates[rate]


def _loss_columns(losses, baseline):
  rate, seeds = _at_best_rate(losses)
  runs = [loss for by_seed in losses["rates"].values() for loss in by_seed.values()]
  all_diverged = len(runs) == losses["wanted"] * len(losses["rates"]) and not any(
    loss is not None for loss in runs
  )
  paired = [loss - baseline[1][seed] for seed, loss in seeds.items() if seed in baseline[1]]
  return {
    "status": "finished" if seeds else "diverged" if all_diverged else "missing",
    "best_rate": rate,
    "loss": _mean(seeds.values()),
    "loss_sd": _deviation(seeds.values()),
    "seeds": sorted(seeds),
    "difference": _mean(paired),
    "difference_sd": _deviation(paired),
    "by_rate": [
      {
        "learning_rate": rate,
        "loss": _mean(_finished(by_seed).values()),
        "finished": len(_finished(by_seed)),
        "diverged": len(by_seed) - len(_finished(by_seed)),
      }
      for rate, by_seed in losses["rates"].items()
    ],
  }


def _cost_columns(results, mixer):
  baseline = results["comparison"]["baseline"]
  parameters, timing = results.get("parameters") or {}, results.get("timing") or {}
  minutes = [
    run["seconds"] / 60
    for run in results["runs"]
    if run["mixer"] == mixer and run["status"] == "done" and run.get("seconds") is not None
  ]
  share = _ratio(parameters, mixer, baseline)
  return {
    "parameters": parameters.get(mixer),
    "parameters_percent": None if share is None else 100 * (share - 1),
    "step_time_ratio": _ratio(timing.get("median_seconds", {}), mixer, baseline),
    "temporary_memory_ratio": _ratio(timing.get("temporary_bytes", {}), mixer, baseline),
    "minutes_per_run": _mean(minutes),
  }


def _mean(values):
  values = list(values)
  return statistics.mean(values) if values else None


def _deviation(values):
  values = list(values)
  return statistics.stdev(values) if len(values) > 1 else None


def _ratio(values, mixer, baseline):
  if mixer not in values or not values.get(baseline):
    return None
  return values[mixer] / values[baseline]


def missing_runs(results: Mapping[str, Any]) -> int:
  """How many of the planned runs have neither finished nor diverged."""
  return sum(run["status"] == "unfinished" for run in results["runs"])


def markdown_table(results: Mapping[str, Any]) -> str:
  """The table with what was held equal above it and what the columns mean below, as Markdown.

  Args:
    results: the object described in `ldm_jax.compare`, with its "summary".
  """
  comparison, missing = results["comparison"], missing_runs(results)
  baseline = comparison["baseline"]
  lines = [
    f"Equal for all: {_setting(comparison)}; data {comparison['base']['data']['source']}; seeds "
    f"{_listed(comparison['seeds'])}; peak rates {_listed(comparison['learning_rates'])}. "
    + _circumstances(results),
    "",
  ]
  if missing:
    lines += [f"**{missing} of {len(results['runs'])} runs are missing.**", ""]
  header = (
    "mixer",
    "held-out loss (nats per token)",
    f"difference to {baseline}",
    "best rate",
    "loss at other rates",
    "parameters",
    f"step time / {baseline}",
    f"temporary memory / {baseline}",
    "minutes per run",
  )
  rows = [_cells(row, baseline, len(comparison["seeds"])) for row in results["summary"]]
  alignment = ("---", *("---:",) * 3, "---", *("---:",) * 4)
  lines += ["| " + " | ".join(cells) + " |" for cells in (header, alignment, *rows)]
  return "\n".join([*lines, "", *_notes(results)]) + "\n"


def _setting(comparison):
  base = comparison["base"]
  model, train, data = base["model"], base["train"], base["data"]
  return (
    f"{model['blocks']} blocks of width {model['width']}, {model['heads']} heads, MLP "
    f"{model['mlp_width']}, vocabulary {model['vocab_size']}; {train['steps']:,} steps of "
    f"{data['batch_size']} x {data['sequence_length']} tokens, "
    f"{tokens_per_run(comparison):,} tokens per run"
  )


def tokens_per_run(comparison: Mapping[str, Any]) -> int:
  """Tokens that each run trains on, from the "comparison" part of the results."""
  data = comparison["base"]["data"]
  return comparison["base"]["train"]["steps"] * data["batch_size"] * data["sequence_length"]


def _listed(values):
  return ", ".join(f"{value:g}" for value in values)


def _circumstances(results):
  environments = [run["environment"] for run in results["runs"] if run.get("environment")]
  forms = {"device": "{}", "jax": "jax {}", "python": "Python {}", "git_commit": "commit {}"}
  parts = []
  for key, form in forms.items():
    found = dict.fromkeys(e[key] for e in environments if e.get(key))
    if found:
      parts.append(form.format(" and ".join(found)))
  where = f"Run on {', '.join(parts)}. " if parts else ""
  known = all(run["seconds"] is not None for run in results["runs"] if run["curve"])
  least = "" if known else "At least "
  return where + f"{least}{results['wall_seconds'] / 60:.1f} minutes of training in all."


def _cells(row, baseline, seeds):
  if row["loss"] is None:
    loss = row["status"]
  else:
    loss = f"{row['loss']:.4f} ± {_known(row['loss_sd'], '{:.4f}')}"
    if len(row["seeds"]) < seeds:
      loss += f" ({len(row['seeds'])} of {seeds} seeds)"
  difference = "" if row["mixer"] == baseline else _known(row["difference"], "{:+.4f}")
  if difference and row["difference_sd"] is not None:
    difference += f" ± {row['difference_sd']:.4f}"
  parameters = _known(row["parameters"], "{:,}")
  if row["mixer"] != baseline and row["parameters_percent"] is not None:
    parameters += f" ({row['parameters_percent']:+.1f} %)"
  return (
    row["mixer"],
    loss,
    difference,
    _known(row["best_rate"], "{:g}"),
    "; ".join(
      f"{rate['learning_rate']:g}: {_at_rate(rate, seeds)}"
      for rate in row["by_rate"]
      if rate["learning_rate"] != row["best_rate"]
    ),
    parameters,
    _known(row["step_time_ratio"], "{:.2f}"),
    _known(row["temporary_memory_ratio"], "{:.2f}"),
    _known(row["minutes_per_run"], "{:.1f}"),
  )


def _known(value, form):
  return "n/a" if value is None else form.format(value)


def _at_rate(rate, seeds):
  ended = rate["finished"] + rate["diverged"]
  text = "missing" if not ended else "diverged" if not rate["finished"] else f"{rate['loss']:.4f}"
  if rate["finished"] and rate["diverged"]:
    text += f" ({rate['diverged']} diverged)"
  return text if ended in (0, seeds) else f"{text} ({ended} of {seeds} seeds)"


def _notes(results):
  comparison, timing = results["comparison"], results.get("timing")
  yield (
    "Loss: after the last step, at the mixer's best rate, mean ± standard deviation over seeds. "
    "A seed sets the initial weights and the order of the rows, so at one seed all mixers see the "
    "same batches; the difference is taken seed by seed. The best rate is chosen by the loss that "
    "is reported. Minutes per run include compilation and whatever else the machine did."
  )
  if timing:
    yield (
      f"Step time: median of {timing['rounds']} train steps on {timing['measured_on']}, the mixers "
      "in turn in one process. Temporary memory: of the compiled train step."
    )
  rates = comparison["learning_rates"]
  edge = [
    f"{row['mixer']} ({row['best_rate']:g})"
    for row in results["summary"]
    if row["best_rate"] in (min(rates), max(rates))
  ]
  if edge and len(rates) > 1:
    yield f"At the lowest or highest rate tried, so perhaps not at their best: {', '.join(edge)}."


def draw_plot(results: Mapping[str, Any]) -> bytes | None:
  """Held-out loss against tokens, and below it the difference to the baseline, as a PNG.

  A line is a mixer at its best rate, mean over seeds; a band spans the seeds.  The first tenth of
  the tokens is left out, where the loss falls so far that the lines could not be told apart.

  Args:
    results: the object described in `ldm_jax.compare`, with its "summary".

  Returns:
    The bytes of the file, or None if no run has finished.
  """
  comparison = results["comparison"]
  rows = [row for row in results["summary"] if row["loss"] is not None]
  if not rows:
    return None
  curves = {row["mixer"]: _curves(results, row) for row in rows}
  reference = curves.get(comparison["baseline"], {})
  figure = Figure(figsize=(10, 7), dpi=150, layout="constrained")
  top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=(1, 1))
  for row in rows:
    style, opacity = _style(comparison, row["mixer"]), min(0.15, 0.9 / len(rows))
    label = f"{row['mixer']}  {row['loss']:.4f} (rate {row['best_rate']:g})"
    _line(top, list(curves[row["mixer"]].values()), style, opacity, label)
    paired = [
      {x: loss - reference[seed][x] for x, loss in curve.items() if x in reference[seed]}
      for seed, curve in curves[row["mixer"]].items()
      if seed in reference
    ]
    if paired:
      _line(bottom, paired, style, opacity)
  top.set_ylabel("held-out loss (nats per token)")
  bottom.set_ylabel(f"difference to {comparison['baseline']}")
  bottom.set_xlabel("training tokens")
  bottom.xaxis.set_major_formatter(lambda tokens, position: f"{tokens:,.0f}")
  for axes in (top, bottom):
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
  figure.suptitle(_title(results), fontsize=11)
  figure.legend(loc="outside right center", fontsize=9, title="final loss, lowest first")
  file = io.BytesIO()
  figure.savefig(file, format="png")
  return file.getvalue()


def _title(results):
  comparison, missing = results["comparison"], missing_runs(results)
  seeds, rates = len(comparison["seeds"]), len(comparison["learning_rates"])
  model = comparison["base"]["model"]
  title = (
    f"Equal data, tokens ({tokens_per_run(comparison):,}), model ({model['blocks']} blocks of "
    f"width {model['width']}) and optimizer;\n"
    f"each mixer at the best of {rates} learning rate{'s' * (rates > 1)}, "
  )
  title += f"mean and range of {seeds} seeds" if seeds > 1 else "one seed"
  return title + (f"; {missing} of {len(results['runs'])} runs missing" if missing else "")


def _curves(results, row):
  """{seed: {tokens: loss}} of a mixer at its best rate, without the first tenth."""
  start = tokens_per_run(results["comparison"]) / 10
  return {
    run["seed"]: {
      point["tokens"]: point["loss"] for point in run["curve"] if point["tokens"] >= start
    }
    for run in results["runs"]
    if (run["mixer"], run["learning_rate"]) == (row["mixer"], row["best_rate"])
    and run["seed"] in row["seeds"]
  }


def _style(comparison, mixer):
  if mixer == comparison["baseline"]:
    return _BASELINE_STYLE
  others = [name for name in comparison["mixers"] if name != comparison["baseline"]]
  lap, index = divmod(others.index(mixer), len(_COLOURS))
  linestyle, marker = _STYLES[lap % len(_STYLES)]
  return {"color": _COLOURS[index], "linestyle": linestyle, "marker": marker, "linewidth": 1.5}


def _line(axes, curves, style, opacity, label=None):
  """Draws the mean of some {tokens: loss} and the band that they span."""
  tokens = sorted(set.intersection(*(set(curve) for curve in curves)))
  values = [[curve[x] for curve in curves] for x in tokens]
  axes.plot(tokens, [statistics.mean(v) for v in values], label=label, markersize=4, **style)
  if len(curves) > 1:
    low, high = [min(v) for v in values], [max(v) for v in values]
    axes.fill_between(tokens, low, high, color=style["color"], alpha=opacity, linewidth=0)
