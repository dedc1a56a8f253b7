"""The notebooks run from top to bottom, with small values of their parameters."""

import nbformat
import pytest
from nbclient import NotebookClient

from tests.rig import ROOT, needs_libtpu

NOTEBOOKS = ROOT / "notebooks"
# What each is given, and how many figures it draws.
SETTINGS = {
  "01_quickstart": ("STEPS = 6", 1),
  "02_the_memory_by_hand": ("", 3),
  "03_looking_inside": ("STEPS, TOKENS = 2, 32", 4),
  "04_adopting": ("STEPS = 4", 1),
  "05_planning_a_pod_run": ('TOPOLOGY, BLOCKS = "v5e:2x2", (1, 2)', 2),
}
MARKS = {
  "01_quickstart": (pytest.mark.slow,),
  "03_looking_inside": (pytest.mark.slow,),
  "05_planning_a_pod_run": (needs_libtpu, pytest.mark.slow),
}


@pytest.mark.parametrize(
  "name", [pytest.param(name, marks=MARKS.get(name, ())) for name in SETTINGS]
)
def test_a_notebook_runs(name, tmp_path, monkeypatch):
  settings, figures = SETTINGS[name]
  monkeypatch.setenv(
    "XLA_FLAGS", "--xla_backend_optimization_level=0"
  )  # one device, as readers have
  monkeypatch.setenv("PYTHONPATH", str(ROOT))
  notebook = nbformat.read(NOTEBOOKS / f"{name}.ipynb", as_version=4)
  places = [
    place
    for place, cell in enumerate(notebook.cells)
    if "parameters" in cell.metadata.get("tags", ())
  ]
  assert bool(places) == bool(settings)
  for place in places:
    notebook.cells.insert(place + 1, nbformat.v4.new_code_cell(settings))
  NotebookClient(
    notebook, timeout=600, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}
  ).execute()
  outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
  assert sum("image/png" in output.get("data", ()) for output in outputs) == figures


def test_committed_notebooks_have_their_outputs_and_no_errors():
  assert sorted(path.stem for path in NOTEBOOKS.glob("*.ipynb")) == sorted(SETTINGS)
  for name, (_, figures) in SETTINGS.items():
    notebook = nbformat.read(NOTEBOOKS / f"{name}.ipynb", as_version=4)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert all(cell.execution_count for cell in code), f"{name} was not run"
    outputs = [output for cell in code for output in cell.outputs]
    assert not any(output.output_type == "error" for output in outputs)
    assert sum("image/png" in output.get("data", ()) for output in outputs) == figures
    text = str(outputs)
    assert "/tmp/" not in text
    assert "Traceback" not in text
