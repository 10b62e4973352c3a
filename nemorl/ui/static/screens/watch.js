// A run as it goes: the head, alarms, the pipeline of stages, then charts, lanes, processes and logs.

import { html, useEffect, useMemo, useRef, useState } from "../lib/preact.js";
import { arrays, follow, get, text } from "../lib/api.js";
import { Lines, PALETTE } from "../lib/chart.js";
import { address, change, go, view } from "../lib/view.js";
import { visible } from "../lib/visible.js";
import { Empty, Loading, Problem, Table, Tabs, bytes, number, percent, seconds, useLoaded } from "../lib/widgets.js";
import { Control, LIVING } from "./control.js";

const TABS = { charts: "Charts", lanes: "Last steps", processes: "Processes", logs: "Logs" };
const AXES = { step: "step", tokens: "tokens", time: "seconds" };
const SMOOTHING = { 0: "none", 0.6: "some", 0.9: "strong", 0.98: "very strong" };

// Seconds since the epoch, four times a second, as the server's clock shows them.
function useNow(serverNow) {
  const [now, setNow] = useState(serverNow);
  const offset = useRef(0);
  useEffect(() => {
    offset.current = serverNow - Date.now() / 1000;
  }, [serverNow]);
  useEffect(() => {
    const timer = setInterval(() => setNow(Date.now() / 1000 + offset.current), 250);
    return () => clearInterval(timer);
  }, []);
  return now;
}

const Fact = ({ name, children, title }) =>
  html`<div class="fact" title=${title}><span class="muted">${name}</span><b>${children}</b></div>`;

// Links to the fields of the config that move a value.
const Fields = ({ run, names }) =>
  names.length > 0 &&
  html`<span class="fields">
    ${names.map((field) => html`<a href=${address("compose", { file: `${run}/config.yaml`, find: field })}><code>${field}</code></a>`)}
  </span>`;

function Head({ head }) {
  const done = head.total_steps ? head.step / head.total_steps : 0;
  return html`<section class="panel head">
    <div class="row">
      <h1>${head.run}</h1>
      <span class=${`tag ${head.state}`} data-state=${head.state}>${head.state}</span>
      <span class="muted">${[head.algorithm, head.model, head.device].filter(Boolean).join(" · ")}</span>
      <span class="grow"></span>
      <${Control} head=${head} />
    </div>
    <div class="row facts">
      <${Fact} name="step">${number(head.step)}${head.total_steps ? ` / ${number(head.total_steps)}` : ""}<//>
      ${head.total_steps > 0 && html`<progress max="1" value=${done} aria-label="Steps">${percent(done)}</progress>`}
      ${head.eta !== null && html`<${Fact} name="left" title="median of the last 20 steps × steps left">${seconds(head.eta)}<//>`}
      ${head.step_seconds !== null && html`<${Fact} name="a step">${seconds(head.step_seconds)}<//>`}
      <${Fact} name="checkpoint">
        ${head.checkpoint_step === null ? "none" : `step ${number(head.checkpoint_step)}, ${seconds(head.checkpoint_age)} old`}
      <//>
      <${Fact} name="disk left">${bytes(head.free_bytes)}<//>
    </div>
    ${head.last_words.length > 0 && html`<details open><summary>Last words of the driver</summary><pre>${visible(head.last_words.join("\n"))}</pre></details>`}
  </section>`;
}

function Alarms({ run, alarms, advice }) {
  if (!alarms.length && !advice.length) return null;
  return html`<section aria-label="Alarms" class="column">
    ${alarms.map(
      (alarm) =>
        html`<div class=${alarm.is_fatal ? "problem alarm" : "notice alarm"} role="alert" key=${alarm.title}>
          <div><b>${alarm.title}</b>: <span class="words">${visible(alarm.value)}</span>${alarm.limit && html` <span class="muted">(limit: ${alarm.limit})</span>`}</div>
          <div class="row">
            <${Fields} run=${run} names=${alarm.fields} />
            ${alarm.filter && html`<a href=${address("read", { run, filter: alarm.filter })}>the trajectories</a>`}
          </div>
        </div>`,
    )}
    ${advice.map(
      ({ text: words, fields }) =>
        html`<div class="advice" key=${words}>${words} <${Fields} run=${run} names=${fields} /></div>`,
    )}
  </section>`;
}

function Stage({ stage, now }) {
  const { name, total, done, unit, deadline } = stage;
  const open = stage.is_open ? Math.max(0, now - stage.since) : null;
  const progress = total ? `${number(done)} / ${number(total)} ${unit}` : done ? `${number(done)} ${unit}` : "";
  return html`<li class=${`stage ${stage.is_open ? "open" : ""} ${stage.is_bottleneck ? "bottleneck" : ""}`} data-stage=${name}>
    <div class="row"><b>${name}</b>${stage.is_bottleneck && html`<span class="tag warn">bottleneck</span>`}</div>
    <div class="share" title=${stage.share === null ? "" : `${percent(stage.share)} of a step`}>
      <i style=${{ width: `${100 * Math.min(1, stage.share || 0)}%` }}></i>
    </div>
    <div class="muted">
      ${stage.seconds === null ? "not measured yet" : `${seconds(stage.seconds)}${stage.share === null ? "" : `, ${percent(stage.share)}`}`}
    </div>
    <div class="now" role="status">
      ${stage.is_open &&
      [seconds(open), progress, stage.tokens_per_second && `${number(Math.round(stage.tokens_per_second))} tokens/s`]
        .filter(Boolean)
        .join(" · ")}
      ${stage.is_open && total ? html`<progress max=${total} value=${done}></progress>` : ""}
      ${stage.is_open && deadline && open > deadline / 2 ? html`<span class="bad">deadline ${seconds(deadline)}</span>` : ""}
    </div>
  </li>`;
}

function Pipeline({ run, stages, critical, now }) {
  const slowest = stages.find((stage) => stage.is_bottleneck);
  const shares = Object.entries(critical).filter(([, share]) => share > 0.005);
  if (!stages.length) return null;
  return html`<section class="panel pipeline" aria-label="Stages of a step">
    <div class="row">
      <h2>Stages</h2>
      <span class="muted">mean of the last 20 steps</span>
      <span class="grow"></span>
      ${slowest?.fields.length > 0 && html`<span class="muted">${slowest.name} depends on</span><${Fields} run=${run} names=${slowest.fields} />`}
    </div>
    <ol class="stages">
      ${stages.map((stage) => html`<${Stage} key=${stage.name} stage=${stage} now=${now} />`)}
    </ol>
    ${shares.length > 0 &&
    html`<div class="critical" aria-label="Critical path">
      <span class="muted">the driver waits for</span>
      <div class="bar-of-shares">
        ${shares.map(
          ([name, share], at) =>
            html`<span
              style=${{ flexGrow: share, background: PALETTE[at % PALETTE.length] }}
              title=${`${name}: ${percent(share)} of a step`}
              >${share > 0.08 ? `${name} ${percent(share)}` : ""}</span
            >`,
        )}
      </div>
    </div>`}
  </section>`;
}

// Names of lines without what all of the plot begin with.
function shortNames(names) {
  const first = (name) => (name.includes("/") ? name.slice(0, name.indexOf("/") + 1) : "");
  const shared = names.every((name) => first(name) === first(names[0])) ? first(names[0]).length : 0;
  return names.map((name) => name.slice(shared).replaceAll("_", " "));
}

// One plot, loaded when it comes into sight and again with new steps.
function Plot({ run, group, numSteps, options, range, setRange }) {
  const box = useRef(null);
  const [isSeen, setSeen] = useState(false);
  const [series, setSeries] = useState(null);
  const [error, setError] = useState(null);
  useEffect(() => {
    const watch = new IntersectionObserver(([entry]) => setSeen(entry.isIntersecting), { rootMargin: "200px" });
    watch.observe(box.current);
    return () => watch.disconnect();
  }, []);
  const { axis, smoothing } = options;
  useEffect(() => {
    if (!isSeen) return undefined;
    const control = new AbortController();
    const pixels = Math.round(box.current.clientWidth) || 600;
    const [low, high] = range || [];
    const asked = { run, names: JSON.stringify(group.names), pixels, axis, smoothing, low, high };
    arrays("/api/watch/series", asked, control.signal).then(
      ({ arrays: found }) => {
        const [lines, titles] = [[], shortNames(group.names)];
        group.names.forEach((name, at) => {
          if (!found[`x${at}`].length) return;
          const color = PALETTE[at % PALETTE.length];
          const points = name.startsWith("validation/") || undefined;
          const raw = { name: titles[at], x: found[`x${at}`], y: found[`y${at}`], color, points };
          if (Number(smoothing)) {
            lines.push({ ...raw, name: `${raw.name} (raw)`, raw: true });
            lines.push({ ...raw, x: found[`t${at}`], y: found[`s${at}`] });
          } else lines.push(raw);
        });
        setSeries(lines);
        setError(null);
      },
      (problem) => control.signal.aborted || setError(problem),
    );
    return () => control.abort();
  }, [isSeen, run, group.names.join(), numSteps, axis, smoothing, range?.[0], range?.[1]]);
  const pick = async (at) => {
    const { step } = await get("/api/watch/step", { run, axis, at });
    if (step !== null) go("read", { run, filter: `step == ${step}` });
  };
  return html`<figure class="panel plot" ref=${box} data-plot=${group.title}>
    <figcaption><h3>${group.title}</h3></figcaption>
    <${Problem} error=${error} />
    ${series === null
      ? html`<div class="placeholder"></div>`
      : series.length
        ? html`<${Lines}
            series=${series}
            xLabel=${AXES[axis]}
            label=${group.title}
            onPick=${pick}
            onZoom=${(low, high) => setRange(low === null ? null : [low, high])}
          />`
        : html`<${Empty}>No finite values.<//>`}
  </figure>`;
}

function Charts({ run, state }) {
  const { params } = view.value;
  const options = { axis: params.axis || "step", smoothing: params.smoothing || "0" };
  const range = params.range ? params.range.split("~").map(Number) : null;
  const setRange = (next) => change({ range: next && next.map((at) => Number(at.toPrecision(6))).join("~") });
  const find = (params.find || "").toLowerCase();
  const groups = state.groups.filter(
    ({ title, names }) => !find || title.toLowerCase().includes(find) || names.some((name) => name.includes(find)),
  );
  if (!state.num_steps) return html`<${Empty}>No step has ended${LIVING.has(state.head.state) ? " yet" : ""}.<//>`;
  return html`<div class="column">
    <div class="row">
      <label>Find <input type="search" value=${params.find || ""} onInput=${(e) => change({ find: e.target.value })} /></label>
      <label>
        Axis
        <select value=${options.axis} onChange=${(e) => change({ axis: e.target.value, range: null })}>
          ${Object.entries(AXES).map(([axis, title]) => html`<option value=${axis}>${title}</option>`)}
        </select>
      </label>
      <label>
        Smoothing
        <select value=${options.smoothing} onChange=${(e) => change({ smoothing: e.target.value })}>
          ${Object.entries(SMOOTHING).map(([weight, title]) => html`<option value=${weight}>${title}</option>`)}
        </select>
      </label>
      ${range && html`<button onClick=${() => setRange(null)}>Whole range</button>`}
      <span class="muted">Drag to zoom, double-click for the whole range, click to read a step.</span>
    </div>
    <div class="plots">
      ${groups.map(
        (group) =>
          html`<${Plot}
            key=${group.title}
            run=${run}
            group=${group}
            numSteps=${state.num_steps}
            options=${options}
            range=${range}
            setRange=${setRange}
          />`,
      )}
    </div>
  </div>`;
}

// What was open and what had work in the last steps.
function Lanes({ run, numSteps }) {
  const [found, error, loading] = useLoaded((signal) => get("/api/watch/lanes", { run }, signal), [run, numSteps]);
  const download = async () => {
    const link = document.createElement("a");
    link.href = URL.createObjectURL(new Blob([await text("/api/watch/timeline", { run })], { type: "application/json" }));
    link.download = "timeline.json";
    link.click();
    URL.revokeObjectURL(link.href);
  };
  if (error) return html`<${Problem} error=${error} />`;
  if (!found) return html`<${Loading} />`;
  if (!found.steps.length) return html`<${Empty}>${loading ? "Loading…" : "No step has ended."}<//>`;
  const begin = found.steps[0][1];
  const ends = [...found.steps, ...found.tracks.flatMap(({ spans }) => spans)].map(([, start, length]) => start + length);
  const width = Math.max(...ends) - begin; // what follows the last step is drawn, too
  const place = ([, from, long]) => {
    const left = Math.max(0, (from - begin) / width);
    return { left: `${100 * left}%`, width: `${100 * Math.max(0.0008, Math.min(1, (from + long - begin) / width) - left)}%` };
  };
  const colors = new Map();
  const color = (name) => {
    if (!colors.has(name)) colors.set(name, PALETTE[colors.size % PALETTE.length]);
    return colors.get(name);
  };
  const lane = (name, spans) =>
    html`<div class="lane" key=${name}>
      <span class="muted">${name}</span>
      <div>
        ${spans.map(
          (span) =>
            html`<i style=${{ ...place(span), background: color(span[0]) }} title=${`${span[0]}: ${seconds(span[2])}`}></i>`,
        )}
      </div>
    </div>`;
  return html`<div class="column">
    <div class="row">
      <span class="muted">${found.steps.length === 1 ? "the last step" : `the last ${found.steps.length} steps`}, ${seconds(width)}</span>
      <span class="grow"></span>
      <button onClick=${download}>Download timeline.json</button>
      <a href="https://ui.perfetto.dev" target="_blank" rel="noreferrer">open it in Perfetto</a>
    </div>
    <div class="lanes">
      <div class="lane steps">
        <span></span>
        <div>${found.steps.map((step) => html`<b style=${place(step)}>${step[0]}</b>`)}</div>
      </div>
      ${found.tracks.map(({ name, spans }) => lane(name, spans))}
    </div>
  </div>`;
}

function Processes({ workers, engines }) {
  if (!workers.length) return html`<${Empty}>No process runs.<//>`;
  const health = ({ health: words }) => html`<span class=${/gone|lost|stopped/.test(words) ? "bad" : ""}>${words}</span>`;
  const log = ({ log: source }) => html`<a href=${address("watch", { ...view.value.params, tab: "logs", source })}>log</a>`;
  const columns = [
    { key: "name", title: "process", value: (row) => row.name },
    { key: "node", title: "node", value: (row) => row.node },
    { key: "pid", title: "pid", value: (row) => row.pid, align: "right" },
    { key: "health", title: "state", value: (row) => row.health, show: health },
    { key: "log", title: "", value: () => "", show: log },
  ];
  const ofEngines = [
    { key: "name", title: "engine", value: (row) => row.name },
    { key: "state", title: "state", value: (row) => row.state, show: (row) => html`${row.state} <span class="muted">${row.cause}</span>` },
    { key: "version", title: "weights", value: (row) => row.version, align: "right" },
    { key: "running", title: "requests", value: (row) => row.running, align: "right" },
    { key: "waiting", title: "waiting", value: (row) => row.waiting, align: "right" },
    {
      key: "idle",
      title: "last step",
      value: (row) => row.seconds_since_step,
      show: (row) => (row.seconds_since_step === null ? "" : `${seconds(row.seconds_since_step)} ago`),
      align: "right",
    },
  ];
  return html`<div class="column">
    ${engines.length > 0 && html`<${Table} label="Engines" columns=${ofEngines} rows=${engines} rowKey=${(row) => row.name} />`}
    <${Table} label="Processes" columns=${columns} rows=${workers} rowKey=${(row) => row.name} />
  </div>`;
}

const clock = (time) => (time ? new Date(time * 1000).toLocaleTimeString("en-GB") : "");

function Logs({ run, mark }) {
  const { params } = view.value;
  const { source = "", grep = "", level = "" } = params;
  const [found, error] = useLoaded((signal) => get("/api/watch/logs", { run, source, find: grep, level }, signal), [
    run, source, grep, level, mark,
  ]);
  const end = useRef(null);
  useEffect(() => {
    if (end.current) end.current.scrollTop = end.current.scrollHeight;
  }, [found]);
  return html`<div class="column">
    <div class="row">
      <label>
        Process
        <select value=${source} onChange=${(e) => change({ source: e.target.value })}>
          <option value="">all</option>
          ${(found?.sources || []).map((name) => html`<option value=${name}>${name}</option>`)}
        </select>
      </label>
      <label>
        From
        <select value=${level} onChange=${(e) => change({ level: e.target.value })}>
          ${["", "INFO", "WARNING", "ERROR"].map((name) => html`<option value=${name}>${name || "all lines"}</option>`)}
        </select>
      </label>
      <label>Find <input type="search" value=${grep} onInput=${(e) => change({ grep: e.target.value })} /></label>
      ${found?.left_out.length > 0 && html`<span class="muted">Only the end of ${found.left_out.join(", ")}</span>`}
    </div>
    <${Problem} error=${error} />
    ${found &&
    (found.lines.length
      ? html`<div class="log" ref=${end} tabindex="0" aria-label="Lines of the logs">
          ${found.lines.map(
            (line, at) =>
              html`<div key=${at} class=${line.level.toLowerCase()}>
                <span class="muted">${clock(line.time)}</span> <span class="source">${line.source}</span> ${visible(line.text)}
              </div>`,
          )}
        </div>`
      : html`<${Empty}>No such line.<//>`)}
  </div>`;
}

export default function Watch() {
  const { params } = view.value;
  const { run } = params;
  const [state, setState] = useState(null);
  const [error, setError] = useState(null);
  useEffect(() => {
    setState(null);
    setError(null);
    return run ? follow("/api/watch/follow", { run }, setState, setError) : undefined;
  }, [run]);
  const now = useNow(state?.head.now || Date.now() / 1000);
  const tab = params.tab in TABS ? params.tab : "charts";
  const problems = useMemo(() => (state ? state.problems : []), [state]);
  if (!run) return html`<main><${Empty}>Choose a run in the <a href="/runs">list</a>.<//></main>`;
  if (!state) return html`<main>${error ? html`<${Problem} error=${error} />` : html`<${Loading} />`}</main>`;
  return html`<main class="watch">
    <${Problem} error=${error} />
    <${Head} head=${state.head} />
    ${problems.map((words) => html`<div class="notice" key=${words}>${words}</div>`)}
    <${Alarms} run=${run} alarms=${state.alarms} advice=${state.advice} />
    <${Pipeline} run=${run} stages=${state.pipeline} critical=${state.critical} now=${now} />
    <div class="row">
      <${Tabs} of=${TABS} at=${tab} onChange=${(next) => change({ tab: next })} label="Details" />
      <span class="grow"></span>
      <a href=${address("read", { run })}>Read its trajectories</a>
    </div>
    ${tab === "charts" && html`<${Charts} run=${run} state=${state} />`}
    ${tab === "lanes" && html`<${Lanes} run=${run} numSteps=${state.num_steps} />`}
    ${tab === "processes" && html`<${Processes} workers=${state.workers} engines=${state.engines} />`}
    ${tab === "logs" && html`<${Logs} run=${run} mark=${state.head.now} />`}
  </main>`;
}
