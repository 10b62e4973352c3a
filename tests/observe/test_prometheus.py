"""What a Prometheus server collects from a run, and the dashboard over it."""

import io
import json
import math
import re
import socket
import urllib.request
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from nemorl.config.run import LoggerConfig
from nemorl.observe.metrics import SHOWN
from nemorl.observe.observer import Observer
from nemorl.observe.run_folder import RunFolder
from tests.observe.examples import CONFIG

DASHBOARD = Path(__file__).parents[2] / "docs" / "grafana.json"
FREE_PORT = LoggerConfig(prometheus={"port": 0}, console="plain")


def collected(url: str) -> dict[tuple[str, ...], float]:
    """By name and labels, without the run's."""
    with urllib.request.urlopen(url, timeout=10) as response:
        text = response.read().decode()
    samples = [s for family in text_string_to_metric_families(text) for s in family.samples]
    assert {sample.labels.pop("run") for sample in samples} <= {"run"}
    return {(sample.name, *sample.labels.values()): sample.value for sample in samples}


def test_the_newest_step_and_the_running_stages(run_dir):
    folder = RunFolder.create(run_dir, CONFIG)
    with Observer(folder, FREE_PORT, total_steps=3, stream=io.StringIO()) as observer:
        observer.header({"algorithm": "grpo"})
        url = json.loads(folder.paths.header.read_text())[-1]["run"]["prometheus"]
        assert url.startswith("http://127.0.0.1:")
        assert collected(url) == {}
        with observer.stage("generation", total=8, unit="trajectories") as stage:
            stage.advance(3)
            during = collected(url)
            assert during["nemorl_stage_done", "generation", "trajectories"] == 3
            assert during["nemorl_stage_seconds", "generation"] >= 0
        for number in (1, 2):
            observer.step(
                number, version=number, values={"reward/mean": number / 10, "loss/policy": math.nan}
            )
        after = collected(url)
        assert not any(name.startswith("nemorl_stage") for name, *_ in after)
        assert after["nemorl_step",] == 2
        assert after["nemorl_metric", "reward/mean"] == 0.2
        assert math.isnan(after["nemorl_metric", "loss/policy"])
        assert after["nemorl_step_timestamp_seconds",] > 1.7e9
    with socket.socket() as sock:
        assert sock.connect_ex(("127.0.0.1", int(url.split(":")[2].split("/")[0]))) != 0


def test_an_address_that_is_taken_costs_a_warning(run_dir, caplog):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        config = LoggerConfig(prometheus={"port": taken.getsockname()[1]}, console="plain")
        folder = RunFolder.create(run_dir, CONFIG)
        with Observer(folder, config, total_steps=1, stream=io.StringIO()) as observer:
            observer.step(1, version=1, values={"reward/mean": 0.1})
    (warning,) = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert "cannot listen on 127.0.0.1:" in warning


def test_the_dashboard_asks_for_metrics_that_runs_have():
    panels = json.loads(DASHBOARD.read_text())["panels"]
    places = [(p["gridPos"]["x"], p["gridPos"]["y"]) for p in panels]
    assert len(set(places)) == len(panels)
    prefixes = {row.prefix for row in SHOWN}
    served = {"nemorl_metric", "nemorl_step", "nemorl_stage_seconds", "nemorl_step_timestamp_seconds"}
    for panel in panels:
        for target in panel["targets"]:
            assert set(re.findall(r"nemorl_\w+", target["expr"])) <= served
            assert 'run=~"$run"' in target["expr"]
            for name in re.findall(r'name=~?"([^"]+)"', target["expr"]):
                for option in name.replace("(reward|accuracy)", "reward").split("|"):
                    assert any(p.startswith(option.rstrip(".*")) for p in prefixes), option
