"""The newest metrics and the running stages of a run, for a Prometheus server to collect."""

import time
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from nemorl.config.run import PrometheusConfig

from .metrics import StepMetrics
from .timeline import OpenStages


class PrometheusEndpoint(OpenStages, Collector):
    """Serves `/metrics` in threads of its own until it is closed. Raises OSError if it cannot listen."""

    def __init__(self, config: PrometheusConfig, run: str) -> None:
        """`run` is the label of everything that is served."""
        super().__init__()
        self._run = run
        self._metrics: StepMetrics | None = None
        self._ended = 0.0  # the newest step, in seconds since the epoch
        registry = CollectorRegistry()
        registry.register(self)
        self._server, self._thread = start_http_server(config.port, config.host, registry)
        host = f"[{config.host}]" if ":" in config.host else config.host
        self.url = f"http://{host}:{self._server.server_port}/metrics"

    def step(self, metrics: StepMetrics) -> None:
        with self._lock:
            self._metrics, self._ended = metrics, time.time()

    def collect(self) -> Iterator[GaugeMetricFamily]:
        with self._lock:
            stages, metrics, ended = self._stages, self._metrics, self._ended
        seconds = self._gauge("nemorl_stage_seconds", "Seconds since a running stage began", "stage")
        done = self._gauge("nemorl_stage_done", "Units of progress of a running stage", "stage", "unit")
        for stage in stages:
            seconds.add_metric([self._run, stage.name], stage.seconds)
            done.add_metric([self._run, stage.name, stage.unit], stage.done)
        yield from (seconds, done)
        if metrics is None:
            return
        step = self._gauge("nemorl_step", "Number of the newest step")
        step.add_metric([self._run], metrics.step)
        when = self._gauge("nemorl_step_timestamp_seconds", "When the newest step ended, since the epoch")
        when.add_metric([self._run], ended)
        values = self._gauge("nemorl_metric", "A metric of the newest step, as in metrics.jsonl", "name")
        for name, value in metrics.values.items():
            values.add_metric([self._run, name], value)
        yield from (step, when, values)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def _gauge(self, name: str, text: str, *labels: str) -> GaugeMetricFamily:
        return GaugeMetricFamily(name, text, labels=["run", *labels])
