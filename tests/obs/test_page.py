"""The page as Prometheus' own parser reads it."""

from __future__ import annotations

import math

import pytest
from prometheus_client.parser import text_string_to_metric_families

from equipoise.obs.page import Histogram, Page


def parsed(page: Page) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """Every sample of the page, by its name and labels."""
    families = list(text_string_to_metric_families(page.text().decode()))
    return {(sample.name, tuple(sample.labels.items())): sample.value for each in families for sample in each.samples}


@pytest.mark.parametrize("label", ["plain", 'say "x"', "back\\slash", "two\nlines", "ünï", "", "\\n", "{a=b},"])
def test_any_label_is_read_back(label: str) -> None:
    page = Page()
    page.family("a_total", "counter", "What is\ncounted \\ here", [((("name", label), ("other", "x")), 3)])
    assert parsed(page) == {("a_total", (("name", label), ("other", "x"))): 3}
    (family,) = text_string_to_metric_families(page.text().decode())
    assert (family.type, family.documentation) == ("counter", "What is\ncounted \\ here")


def test_what_is_no_unicode_hides_nothing() -> None:
    page = Page()
    page.family("a", "gauge", "A", [((("name", "\udcff"),), 1)])
    assert parsed(page) == {("a", (("name", "?"),)): 1}


@pytest.mark.parametrize("value", [0, 7, 1.5, 1e-9, 12345678901234567, math.inf, -math.inf])
def test_any_number_is_read_back(value: float) -> None:
    page = Page()
    page.value("a", "gauge", "A", value)
    page.value("b", "gauge", "B", math.nan)
    found = parsed(page)
    assert found["a", ()] == value
    assert math.isnan(found["b", ()])


def test_histograms_add_up() -> None:
    histogram = Histogram((0.1, 1, 5))
    for value in (0.05, 0.1, 0.5, 5, 5.1, 100):
        histogram.observe(value)
    page = Page()
    page.histograms("a_seconds", "A", [((("model", "m"),), histogram), ((("model", "n"),), Histogram((0.1, 1, 5)))])
    found = parsed(page)
    counts = [found["a_seconds_bucket", (("model", "m"), ("le", bound))] for bound in ("0.1", "1", "5", "+Inf")]
    assert counts == [2, 3, 4, 6]
    assert found["a_seconds_count", (("model", "m"),)] == 6
    assert found["a_seconds_sum", (("model", "m"),)] == pytest.approx(110.75)
    assert found["a_seconds_count", (("model", "n"),)] == 0


def test_families_without_samples_are_left_out() -> None:
    page = Page()
    page.family("a", "gauge", "A", [])
    page.histograms("b", "B", [])
    assert page.text() == b""
