// The list of runs: state, step, reward, time and device; up to ten are marked to be compared.

import { html, useEffect, useMemo, useState } from "../lib/preact.js";
import { get } from "../lib/api.js";
import { address, change, go, joinNames, splitNames, view } from "../lib/view.js";
import { Empty, Loading, Problem, Table, number, seconds } from "../lib/widgets.js";

const PERIOD = 3000; // milliseconds between two looks
const MAX_MARKED = 10;

function useRuns() {
  const [state, setState] = useState([null, null]);
  useEffect(() => {
    let ended = false;
    const look = async () => {
      try {
        const runs = await get("/api/runs/list");
        if (!ended) setState([runs, null]);
      } catch (error) {
        if (!ended) setState(([runs]) => [runs, error]);
      }
      if (!ended) timer = setTimeout(look, document.hidden ? 5 * PERIOD : PERIOD);
    };
    let timer = setTimeout(look, 0);
    return () => {
      ended = true;
      clearTimeout(timer);
    };
  }, []);
  return state;
}

const ago = (time) => (time ? `${seconds(Math.max(0, Date.now() / 1000 - time))} ago` : "");

function columns(marked, mark) {
  const name = ({ name: run }) => html`<a href=${address("watch", { run })}>${run}</a>`;
  const box = ({ name: run }) =>
    html`<input
      type="checkbox"
      aria-label=${`Compare ${run}`}
      checked=${marked.includes(run)}
      disabled=${!marked.includes(run) && marked.length >= MAX_MARKED}
      onChange=${() => mark(run)}
    />`;
  const state = (run) =>
    html`<span class=${`tag ${run.state}`} title=${run.words}>${run.state}</span>
      ${run.problem && html`<span class="bad" title=${run.problem}> !</span>`}`;
  const step = ({ step: at, total_steps: total }) => (total ? `${number(at)} / ${number(total)}` : number(at));
  return [
    { key: "mark", title: "", value: () => 0, show: box },
    { key: "name", title: "run", value: (run) => run.name, show: name },
    { key: "state", title: "state", value: (run) => run.state, show: state },
    { key: "step", title: "step", value: (run) => run.step, show: step, align: "right" },
    { key: "reward", title: "reward", value: (run) => run.reward, show: (run) => number(run.reward), align: "right" },
    { key: "loss", title: "loss", value: (run) => run.loss, show: (run) => number(run.loss), align: "right" },
    { key: "algorithm", title: "algorithm", value: (run) => run.algorithm },
    { key: "model", title: "model", value: (run) => run.model },
    { key: "device", title: "device", value: (run) => run.device },
    { key: "started", title: "started", value: (run) => run.started, show: (run) => ago(run.started), align: "right" },
    { key: "seconds", title: "ran", help: "time that its drivers ran, start and end included", value: (run) => run.seconds, show: (run) => seconds(run.seconds), align: "right" },
    { key: "changed", title: "last wrote", value: (run) => run.changed, show: (run) => ago(run.changed), align: "right" },
  ];
}

const matches = (run, text) =>
  text
    .toLowerCase()
    .split(/\s+/)
    .every((word) => `${run.name} ${run.state} ${run.algorithm} ${run.model} ${run.device}`.toLowerCase().includes(word));

export default function Runs() {
  const [runs, error] = useRuns();
  const { params } = view.value;
  const marked = splitNames(params.runs);
  const text = params.find || "";
  const shown = useMemo(() => (runs || []).filter((run) => matches(run, text)), [runs, text]);
  const mark = (run) => {
    const next = marked.includes(run) ? marked.filter((each) => each !== run) : [...marked, run];
    change({ runs: joinNames(next) });
  };
  if (!runs && !error) return html`<${Loading} />`;
  return html`<main class="runs">
    <div class="row">
      <h1>Runs</h1>
      <label>
        <span class="muted">Find </span>
        <input type="search" value=${text} onInput=${(event) => change({ find: event.target.value })} />
      </label>
      <span class="muted" role="status">${shown.length === (runs || []).length ? "" : `${shown.length} of `}${(runs || []).length}</span>
      <span class="grow"></span>
      <button disabled=${marked.length < 2} onClick=${() => go("compare", { runs: joinNames(marked) })}>
        Compare ${marked.length || ""}
      </button>
    </div>
    <${Problem} error=${error} />
    ${runs && !runs.length
      ? html`<${Empty}>No run here yet. Start one in Compose, or with <code>nemorl train</code>.<//>`
      : html`<${Table}
          label="Runs"
          columns=${columns(marked, mark)}
          rows=${shown}
          rowKey=${(run) => run.name}
          sort=${params.sort || "-changed"}
          onSort=${(sort) => change({ sort })}
        />`}
  </main>`;
}
