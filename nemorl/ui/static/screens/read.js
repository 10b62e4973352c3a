// The trajectories of a run: a table with filter, chips, histogram and search, and below it the one that is open.

import { html, useEffect, useMemo, useState } from "../lib/preact.js";
import { get } from "../lib/api.js";
import { Histogram } from "../lib/chart.js";
import { Grid, usePages } from "../lib/grid.js";
import { change, go, joinNames, splitNames, view } from "../lib/view.js";
import { visible } from "../lib/visible.js";
import { Empty, Loading, Problem, number, seconds, useLoaded } from "../lib/widgets.js";
import { Trajectory } from "./trajectory.js";

const NEW_ROWS_PERIOD = 5000; // milliseconds between two looks for rows that a run has added
const ALWAYS = ["step", "group", "sample", "task", "turns", "tokens", "reward", "advantage", "logprob_gap", "stop"];
const TITLES = { logprob_gap: "logprob gap", validation_set: "set", seconds_generation: "generation", seconds_environment: "environment s" };
const WIDTHS = { phase: 92, stop: 76, validation_set: 92, environment: 110, step: 60, sample: 68, turns: 60, tokens: 68, logprob_gap: 96, trains: 60, stored: 66, failed: 60 };

// Parts of a filter that are joined by "and" on the outermost level; null if it has an "or" there.
function parts(text) {
  const found = [];
  let [depth, quote, start] = [0, "", 0];
  for (let at = 0; at < text.length; at += 1) {
    const sign = text[at];
    if (quote) {
      if (sign === "\\") at += 1;
      else if (sign === quote) quote = "";
    } else if (sign === '"' || sign === "'") quote = sign;
    else if ("([".includes(sign)) depth += 1;
    else if (")]".includes(sign)) depth -= 1;
    else if (!depth && /\s/.test(sign)) {
      if (/^\sor[\s(]/.test(text.slice(at))) return null;
      if (/^\sand[\s(]/.test(text.slice(at))) {
        found.push(text.slice(start, at).trim());
        start = at + 4;
      }
    }
  }
  return [...found, text.slice(start).trim()].filter(Boolean);
}

// Adds a part to a filter, or takes it out.
function toggled(text, part) {
  const all = parts(text);
  if (all === null) return `(${text}) and ${part}`;
  return (all.includes(part) ? all.filter((each) => each !== part) : [...all, part]).join(" and ");
}

const name = (column) => {
  const reward = column.startsWith("rewards.") ? column.slice(8) : null;
  return reward === null || /^\w[\w/-]*(\.\w[\w/-]*)*$/.test(reward) ? column : `rewards[${JSON.stringify(reward)}]`;
};

function show(column, kind) {
  if (kind === "boolean") return (row) => (row[column] ? "✓" : "");
  if (kind === "text") return (row) => visible(row[column]);
  if (["step", "group", "sample", "task"].includes(column)) return (row) => String(row[column]);
  if (column.startsWith("seconds_")) return (row) => seconds(row[column]);
  return (row) => (row[column] === "NaN" ? "" : number(row[column]));
}

const closed = (event) => {
  if (event.key === "Escape") event.currentTarget.open = false;
};

function FilterBox({ text, problem, remarks, kinds }) {
  const [draft, setDraft] = useState(text);
  useEffect(() => setDraft(text), [text]);
  useEffect(() => {
    if (draft === text) return undefined;
    const timer = setTimeout(() => change({ filter: draft, rows: null }), 350);
    return () => clearTimeout(timer);
  }, [draft, text]);
  const place = draft === text && /columns (\d+) to (\d+)/.exec(problem?.place || "");
  const [from, to] = place ? [Number(place[1]) - 1, Number(place[2])] : [0, 0];
  return html`<div class="filter grow">
    <div class="row tight">
      <label for="filter">Filter</label>
      <details class="menu below" onKeyDown=${closed}>
        <summary>Columns to filter by</summary>
        <div class="panel">
          <p class="muted">${"< <= > >= == != in not and or ( )"}</p>
          ${Object.entries(kinds).map(([column, kind]) => html`<div><code>${name(column)}</code> <span class="muted">${kind}</span></div>`)}
        </div>
      </details>
    </div>
    <input
      id="filter"
      class="mono"
      spellcheck=${false}
      autocomplete="off"
      value=${draft}
      placeholder=${'reward < 0 and stop == "length"'}
      aria-invalid=${Boolean(place)}
      aria-describedby="filter-says"
      onInput=${(event) => setDraft(event.target.value)}
      onKeyDown=${(event) => event.key === "Enter" && change({ filter: draft, rows: null })}
    />
    <div id="filter-says" aria-live="polite">
      ${place &&
      html`<pre class="wrong">${text.slice(0, from)}<mark>${text.slice(from, Math.max(to, from + 1)) || " "}</mark>${text.slice(Math.max(to, from + 1))}</pre>
        <div class="bad">${problem.error} <span class="muted">at ${problem.place}</span>${problem.fix && html`: <b>${problem.fix}</b>`}</div>`}
      ${!place && (remarks || []).map((remark) => html`<div class="warn">${remark}</div>`)}
    </div>
  </div>`;
}

function Chips({ counts, filter }) {
  const chosen = parts(filter) || [];
  const chip = (column, value, count) => {
    const part = value === "true" ? name(column) : value === "false" ? `not ${name(column)}` : `${name(column)} == ${JSON.stringify(value)}`;
    return html`<button
      class="chip"
      aria-pressed=${chosen.includes(part)}
      disabled=${!count && !chosen.includes(part)}
      onClick=${() => change({ filter: toggled(filter, part), rows: null })}
      >${visible(value) || "none"} <span class="muted">${number(count)}</span></button
    >`;
  };
  return Object.entries(counts).map(([column, values]) => {
    const listed = Object.entries(values).slice(0, 12);
    return html`<span class="chips" role="group" aria-label=${column}>
      <span class="muted">${TITLES[column] || column}</span>${listed.map(([value, count]) => chip(column, value, count))}
    </span>`;
  });
}

function Distribution({ run, rows, filter, columns }) {
  const { params } = view.value;
  const column = columns.includes(params.of) ? params.of : "reward";
  const [found, error] = useLoaded(
    (signal) => get("/api/read/histogram", { run, rows, filter, column, bins: 40 }, signal),
    [run, rows, filter, column],
  );
  const bins = (found?.counts || []).map((count, at) => ({ low: found.edges[at], high: found.edges[at + 1], count }));
  const part = ({ low, high }) => `${low} <= ${name(column)} < ${high}`;
  const chosen = parts(filter) || [];
  const rest = [found?.unknown && `${number(found.unknown)} unknown`, found?.infinite && `${number(found.infinite)} infinite`];
  return html`<div class="distribution">
    <label>
      <span>Histogram of </span>
      <select value=${column} onChange=${(event) => change({ of: event.target.value })}>
        ${columns.map((each) => html`<option value=${each} selected=${each === column}>${each}</option>`)}
      </select>
    </label>
    <${Problem} error=${error} />
    ${bins.length
      ? html`<${Histogram}
            bins=${bins}
            height=${48}
            label=${`Histogram of ${column}`}
            chosen=${(bin) => chosen.includes(part(bin))}
            onPick=${(bin) => change({ filter: toggled(filter, part(bin)), rows: null })}
          />
          <div class="ends muted"><span>${number(bins[0].low)}</span><span>${rest.filter(Boolean).join(", ")}</span><span>${number(bins.at(-1).high)}</span></div>`
      : found && html`<p class="muted">${rest.filter(Boolean).join(", ") || "no rows"}</p>`}
  </div>`;
}

const opened = (row) => ({
  at: `${row.step}/${row.group}/${row.sample}`,
  phase: row.phase === "training" ? null : row.phase,
  set: row.validation_set || null,
  branch: null,
  token: null,
});

function Search({ run, rows, filter }) {
  const { params } = view.value;
  const [draft, setDraft] = useState(params.find || "");
  const [state, setState] = useState(null); // {matches, looked, total, next, notes} of the searches so far
  const [busy, setBusy] = useState(false);
  const [error, setError] = useState(null);
  const look = async (text, before) => {
    setBusy(true);
    setError(null);
    try {
      const found = await get("/api/read/search", { run, rows, filter, text, start: before?.next || 0 });
      setState({ ...found, matches: [...(before?.matches || []), ...found.matches] });
    } catch (problem) {
      setError(problem);
    }
    setBusy(false);
  };
  useEffect(() => {
    setState(null);
    if (params.find) look(params.find, null);
  }, [run, filter, params.find]);
  const start = (event) => {
    event.preventDefault();
    if (draft === params.find) look(draft, null);
    else change({ find: draft });
  };
  return html`<form class="search" role="search" onSubmit=${start}>
    <label for="find">Search</label>
    <span class="row tight">
      <input id="find" type="search" value=${draft} placeholder="text, or ids: 5 17" onInput=${(event) => setDraft(event.target.value)} />
      <button disabled=${busy || !draft}>${busy ? "Searching…" : "Search"}</button>
    </span>
    <${Problem} error=${error} />
    ${params.find &&
    state &&
    html`<div class="panel matches">
      <div class="row">
        <b>${number(state.matches.length)} found</b>
        <span class="muted" role="status">looked at ${number(state.looked)} of ${number(state.total)} stored, newest steps first</span>
        <span class="grow"></span>
        ${state.next !== null && html`<button type="button" disabled=${busy} onClick=${() => look(params.find, state)}>Continue</button>`}
        <button type="button" class="quiet" aria-label="Close the search" onClick=${() => change({ find: null })}>✕</button>
      </div>
      ${state.notes.map((note) => html`<div class="warn">${note}</div>`)}
      <div class="matches-list">
        ${state.matches.map(
          ({ row, token, before, text, after }) =>
            html`<button type="button" class="match" onClick=${() => change({ ...opened(row), token: token >= 0 ? token : null, tab: null })}>
              <span class="muted">${row.step}/${row.group}/${row.sample}${row.phase === "training" ? "" : ` ${row.phase}`}</span>
              <span class="mono">${visible(before)}<mark>${visible(text)}</mark>${visible(after)}</span>
            </button>`,
        )}
      </div>
    </div>`}
  </form>`;
}

// Looks whether the run has more rows than are shown.
function useRowsNow(run, shown) {
  const [now, setNow] = useState(null);
  useEffect(() => {
    setNow(null);
    const look = () => {
      if (!document.hidden) get("/api/read/rows", { run }).then((found) => setNow(found.rows), () => {});
    };
    const timer = setInterval(look, NEW_ROWS_PERIOD);
    return () => clearInterval(timer);
  }, [run, shown]);
  return now;
}

function Columns({ kinds, chosen }) {
  const set = (column, on) => {
    const next = Object.keys(kinds).filter((each) => (each === column ? on : chosen.includes(each)));
    change({ columns: joinNames(next) });
  };
  return html`<details class="menu" onKeyDown=${closed}>
    <summary>Columns</summary>
    <div class="panel">
      ${Object.keys(kinds).map(
        (column) =>
          html`<label><input type="checkbox" checked=${chosen.includes(column)} onChange=${(event) => set(column, event.target.checked)} /> ${column}</label>`,
      )}
      <button class="quiet" onClick=${() => change({ columns: null })}>As at first</button>
    </div>
  </details>`;
}

function TableOf({ run, table, filter, rows }) {
  const { params } = view.value;
  const kinds = table.columns;
  // The parts of the reward follow it.
  const ofReward = Object.keys(kinds).filter((column) => column.startsWith("rewards."));
  const ordered = Object.keys(kinds).flatMap((column) => (column === "reward" ? [column, ...ofReward] : ofReward.includes(column) ? [] : [column]));
  const first = ordered.filter((column) => ALWAYS.includes(column) || ofReward.includes(column) || column in table.counts);
  const asked = splitNames(params.columns);
  const chosen = params.columns ? ordered.filter((column) => asked.includes(column)) : first;
  const sort = params.sort || "-"; // the newest first
  const key = JSON.stringify([run, rows, filter, sort]);
  const load = async (offset, count, signal) => (await get("/api/read/page", { run, rows, filter, sort, offset, count }, signal)).rows;
  const [rowAt, error] = usePages(load, key);
  const [at, setAt] = useState(null);
  useEffect(() => setAt(null), [key]);
  const open = (n) => {
    setAt(n);
    const row = rowAt(n);
    if (row) go("read", { ...view.value.params, ...opened(row) });
  };
  const move = (n) => {
    setAt(n);
    const row = rowAt(n);
    if (row && params.at) change(opened(row));
  };
  const columns = useMemo(
    () =>
      chosen.map((column) => ({
        key: column,
        title: TITLES[column] || column.replace("rewards.", ""),
        help: column,
        align: kinds[column] === "number" ? "right" : "",
        width: WIDTHS[column] || Math.max(76, 24 + 8 * (TITLES[column] || column.replace("rewards.", "")).length),
        show: show(column, kinds[column]),
      })),
    [chosen.join(), key],
  );
  const isOpen = (row) => opened(row).at === params.at && opened(row).phase === (params.phase || null) && opened(row).set === (params.set || null);
  return html`<section class="column table-of" aria-label="Trajectories">
    <${Problem} error=${error} />
    ${table.matching
      ? html`<${Grid}
          label="Trajectories"
          count=${table.matching}
          columns=${columns}
          rowAt=${rowAt}
          at=${at}
          onMove=${move}
          onOpen=${open}
          sort=${sort}
          onSort=${(next) => change({ sort: next || null })}
          rowClass=${(row) => (isOpen(row) ? "open" : "")}
        />`
      : html`<${Empty}>${table.rows ? "No trajectory matches the filter." : "No trajectory was recorded yet."}<//>`}
    <div class="row tight foot">
      <span class="muted">${params.sort ? "" : "Newest first. "}Arrow keys move, Enter opens.</span>
      <span class="grow"></span>
      <${Columns} kinds=${kinds} chosen=${chosen} />
    </div>
  </section>`;
}

export default function Read() {
  const { params } = view.value;
  const { run } = params;
  const filter = params.filter || "";
  const rows = params.rows || null; // a table of so many rows stays as it is while the run adds some
  const [state, setState] = useState({ table: null, error: null });
  useEffect(() => {
    if (!run) return undefined;
    const control = new AbortController();
    get("/api/read/table", { run, rows, filter }, control.signal).then(
      // A wrong filter leaves the rows of the one before.
      (table) =>
        setState((old) => {
          const left = table.problem ? (old.run === run ? old.filter : "") : filter;
          return { table: table.problem && old.run === run ? { ...old.table, problem: table.problem } : table, error: null, run, filter: left, rows };
        }),
      (error) => control.signal.aborted || setState((old) => ({ ...old, table: old.run === run ? old.table : null, error })),
    );
    return () => control.abort();
  }, [run, rows, filter]);
  const { table, error } = state;
  const now = useRowsNow(run, table?.rows);
  if (!run) return html`<main><${Empty}>Choose a run in <a href="/runs">Runs</a>.<//></main>`;
  if (!table) return html`<main>${error ? html`<${Problem} error=${error} />` : html`<${Loading} />`}</main>`;
  const shown = rows || table.rows;
  const numbers = Object.keys(table.columns).filter((column) => table.columns[column] === "number");
  return html`<main class=${params.at ? "read with-one" : "read"}>
    <div class="row tight">
      <h1>${run}</h1>
      <span class="muted" role="status">${table.matching === table.rows ? "" : `${number(table.matching)} of `}${number(table.rows)} trajectories</span>
      ${now > table.rows && html`<button onClick=${() => change({ rows: now })}>Show ${number(now - table.rows)} new</button>`}
    </div>
    ${table.notes.map((note) => html`<div class="notice">${note}</div>`)}
    <${Problem} error=${error} />
    <div class="controls">
      <div class="column">
        <${FilterBox} text=${filter} problem=${table.problem} remarks=${table.remarks} kinds=${table.columns} />
        <div class="chip-rows"><${Chips} counts=${table.counts} filter=${filter} /></div>
      </div>
      <${Distribution} run=${run} rows=${shown} filter=${state.filter} columns=${numbers} />
      <${Search} run=${run} rows=${shown} filter=${state.filter} />
    </div>
    <${TableOf} run=${run} table=${table} filter=${state.filter} rows=${shown} />
    ${params.at && html`<${Trajectory} run=${run} rows=${shown} params=${params} source=${table.source} />`}
  </main>`;
}
