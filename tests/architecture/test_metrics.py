"""Every metric is set somewhere, and pages, dashboards and alerts name metrics that exist."""

import ast
import json
import re

import pytest
import yaml

from observability import metrics
from observability.metrics import ALL_METRICS, Metric
from tests.support.sources import PACKAGES, ROOT, tree

NAMES = {name: value for name, value in vars(metrics).items() if isinstance(value, Metric)}


def used_names():
    for path in (path for package in PACKAGES for path in (ROOT / package).rglob("*.py")):
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "metrics":
                yield node.attr


def test_every_metric_is_counted_somewhere():
    assert set(NAMES) - set(used_names()) == set()


def test_pages_and_dashboards_name_metrics_that_exist():
    known = {f"baton_{metric.name}" for metric in ALL_METRICS} | {"baton_client"}  # a package
    pages = [*(ROOT / "docs").glob("*.md"), ROOT / "README.md", *(ROOT / "deploy").rglob("*.*")]
    found = set()
    for page in pages:
        words = re.findall(r"\bbaton_[a-z0-9_]+", page.read_text())
        found |= {re.sub(r"_(bucket|sum|count)$", "", word) for word in words}
    assert found - {"baton_llm"} <= known  # the installed package


MONITORING = ROOT / "deploy" / "monitoring"
EVERYWHERE = {"model_name", "le"}
EXPORTED = {
    f"baton_{m.name}": EVERYWHERE
    | set(m.labels)
    | (set(metrics.WORKER_LABELS) if m in metrics.WORKER_COUNTERS else set())
    for m in ALL_METRICS
}


def expressions():
    board = json.loads((MONITORING / "grafana-dashboard.json").read_text())
    yield from (t["expr"] for panel in board["panels"] for t in panel.get("targets", ()))
    rules = yaml.safe_load((MONITORING / "alerts.yaml").read_text())
    yield from (rule["expr"] for group in rules["groups"] for rule in group["rules"])


@pytest.mark.parametrize("expression", expressions())
def test_panels_and_alerts_use_labels_that_are_exported(expression):
    used = re.findall(r"\b(baton_[a-z0-9_]+)(?:\{([^}]*)\})?", expression)
    assert used
    known = set()
    for name, selectors in used:
        labels = EXPORTED[re.sub(r"_(bucket|sum|count)$", "", name)]
        assert set(re.findall(r"(\w+)\s*[=!]~?\s*\"", selectors)) <= labels
        known |= labels
    for group in re.findall(r"\bby \(([^)]*)\)", expression):
        assert {label.strip() for label in group.split(",")} <= known
    assert expression.count("(") == expression.count(")")
