// Up to ten runs side by side: curves, fields of their configurations that differ, and the same tasks in two of them.

import { html, useEffect, useMemo, useState } from "../lib/preact.js";
import { arrays, get } from "../lib/api.js";
import { Lines, PALETTE } from "../lib/chart.js";
import { address, change, joinNames, splitNames, view } from "../lib/view.js";
import { visible } from "../lib/visible.js";
import { Empty, Loading, Problem, Table, Tabs, number, useLoaded } from "../lib/widgets.js";

const FIRST_METRICS = ["reward/mean", "validation/reward", "loss/policy", "loss/sft", "entropy", "length/mean", "grad_norm", "logprob_gap/mean"];
const AXES = { step: "step", tokens: "tokens", time: "hours" };
const MAX_CHARTS = 12;

const color = (at) => PALETTE[at % PALETTE.length];
const short = (runs) => {
  // Without the folders that all names have in common.
  const parts = runs.map((run) => run.split("/"));
  let common = 0;
  while (runs.length > 1 && parts.every((each) => each.length > common + 1 && each[common] === parts[0][common])) common += 1;
  return parts.map((each) => each.slice(common).join("/"));
};

function Chart({ runs, names, metric, axis, smoothing, onRemove }) {
  const [found, error] = useLoaded((signal) => arrays("/api/compare/curves", { runs: joinNames(runs), metric, axis, smoothing }, signal), [runs.join(), metric, axis, smoothing]);
  const series = useMemo(() => {
    const made = [];
    const axisOf = (x) => (axis === "time" ? x.map((seconds) => seconds / 3600) : x);
    runs.forEach((_, at) => {
      const of = (letter) => found?.arrays[`${letter}${at}`];
      if (!of("y")?.length) return;
      const raw = { name: names[at], x: axisOf(of("x")), y: of("y"), color: color(at) };
      if (!of("s")) made.push(raw);
      else made.push({ ...raw, name: `${names[at]} raw`, raw: true }, { ...raw, x: axisOf(of("t")), y: of("s") });
    });
    return made;
  }, [found]);
  const missing = found?.facts.missing || [];
  return html`<section class="panel" aria-label=${metric}>
    <div class="row tight">
      <h2>${metric}</h2>
      ${missing.length > 0 && html`<span class="muted">not in ${missing.map((run) => names[runs.indexOf(run)]).join(", ")}</span>`}
      <span class="grow"></span>
      <button class="quiet" aria-label=${`Remove ${metric}`} onClick=${onRemove}>✕</button>
    </div>
    <${Problem} error=${error} />
    ${found && (series.length ? html`<${Lines} series=${series} xLabel=${AXES[axis]} sync="compare" label=${metric} />` : html`<p class="muted">No value.</p>`)}
    ${!found && !error && html`<${Loading} />`}
  </section>`;
}

function Curves({ runs, names }) {
  const { params } = view.value;
  const [found, error] = useLoaded((signal) => get("/api/compare/metrics", { runs: joinNames(runs) }, signal), [runs.join()]);
  const [draft, setDraft] = useState("");
  if (error) return html`<${Problem} error=${error} />`;
  if (!found) return html`<${Loading} />`;
  const all = Object.keys(found.metrics);
  const chosen = params.metrics === undefined ? FIRST_METRICS.filter((metric) => all.includes(metric)) : splitNames(params.metrics);
  const axis = params.axis in AXES ? params.axis : "step";
  const smoothing = Math.min(0.99, Math.max(0, Number(params.smooth) || 0));
  const add = (event) => {
    const metric = event.target.value;
    setDraft(metric);
    if (!all.includes(metric)) return;
    setDraft("");
    if (!chosen.includes(metric)) change({ metrics: joinNames([metric, ...chosen].slice(0, MAX_CHARTS)) });
  };
  return html`<div class="column">
    ${found.notes.map((note) => html`<div class="notice">${note}</div>`)}
    <div class="row">
      <label><span>Add a metric </span><input list="metrics" value=${draft} placeholder=${`${all.length} metrics`} onInput=${add} /></label>
      <datalist id="metrics">${all.map((metric) => html`<option value=${metric}></option>`)}</datalist>
      <label><span>By </span><select value=${axis} onChange=${(event) => change({ axis: event.target.value })}>
        ${Object.entries(AXES).map(([key, title]) => html`<option value=${key} selected=${key === axis}>${title}</option>`)}
      </select></label>
      <label><span>Smoothing </span><input type="range" min="0" max="0.98" step="0.02" value=${smoothing} onInput=${(event) => change({ smooth: Number(event.target.value) || null })} /></label>
      ${smoothing > 0 && html`<span class="muted">${smoothing}; the raw lines are pale</span>`}
    </div>
    ${!chosen.length && html`<${Empty}>Add a metric.<//>`}
    <div class="charts">
      ${chosen.map(
        (metric) =>
          html`<${Chart}
            key=${metric}
            runs=${runs}
            names=${names}
            metric=${metric}
            axis=${axis}
            smoothing=${smoothing}
            onRemove=${() => change({ metrics: joinNames(chosen.filter((each) => each !== metric)) || "," })}
          />`,
      )}
    </div>
  </div>`;
}

function Configs({ runs, names }) {
  const { params } = view.value;
  const [found, error] = useLoaded((signal) => get("/api/compare/configs", { runs: joinNames(runs) }, signal), [runs.join()]);
  if (error) return html`<${Problem} error=${error} />`;
  if (!found) return html`<${Loading} />`;
  const text = params.field || "";
  const fields = found.fields.filter(({ field }) => field.includes(text));
  const shown = (value) => (typeof value === "string" ? value : JSON.stringify(value));
  const columns = [
    { key: "field", title: "field", value: ({ field }) => field, show: ({ field }) => html`<code>${field}</code>` },
    ...runs.map((run, at) => ({
      key: run,
      title: names[at],
      value: ({ values }) => shown(values[at]),
      show: ({ values, given }) => (given[at] ? html`<span class="value" title=${shown(values[at])}>${visible(shown(values[at]))}</span>` : html`<span class="muted">not there</span>`),
    })),
  ];
  return html`<div class="column">
    ${found.notes.map((note) => html`<div class="notice">${note}</div>`)}
    <div class="row">
      <b>${number(found.fields.length)} fields differ</b>
      <label><span>Find </span><input type="search" value=${text} onInput=${(event) => change({ field: event.target.value || null })} /></label>
    </div>
    ${fields.length > 0 && html`<div class="wide"><${Table} label="Fields that differ" columns=${columns} rows=${fields} rowKey=${({ field }) => field} /></div>`}
  </div>`;
}

function Interval({ paired }) {
  const { difference, low, high } = paired;
  const known = Number.isFinite(low);
  const clear = known && (low > 0 || high < 0);
  const sign = difference > 0 ? "+" : "";
  return html`<b class=${clear ? (difference > 0 ? "good" : "bad") : ""} data-interval>
      ${sign}${number(difference)} ${known ? `[${number(low, 3)}, ${number(high, 3)}]` : ""}
    </b>
    <span class="muted"> ${known ? (clear ? "95 % interval of the mean difference, by a paired t test" : "95 % interval, by a paired t test: it includes 0") : "an interval takes two tasks"}</span>`;
}

function SideBySide({ names, query }) {
  const [found, error] = useLoaded((signal) => get("/api/compare/answers", query, signal), [JSON.stringify(query)]);
  if (error) return html`<${Problem} error=${error} />`;
  if (!found) return html`<${Loading} />`;
  const prompt = found.flat().find((answer) => answer.prompt)?.prompt;
  return html`<section class="column" aria-label="Answers to the task">
    <h2>Task ${query.task}</h2>
    ${prompt && html`<pre class="prompt" dir="auto">${visible(prompt)}</pre>`}
    <div class="two">
      ${found.map(
        (side, at) =>
          html`<div class="column">
            <h3><i class="dot" style=${{ background: color(at) }}></i> ${names[at]}</h3>
            ${side.map(
              ({ row, text, problem }) =>
                html`<article class="panel answer">
                  <a href=${address("read", { run: splitNames(query.runs)[at], at: `${row.step}/${row.group}/${row.sample}`, phase: row.phase === "training" ? null : row.phase, set: row.validation_set })}>step ${row.step} · sample ${row.sample}</a>
                  <b> ${number(row.reward)}</b> <span class="muted">${row.stop} · ${number(row.sampled)} tokens</span>
                  ${text === null ? html`<p class="muted">${problem}</p>` : html`<pre dir="auto">${visible(text)}</pre>`}
                </article>`,
            )}
          </div>`,
      )}
    </div>
  </section>`;
}

function Tasks({ runs, names }) {
  const { params } = view.value;
  const first = runs.includes(params.first) ? params.first : runs[0];
  const second = runs.includes(params.second) && params.second !== first ? params.second : runs.find((run) => run !== first);
  const filter = params.filter ?? 'phase == "validation"';
  const last = params.last !== "0";
  const [draft, setDraft] = useState(filter);
  useEffect(() => setDraft(filter), [filter]);
  const query = { runs: joinNames([first, second]), filter, last: last ? 1 : 0 };
  const [paired, error] = useLoaded((signal) => get("/api/compare/tasks", query, signal), [JSON.stringify(query)]);
  const of = [names[runs.indexOf(first)], names[runs.indexOf(second)]];
  const pick = (key, value) =>
    html`<select value=${value} onChange=${(event) => change({ [key]: event.target.value, task: null, set: null })}>
      ${runs.map((run, at) => html`<option value=${run} selected=${run === value}>${names[at]}</option>`)}
    </select>`;
  const mean = (side) => (task) => task[side].mean;
  const columns = [
    { key: "task", title: "task", value: ({ task }) => task, show: ({ task, validation_set: set }) => html`<button class="link" onClick=${() => change({ task, set: set || null })}>${set && `${set} `}${task}</button>` },
    { key: "first", title: of[0], value: mean("first"), show: (task) => `${number(task.first.mean)} (${task.first.count}, step ${task.first.step})`, align: "right" },
    { key: "second", title: of[1], value: mean("second"), show: (task) => `${number(task.second.mean)} (${task.second.count}, step ${task.second.step})`, align: "right" },
    { key: "difference", title: "difference", value: ({ difference }) => difference, show: ({ difference }) => html`<span class=${difference > 0 ? "good" : difference < 0 ? "bad" : ""}>${number(difference)}</span>`, align: "right" },
  ];
  return html`<div class="column">
    <form class="row" onSubmit=${(event) => { event.preventDefault(); change({ filter: draft, task: null }); }}>
      <label><span>From </span>${pick("first", first)}</label>
      <label><span>to </span>${pick("second", second)}</label>
      <label class="grow row tight"><span>Filter </span><input class="mono grow" spellcheck=${false} value=${draft} onInput=${(event) => setDraft(event.target.value)} /></label>
      <label><input type="checkbox" checked=${last} onChange=${(event) => change({ last: event.target.checked ? null : "0" })} /> last step of each task</label>
      <button>Pair</button>
    </form>
    <${Problem} error=${error} />
    ${!paired && !error && html`<${Loading} />`}
    ${paired &&
    html`${paired.notes.map((note) => html`<div class="notice">${note}</div>`)}
      ${paired.count
        ? html`<div class="panel summary">
            <div><b>${number(paired.count)} tasks in both</b> <span class="muted">${number(paired.only_first)} only in ${of[0]}, ${number(paired.only_second)} only in ${of[1]}</span></div>
            <div>Mean reward ${number(paired.first_mean)} → ${number(paired.second_mean)}: <${Interval} paired=${paired} /></div>
            <div class="muted">${number(paired.improved)} tasks better, ${number(paired.worse)} worse, ${number(paired.count - paired.improved - paired.worse)} equal</div>
          </div>`
        : html`<${Empty}>No task is in both runs under this filter: ${number(paired.only_first)} only in ${of[0]}, ${number(paired.only_second)} only in ${of[1]}.<//>`}
      ${params.task && html`<${SideBySide} names=${of} query=${{ ...query, task: params.task, set: params.set }} />`}
      ${paired.count > 0 &&
      html`<div class="paired"><${Table}
          label="Paired tasks"
          columns=${columns}
          rows=${paired.tasks}
          rowKey=${({ task, validation_set: set }) => `${set}/${task}`}
          sort=${params.sort || ""}
          onSort=${(sort) => change({ sort })}
        /></div>
        ${paired.count > paired.tasks.length && html`<p class="muted">The ${paired.tasks.length} tasks that differ most.</p>`}`}`}
  </div>`;
}

const SCREENS = { curves: [Curves, "Curves"], configs: [Configs, "Configuration"], tasks: [Tasks, "Same tasks"] };

export default function Compare() {
  const { params } = view.value;
  const runs = [...new Set(splitNames(params.runs))];
  if (!runs.length) return html`<main><${Empty}>Mark two to ten runs in <a href="/runs">Runs</a>.<//></main>`;
  const names = short(runs);
  const tab = params.tab in SCREENS ? params.tab : "curves";
  const [Screen] = SCREENS[tab];
  const lonely = runs.length < 2 && tab !== "curves";
  return html`<main class="compare">
    <div class="row">
      <h1>Compare</h1>
      ${runs.map(
        (run, at) =>
          html`<span class="tag run"><i class="dot" style=${{ background: color(at) }}></i> <a href=${address("watch", { run })} title=${run}>${names[at]}</a>
            <button class="quiet" aria-label=${`Remove ${run}`} onClick=${() => change({ runs: joinNames(runs.filter((each) => each !== run)) })}>✕</button></span>`,
      )}
      <a href=${address("runs", { runs: joinNames(runs) })}>Choose others</a>
    </div>
    <${Tabs} label="What is compared" of=${Object.fromEntries(Object.entries(SCREENS).map(([key, [, title]]) => [key, title]))} at=${tab} onChange=${(next) => change({ tab: next })} />
    ${lonely ? html`<${Empty}>Choose at least two runs.<//>` : html`<${Screen} runs=${runs} names=${names} />`}
  </main>`;
}
