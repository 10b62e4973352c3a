// One trajectory: its rewards, its turns token by token, its group, and its task over the steps.

import { html, useEffect, useMemo, useRef, useState } from "../lib/preact.js";
import { arrays, get } from "../lib/api.js";
import { Lines } from "../lib/chart.js";
import { change } from "../lib/view.js";
import { visible } from "../lib/visible.js";
import { Loading, Problem, Tabs, number, seconds, useLoaded } from "../lib/widgets.js";

const ANSWERS = 20; // of a task that are loaded at once
// What tokens are colored by: title, and how a value becomes a shade. Those around a center have two colors.
const QUANTITIES = {
  logprob: { title: "engine logprob", shade: (x) => -x },
  trainer_logprob: { title: "trainer logprob", shade: (x) => -x },
  gap: { title: "logprob gap (trainer - engine)", center: 0 },
  ratio: { title: "ratio exp(gap)", center: 1 },
  advantage: { title: "advantage", center: 0 },
  value: { title: "value", center: 0 },
  return: { title: "return", center: 0 },
  entropy: { title: "entropy", shade: (x) => x },
  reference_logprob: { title: "reference logprob", shade: (x) => -x },
  version: { title: "version of the weights", shade: (x) => x, spread: true },
};
const SHADES = 9;
const MAX_POINTS = 4000; // of the chart by position

// Of [T] values the class of each token, and what the strongest shade stands for. The 2 % that are largest share it.
function shades(quantity, values) {
  const { center, shade, spread } = QUANTITIES[quantity];
  const known = (x) => Number.isFinite(x) && !(quantity === "version" && x < 0);
  const strength = center === undefined ? shade : (x) => x - center;
  const sizes = Float64Array.from(Array.from(values).filter(known), (x) => Math.abs(strength(x))).sort();
  const low = spread && sizes.length ? sizes[0] : 0;
  const high = sizes.length ? sizes[Math.min(sizes.length - 1, Math.floor(0.98 * sizes.length))] : 0;
  const classes = Array.from(values, (x) => {
    if (!known(x)) return "";
    const share = high > low ? Math.min(1, (Math.abs(strength(x)) - low) / (high - low)) : 0;
    const level = Math.round(share * SHADES);
    const kind = center === undefined ? "s" : strength(x) < 0 ? "n" : "p";
    return level ? `${kind}${level}` : "";
  });
  return { classes, low, high };
}

// Points of a chart: all known values, or of each of many parts the least and the most.
function thinned(values, known) {
  const part = Math.max(1, Math.ceil((2 * values.length) / MAX_POINTS));
  const [x, y] = [[], []];
  for (let start = 0; start < values.length; start += part) {
    let [least, most] = [-1, -1];
    for (let at = start; at < Math.min(start + part, values.length); at += 1) {
      if (!known(values[at])) continue;
      if (least < 0 || values[at] < values[least]) least = at;
      if (most < 0 || values[at] > values[most]) most = at;
    }
    for (const at of least === most ? [least] : [Math.min(least, most), Math.max(least, most)]) {
      x.push(at < 0 ? start : at);
      y.push(at < 0 ? null : values[at]);
    }
  }
  return { x, y };
}

function Legend({ quantity, low, high }) {
  const { center, shade } = QUANTITIES[quantity];
  const bar = (kind, levels) => levels.map((level) => html`<i class=${level ? `${kind}${level}` : ""}></i>`);
  const levels = Array.from({ length: SHADES + 1 }, (_, level) => level);
  const sign = shade && shade(1) < 0 ? -1 : 1;
  return html`<span class="legend" aria-hidden="true">
    <span class="muted">${center === undefined ? number(sign * low || 0, 3) : number(center - high, 3)}</span>
    ${center === undefined ? bar("s", levels) : [...bar("n", [...levels].reverse()), ...bar("p", levels.slice(1))]}
    <span class="muted">${center === undefined ? number(sign * high, 3) : number(center + high, 3)}</span>
  </span>`;
}

// The tokens of one segment; elements are made without a component each, since there may be 100,000.
function TokenText({ data, start, end, asIds, whitespace, into }) {
  const box = useRef(null);
  useEffect(() => {
    const { texts, special } = data.facts;
    const { tokens, mask, trained } = data.arrays;
    const marked = new Set(special);
    const made = document.createDocumentFragment();
    for (let at = start; at < end; at += 1) {
      const span = document.createElement("span");
      const id = tokens[at];
      span.textContent = asIds || !texts ? `${id} ` : texts[at] === "" ? "⋯" : visible(texts[at], whitespace);
      const dim = !mask[at] || (trained && !trained[at]);
      span.baseClass = `t${dim ? " dim" : ""}${marked.has(id) ? " special" : ""}${texts?.[at] === "" && !asIds ? " rest" : ""}`;
      span.className = span.baseClass;
      span.place = at;
      into[at] = span;
      made.append(span);
    }
    box.current.replaceChildren(made);
  }, [data, start, end, asIds, whitespace, into]);
  return html`<div class="tokens mono" ref=${box}></div>`; // dir="auto" would look through all of them for each
}

function Tokens({ data, params }) {
  const { facts, arrays: of } = data;
  const { segments, texts } = facts;
  const count = of.tokens.length;
  const there = Object.keys(QUANTITIES).filter((name) => name in of);
  const quantity = there.includes(params.color) ? params.color : params.color === "none" ? "" : "logprob";
  const asIds = params.as === "ids";
  const whitespace = params.spaces === "1";
  const [hover, setHover] = useState(null);
  const at = params.token !== undefined && Number(params.token) < count ? Number(params.token) : null;
  const spans = useMemo(() => new Array(count), [data, asIds, whitespace]);
  const shaded = useMemo(() => (quantity ? shades(quantity, of[quantity]) : null), [data, quantity]);
  const box = useRef(null);
  useEffect(() => {
    spans.forEach((span, place) => {
      span.className = shaded?.classes[place] ? `${span.baseClass} ${shaded.classes[place]}` : span.baseClass;
    });
  }, [spans, shaded]);
  useEffect(() => {
    const span = at === null ? null : spans[at];
    span?.classList.add("here");
    span?.scrollIntoView({ block: "nearest" });
    return () => span?.classList.remove("here");
  }, [spans, shaded, at]);
  const onKey = (event) => {
    const move = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: 10, ArrowUp: -10, Home: -count, End: count }[event.key];
    if (!move || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    change({ token: Math.max(0, Math.min(count - 1, (at ?? -1) + move)) });
  };
  const series = useMemo(
    () =>
      quantity
        ? [{ name: QUANTITIES[quantity].title, ...thinned(of[quantity], (x) => Number.isFinite(x) && !(quantity === "version" && x < 0)) }]
        : [],
    [data, quantity],
  );
  const shown = hover ?? at;
  return html`<div class="column">
    <div class="row tight">
      <label>
        <span>Color by </span>
        <select value=${quantity} onChange=${(event) => change({ color: event.target.value || "none" })}>
          <option value="" selected=${!quantity}>nothing</option>
          ${there.map((name) => html`<option value=${name} selected=${name === quantity}>${QUANTITIES[name].title}</option>`)}
        </select>
      </label>
      ${shaded && html`<${Legend} quantity=${quantity} ...${shaded} />`}
      <label><input type="checkbox" checked=${asIds} onChange=${(event) => change({ as: event.target.checked ? "ids" : null })} disabled=${!texts} /> ids</label>
      <label><input type="checkbox" checked=${whitespace} onChange=${(event) => change({ spaces: event.target.checked ? "1" : null })} disabled=${!texts || asIds} /> whitespace</label>
      <span class="grow"></span>
      <span class="muted">${number(count)} tokens; masked ones are pale</span>
    </div>
    <div class="reader">
      <div
        class="text"
        ref=${box}
        tabindex="0"
        role="group"
        aria-label="Tokens; arrow keys choose one"
        onKeyDown=${onKey}
        onMouseOver=${(event) => setHover(event.target.place ?? null)}
        onMouseLeave=${() => setHover(null)}
        onClick=${(event) => event.target.place !== undefined && change({ token: event.target.place })}
      >
        ${segments.map(
          (segment, n) =>
            html`<section key=${n} class=${`segment ${segment.role}`}>
              <h3>
                ${segment.role}${segment.role === "policy" ? ` · turn ${segments.slice(0, n + 1).filter((each) => each.role === "policy").length}` : ""}
                <span class="muted">
                  ${` ${number(segment.end - segment.start)} tokens`}${segment.stop && ` · ended by ${segment.stop}`}${segment.seconds && ` · ${seconds(segment.seconds)}`}
                  ${segment.flags.length > 0 && ` · flagged ${segment.flags.join(", ")}`}
                  ${Object.keys(segment.rewards).length > 0 &&
                  ` · reward ${number(segment.reward)} (${Object.entries(segment.rewards).map(([part, value]) => `${part} ${number(value)}`).join(", ")})`}
                </span>
              </h3>
              <${TokenText} data=${data} start=${segment.start} end=${segment.end} asIds=${asIds} whitespace=${whitespace} into=${spans} />
            </section>`,
        )}
      </div>
      <aside class="panel about" aria-live="polite" aria-label="The token">
        ${shown === null ? html`<p class="muted">Point at a token, or choose one with the arrow keys.</p>` : html`<${About} data=${data} at=${shown} />`}
      </aside>
    </div>
    ${series.length > 0 &&
    html`<${Lines} series=${series} height=${130} xLabel="position" label=${`${QUANTITIES[quantity].title} by position`} onPick=${(place) => change({ token: place })} />`}
  </div>`;
}

// All that is known of a token.
function About({ data, at }) {
  const { facts, arrays: of } = data;
  const rows = [
    ["position", number(at)],
    ["id", String(of.tokens[at])],
    ["may train", of.mask[at] ? "yes" : "no"],
    ...(of.trained ? [["trained", of.trained[at] ? "yes" : "no"]] : []),
    ...Object.entries(QUANTITIES)
      .filter(([name]) => name in of && !(name === "version" && of.version[at] < 0))
      .map(([name, { title }]) => [title, Number.isNaN(of[name][at]) ? "unknown" : number(of[name][at], 6)]),
  ];
  return html`<div class="mono token-text">${facts.texts ? visible(facts.texts[at], true) || "part of the character before" : `id ${of.tokens[at]}`}</div>
    <dl>${rows.map(([title, value]) => html`<dt>${title}</dt><dd data-about=${title}>${value}</dd>`)}</dl>`;
}

function Rewards({ rewards, row }) {
  if (!rewards.length) return null;
  const sum = rewards.reduce((total, { product }) => total + (product ?? NaN), 0);
  const rest = row.reward - sum;
  return html`<table class="rewards" aria-label="Rewards">
    <tbody>
      ${rewards.map(
        ({ name, value, weight, product }) =>
          html`<tr><th>${name}</th><td>${number(value)}</td><td class="muted">× ${weight === null ? "unknown" : number(weight)}</td><td>${product === null ? "" : `= ${number(product)}`}</td></tr>`,
      )}
      ${Math.abs(rest) > 1e-5 && html`<tr><th>other</th><td></td><td></td><td>${number(rest)}</td></tr>`}
      <tr class="sum"><th>reward</th><td></td><td></td><td>${number(row.reward)}</td></tr>
    </tbody>
  </table>`;
}

const known = (value) => value !== null && value !== undefined && value !== "NaN";

function Answer({ answer, here, onOpen }) {
  const { row, text, problem } = answer;
  const parts = Object.entries(row).filter(([column, value]) => column.startsWith("rewards.") && known(value));
  return html`<article class=${`panel answer ${here ? "here" : ""}`}>
    <header class="row tight">
      <button class="link" onClick=${() => onOpen(row)} aria-current=${here ? "true" : undefined}>step ${row.step} · sample ${row.sample}</button>
      <b>${number(row.reward)}</b>
      ${known(row.advantage) && html`<span class=${row.advantage < 0 ? "bad" : "good"}>advantage ${number(row.advantage)}</span>`}
      <span class="muted">${row.stop} · ${number(row.sampled)} tokens${row.player && ` · ${row.player}`}${row.fork ? ` · fork ${row.fork}` : ""}</span>
    </header>
    ${parts.length > 1 && html`<div class="muted">${parts.map(([column, value]) => `${column.slice(8)} ${number(value)}`).join(" · ")}</div>`}
    ${text === null ? html`<p class="muted">${problem}</p>` : html`<pre dir="auto">${visible(text)}</pre>`}
  </article>`;
}

const place = (row) => ({ at: `${row.step}/${row.group}/${row.sample}`, phase: row.phase === "training" ? null : row.phase, set: row.validation_set || null, branch: null, token: null });
const open = (row) => change({ ...place(row), tab: null });

function Prompt({ answers }) {
  const prompt = answers.find((answer) => answer.prompt)?.prompt;
  return prompt ? html`<details open=${prompt.length < 400}><summary>Prompt</summary><pre class="prompt" dir="auto">${visible(prompt)}</pre></details>` : null;
}

function Group({ query, of }) {
  const [found, error] = useLoaded((signal) => get("/api/read/group", query, signal), [JSON.stringify(query)]);
  if (error) return html`<${Problem} error=${error} />`;
  if (!found) return html`<${Loading} />`;
  const rewards = found.answers.map(({ row }) => row.reward);
  const spread = rewards.every((reward) => reward === rewards[0]) ? "all rewards are equal: nothing is learned from it" : "";
  return html`<div class="column">
    <div class="row tight"><b>${number(found.count)} ${found.count === 1 ? "answer" : "answers"}</b><span class="warn">${rewards.length > 1 && spread}</span></div>
    <${Prompt} answers=${found.answers} />
    <div class="answers side">
      ${found.answers.map((answer) => html`<${Answer} key=${answer.row.row} answer=${answer} here=${answer.row.row === of.row} onOpen=${open} />`)}
    </div>
  </div>`;
}

function TaskOverSteps({ query, of, params }) {
  const [count, setCount] = useState(ANSWERS);
  const stored = params.unstored !== "1";
  const each = params.every === "1";
  const asked = { run: query.run, rows: query.rows, task: of.task, phase: of.phase, set: of.validation_set, count, stored: stored ? 1 : 0, each: each ? 1 : 0 };
  const [found, error] = useLoaded((signal) => get("/api/read/task", asked, signal), [JSON.stringify(asked)]);
  const series = useMemo(() => (found ? [{ name: "mean reward", x: found.trend.steps, y: found.trend.rewards, points: true }] : []), [found]);
  if (error) return html`<${Problem} error=${error} />`;
  if (!found) return html`<${Loading} />`;
  return html`<div class="column">
    <div class="row tight">
      <b>Task ${of.task}</b>
      <span class="muted">${found.trend.steps.length === 1 ? "1 step" : `${number(found.trend.steps.length)} steps`}</span>
      <label><input type="checkbox" checked=${stored} onChange=${(event) => change({ unstored: event.target.checked ? null : "1" })} /> only stored answers</label>
      <label><input type="checkbox" checked=${each} onChange=${(event) => change({ every: event.target.checked ? "1" : null })} /> every sample of a step</label>
    </div>
    <${Lines} series=${series} height=${120} xLabel="step" label="Mean reward of the task by step" />
    <${Prompt} answers=${found.answers} />
    <div class="answers">
      ${found.answers.map((answer) => html`<${Answer} key=${answer.row.row} answer=${answer} here=${answer.row.row === of.row} onOpen=${open} />`)}
    </div>
    ${count < found.count && html`<button onClick=${() => setCount(Math.min(200, count + ANSWERS))} disabled=${count >= 200}>Show more of ${number(found.count)}</button>`}
  </div>`;
}

function Conversation({ line }) {
  const text = (title, content) => (content === undefined || content === null ? null : html`<section class="segment"><h3>${title}</h3><pre dir="auto">${visible(String(content))}</pre></section>`);
  return html`<div class="column text">${text("prompt", line.prompt)}${text("completion", line.completion)}${text("expected answer", line.answer)}${text("error", line.error)}</div>`;
}

// The trajectory that the parameters of the page name.
export function Trajectory({ run, rows, params, source }) {
  const [step, group, sample] = params.at.split("/");
  const query = { run, rows, step, group, sample, phase: params.phase, set: params.set };
  const key = JSON.stringify([query, params.branch]);
  const [data, error, loading] = useLoaded((signal) => arrays("/api/read/trajectory", { ...query, branch: params.branch }, signal), [key]);
  const tab = params.tab || "tokens";
  const close = () => change({ at: null, phase: null, set: null, branch: null, token: null, tab: null });
  const facts = data?.facts;
  const row = facts?.row;
  return html`<section class=${`column one ${loading ? "busy" : ""}`} aria-label="Trajectory">
    <div class="row tight">
      <h2>Trajectory ${params.at}</h2>
      ${row &&
      html`<span class="muted">
        ${row.phase === "training" ? "" : `${row.phase} ${row.validation_set} · `}task ${row.task} · reward ${number(row.reward)} · ended by ${row.stop}
        ${row.seconds_generation !== undefined && ` · ${seconds(row.seconds_generation)} generation + ${seconds(row.seconds_environment)} environment`}
        ${row.min_version >= 0 && ` · weights ${row.min_version === row.max_version ? row.min_version : `${row.min_version} to ${row.max_version}`}`}
        ${row.player && ` · player ${row.player}`}${row.fork ? ` · fork ${row.fork}` : ""}
      </span>`}
      <span class="grow"></span>
      <button class="quiet" aria-label="Close the trajectory" onClick=${close}>✕</button>
    </div>
    <${Problem} error=${error} />
    ${!data && !error && html`<${Loading} />`}
    ${data &&
    html`<div class="row">
        <${Tabs} label="Parts" of=${{ tokens: source === "samples" ? "Text" : "Tokens", group: "Group", task: "Task over the steps" }} at=${tab} onChange=${(next) => change({ tab: next === "tokens" ? null : next })} />
        ${facts.branches > 1 &&
        html`<label><span>Branch </span><select value=${facts.branch} onChange=${(event) => change({ branch: event.target.value, token: null })}>
          ${Array.from({ length: facts.branches }, (_, n) => html`<option value=${n} selected=${n === facts.branch}>${n + 1} of ${facts.branches}</option>`)}
        </select></label>`}
      </div>
      ${facts.error && html`<div class="problem">${visible(facts.error)}</div>`}
      ${facts.notes.map((note) => html`<div class="notice">${note}</div>`)}
      ${tab === "tokens" &&
      html`<${Rewards} rewards=${facts.rewards} row=${row} />
        ${facts.conversation ? html`<${Conversation} line=${facts.conversation} />` : data.arrays.tokens && html`<${Tokens} data=${data} params=${params} />`}`}
      ${tab === "group" && html`<${Group} query=${query} of=${row} />`}
      ${tab === "task" && html`<${TaskOverSteps} key=${row.task} query=${query} of=${row} params=${params} />`}`}
  </section>`;
}
