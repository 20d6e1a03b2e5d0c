"""From the ledger to Prometheus' text, on demand. Knows prometheus_client; counts nothing itself."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from millpond.outputs import EngineInfo
from millpond.telemetry.catalogue import CATALOGUE, Kind, Metric, View
from millpond.telemetry.histogram import Histogram
from millpond.telemetry.ledger import Ledger
from millpond.telemetry.vllm_names import VLLM_NAMES

COMPAT_NAMES: Mapping[str, Sequence[Metric]] = {"none": (), "vllm": VLLM_NAMES}
"""`--metrics-compat` -> what it adds."""


class MetricsPage:
    """The body of /metrics. `clock`: monotonic seconds; `info`: of the engine, None before the first one was ready."""

    def __init__(
        self,
        ledger: Ledger,
        *,
        model: str,
        version: str,
        compat: str,
        clock: Callable[[], float],
        info: Callable[[], EngineInfo | None],
        side_counts: Callable[[], Mapping[str, float]] = dict,
    ) -> None:
        self._ledger = ledger
        self._metrics = (*CATALOGUE, *COMPAT_NAMES[compat])
        self._model = model
        self._version = version
        self._clock = clock
        self._info = info
        self._side_counts = side_counts
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(_Families(self._families))

    def count_response(self, status: int) -> None:
        self._ledger.count_response(status)

    def render(self) -> tuple[bytes, str]:
        """The page and its content type: the plain format only, since OpenMetrics would change vLLM's names."""
        return generate_latest(self._registry), CONTENT_TYPE_PLAIN_0_0_4

    def _families(self) -> Iterable[Family]:
        view = View(self._ledger, self._clock(), self._model, self._version, self._info(), self._side_counts())
        return [_family(metric, view) for metric in self._metrics]


class _Families(Collector):
    def __init__(self, families: Callable[[], Iterable[Family]]) -> None:
        self._families = families

    def collect(self) -> Iterable[Family]:
        return self._families()


def _family(metric: Metric, view: View) -> Family:
    if metric.kind is Kind.HISTOGRAM:
        histograms = HistogramMetricFamily(metric.name, metric.help, labels=metric.labels)
        for labels, value in metric.read(view):
            assert isinstance(value, Histogram)
            histograms.add_metric(labels, value.cumulative(), value.sum)
        return histograms
    maker = CounterMetricFamily if metric.kind is Kind.COUNTER else GaugeMetricFamily
    family = maker(metric.name, metric.help, labels=metric.labels)
    for labels, value in metric.read(view):
        assert not isinstance(value, Histogram)
        family.add_metric(labels, float(value))
    return family
